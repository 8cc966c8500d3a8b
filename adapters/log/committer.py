"""Group commit: a thread stores all that was called meanwhile by one transaction and one fsync."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from queue import Empty, SimpleQueue

from ...streams.errors import HeadraceError, StorageError, StorageFull
from .acknowledgements import store
from .blocks import BlockEncoder
from .environment import LogEnvironment
from .group import Call, Group, Outcome

_CHORES_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class Committer:
    """Stores calls in the order of `submit`, in groups. Used from one event loop, except for its own thread.

    `committed` is called in the committer's thread with the queues that have grown, `answered` likewise on the event
    loop once the calls of the group have their answers.
    """

    def __init__(
        self,
        environment: LogEnvironment,
        committed: Callable[[set[int]], None],
        answered: Callable[[set[int]], None],
    ) -> None:
        self._environment = environment
        self._committed = committed
        self._answered = answered
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Call] = deque()
        self._kicked = False
        self._kick: SimpleQueue[bool] = SimpleQueue()
        self._unsynced = False
        self._encoder = BlockEncoder()
        self._stopped = asyncio.Event()
        threading.Thread(target=self._run, name="headrace-log-commit", daemon=True).start()

    def submit(self, call: Call) -> None:
        self._calls.append(call)
        if not self._kicked:
            # Not at once: what other tasks submit in this turn of the loop is to share the commit.
            self._kicked = True
            self._loop.call_soon(self._start)

    async def aclose(self) -> None:
        """Store everything submitted, then stop."""
        self._kick.put(False)
        await self._stopped.wait()

    def _start(self) -> None:
        self._kicked = False
        self._kick.put(True)

    # From here on: the committer's thread.

    def _run(self) -> None:
        # A loop that was closed without `aclose` takes no more answers.
        with suppress(RuntimeError):
            going, chores_at = True, time.monotonic() + _CHORES_EVERY_S
            while going and not self._loop.is_closed():
                going = self._wait(chores_at)
                while self._calls:
                    for calls in groups(self._take(), self._environment.options.group_bytes):
                        self._commit(calls)
                if not going or time.monotonic() >= chores_at:
                    self._do_chores()
                    chores_at = time.monotonic() + _CHORES_EVERY_S
            self._loop.call_soon_threadsafe(self._stopped.set)

    def _wait(self, until: float) -> bool:
        try:
            return self._kick.get(timeout=max(until - time.monotonic(), 0))
        except Empty:
            return True

    def _take(self) -> list[Call]:
        take = self._calls.popleft
        return [take() for _ in range(len(self._calls))]

    def _commit(self, calls: Sequence[Call]) -> None:
        try:
            outcomes, grown = self._store(calls)
        except HeadraceError as error:
            outcomes, grown = [_own(error) for _ in calls], set[int]()
        except Exception as error:  # noqa: BLE001 (whatever it was: the callers wait, and the thread goes on)
            _log.exception("a commit failed in an unforeseen way")
            outcomes, grown = [StorageError(f"a commit failed: {error!r}") for _ in calls], set[int]()
        self._unsynced = True
        self._tell(grown)
        self._loop.call_soon_threadsafe(self._answer, calls, outcomes, grown)

    def _tell(self, grown: set[int]) -> None:
        """Ring the others. Where that fails they look for themselves within a second: it must not stop this thread."""
        try:
            self._committed(grown)
        except OSError as error:
            _log.warning("%s: other handles cannot be woken up: %s", self._environment.path, error)

    def _store(self, calls: Sequence[Call]) -> tuple[Sequence[Outcome | HeadraceError], set[int]]:
        try:
            return self._store_once(calls)
        except StorageFull:
            self._environment.advance()
            return self._store_once(calls)

    def _store_once(self, calls: Sequence[Call]) -> tuple[Sequence[Outcome | HeadraceError], set[int]]:
        with self._environment.writing() as changes:
            group = Group(changes, self._encoder, time.time_ns() // 1000)
            outcomes = [group.add(call) for call in calls]
            return outcomes, group.write()

    def _do_chores(self) -> None:
        try:
            self._store_acknowledgements()
            if self._unsynced and self._environment.options.durability == "relaxed":
                self._environment.sync()
            self._unsynced = False
        except StorageError as error:
            _log.warning("acknowledgements and fsync are put off: %s", error)

    def _store_acknowledgements(self) -> None:
        pending = self._environment.acknowledgements.pending()
        if pending:
            with self._environment.writing() as changes:
                store(changes, pending)
            self._environment.acknowledgements.forget(pending)

    # On the loop.

    def _answer(self, calls: Sequence[Call], outcomes: Sequence[Outcome | HeadraceError], grown: set[int]) -> None:
        for call, outcome in zip(calls, outcomes, strict=True):
            answer = call.answer
            if answer.done():
                continue
            if isinstance(outcome, HeadraceError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._answered(grown)


def groups(calls: Sequence[Call], limit: int) -> Iterator[Sequence[Call]]:
    """Cut calls into groups, each up to the call with which it reaches `limit` bytes."""
    ends = list(accumulate(call.nbytes for call in calls))
    start = taken = 0
    while start < len(calls):
        stop = bisect_left(ends, taken + limit, start) + 1
        yield calls[start:stop]
        start, taken = stop, ends[min(stop, len(ends)) - 1]


def _own(error: HeadraceError) -> HeadraceError:
    """A copy: each caller raises its own."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy
