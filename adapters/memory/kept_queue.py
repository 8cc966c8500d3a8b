"""One queue of the memory adapter that keeps all batches, so that it can rewind."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from ...streams.clock import now_us
from ...streams.errors import InvalidArgument
from ...streams.events import EventBatch
from ..limits import within_limits
from ..receiving import Bounds, Received
from ..seam import Backlog, QueueStatistics
from .queue import WakingReceiver, copy_of


class KeptQueue:
    """Stores batches, and wakes all receivers."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.acknowledged = 0
        """A receiver without a start begins here."""
        self._times_us: list[int] = []
        """When each batch was stored. Never decreases, also if the clock is set back."""
        self._events = self._bytes = 0
        self._receivers: set[KeptReceiver] = set()

    @property
    def next(self) -> int:
        """The offset of the next batch."""
        return len(self.batches)

    @property
    def statistics(self) -> QueueStatistics:
        return QueueStatistics(Bounds(0, self.next), self._events, self._bytes)

    def append(self, batch: EventBatch) -> int:
        """Store a batch, wake the receivers, and return its offset."""
        offset = self.next
        self.batches.append(copy_of(batch, offset))
        self._times_us.append(max([now_us(), *self._times_us[-1:]]))
        self._events += batch.count
        self._bytes += batch.nbytes
        for receiver in self._receivers:
            receiver.wake()
        return offset

    def open(self, start: int | None) -> KeptReceiver:
        """Open a receiver. Raises InvalidArgument if `start` is above the next offset."""
        position = self.acknowledged if start is None else start
        if not 0 <= position <= self.next:
            raise InvalidArgument(f"the queue ends at offset {self.next}: it cannot be read from {position}")
        receiver = KeptReceiver(self, position, self._receivers.discard)
        self._receivers.add(receiver)
        return receiver

    def offset_at(self, time_us: int) -> int:
        return bisect_left(self._times_us, time_us)

    def backlog(self, offset: int) -> Backlog:
        start = max(offset, 0)
        events = sum(batch.count for batch in self.batches[start:])
        since_us = self._times_us[start] if start < self.next else None
        return Backlog(max(self.next - start, 0), events, since_us=since_us)

    def close(self) -> None:
        for receiver in list(self._receivers):
            receiver.end("the adapter was closed")


class KeptReceiver(WakingReceiver):
    """Reads a queue from an offset on."""

    def __init__(self, queue: KeptQueue, position: int, on_end: Callable[[KeptReceiver], None]) -> None:
        super().__init__()
        self._queue = queue
        self._position = position
        self._on_end = on_end

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        while True:
            self._check_open()
            self._changed.clear()  # before the read: an append after it sets the event again
            start, stored = self._position, self._queue.batches
            ahead = (stored[offset] for offset in range(start, len(stored)))
            batches = [copy_of(batch, batch.offset) for batch in within_limits(ahead, max_events, max_bytes)]
            if batches:
                self._position += len(batches)
                return Received(batches, self._position)
            await self._changed.wait()

    async def acknowledge(self, offset: int) -> None:
        """See QueueReceiver. Raises InvalidArgument above the next offset, Closed."""
        self._check_open()
        if offset > self._queue.next:
            raise InvalidArgument(
                f"cannot acknowledge up to offset {offset}: the next batch will have offset {self._queue.next}"
            )
        self._queue.acknowledged = max(self._queue.acknowledged, offset)

    def end(self, why: str) -> None:
        super().end(why)
        self._on_end(self)
