"""Group commit: a thread stores all waiting calls by one transaction."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from queue import Empty, SimpleQueue

import psycopg
from psycopg import Connection
from psycopg.rows import TupleRow

from ...store.postgres import BoundedConnection
from ...streams.backoff import Backoff
from ...streams.errors import HeadraceError, QueueFull, StorageError
from ..log.acknowledgements import PendingAcknowledgements
from ..log.blocks import BlockEncoder
from ..log.group import StoredBatches
from .connecting import DatabasePlace
from .group import Outcome, WaitingCall
from .schema import ProviderRow
from .transaction import GroupTransaction, LostBlocksError

log = logging.getLogger("headrace.adapters.postgres")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5
_CONFLICTS = frozenset({"40001", "40P01", "55P03", "57014"})
"""SQL states after which the same transaction may succeed: conflicts, and locks that others hold for too long."""

Growth = Mapping[int, StoredBatches]
"""The batches that a commit has added, by queue."""


class PostgresCommitter:
    """Stores calls in groups, in the order of `submit`. Used from one event loop; has a thread and a connection.

    `on_answers` gets the new batches of a commit, on the event loop, after the futures of its calls have their results.
    """

    def __init__(
        self,
        place: DatabasePlace,
        provider: ProviderRow,
        acknowledgements: PendingAcknowledgements,
        on_answers: Callable[[Growth], None],
        group_bytes: int,
    ) -> None:
        self._place = place
        self._provider = provider
        self._acknowledgements = acknowledgements
        self._on_answers = on_answers
        self._group_bytes = group_bytes
        self._limits = place.limits
        self._loop = asyncio.get_running_loop()
        self._calls: deque[WaitingCall] = deque()
        self._pending_bytes = 0
        self._kicked = False
        self._kick: SimpleQueue[bool] = SimpleQueue()
        self._encoder = BlockEncoder()
        self._stopped = asyncio.Event()
        self._connection: Connection[TupleRow] | None = None
        self._backend = 0
        threading.Thread(target=self._run, name="headrace-postgres-commit", daemon=True).start()

    def submit(self, call: WaitingCall) -> None:
        """Store the call with one of the next commits. The result or the error is set on its future.

        Raises QueueFull if too many bytes wait.
        """
        if self._pending_bytes and self._pending_bytes + call.nbytes > self._limits.pending_bytes:
            raise QueueFull(
                f"{self._pending_bytes:,} bytes wait for {self._place.shown}: publish again when some are stored"
            )
        self._pending_bytes += call.nbytes
        self._calls.append(call)
        if not self._kicked:
            # At the end of this turn of the loop, so that calls of other tasks in the same turn share the commit.
            self._kicked = True
            self._loop.call_soon(self._start)

    def backend(self) -> int:
        """Return the number of the server's process that serves this committer, 0 if there is none."""
        return self._backend

    async def aclose(self) -> None:
        """Store everything submitted, then stop."""
        self._kick.put(False)
        await self._stopped.wait()

    def _start(self) -> None:
        self._kicked = False
        self._kick.put(True)

    # ---- in the committer's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        # The loop raises RuntimeError if it was closed without `aclose`: then no caller waits for answers.
        with suppress(RuntimeError):
            going, chores_at = True, time.monotonic() + self._limits.chores_s
            while going and not self._loop.is_closed():
                going = self._wait(chores_at)
                while self._calls:
                    for calls in groups(self._take(), self._group_bytes):
                        self._store(calls)
                if not going or time.monotonic() >= chores_at:
                    self._store_acknowledgements()
                    chores_at = time.monotonic() + self._limits.chores_s
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._drop_connection()

    def _wait(self, until: float) -> bool:
        try:
            return self._kick.get(timeout=max(until - time.monotonic(), 0))
        except Empty:
            return True

    def _take(self) -> list[WaitingCall]:
        take = self._calls.popleft
        return [take() for _ in range(len(self._calls))]

    def _store(self, calls: Sequence[WaitingCall]) -> None:
        grown: Growth = {}
        outcomes: Sequence[Outcome | HeadraceError]
        try:
            stored = self._persistently(calls)
            outcomes = stored.outcomes
            grown = {} if stored.writes is None else stored.writes.grown
        except HeadraceError as error:
            outcomes = [error.copy() for _ in calls]
        except Exception as error:
            log.exception("%s: a commit failed with an unexpected error", self._place.shown)
            outcomes = [StorageError(f"a commit failed: {error!r}") for _ in calls]
            self._drop_connection()
        self._loop.call_soon_threadsafe(self._answer, calls, outcomes, grown)

    def _persistently(self, calls: Sequence[WaitingCall]) -> GroupTransaction:
        """Store a group, and repeat it while the server is away. Raises HeadraceError after the calls' deadline."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        deadline = max(call.deadline for call in calls)
        uncertain: GroupTransaction | None = None
        while True:
            attempt = GroupTransaction(self._provider, calls, self._limits)
            committing = False
            try:
                connection = self._connected(deadline)
                if uncertain is not None:
                    if self._was_stored(uncertain, connection):
                        return uncertain
                    uncertain = None
                attempt.prepare(connection, self._encoder)
                committing = not attempt.is_empty
                if committing:
                    self._begin_deadline(connection)
                    attempt.commit(connection)
                return attempt
            except LostBlocksError:
                raise StorageError(f"{self._place.shown} does not have the queues of this provider any more") from None
            except (psycopg.Error, StorageError) as error:
                failure = error
            if committing:
                uncertain = attempt
            self._after_failure(failure)
            if time.monotonic() >= deadline or not _is_passing(failure):
                raise self._failure(failure, uncertain=uncertain is not None)
            time.sleep(min(backoff.next_s(), max(deadline - time.monotonic(), 0)))

    def _was_stored(self, uncertain: GroupTransaction, connection: Connection[TupleRow]) -> bool:
        """Return whether a group was stored by a commit whose answer was lost. Raises StorageError if this cannot be
        known."""
        stored = uncertain.is_stored(connection)
        if stored is None:
            raise StorageError(f"{self._place.shown}: the connection was lost during a commit: events may be stored")
        return stored

    def _connected(self, deadline: float | None = None) -> Connection[TupleRow]:
        if self._connection is None:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
            self._connection = self._place.connect(left_s)
            self._backend = 0 if self._place.pooler else self._connection.info.backend_pid
        self._begin_deadline(self._connection)
        return self._connection

    def _begin_deadline(self, connection: Connection[TupleRow]) -> None:
        if isinstance(connection, BoundedConnection) and connection.deadline is not None:
            connection.deadline.begin()

    def _after_failure(self, failure: BaseException) -> None:
        """End the transaction that failed. If that does not work, or after an outage, drop the connection."""
        connection = self._connection
        if connection is not None and not connection.closed and getattr(failure, "sqlstate", None):
            with suppress(psycopg.Error):
                self._begin_deadline(connection)
                connection.execute("ROLLBACK")
                return
        self._drop_connection()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _failure(self, failure: psycopg.Error | StorageError, *, uncertain: bool) -> HeadraceError:
        error = self._place.failure(failure)
        if uncertain:
            return StorageError(f"{error}: these events may or may not be stored, publish them again")
        return error

    def _store_acknowledgements(self) -> None:
        pending = self._acknowledgements.pending()
        if not pending:
            return
        try:
            connection = self._connected()
            for queue, offset in sorted(pending.items()):
                connection.execute(
                    "UPDATE headrace_queue SET acknowledged = greatest(acknowledged, least(%s, next)) "
                    "WHERE provider = %s AND queue = %s AND acknowledged < least(%s, next)",
                    [offset, self._provider.provider, queue, offset],
                )
            self._acknowledgements.forget(pending)
        except (psycopg.Error, StorageError) as error:
            self._drop_connection()
            log.warning("acknowledgements are not stored, trying again: %s", self._place.failure(error))

    # ---- on the event loop -----------------------------------------------------------------------------------------

    def _answer(self, calls: Sequence[WaitingCall], outcomes: Sequence[Outcome | HeadraceError], grown: Growth) -> None:
        for call, outcome in zip(calls, outcomes, strict=True):
            self._pending_bytes -= call.nbytes
            answer = call.answer
            if answer.done():
                continue
            if isinstance(outcome, HeadraceError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._on_answers(grown)


def _is_passing(failure: psycopg.Error | StorageError) -> bool:
    """Whether the same transaction may succeed later: the server is away, or others hold locks."""
    if isinstance(failure, StorageError) or failure.sqlstate in _CONFLICTS:
        return True
    state = failure.sqlstate
    # No state: no answer. 08, 57P: the connection was ended. 25: a standby. 53: no connection or memory is left.
    return state is None or state[:2] in ("08", "25", "53") or state.startswith("57P")


def groups(calls: Sequence[WaitingCall], limit: int) -> Iterator[Sequence[WaitingCall]]:
    """Divide calls into groups. Each ends with the call that makes it reach `limit` bytes."""
    ends = list(accumulate(call.nbytes for call in calls))
    start = taken = 0
    while start < len(calls):
        stop = bisect_left(ends, taken + limit, start) + 1
        yield calls[start:stop]
        start, taken = stop, ends[min(stop, len(ends)) - 1]
