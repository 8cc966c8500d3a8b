"""The memory adapter: queues behind one capacity gate. One event loop, no threads."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import structs

from ...streams.errors import Closed, InvalidArgument, NotSupported, QueueFull
from ...streams.events import EventBatch
from ...streams.identity import SequenceToken
from ...streams.producer_ledger import ProducerLedger
from ..receiving import Bounds, QueueReceiver
from ..registry import read_options
from ..seam import AdapterContext, Backlog, Capabilities, ProducerSequence, QueueAdapter, QueueStatistics, Receipt
from .call import EnqueueCall, Placed, events_of
from .capacity import CapacityGate, cut
from .kept_queue import KeptQueue
from .queue import MemoryQueue

MAX_PRODUCERS = 100_000
"""Idempotent producers that an adapter remembers."""

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the memory adapter."""

    capacity: _AtLeastOne | None = 100_000
    """Largest number of events held in all queues together, None for no bound. Acknowledged events do not count."""
    when_full: Literal["wait", "fail"] = "wait"
    """`wait`: calls of `enqueue` wait for capacity, in their order. `fail`: they raise QueueFull and store nothing."""
    segment_size: _AtLeastOne = 1024
    """Batches in one segment of a partition."""
    rewindable: bool = False
    """Keep all events until the adapter is closed, so that subscriptions can go back. For tests: `capacity` does not
    apply."""


class MemoryAdapter(QueueAdapter):
    """Queues in the memory of one process. They end when the adapter is closed: use it for tests, or if events may be
    lost.

    Each adapter object has its own data, even with the same provider name.
    """

    def __init__(self, context: AdapterContext, options: MemoryOptions | None = None) -> None:
        self._provider = context.provider
        options = options or MemoryOptions()
        self._options = structs.replace(options, capacity=None) if options.rewindable else options
        self.capabilities = Capabilities(idempotent=True, rewindable=options.rewindable)
        self._gate = CapacityGate[EnqueueCall](self._options.capacity)
        self._queues = [self._new_queue() for _ in range(context.queues)]
        self._ledger = ProducerLedger(MAX_PRODUCERS)
        self._closed = False

    def _new_queue(self) -> MemoryQueue | KeptQueue:
        return KeptQueue() if self._options.rewindable else MemoryQueue(self._options.segment_size, self._gate.release)

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """See QueueAdapter. If there is capacity, batches are stored and can be received before this returns.

        `wait`: a call larger than the whole capacity is stored in slices of up to the capacity, without other calls
        between them. A cancelled call is withdrawn if nothing of it is stored yet, else it is completed.
        `fail`: a call larger than the free capacity raises QueueFull, and nothing of it is stored.

        Also raises InvalidArgument for a batch with more events than the capacity, which would never fit.
        """
        self._check(batches)
        call = EnqueueCall(self._slices(tuple(batches)), sequence, self._store, self._ledger)
        if self._options.when_full == "fail":
            self._enter_nowait(call)
        else:
            self._enter(call)
        return call.answer

    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        """Read a queue. Raises NotSupported for a `start`, unless the option `rewindable` is set.

        Without that option, a queue has one receiver: a new one replaces the former one, which then raises Closed.
        """
        found = self._queue(queue)
        if isinstance(found, KeptQueue):
            return found.open(start)
        if start is not None:
            raise NotSupported(
                f"provider {self._provider!r}: the memory adapter is not rewindable, so a receiver starts at the "
                "first batch that is not acknowledged; use the log adapter to start at an offset, or set rewindable"
            )
        return found.open()

    async def offset_at(self, queue: int, time_us: int) -> int:
        found = self._queue(queue)
        return found.offset_at(time_us) if isinstance(found, KeptQueue) else await super().offset_at(queue, time_us)

    async def backlog(self, queue: int, offset: int) -> Backlog:
        found = self._queue(queue)
        return found.backlog(offset) if isinstance(found, KeptQueue) else await super().backlog(queue, offset)

    async def bounds(self, queue: int) -> Bounds:
        return self._queue(queue).statistics.bounds

    async def statistics(self, queue: int) -> QueueStatistics:
        return self._queue(queue).statistics

    async def last_sequence(self, producer: str) -> int:
        self._check_open()
        return self._ledger.last(producer).number

    async def aclose(self) -> None:
        """See QueueAdapter. Calls that still wait for capacity raise Closed."""
        self._closed = True
        for call in self._gate.dismiss():
            call.fail(Closed(f"provider {self._provider!r} was closed while an enqueue waited for capacity"))
        for queue in self._queues:
            queue.close()
        self._queues.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"provider {self._provider!r}: the memory adapter is closed")

    def _queue(self, index: int) -> MemoryQueue | KeptQueue:
        self._check_open()
        if not 0 <= index < len(self._queues):
            raise InvalidArgument(
                f"provider {self._provider!r} has no queue {index}: they are numbered 0 to {len(self._queues) - 1}"
            )
        return self._queues[index]

    def _check(self, batches: Sequence[Placed]) -> None:
        self._check_open()
        capacity = self._options.capacity
        for queue, batch in batches:
            self._queue(queue)
            if capacity is not None and batch.count > capacity:
                raise InvalidArgument(
                    f"a batch of {batch.count:,} events for {batch.stream} never fits the memory adapter's capacity of "
                    f"{capacity:,}: publish smaller batches, or raise the capacity"
                )

    def _slices(self, batches: Sequence[Placed]) -> Sequence[Sequence[Placed]]:
        return cut(batches, events_of, self._options.capacity) if self._options.when_full == "wait" else [batches]

    def _enter_nowait(self, call: EnqueueCall) -> None:
        if not self._gate.enter_nowait(call):
            raise QueueFull(
                f"provider {self._provider!r}: no capacity for {call.weight:,} events, {self._gate.free:,} are free of "
                f"{self._options.capacity:,}: retry later, or raise the memory adapter's capacity"
            )

    def _enter(self, call: EnqueueCall) -> None:
        self._gate.enter(call)
        if not call.answer.done():
            call.answer.add_done_callback(lambda _: None if call.has_begun else self._gate.withdraw(call))

    def _store(self, batches: Sequence[Placed]) -> Sequence[Receipt]:
        return [Receipt(SequenceToken(self._queues[queue].append(batch))) for queue, batch in batches]


async def open_adapter(context: AdapterContext, options: Mapping[str, Any]) -> MemoryAdapter:
    """Open the adapter `memory`. Raises InvalidArgument for wrong options."""
    return MemoryAdapter(context, read_options("memory", MemoryOptions, options))
