"""One queue of the memory adapter: a partition and its receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...streams.errors import Closed
from ...streams.events import EventBatch
from ..receiving import Bounds, QueueReceiver, Received
from ..seam import QueueStatistics
from .partition import MemoryPartition, PartitionReader


class WakingReceiver(QueueReceiver):
    """A receiver that an append wakes up, so that it does not poll."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._ended_because = ""

    async def aclose(self) -> None:
        self.end("it was closed")

    def wake(self) -> None:
        self._changed.set()

    def end(self, why: str) -> None:
        """Make all calls raise Closed with the reason `why`. The first reason stays."""
        self._ended_because = self._ended_because or why
        self._changed.set()

    def _check_open(self) -> None:
        if self._ended_because:
            raise Closed(f"this receiver has ended: {self._ended_because}")


class MemoryReceiver(WakingReceiver):
    """Reads a queue."""

    def __init__(self, partition: MemoryPartition[EventBatch], release: Callable[[int], None]) -> None:
        super().__init__()
        self._partition = partition
        self._release = release
        self._reader = PartitionReader(partition)

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        while True:
            self._check_open()
            self._changed.clear()  # before the read: an append after it sets the event again
            offset = self._reader.position
            batches = self._reader.take(max_events, max_bytes)
            if batches:
                own = [copy_of(batch, offset + index) for index, batch in enumerate(batches)]
                return Received(own, offset + len(own))
            await self._changed.wait()

    async def acknowledge(self, offset: int) -> None:
        """See QueueReceiver. Raises InvalidArgument above the next offset, Closed."""
        self._check_open()
        self._release(self._partition.commit(offset))


class MemoryQueue:
    """Stores batches, and wakes the receiver. Calls `release` with the number of deleted events."""

    def __init__(self, segment_size: int, release: Callable[[int], None]) -> None:
        self._partition = MemoryPartition[EventBatch](segment_size)
        self._release = release
        self._receiver: MemoryReceiver | None = None

    @property
    def statistics(self) -> QueueStatistics:
        partition = self._partition
        return QueueStatistics(Bounds(partition.first, partition.next), partition.events, partition.bytes)

    def append(self, batch: EventBatch) -> int:
        """Store a batch, wake the receiver, and return its offset."""
        offset = self._partition.append(copy_of(batch, self._partition.next))
        if self._receiver is not None:
            self._receiver.wake()
        return offset

    def open(self) -> MemoryReceiver:
        """Open a receiver. It replaces the former one."""
        self._end("another receiver of the queue was opened")
        self._receiver = MemoryReceiver(self._partition, self._release)
        return self._receiver

    def close(self) -> None:
        self._end("the adapter was closed")

    def _end(self, why: str) -> None:
        if self._receiver is not None:
            self._receiver.end(why)


def copy_of(batch: EventBatch, offset: int) -> EventBatch:
    """Return a new batch that shares the encoded bytes. Each holder of a batch may write to its cache fields."""
    return EventBatch(batch.stream, batch.encoded, batch.count, offset)
