"""An adapter that passes every call on to another one: the base of decorators."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence

from ..streams.events import EventBatch
from .receiving import Bounds, QueueReceiver
from .seam import Backlog, ProducerSequence, QueueAdapter, QueueStatistics, Receipt


class ForwardingAdapter(QueueAdapter):
    """Behaves as `inner`. Subclasses override some of the calls."""

    def __init__(self, inner: QueueAdapter) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.mapper = inner.mapper
        self.identity = inner.identity
        self.location = inner.location
        self.other_queues = inner.other_queues
        self.durations = inner.durations

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        return self.inner.enqueue(batches, sequence=sequence)

    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        return await self.inner.open_receiver(queue, start)

    async def bounds(self, queue: int) -> Bounds:
        return await self.inner.bounds(queue)

    async def resume_at(self, queue: int, offset: int) -> int:
        return await self.inner.resume_at(queue, offset)

    async def statistics(self, queue: int) -> QueueStatistics:
        return await self.inner.statistics(queue)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def offset_at(self, queue: int, time_us: int) -> int:
        return await self.inner.offset_at(queue, time_us)

    async def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        return await self.inner.end_within(queue, start, end, max_events, max_bytes)

    async def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        return await self.inner.skipped(queue, start, end)

    async def backlog(self, queue: int, offset: int) -> Backlog:
        return await self.inner.backlog(queue, offset)

    async def due_end(self, queue: int) -> int | None:
        return await self.inner.due_end(queue)

    async def last_sequence(self, producer: str) -> int:
        return await self.inner.last_sequence(producer)

    async def apply_retention(self, watermarks: Mapping[int, int]) -> None:
        await self.inner.apply_retention(watermarks)

    async def show_progress(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        await self.inner.show_progress(positions)
