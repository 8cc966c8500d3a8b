"""Publishes the committed rows of an outbox, each once, in the order of ids within each lane.

A cursor over ids would lose rows: a transaction may commit late with lower ids. So the mover takes every row that it
sees, and deletes it when it is published. If the commit of one transaction precedes the insert of another one, its ids
are lower, and each snapshot that has the second one has the first one, too. So the order of a stream holds.

A release is a set of rows of one lane that are published together, as call `number` of an idempotent producer. So the
queue stores a release once, however often it is repeated. One transaction decides a release: it deletes the rows of
the previous release, and stores the number and the ids of the next one. Several processes may move the same lane: the
second one only repeats the work of the first one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Connection, Executable, Row, text
from sqlalchemy.exc import SQLAlchemyError

from ..streams.backoff import Backoff
from ..streams.clock import now_us
from ..streams.errors import HeadraceError, InvalidArgument, NotSupported
from ..streams.events import EventBatch, ScheduledBatch
from ..streams.failure_log import described
from ..streams.incoming import accepted
from ..streams.publishing import ProducerSequence, Receipt
from .database import EffectDatabase
from .outages import outages
from .outbox_rows import LANES
from .schema import require

log = logging.getLogger("headrace.effects")

POLL_S = 0.1
"""How often the mover looks for rows while there are none, in seconds."""
LEASE_US = 5_000_000
"""How long a process has the lease of a lane after each step, in microseconds. A lease only saves work: two processes
that move a lane store nothing twice."""
RELEASE_ROWS = 1000
RELEASE_BYTES = 8 << 20
"""Bounds of one release."""
MAX_TRANSACTIONS = 4
"""How many lanes have a transaction at a time. A pool of SQLAlchemy keeps five connections, and opens others anew."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0

