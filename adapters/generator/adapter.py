"""The generator adapter: receivers over timelines, and their faults."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

from ...streams.errors import Closed, InvalidArgument, NotSupported, StorageError
from ...streams.events import EventBatch
from ..limits import within_limits
from ..receiving import Bounds, QueueReceiver, Received
from ..registry import read_options
from ..seam import AdapterContext, Capabilities, ProducerSequence, QueueAdapter, QueueStatistics, Receipt
from .options import GeneratorOptions
from .plan import GeneratorPlan
from .timeline import QueueTimeline


class GeneratorReceiver(QueueReceiver):
    """Reads a generated queue from its own position, with the faults of the plan."""

    def __init__(self, queue: GeneratorQueue, position: int) -> None:
        self._queue = queue
        self._position = position
        self._changed = asyncio.Event()
        self._stalled = (-1, 0.0)  # the offset of the last stall, and the time at which it ends
        self._closed = False

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        await asyncio.sleep(0)  # endless data must not block the loop for other tasks
        while (due_s := self._due_s()) > _now_s():
            await self._pause(due_s)
        self._queue.read(self._position)
        batches = list(within_limits(self._ahead(), max_events, max_bytes))
        self._position = batches[-1].offset + 1
        return Received(batches, self._position)

    async def acknowledge(self, offset: int) -> None:
        self._check_open()
        self._queue.acknowledge(offset)

    async def aclose(self) -> None:
        self._closed = True
        self._queue.receivers.discard(self)
        self.wake()

    def wake(self) -> None:
        """Make a waiting `receive` check again: the plan has changed, or this receiver is closed."""
        self._changed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this receiver is closed")

    def _due_s(self) -> float:
        """Return when the next batch can be returned, in seconds of the loop's clock."""
        self._check_open()
        self._changed.clear()
        stall_s = self._queue.timeline.plan.stall_s(self._position)
        if stall_s and self._stalled[0] != self._position:
            self._stalled = (self._position, _now_s() + stall_s)
        return max(self._queue.timeline.due_s(self._position), self._stalled[1])

    async def _pause(self, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(None if math.isinf(until_s) else until_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _ahead(self) -> Iterator[EventBatch]:
        """Yield the batches that can be returned now, up to the next stall."""
        timeline, offset, now_s = self._queue.timeline, self._position, _now_s()
        while timeline.due_s(offset) <= now_s:
            yield timeline.batch(offset)
            offset += 1
            if timeline.plan.stall_s(offset):
                return


class GeneratorQueue:
    """A timeline and its receivers."""

    def __init__(self, index: int, plan: GeneratorPlan) -> None:
        self.index = index
        self.timeline = QueueTimeline(index, plan, _now_s())
        self._acknowledged = 0
        self.receivers: set[GeneratorReceiver] = set()
        self._reads = 0

    @property
    def bounds(self) -> Bounds:
        return Bounds(0, self.timeline.next(_now_s()))

    def read(self, offset: int) -> None:
        """Count an attempt to read from `offset` on. Raises StorageError if the plan wants this attempt to fail."""
        self._reads += 1
        if self.timeline.plan.fails(self.index, self._reads):
            raise StorageError(
                f"queue {self.index}, offset {offset}: reading failed, by the generator's option read_errors: receive "
                "again"
            )

    def open(self, start: int | None) -> GeneratorReceiver:
        position = self._acknowledged if start is None else start
        if not 0 <= position <= self.timeline.end:
            raise InvalidArgument(f"queue {self.index} ends at offset {self.timeline.end}: it has no offset {position}")
        self.timeline.reach(position, _now_s())
        receiver = GeneratorReceiver(self, position)
        self.receivers.add(receiver)
        return receiver

    def acknowledge(self, offset: int) -> None:
        self._acknowledged = max(self._acknowledged, offset)

    def change(self, plan: GeneratorPlan) -> None:
        self.timeline.change(plan, _now_s())
        for receiver in self.receivers:
            receiver.wake()


class GeneratorAdapter(QueueAdapter):
    """Generates events instead of reading a queue: for tests and load.

    Batch k of queue q is a pure function of (seed, q, k, options), so that reading again gives the same bytes. Nothing
    is stored: a receiver can start at any offset below the end, and acknowledged batches can still be read. With a
    rate, `Bounds.next` is the end of the batches that are due; without one, of those that were read so far.
    """

    capabilities = Capabilities(rewindable=True, read_only=True)

    def __init__(self, context: AdapterContext, options: GeneratorOptions | None = None) -> None:
        self._context = context
        self.options = options or GeneratorOptions()
        plan = self._plan()
        self._queues = [GeneratorQueue(index, plan) for index in range(context.queues)]
        self._closed = False

    def reconfigure(self, options: GeneratorOptions | Mapping[str, Any]) -> None:
        """Replace all options. Offsets and times continue.

        The contents change from the next batch on that is not generated yet; faults in reading change at once.
        `start_us` has no effect. If this raises InvalidArgument, nothing changes.
        """
        self.options = (
            options if isinstance(options, GeneratorOptions) else read_options("generator", GeneratorOptions, options)
        )
        plan = self._plan()
        for queue in self._queues:
            queue.change(plan)

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        raise NotSupported(
            f"provider {self._context.provider!r} cannot be published to: the generator adapter makes its own events"
        )

    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        """See QueueAdapter. Receivers of one queue are independent; faults apply to each of them."""
        return self._queue(queue).open(start)

    async def bounds(self, queue: int) -> Bounds:
        return self._queue(queue).bounds

    async def statistics(self, queue: int) -> QueueStatistics:
        return QueueStatistics(self._queue(queue).bounds)

    async def offset_at(self, queue: int, time_us: int) -> int:
        """See QueueAdapter. Uses the generated times."""
        return self._queue(queue).timeline.offset_at(time_us, _now_s())

    async def aclose(self) -> None:
        self._closed = True
        for queue in self._queues:
            for receiver in tuple(queue.receivers):
                await receiver.aclose()

    def _plan(self) -> GeneratorPlan:
        return GeneratorPlan(self.options, self._context.queue_of)

    def _queue(self, index: int) -> GeneratorQueue:
        if self._closed:
            raise Closed(f"provider {self._context.provider!r}: the generator adapter is closed")
        if not 0 <= index < len(self._queues):
            raise InvalidArgument(
                f"provider {self._context.provider!r} has no queue {index}: they are numbered 0 to "
                f"{len(self._queues) - 1}"
            )
        return self._queues[index]


async def open_adapter(context: AdapterContext, options: Mapping[str, Any]) -> GeneratorAdapter:
    """Entry point of the adapter `generator`. Raises InvalidArgument for wrong options."""
    return GeneratorAdapter(context, read_options("generator", GeneratorOptions, options))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
