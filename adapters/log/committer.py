"""Group commit: a thread stores all waiting calls by one transaction and one fsync."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVarTuple

from ...streams.errors import HeadraceError, StorageError, StorageFull
from ...streams.histograms import Histogram
from ..group_commit import Growth, Outcome, groups
from .acknowledgements import store
from .blocks import BlockEncoder
from .environment import LogEnvironment
from .group import CommitGroup, CommitRequest
from .limits import LogLimits

log = logging.getLogger(__name__)

_Ts = TypeVarTuple("_Ts")


class LogCommitter:
    """Stores calls in groups, in the order of `submit`. Used from one event loop; has a thread of its own.

    `on_commit` gets the queues that have grown, in the committer's thread. `on_answers` gets their new batches, on the
    event loop, after the futures of the group's calls have their results. It must not raise.
    """

    def __init__(
        self,
        environment: LogEnvironment,
        on_commit: Callable[[Iterable[int]], None],
        on_answers: Callable[[Growth], None],
        limits: LogLimits,
    ) -> None:
        self._limits = limits
        self._environment = environment
        self._on_commit = on_commit
        self._on_answers = on_answers
        self._loop = asyncio.get_running_loop()
        self._calls: deque[CommitRequest] = deque()
        self._wake_scheduled = False
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._unsynced = False
        self._encoder = BlockEncoder()
        self.commits = Histogram()
        """How long commits took, with fsync."""
        self.syncs = Histogram()
        """How long fsync took with durability `relaxed`: its commits do not wait for fsync."""
        self._stopped = asyncio.Event()
        threading.Thread(target=self._run, name="headrace-log-commit", daemon=True).start()

    def submit(self, call: CommitRequest) -> None:
        """Store the call with one of the next commits. The result or the error is set on its future."""
        self._calls.append(call)
        if not self._wake_scheduled:
            # At the end of this turn of the loop, so that calls of other tasks in the same turn share the commit.
            self._wake_scheduled = True
            self._loop.call_soon(self._start)

    async def aclose(self) -> None:
        """Store everything submitted, then stop."""
        self._wakes.put(False)
        await self._stopped.wait()

    def _start(self) -> None:
        self._wake_scheduled = False
        self._wakes.put(True)

    # ---- in the committer's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        running, chores_at = True, time.monotonic() + self._limits.chores_s
        while running and not self._loop.is_closed():
            running = self._wait(chores_at)
            while self._calls:
                for calls in groups(self._take(), self._environment.options.group_bytes):
                    self._commit(calls)
            if not running or time.monotonic() >= chores_at:
                self._do_chores()
                chores_at = time.monotonic() + self._limits.chores_s
        self._tell_loop(self._stopped.set)

    def _wait(self, until: float) -> bool:
        try:
            return self._wakes.get(timeout=max(until - time.monotonic(), 0))
        except Empty:
            return True

    def _take(self) -> list[CommitRequest]:
        take = self._calls.popleft
        return [take() for _ in range(len(self._calls))]

    def _commit(self, calls: Sequence[CommitRequest]) -> None:
        grown: Growth = {}
        try:
            outcomes, grown = self._store(calls)
        except HeadraceError as error:
            outcomes = [error.copy() for _ in calls]
        except Exception as error:  # callers must get an answer, and the thread must go on
            log.exception("%s: a commit failed with an unexpected error", self._environment.path)
            outcomes = [StorageError(f"a commit failed: {error!r}") for _ in calls]
        self._unsynced = True
        self._notify(grown)
        self._tell_loop(self._answer, calls, outcomes, grown)

    def _tell_loop(self, function: Callable[[*_Ts], object], *arguments: *_Ts) -> None:
        """Call a function on the loop. If the loop was closed without `aclose`, no caller waits."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _notify(self, grown: Iterable[int]) -> None:
        """Wake up the receivers of other handles. If that fails, they still poll each second, so only log the error."""
        try:
            self._on_commit(grown)
        except OSError as error:
            log.warning("%s: receivers of other handles cannot be woken up: %s", self._environment.path, error)

    def _store(self, calls: Sequence[CommitRequest]) -> tuple[Sequence[Outcome | HeadraceError], Growth]:
        try:
            return self._store_once(calls)
        except StorageFull:
            self._environment.release_freed_pages()
            return self._store_once(calls)

    def _store_once(self, calls: Sequence[CommitRequest]) -> tuple[Sequence[Outcome | HeadraceError], Growth]:
        with self._environment.writing() as changes:
            group = CommitGroup(changes, self._encoder, time.time_ns() // 1000)
            outcomes = [group.add(call) for call in calls]
            grown = group.write()
            written = time.monotonic()
        self.commits.observe(time.monotonic() - written)
        return outcomes, grown

    def _do_chores(self) -> None:
        try:
            self._store_acknowledgements()
            if self._unsynced and self._environment.options.durability == "relaxed":
                began = time.monotonic()
                self._environment.sync()
                self.syncs.observe(time.monotonic() - began)
            self._unsynced = False
        except StorageError as error:
            log.warning("%s: acknowledgements or fsync failed, trying again: %s", self._environment.path, error)
        except Exception:  # the thread must go on
            log.exception("%s: acknowledgements or fsync failed, trying again", self._environment.path)

    def _store_acknowledgements(self) -> None:
        pending = self._environment.acknowledgements.pending()
        if pending:
            with self._environment.writing() as changes:
                store(changes, pending)
            self._environment.acknowledgements.forget(pending)

    # ---- on the event loop -----------------------------------------------------------------------------------------

    def _answer(
        self, calls: Sequence[CommitRequest], outcomes: Sequence[Outcome | HeadraceError], grown: Growth
    ) -> None:
        for call, outcome in zip(calls, outcomes, strict=True):
            answer = call.answer
            if answer.done():
                continue
            if isinstance(outcome, HeadraceError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._on_answers(grown)