_NO_IDS = "[]"
_LANE = "provider = :provider AND lane = :lane"
_LANES_WITH_ROWS = " UNION ALL ".join(
    f"SELECT lane FROM (SELECT lane FROM headrace_outbox WHERE provider = :provider AND lane = {lane} LIMIT 1) AS l"  # noqa: S608
    for lane in range(LANES)
)
_BUSY_LANES = text(f"""
    SELECT busy.lane, known.producer FROM ({_LANES_WITH_ROWS}) AS busy
    LEFT JOIN headrace_outbox_lane AS known ON known.provider = :provider AND known.lane = busy.lane
""")  # noqa: S608
_NEW_LANE = text("""
    INSERT INTO headrace_outbox_lane (provider, lane, producer, number, ids, holder, until_us)
    VALUES (:provider, :lane, :producer, 0, '[]', '', 0) ON CONFLICT DO NOTHING
""")
_NOW_US = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
}
"""The clock of the database: those of the processes may differ."""
_FIND_LANE = {
    name: f"SELECT producer, number, ids, holder, until_us - {now} AS left_us FROM headrace_outbox_lane WHERE {_LANE}"  # noqa: S608
    for name, now in _NOW_US.items()
}
_LOCK_LANE = {
    "postgresql": text(f"{_FIND_LANE['postgresql']} FOR UPDATE SKIP LOCKED"),
    "sqlite": text(_FIND_LANE["sqlite"]),
}
_BEGIN_WRITING = text(f"UPDATE headrace_outbox_lane SET until_us = until_us WHERE {_LANE}")  # noqa: S608
"""SQLite has no locks of rows: the first statement that writes locks the file. A read before it would be in no
transaction."""
_WRITE_LANE = {
    name: text(f"""
        UPDATE headrace_outbox_lane SET number = :number, ids = :ids, holder = :holder, until_us = {now} + {LEASE_US}
        WHERE {_LANE}
    """)  # noqa: S608
    for name, now in _NOW_US.items()
}
_IDS_IN_POSTGRESQL = "SELECT CAST(value AS BIGINT) FROM json_array_elements_text(CAST(:ids AS JSON)) AS value"
_WITH_IDS = {
    "postgresql": f"id = ANY(ARRAY({_IDS_IN_POSTGRESQL}))",
    "sqlite": "id IN (SELECT value FROM json_each(:ids))",
}
"""All ids are one parameter: a statement with a thousand parameters takes longer than its work."""
_RELEASED_IDS = {name: f"{_LANE} AND id BETWEEN :first AND :last AND {ids}" for name, ids in _WITH_IDS.items()}
"""With first and last id, because PostgreSQL may compare each row of the lane with all ids."""
_DELETE = {name: text(f"DELETE FROM headrace_outbox WHERE {ids}") for name, ids in _RELEASED_IDS.items()}  # noqa: S608
_COLUMNS = "id, batch, written_at_us"
_AS_ONE_ROW = """
    SELECT array_agg(id ORDER BY id), array_agg(written_at_us ORDER BY id), array_agg(LENGTH(batch) ORDER BY id),
    string_agg(batch, '' ORDER BY id) FROM ({}) AS found
"""
"""All rows as one row: for a thousand rows, SQLAlchemy and the driver take longer than the rest of a release."""
_RELEASED_ROWS = f"SELECT {_COLUMNS} FROM headrace_outbox WHERE {{}}"  # noqa: S608
_RELEASED = {
    "postgresql": text(_AS_ONE_ROW.format(_RELEASED_ROWS.format(_RELEASED_IDS["postgresql"]))),
    "sqlite": text(f"{_RELEASED_ROWS.format(_RELEASED_IDS['sqlite'])} ORDER BY id"),
}
_STREAMS = {name: text(f"SELECT id, stream FROM headrace_outbox WHERE {ids}") for name, ids in _RELEASED_IDS.items()}  # noqa: S608
_REFUSE = text(f"UPDATE headrace_outbox SET problem = :problem WHERE {_LANE} AND id = :id")  # noqa: S608
_FIRST = f"""
    FROM headrace_outbox WHERE {_LANE} AND stream NOT IN
    (SELECT stream FROM headrace_outbox WHERE {_LANE} AND problem IS NOT NULL) ORDER BY id LIMIT {RELEASE_ROWS}
"""  # noqa: S608
_FITS = "total <= :max_bytes OR total = size"
_NEXT = {
    # The inner rows of PostgreSQL have references to large batches, and not the batches.
    "postgresql": text(
        _AS_ONE_ROW.format(f"""
            SELECT {_COLUMNS} FROM (
                SELECT *, LENGTH(batch) AS size, SUM(LENGTH(batch)) OVER (ORDER BY id) AS total
                FROM (SELECT {_COLUMNS} {_FIRST}) AS first_rows
            ) AS sizes WHERE {_FITS}
        """)  # noqa: S608
    ),
    "sqlite": text(f"""
        SELECT {_COLUMNS} FROM headrace_outbox WHERE id IN (
            SELECT id FROM (
                SELECT id, size, SUM(size) OVER (ORDER BY id) AS total FROM (SELECT id, LENGTH(batch) AS size {_FIRST})
            ) WHERE {_FITS}
        ) ORDER BY id
    """),  # noqa: S608
}
"""The first batches that have the bytes of one release together, and the first one in any case. The database adds the
sizes up, because a result with a thousand batches may be larger than the memory."""
_BACKLOG = text("""
    SELECT COUNT(*), COALESCE(SUM(events), 0), MIN(written_at_us), COUNT(problem) FROM headrace_outbox
    WHERE provider = :provider
""")


class OutboxTarget(Protocol):
    """The provider that the events are for."""

    name: str

    async def last_sequence(self, producer: str) -> int: ...

    def publish_encoded(
        self, batches: Sequence[EventBatch], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """Publish the batches as one call. InvalidArgument and NotSupported mean that nothing of the call is stored.
        After any other error, parts of it may be stored, and the call is to be repeated as it is."""
        ...


class WaitingBatch(NamedTuple):
    """A row of the outbox that is not published yet."""

    id: int
    batch: bytes
    written_at_us: int


class OutboxRelease(NamedTuple):
    """Rows of one lane that are published as one call of a producer."""

    producer: str
    number: int
    ids: Sequence[int]
    batches: Sequence[EventBatch]


class OutboxBacklog(NamedTuple):
    """The rows of an outbox that are not published yet, for one provider."""

    batches: int
    events: int
    age_s: float
    """The age of the oldest batch, in seconds."""
    refused: int
    """Batches that the queue refused: their streams wait."""


class OutboxMover:
    """Moves the rows of one provider from one database."""

    def __init__(self, database: EffectDatabase, target: OutboxTarget) -> None:
        self.moved_events = 0
        self.problem = ""
        """Why nothing can be moved at present; "" if it can."""
        self._database = database
        self._target = target
        self._holder = uuid.uuid4().hex
        self._is_warned = False
        self._slots = asyncio.Semaphore(min(MAX_TRANSACTIONS, database.transactions))

    async def run(self) -> None:
        """Move rows for ever. After any failure, note it as the problem, and try again after a pause."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            try:
                if not await self.move():
                    await asyncio.sleep(POLL_S)
                backoff.reset()
                if self.problem:
                    log.info("the outbox of %r is moved again", self._target.name)
                self.problem = ""
            except Exception as error:  # noqa: BLE001 (committed events must be moved after any failure)
                self._note_problem(error)
                await asyncio.sleep(backoff.next_s())

    def _note_problem(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, HeadraceError) else described(error)
        if not self.problem:
            unforeseen = None if isinstance(error, (HeadraceError, SQLAlchemyError)) else error
            log.warning(
                "the outbox of %r cannot be moved, trying again: %s", self._target.name, reason, exc_info=unforeseen
            )
        self.problem = reason or type(error).__name__

    async def move(self) -> int:
        """Move rows of each lane that has some, for about `POLL_S`, but at least one release.

        Return the number of batches, and count a refusal as one: after 0, no row is left to try. If lanes fail, raise
        the error of one of them when all lanes have ended.
        """
        async with self._database.transaction() as transaction:
            with outages:
                lanes = await transaction.call(self._busy_lanes)
        # A lane that fails neither cancels the others nor leaves them behind: all have ended when this returns.
        outcomes = await asyncio.gather(
            *(self._move_lane(lane, producer) for lane, producer in lanes), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise failures[0]
        return sum(outcome for outcome in outcomes if isinstance(outcome, int))

    async def backlog(self) -> OutboxBacklog:
        """Count the rows that are not published yet."""
        async with self._database.transaction() as transaction:
            with outages:
                return await transaction.call(self._backlog)

    def _backlog(self, connection: Connection) -> OutboxBacklog:
        batches, events, oldest, refused = connection.execute(_BACKLOG, {"provider": self._target.name}).one()
        age_s = 0.0 if oldest is None else max(now_us() - oldest, 0) / 1e6
        return OutboxBacklog(batches, int(events), age_s, refused)

    def _busy_lanes(self, connection: Connection) -> Sequence[tuple[int, str | None]]:
        """Return the lanes that have rows, and their producers. None: the lane has none yet."""
        require(connection)
        return [(lane, producer) for lane, producer in connection.execute(_BUSY_LANES, {"provider": self._target.name})]

    async def _move_lane(self, lane: int, producer: str | None) -> int:
        # The queue is asked before the lane: if the database was restored from a backup, the queue has later numbers.
        loop = asyncio.get_running_loop()
        moved, last = 0, 0 if producer is None else await self._target.last_sequence(producer)
        ends_at = loop.time() + POLL_S
        while (release := await self._step(lane, last)) is not None:
            if not await self._publish(lane, release, last):
                return moved + 1  # the lane goes on without the stream that the queue refused
            moved += len(release.batches)
            self.moved_events += sum(batch.count for batch in release.batches)
            last = release.number
            if loop.time() > ends_at:
                break  # let `move` look for lanes that got their first rows
        return moved

    async def _publish(self, lane: int, release: OutboxRelease, last: int) -> bool:
        """Publish a release. If the queue refuses it, halve it, or mark its only batch as refused, and return False."""
        # After `last`, not after `number - 1`: the queue may have forgotten that number, but never `last`.
        sequence = ProducerSequence(release.producer, release.number, last)
        try:
            await self._target.publish_encoded(release.batches, sequence=sequence)
        except (InvalidArgument, NotSupported) as error:
            await self._narrow_refused(lane, release, error)
            return False
        return True

    async def _narrow_refused(self, lane: int, release: OutboxRelease, error: HeadraceError) -> None:
        """Retry the first half under the same number, which is free, because the queue has stored nothing of it.

        A queue that may have stored a part raises StorageError instead. Then the whole release is repeated until it is
        stored: rows that left it would be stored twice, because no number tells that they are the same."""
        ids = release.ids[: len(release.ids) // 2]
        async with self._database.transaction() as transaction:
            with outages:
                await transaction.call(self._narrow, lane, release, ids, str(error))

    def _narrow(
        self, connection: Connection, lane: int, release: OutboxRelease, ids: Sequence[int], problem: str
    ) -> None:
        row = self._lock(connection, lane)
        if row is None or row.number != release.number or json.loads(row.ids) != list(release.ids):
            return
        if not ids:
            self._refuse(connection, self._key(lane), release.ids[0], str(release.batches[0].stream), problem)
        self._write_lane(connection, lane, release.number, ids)

    # ---- one transaction -------------------------------------------------------------------------------------------

    def _key(self, lane: int) -> dict[str, Any]:
        return {"provider": self._target.name, "lane": lane}

    def _lock(self, connection: Connection, lane: int) -> Row[str, int, str, str, int] | None:
        """Lock the row of a lane until the transaction ends, and return it. None: another process has locked it, or
        there is none."""
        key, dialect = self._key(lane), connection.dialect.name
        if dialect == "sqlite":
            connection.execute(_BEGIN_WRITING, key)
        return connection.execute(_LOCK_LANE[dialect], key).first()

    async def _step(self, lane: int, last: int) -> OutboxRelease | None:
        """Return the lane's release. `last` is the last number that the queue has: if it has the one of the release,
        delete the rows of the release first, and decide the next one. None: there are no rows, or another process has
        the lease."""
        async with self._slots, self._database.transaction() as transaction:
            with outages:
                return await transaction.call(self._decide, lane, last)

    def _decide(self, connection: Connection, lane: int, last: int) -> OutboxRelease | None:
        key, dialect = self._key(lane), connection.dialect.name
        if not last:
            connection.execute(_NEW_LANE, {**key, "producer": f"outbox {uuid.uuid4().hex}"})
        row = self._lock(connection, lane)
        # More than a lease is left only if the clock was set back.
        if row is None or (row.holder not in ("", self._holder) and 0 < row.left_us <= LEASE_US):
            return None
        number = row.number
        if 0 < last < number - (row.ids != _NO_IDS):  # 0: perhaps the queue has forgotten the producer
            self._warn_of_others()
        rows: Sequence[WaitingBatch] = ()
        if row.ids != _NO_IDS:
            if number <= last:
                connection.execute(_DELETE[dialect], {**key, **_released(json.loads(row.ids))})
            else:
                rows = _find_batches(connection, _RELEASED, {**key, **_released(json.loads(row.ids))})
        if rows:
            ids = [each.id for each in rows]
            at_us = now_us()
            batches = [_batch_of(each, at_us) for each in rows]
        else:
            # A restored database has a lower number than the queue, which would take the next releases for stored.
            number = max(number, last)
            ids, batches = self._next(connection, key)
            number += bool(ids)
        self._write_lane(connection, lane, number, ids)
        return OutboxRelease(row.producer, number, ids, batches) if ids else None

    def _warn_of_others(self) -> None:
        """Another queue has got releases that this one should have: each mover brings a part of the streams into its
        own queue."""
        if not self._is_warned:
            self._is_warned = True
            log.warning(
                "the outbox of %r was moved into another queue, too: if another provider has this name, with another "
                "data directory, each of them gets a part of the events; give each a name of its own",
                self._target.name,
            )

    def _next(self, connection: Connection, key: dict[str, Any]) -> tuple[list[int], list[EventBatch]]:
        """Return ids and batches of the lane's next release. Mark a batch that cannot be read as refused: later batches
        of its stream wait."""
        values = {**key, "max_bytes": RELEASE_BYTES}
        while rows := _find_batches(connection, _NEXT, values):
            batches: dict[int, EventBatch] = {}
            streams: Mapping[int, str] = {}
            waiting: set[str] = set()
            at_us = now_us()
            for row in rows:
                if waiting and streams.get(row.id) in waiting:
                    continue
                try:
                    batches[row.id] = _batch_of(row, at_us)
                except InvalidArgument as error:
                    streams = streams or _find_streams(connection, key, rows)
                    stream = streams.get(row.id, "")
                    self._refuse(connection, key, row.id, stream, str(error))
                    waiting.add(stream)
            if batches:
                return list(batches), list(batches.values())
        return [], []

    def _refuse(self, connection: Connection, key: Mapping[str, Any], row_id: int, stream: str, problem: str) -> None:
        log.error(
            "outbox of %r: stream %s waits, because the queue refuses its next batch: %s",
            self._target.name, stream, problem,
        )  # fmt: skip
        connection.execute(_REFUSE, {**key, "problem": problem, "id": row_id})

    def _write_lane(self, connection: Connection, lane: int, number: int, ids: Sequence[int]) -> None:
        values = {"number": number, "ids": json.dumps(list(ids)), "holder": self._holder}
        connection.execute(_WRITE_LANE[connection.dialect.name], {**self._key(lane), **values})


def _find_batches(
    connection: Connection, statements: Mapping[str, Executable], values: Mapping[str, Any]
) -> list[WaitingBatch]:
    """Return the rows that the statement finds, in the order of their ids. In PostgreSQL, they come as one row."""
    dialect = connection.dialect.name
    found = connection.execute(statements[dialect], values)
    if dialect == "sqlite":
        return [WaitingBatch(*row) for row in found]
    ids, times, sizes, joined = found.one()
    if ids is None:
        return []
    whole, ends = bytes(joined), accumulate(sizes)
    batches = (whole[end - size : end] for size, end in zip(sizes, ends, strict=True))
    return list(map(WaitingBatch, ids, batches, times))


def _find_streams(connection: Connection, key: Mapping[str, Any], rows: Sequence[WaitingBatch]) -> Mapping[int, str]:
    """Return the stream of each row, by its id. Only for rows that cannot be read, because it takes time."""
    values = {**key, **_released([row.id for row in rows])}
    return {row.id: row.stream for row in connection.execute(_STREAMS[connection.dialect.name], values)}


def _released(ids: Sequence[int]) -> Mapping[str, Any]:
    """Return the parameters of `_RELEASED_IDS`."""
    return {"ids": json.dumps(list(ids)), "first": min(ids), "last": max(ids)}


def _batch_of(row: WaitingBatch, at_us: int) -> EventBatch:
    """Return the batch of a row, at the time `at_us`. Its delay began at the publish: only the rest of it is left.

    At least 1 µs is left. So a release that is repeated goes the same way through the queue, which knows its number
    there: a queue may keep batches with a delay in another place than the others. Raises InvalidArgument.
    """
    batch = accepted(bytes(row.batch), at_us)
    if not isinstance(batch, ScheduledBatch) or not batch.delay_us:
        return batch
    waited_us = max(at_us - row.written_at_us, 0)  # the clocks of two processes may differ
    return batch.with_delay(max(batch.delay_us - waited_us, 1))
