"""Group commit: a thread stores all waiting calls by one transaction."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVarTuple

import psycopg
from psycopg import Connection
from psycopg.rows import TupleRow

from ...store.postgres import BoundedConnection
from ...streams.backoff import Backoff
from ...streams.errors import HeadraceError, QueueFull, StorageError
from ..group_commit import Outcome, groups
from ..log.acknowledgements import PendingAcknowledgements
from ..log.blocks import BlockEncoder
from .connecting import DatabasePlace
from .group import CommittedGrowth, WaitingCall
from .schema import ProviderRow
from .transaction import GroupTransaction, LostQueueError, store_acknowledgements

log = logging.getLogger("headrace.adapters.postgres")
_Ts = TypeVarTuple("_Ts")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5
_CONFLICTS = frozenset({"40001", "40P01", "55P03", "57014"})
"""SQL states after which the same transaction may succeed: conflicts, and locks that others hold for too long."""


class NoTimeLeftError(StorageError):
    """The deadlines of all calls have passed before the next part of a large commit. The connection is good."""


class PostgresCommitter:
    """Stores calls in groups, in the order of `submit`. Used from one event loop; has a thread and a connection.

    `on_answers` gets the new batches of a commit, on the event loop, after the futures of its calls have their results.
    """

    def __init__(
        self,
        place: DatabasePlace,
        provider: ProviderRow,
        acknowledgements: PendingAcknowledgements,
        on_answers: Callable[[CommittedGrowth], None],
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
        self._wake_scheduled = False
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._encoder = BlockEncoder()
        self._stopped = asyncio.Event()
        self._connection: Connection[TupleRow] | None = None
        self._backend_pid = 0
        self._is_server_away = False
        """Whether the server could not be used at the last attempt."""
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
        if not self._wake_scheduled:
            # At the end of this turn of the loop, so that calls of other tasks in the same turn share the commit.
            self._wake_scheduled = True
            self._loop.call_soon(self._start)

    def backend_pid(self) -> int:
        """Return the pid of the server process of this committer's connection, 0 if there is none."""
        return self._backend_pid

    def note_server_answered(self) -> None:
        """Store acknowledgements again, because the server has answered on another connection."""
        self._is_server_away = False

    async def aclose(self) -> None:
        """Store everything submitted, then stop."""
        self._wakes.put(False)
        await self._stopped.wait()

    def _start(self) -> None:
        self._wake_scheduled = False
        self._wakes.put(True)

    # ---- in the committer's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        running, acknowledge_at = True, time.monotonic() + self._limits.acknowledge_s
        try:
            while running and not self._loop.is_closed():
                running = self._wait(acknowledge_at)
                while self._calls:
                    for calls in groups(self._take(), self._group_bytes):
                        self._store(calls)
                if not running or time.monotonic() >= acknowledge_at:
                    if not self._is_server_away:  # else each attempt could take seconds, and delay new calls
                        self._store_acknowledgements(wait=not running)
                    acknowledge_at = time.monotonic() + self._limits.acknowledge_s
        finally:
            self._drop_connection()
            self._tell_loop(self._stopped.set)

    def _tell_loop(self, function: Callable[[*_Ts], object], *arguments: *_Ts) -> None:
        """Call a function on the loop. If the loop was closed without `aclose`, no caller waits."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _wait(self, until: float) -> bool:
        try:
            return self._wakes.get(timeout=max(until - time.monotonic(), 0))
        except Empty:
            return True

    def _take(self) -> list[WaitingCall]:
        take = self._calls.popleft
        return [take() for _ in range(len(self._calls))]

    def _store(self, calls: Sequence[WaitingCall]) -> None:
        waiting = list(calls)
        try:
            stored = self._store_with_retries(waiting)
        except HeadraceError as error:
            self._fail(waiting, error)
        except Exception as error:
            log.exception("%s: a commit failed with an unexpected error", self._place.shown)
            self._drop_connection()
            self._fail(waiting, StorageError(f"a commit failed: {error!r}"))
        else:
            if stored is not None:
                grown: CommittedGrowth = {} if stored.writes is None else stored.writes.grown
                self._tell_loop(self._answer, stored.calls, stored.outcomes, grown)

    def _fail(self, calls: Sequence[WaitingCall], error: HeadraceError) -> None:
        grown: CommittedGrowth = {}
        self._tell_loop(self._answer, calls, [error.copy() for _ in calls], grown)

    def _store_with_retries(self, waiting: list[WaitingCall]) -> GroupTransaction | None:
        """Store a group, and repeat while the server is away.

        A call whose deadline has passed fails and leaves `waiting`; if none is left, return None. Raises HeadraceError
        if repeating does not help.
        """
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        uncertain: GroupTransaction | None = None
        reason: psycopg.Error | StorageError | None = None
        while waiting:
            attempt = GroupTransaction(self._provider, tuple(waiting), self._limits)
            committing = False
            try:
                connection = self._connected(max(call.deadline for call in waiting))
                if uncertain is not None:
                    if self._was_stored(uncertain, connection):
                        return uncertain
                    uncertain = None
                attempt.prepare(connection, self._encoder, partial(self._renew_deadline, connection, attempt.calls))
                committing = not attempt.is_empty
                if committing:
                    self._begin_deadline(connection)
                    attempt.commit(connection)
                return attempt
            except LostQueueError:
                raise StorageError(f"{self._place.shown} does not have the queues of this provider any more") from None
            except (psycopg.Error, StorageError) as error:
                failure = error
            if committing and _ends_connection(failure):
                uncertain = attempt  # else the server has answered that it stored nothing
            self._after_failure(failure)
            # No time is left because earlier attempts failed: report their reason.
            if reason is None or not isinstance(failure, NoTimeLeftError):
                reason = failure
            explained = self._failure(reason, uncertain=uncertain is not None)
            if not _is_transient(failure):
                raise explained
            now = time.monotonic()
            self._fail([call for call in waiting if call.deadline <= now], explained)
            waiting[:] = [call for call in waiting if call.deadline > now]
            time.sleep(min([backoff.next_s(), *(call.deadline - now for call in waiting)]) if waiting else 0)
        return None

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
            self._is_server_away = False
            self._backend_pid = 0 if self._place.pooler else self._connection.info.backend_pid
        self._begin_deadline(self._connection)
        return self._connection

    def _begin_deadline(self, connection: Connection[TupleRow]) -> None:
        if isinstance(connection, BoundedConnection) and connection.deadline is not None:
            connection.deadline.begin()

    def _renew_deadline(self, connection: Connection[TupleRow], calls: Sequence[WaitingCall]) -> None:
        """Allow the next part of a large commit its own time. Raises NoTimeLeftError."""
        if max(call.deadline for call in calls) <= time.monotonic():
            nbytes = sum(call.nbytes for call in calls)
            raise NoTimeLeftError(
                f"{self._place.shown}: {nbytes:,} bytes of one commit could not be stored in the time that publishes "
                "have: publish fewer events in one call, or raise publish_timeout_s"
            )
        self._begin_deadline(connection)

    def _after_failure(self, failure: BaseException) -> None:
        """End the transaction that failed. If that does not work, or after an outage, drop the connection."""
        connection = self._connection
        answered = isinstance(failure, NoTimeLeftError) or getattr(failure, "sqlstate", None)
        if connection is not None and not connection.closed and answered:
            with suppress(psycopg.Error):
                self._begin_deadline(connection)
                connection.execute("ROLLBACK")
                return
        self._drop_connection()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        self._is_server_away = True
        self._backend_pid = 0  # the server may give the number to another process
        if connection is not None:
            connection.close()

    def _failure(self, failure: psycopg.Error | StorageError, *, uncertain: bool) -> HeadraceError:
        error = self._place.failure(failure)
        if uncertain:
            return StorageError(f"{error}: these events may or may not be stored, publish them again")
        return error

    def _store_acknowledgements(self, *, wait: bool) -> None:
        try:
            if not (pending := self._acknowledgements.pending()):
                return
            done = store_acknowledgements(self._connected(), self._provider, pending, self._limits, wait=wait)
            self._acknowledgements.forget({queue: pending[queue] for queue in done})
        except (psycopg.Error, StorageError) as error:
            self._drop_connection()
            log.warning("acknowledgements are not stored, trying again: %s", self._place.failure(error))
        except Exception:
            self._drop_connection()
            log.exception("acknowledgements are not stored, trying again")

    # ---- on the event loop -----------------------------------------------------------------------------------------

    def _answer(
        self, calls: Sequence[WaitingCall], outcomes: Sequence[Outcome | HeadraceError], grown: CommittedGrowth
    ) -> None:
        for call, outcome in zip(calls, outcomes, strict=True):
            self._pending_bytes -= call.nbytes
            call.nbytes = 0  # if it has failed at its deadline, it may be stored and be answered again
            answer = call.answer
            if answer.done():
                continue
            if isinstance(outcome, HeadraceError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._on_answers(grown)


def _is_transient(failure: psycopg.Error | StorageError) -> bool:
    """Whether the same transaction may succeed later: the server is away, or others hold locks."""
    state = failure.sqlstate if isinstance(failure, psycopg.Error) else None
    # 25: a standby. 53: no connection, memory or disk is left.
    return _ends_connection(failure) or state in _CONFLICTS or (state or "")[:2] in ("25", "53")


def _ends_connection(failure: psycopg.Error | StorageError) -> bool:
    """Whether the connection was ended. Then a commit may be stored or not."""
    state = failure.sqlstate if isinstance(failure, psycopg.Error) else None
    return state is None or state.startswith(("08", "57P"))
