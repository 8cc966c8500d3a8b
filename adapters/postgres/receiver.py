"""Receives the batches of one queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ...streams.background import BackgroundTasks
from ...streams.errors import Closed, HeadraceError
from ...streams.events import EventBatch
from ..limits import within_limits
from ..receiving import Accept, QueueReceiver, Received
from .group import CommittedBatches
from .reading import Fetched


class WatchedQueue(NamedTuple):
    """A queue, as its receivers use it."""

    number: int
    fetch: Callable[[int, int | None], Awaitable[Fetched]]
    """Reads batches from a position on. The second argument is the commit time of the block before it, if known."""
    end: Callable[[], int]
    """Returns the offset after the last batch that is known to be stored."""
    fault: Callable[[], HeadraceError | None]
    """Returns the reason why the server cannot be used at present."""
    acknowledge: Callable[[int], None]


class PostgresReceiver(QueueReceiver):
    """Receives the batches of one queue, from a position on. It holds the batches of one query at most."""

    def __init__(
        self,
        queue: WatchedQueue,
        position: int,
        first: int,
        on_close: Callable[[PostgresReceiver], None],
        before_us: int | None = None,
    ) -> None:
        """`first` is the first retained offset, `before_us` the commit time of the block before `position`."""
        self._queue = queue
        self._position = position
        self._before_us = before_us
        """Commit time of the block before the position, after the fetched batches are taken. None: not known. If the
        server has another block there, it has lost the end of the queue, and stored other batches."""
        self._is_before_first = position < first
        self._on_close = on_close
        self._fetched: deque[EventBatch] = deque()
        self._fetching: asyncio.Task[Fetched] | None = None
        self._tasks = BackgroundTasks()
        self._changed = asyncio.Event()
        self._accept: Accept | None = None
        self._waiting = False
        self._accepted = False
        """Whether batches were accepted while the present `receive` waited."""
        self._closed = False
        self._may_be_truncated = False
        """Whether the queue may have lost its end."""

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        while True:
            self._check_open()
            if self._fetched:
                return self._take(max_events, max_bytes)
            self._changed.clear()
            if self._fetching is None and (fault := self._queue.fault()) is not None:
                raise fault.copy()
            end = self._queue.end()
            if self._fetching is not None or self._position < end or self._is_before_first or self._may_be_truncated:
                if (gap := await self._fetch()) is not None:
                    return gap
            elif await self._wait():
                return Received((), self._position)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the receiver of queue {self._queue.number} is closed")

    def _take(self, max_events: int, max_bytes: int) -> Received:
        taken = list(within_limits(self._fetched, max_events, max_bytes))
        for _ in taken:
            self._fetched.popleft()
        self._position = taken[-1].offset + 1
        if not self._fetched and self._position < self._queue.end():
            self._begin_fetch()  # while the caller is busy with these batches
        return Received(taken, self._position)

    def _begin_fetch(self) -> asyncio.Task[Fetched]:
        if self._fetching is None:
            self._may_be_truncated = False  # not after the fetch: `wake` may set it meanwhile
            name = f"headrace postgres read of queue {self._queue.number}"
            self._fetching = self._tasks.hold(_fetched(self._queue, self._position, self._before_us), name)
        return self._fetching

    async def _fetch(self) -> Received | None:
        """Fetch the next batches. Return a result if they begin with a gap. A cancelled call loses nothing."""
        task = self._begin_fetch()
        await asyncio.wait({task})
        self._fetching = None
        self._check_open()
        try:
            batches, end, gap, time_us = task.result()
        except HeadraceError:
            self._may_be_truncated = True  # until a fetch succeeds
            raise
        self._is_before_first = False
        self._before_us = time_us
        if gap is not None:
            self._position = end
            return Received((), end, gap)
        self._fetched.extend(batches)
        return None

    async def _wait(self) -> bool:
        """Wait until the queue may have grown. Return whether batches were accepted meanwhile."""
        self._waiting, self._accepted = True, False
        try:
            await self._changed.wait()
        finally:
            self._waiting = False
        return self._accepted

    def offer_to(self, accept: Accept) -> None:
        self._accept = accept

    def offer(self, committed: CommittedBatches) -> None:
        """This process has committed batches of the queue: offer them if they are the next ones."""
        stored, before_us, time_us = committed
        follows = self._position == stored.first and self._before_us in (None, before_us)
        if not follows or not self._waiting or self._changed.is_set():
            return
        if self._accept is not None and self._accept(stored.copies()):
            self._position, self._before_us = stored.end, time_us
            self._accepted = True

    def wake(self) -> None:
        """The queue, or the state of the server, may have changed."""
        self._may_be_truncated = self._may_be_truncated or self._position > self._queue.end()
        if self._may_be_truncated or self._position < self._queue.end() or self._queue.fault() is not None:
            self._changed.set()

    async def acknowledge(self, offset: int) -> None:
        self._check_open()
        self._queue.acknowledge(offset)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._changed.set()
            self._on_close(self)
            self._fetched.clear()
        await self._tasks.aclose()


async def _fetched(queue: WatchedQueue, position: int, before_us: int | None) -> Fetched:
    return await queue.fetch(position, before_us)
