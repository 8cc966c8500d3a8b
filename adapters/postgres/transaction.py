"""The transaction that stores a group of calls.

It takes two round trips if the group is small, and more for each `COPY` of a large one: lock the rows of the queues and
producers, in ascending order; `COPY` the blocks; write the ends of the queues, notify, and commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from psycopg import Connection, OperationalError
from psycopg.errors import Diagnostic
from psycopg.rows import TupleRow

from ...streams.producer_ledger import LastCall
from ..group_commit import Outcome
from ..log.blocks import BlockEncoder
from .connecting import timeouts_ms
from .group import (
    CHUNK_BYTES,
    EnqueueGroup,
    GroupWrites,
    LockedTail,
    WaitingCall,
    bytea,
    copy_binary,
    literals,
)
from .limits import PostgresLimits
from .schema import COLUMNS, ProviderRow, segment_table

_MAX_NOTIFIED_BYTES = 7000
"""PostgreSQL takes 8,000 bytes."""


class LostQueueError(Exception):
    """The row of a queue is missing."""


class GroupTransaction:
    """Stores one group. If `commit` fails by a lost connection, it may be stored: ask `is_stored`."""

    def __init__(self, provider: ProviderRow, calls: Sequence[WaitingCall], limits: PostgresLimits) -> None:
        self._provider = provider
        self.calls = calls
        self._limits = limits
        self._queues = sorted({queue for call in calls for queue in call.queues})
        self._producers = sorted({call.producer for call in calls if call.sequence is not None})
        self.outcomes: Sequence[Outcome] = ()
        self.writes: GroupWrites | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has to be written, because all calls are duplicates or conflicts."""
        return self.writes is not None and not self.writes.rows and not self.writes.producers

    def prepare(self, connection: Connection[TupleRow], encoder: BlockEncoder, before_copy: Callable[[], None]) -> None:
        """Lock the rows, decide about each call, and send the blocks if they are large.

        `before_copy` is called before each `COPY`, to renew the deadline of the connection, or to raise. Raises
        psycopg.Error. If this raises, nothing is stored.
        """
        tails, producers, now_us = self._lock(connection)
        group = EnqueueGroup(tails, producers, now_us)
        self.outcomes = [group.add(call) for call in self.calls]
        self.writes = group.writes(encoder)
        if self.is_empty:
            _commit(connection)  # the calls are confirmed: what stored them may still wait for a standby
            return
        if self.writes.nbytes() > self._limits.literal_bytes:
            for segment, rows in self.writes.rows.items():
                statement = f"COPY {self._table(segment)} ({COLUMNS}) FROM STDIN (FORMAT BINARY)"
                size = max(self._limits.copy_bytes // CHUNK_BYTES, 1)
                for start in range(0, len(rows), size):
                    before_copy()
                    with connection.cursor().copy(statement.encode()) as copy:
                        copy.write(copy_binary(rows[start : start + size]))

    def commit(self, connection: Connection[TupleRow]) -> None:
        """Write, and commit. Raises psycopg.Error."""
        assert self.writes is not None
        _commit(connection, *self._statements(self.writes))

    def is_stored(self, connection: Connection[TupleRow]) -> bool | None:
        """Return whether an earlier `commit` has stored the group. None: this cannot be known.

        Waits until the earlier transaction has ended, because that holds the locks. The server's process that waited
        for a synchronous standby may have been ended, and the group is visible on this server only: so this waits for
        the standby again. Raises psycopg.Error.
        """
        assert self.writes is not None
        if not self.writes.rows:
            return False  # a call without batches is only a number: it is a duplicate if it was stored
        tails, _, _ = self._lock(connection)
        _commit(connection)
        segment, rows = next(iter(self.writes.rows.items()))
        row = rows[0]  # all rows were stored by one commit, or none
        if tails[row.queue].next <= row.first:
            return False
        name = self._table(segment)
        if connection.execute("SELECT to_regclass(%s)", [name]).fetchone() == (None,):
            return None  # retention has deleted it
        query = f"SELECT chunk FROM {name} WHERE queue = {row.queue} AND first = {row.first} AND part = 0"  # noqa: S608
        found = connection.execute(query.encode(), binary=True).fetchone()
        return found is not None and found[0] == row.chunk

    def _table(self, segment: int) -> str:
        return segment_table(self._provider.provider, segment)

    # ---- statements ------------------------------------------------------------------------------------------------

    def _lock(self, connection: Connection[TupleRow]) -> tuple[Mapping[int, LockedTail], Mapping[bytes, LastCall], int]:
        """Begin a transaction, and lock the rows of all queues and producers."""
        provider = self._provider.provider
        statements = _begin(self._limits)
        if self._queues:
            statements.append(
                "SELECT queue, segment, next, events, bytes, time_us FROM headrace_queue "  # noqa: S608 (numbers)
                f"WHERE provider = {provider} AND queue IN ({_listed(self._queues)}) ORDER BY queue FOR UPDATE"
            )
        if self._producers:
            new = ", ".join(f"({provider}, {bytea(producer)}, 0, 0, '{{}}'::bigint[])" for producer in self._producers)
            columns = "provider, producer, number, time_us, offsets"
            statements.append(f"INSERT INTO headrace_producer ({columns}) VALUES {new} ON CONFLICT DO NOTHING")  # noqa: S608
            named = ", ".join(map(bytea, self._producers))
            statements.append(
                f"SELECT producer, number, offsets FROM headrace_producer WHERE provider = {provider} "  # noqa: S608
                f"AND producer IN ({named}) ORDER BY producer FOR UPDATE"
            )
        # The clock is read after the locks are there, so that times do not decrease.
        statements.append("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
        results = _results(connection, "; ".join(statements))
        (now_us,) = results.pop()[0]
        producers = {bytes(row[0]): LastCall(row[1], row[2]) for row in results.pop()} if self._producers else {}
        tails = {row[0]: LockedTail(*row[1:]) for row in results.pop()} if self._queues else {}
        if len(tails) != len(self._queues):
            connection.execute("ROLLBACK")
            raise LostQueueError
        return tails, producers, now_us

    def _statements(self, writes: GroupWrites) -> Iterable[str]:
        provider = self._provider.provider
        if writes.nbytes() <= self._limits.literal_bytes:
            for segment, rows in writes.rows.items():
                yield f"INSERT INTO {self._table(segment)} ({COLUMNS}) VALUES {literals(rows)}"  # noqa: S608
        if writes.tails:
            ends = ", ".join(
                f"({queue}, {tail.next}, {tail.events}, {tail.nbytes}, {tail.time_us})"
                for queue, tail in writes.tails.items()
            )
            yield (
                "UPDATE headrace_queue AS q SET next = v.next, events = v.events, bytes = v.bytes, time_us = v.time_us "  # noqa: S608
                f"FROM (VALUES {ends}) AS v (queue, next, events, bytes, time_us) "
                f"WHERE q.provider = {provider} AND q.queue = v.queue"
            )
        if writes.producers:
            calls = ", ".join(
                f"({bytea(producer)}, {number}, '{{{_listed(offsets)}}}'::bigint[])"
                for producer, (number, offsets) in writes.producers.items()
            )
            yield (
                f"UPDATE headrace_producer AS p SET number = v.number, offsets = v.offsets, time_us = {writes.now_us} "  # noqa: S608
                f"FROM (VALUES {calls}) AS v (producer, number, offsets) "
                f"WHERE p.provider = {provider} AND p.producer = v.producer"
            )
        if writes.tails:
            ends = ",".join(f"{queue}={tail.next}" for queue, tail in writes.tails.items())
            payload = ends if len(ends) <= _MAX_NOTIFIED_BYTES else ""
            yield f"SELECT pg_notify('{self._provider.channel}', '{payload}')"


def _commit(connection: Connection[Any], *statements: str) -> None:
    """Execute the statements and commit. Raise psycopg.Error if that fails, or if the server stops waiting for a
    synchronous standby: PostgreSQL then only warns, and reports success.

    The commit waits for the standby also without statements: locking rows has written to the server's log.
    """
    stopped = False

    def note(notice: Diagnostic) -> None:
        nonlocal stopped
        stopped |= notice.source_function == "SyncRepWaitForLSN"

    connection.add_notice_handler(note)
    try:
        connection.execute("; ".join([*statements, "COMMIT"]).encode())
    finally:
        connection.remove_notice_handler(note)
    if stopped:
        raise OperationalError("the server stopped waiting for its synchronous standby: a failover may lose the commit")


def store_acknowledgements(
    connection: Connection[TupleRow],
    provider: ProviderRow,
    acknowledged: Mapping[int, int],
    limits: PostgresLimits,
    *,
    wait: bool,
) -> Sequence[int]:
    """Store offsets by queue, in one transaction. Return the queues whose offsets are stored. Raises psycopg.Error.

    The transaction does not wait for the disk, because a lost acknowledgement is harmless. Queues whose rows others
    have locked are left out, unless `wait`: their writers would wait for all rows locked here.
    """
    offsets = ", ".join(f"({queue}, {offset})" for queue, offset in acknowledged.items())
    lock = (
        f"SELECT queue FROM headrace_queue WHERE provider = {provider.provider} AND queue IN ({_listed(acknowledged)}) "  # noqa: S608 (numbers)
        f"ORDER BY queue FOR UPDATE{'' if wait else ' SKIP LOCKED'}"
    )
    statements = [*_begin(limits), "SET LOCAL synchronous_commit = off", lock]
    locked = [row[0] for row in _results(connection, "; ".join(statements))[0]]
    update = (
        "UPDATE headrace_queue AS q SET acknowledged = least(v.acknowledged, q.next) "  # noqa: S608 (numbers)
        f"FROM (VALUES {offsets}) AS v (queue, acknowledged) WHERE q.provider = {provider.provider} "
        f"AND q.queue = v.queue AND q.queue IN ({_listed(locked)}) AND q.acknowledged < least(v.acknowledged, q.next)"
    )
    connection.execute("; ".join([*([update] if locked else []), "COMMIT"]).encode())
    return locked


def _begin(limits: PostgresLimits) -> list[str]:
    """Return the statements that begin a transaction."""
    timeouts = (f"SET LOCAL {name} = {value}" for name, value in timeouts_ms(limits.request_s).items())
    return ["BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", *timeouts]


def parse_ends(payload: str) -> Mapping[int, int]:
    """Return the ends of queues in a notification. Empty: any queue may have grown. Raises ValueError."""
    pairs = (pair.split("=") for pair in payload.split(",") if pair)
    return {int(queue): int(end) for queue, end in pairs}


def _listed(numbers: Iterable[int | None]) -> str:
    return ", ".join(map(str, numbers))


def _results(connection: Connection[Any], statements: str) -> list[list[Any]]:
    """Run statements, and return the rows of those that return rows."""
    found: list[list[Any]] = []
    cursor = connection.execute(statements.encode())
    while True:
        if cursor.description is not None:
            found.append(cursor.fetchall())
        if not cursor.nextset():
            return found
