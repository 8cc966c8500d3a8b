"""The adapter seam: the interface that a queue technology implements.

An adapter serves the N queues of one provider, numbered 0 to N-1. It is found by name through the entry point group
`headrace.adapters`; the entry point is an `AdapterFactory`. The package `headrace.adapters.conformance` has the tests
that every adapter must pass, as pytest classes to inherit from.

An adapter gives each batch of a queue an integer offset. Offsets are strictly increasing; the first is 0 or higher.
Positions are EXCLUSIVE everywhere: "next" is the first offset that is not yet read, finished or used; 0 stands for "no
batch yet".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..streams.errors import NotSupported
from ..streams.events import EventBatch
from ..streams.histograms import Histogram
from ..streams.identity import StreamId
from ..streams.publishing import ProducerSequence, Receipt
from .range_ends import OffsetRange, RangeLimits, end_by_reading
from .receiving import Bounds, QueueReceiver


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The abilities of an adapter. An option that needs a missing capability raises an error when it is set."""

    rewindable: bool = False
    """A receiver can start at any retained offset, and several may read one queue independently."""
    durable: bool = False
    """Enqueued batches survive the end of the process."""
    delay: bool = False
    priority: bool = False
    idempotent: bool = False
    """`enqueue` supports `sequence`."""
    ordered: bool = True
    """Batches of a queue are received in the order in which they were stored, at the offsets of their receipts; a
    delayed batch at a higher one. If False, a batch gets its offset when it is first received; the offset in its
    receipt is only a lower bound."""
    read_only: bool = False
    """The adapter cannot enqueue."""
    shows_progress: bool = False
    """`show_progress` tells the queue technology's own tools how far subscriptions are."""
    shared_calls: bool = False
    """Batches of several callers may come in one call of `enqueue`: a call is atomic, and takes its place in the order
    when it is made, not when it is awaited."""
    time_resolution_us: int = 1
    """`offset_at` distinguishes times that differ by this many microseconds."""


class QueueStatistics(NamedTuple):
    """A cheap snapshot of one queue."""

    bounds: Bounds
    events: int | None = None
    bytes: int | None = None


class Backlog(NamedTuple):
    """The due batches of a queue at or above an offset."""

    batches: int
    events: int | None = None
    """None if the adapter does not know."""
    estimated: bool = False
    """Whether only the first events were counted, and the others estimated from the number of batches."""
    since_us: int | None = None
    """Time at which the first batch was stored, or became due if it had a delay, in microseconds since 1970 UTC.

    None if there is no batch, or if the adapter does not know. A rewindable adapter must know.
    """
    later: int = 0
    """Batches that are not due yet; they are not included in `batches`."""
    later_events: int = 0
    """The events of these batches; an estimate if there are many."""
    later_us: int | None = None
    """When the first of these batches is due, in microseconds since 1970 UTC; None if there is none, or if the adapter
    does not know."""


class StreamMapper(Protocol):
    """Says which queues have the events of a stream. It depends only on the stream's name and the number of queues."""

    @property
    def name(self) -> str:
        """The name of the algorithm. The control store keeps it with the provider, and refuses another one."""
        ...

    @property
    def queues(self) -> int: ...

    def queue_of(self, stream: StreamId) -> int:
        """Return the queue into which headrace publishes events of the stream.

        Raises InvalidArgument if there can be no such stream.
        """
        ...

    def queues_with(self, stream: StreamId) -> Sequence[int]:
        """Return the queues that may have events of the stream."""
        ...


class QueueAdapter(ABC):
    """One provider's queues in some queue technology."""

    capabilities: Capabilities
    mapper: StreamMapper | None = None
    """The mapper of these queues, if other programs write to them, too, and decide which queue a stream is in. None:
    headrace's hash ring, and headrace alone writes."""
    identity: str = ""
    """Identifies these queues. It differs from the identity of all other queues, also of earlier ones in the same
    place. "" if the adapter does not know."""
    location: Mapping[str, Any] = {}
    """The options that say where the queues are, without secrets, as JSON values. The control store keeps them and
    gives them to the next `AdapterContext`."""
    other_queues: str = ""
    """How to choose other queues if these belong to another control store, for an error's text. "" if they are in the
    data directory."""
    durations: Mapping[str, Histogram] = {}
    """How long operations took that the adapter measures, by name, such as `commit`."""

    @abstractmethod
    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """Store batches in order, each in the queue with the given index. A durable adapter returns when they are
        durable.

        Calls are stored in the order in which they are made, also if the caller does not await one before the next. The
        batches are not changed. If the adapter is idempotent, a call is atomic: all its batches are stored, or none.
        The `sequence` of a call without batches counts, too.

        Raises QueueFull, StorageFull, StorageError (no batch of this call is acknowledged; retry with the same
        `sequence`), SequenceConflict, NotSupported (read-only adapter, or `sequence` without the capability), Closed.
        """

    @abstractmethod
    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        """Read queue `queue` from offset `start` on. None: from the first batch that is not acknowledged.

        If `start` is below the retained offsets, the first `receive` returns a Gap. Raises InvalidArgument if `start`
        is above the next offset, NotSupported if `start` is given and the adapter is not rewindable.
        """

    @abstractmethod
    async def bounds(self, queue: int) -> Bounds: ...

    async def resume_at(self, queue: int, offset: int) -> int:
        """Return the offset at which a reader resumes that has finished everything below `offset`.

        This is `offset`, or the queue's end if a crash of the machine lost the batches before `offset`. From now on,
        new batches get offsets at or above the result.
        """
        return min(offset, (await self.bounds(queue)).next)

    @abstractmethod
    async def statistics(self, queue: int) -> QueueStatistics: ...

    @abstractmethod
    async def aclose(self) -> None:
        """Store all enqueued batches, close all receivers, release all resources. Idempotent."""

    async def offset_at(self, queue: int, time_us: int) -> int:
        """Return the offset of the first batch stored at or after `time_us`, or `Bounds.next` if there is none.

        `time_us` is in microseconds since 1970 UTC, by the store's clock. Raises NotSupported if the adapter is not
        rewindable.
        """
        raise NotSupported("this adapter cannot find a position by time: it is not rewindable")

    async def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        """Return how far a reader can read from `start` on within limits of events and encoded bytes (None: no limit).

        The result is the offset after the last batch that the limits allow, at most `end`. The first batch is always
        allowed. The result is `start` if there is no batch. It may be the offset of a damaged batch. Raises
        NotSupported if the adapter is not rewindable, OffsetsGone if `start` is not retained, CorruptRecord if its
        batch is damaged.
        """
        if not self.capabilities.rewindable:
            raise NotSupported("this adapter cannot be read by ranges of offsets: it is not rewindable")
        return await end_by_reading(self, OffsetRange(queue, start, end), RangeLimits(max_events, max_bytes))

    async def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        """Return the damaged ranges of offsets from `start` up to `end` (exclusive) that an operator skipped with
        `headrace repair queue`."""
        return ()

    async def backlog(self, queue: int, offset: int) -> Backlog:
        """Count the retained batches from `offset` on. Takes bounded time: in a large backlog, the events are
        estimated."""
        bounds = await self.bounds(queue)
        return Backlog(max(bounds.next - max(offset, bounds.first), 0))

    async def due_end(self, queue: int) -> int | None:
        """Return the lowest offset above all batches that are due now. An adapter that is not `ordered` returns None if
        some of these batches have no offset yet, because they were never received."""
        return (await self.bounds(queue)).next

    async def last_sequence(self, producer: str) -> int:
        """Return the highest number stored for an idempotent producer, 0 if there is none."""
        raise NotSupported("this adapter does not support idempotent producers")

    async def show_progress(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Tell the queue technology how far subscriptions are, for its own tools. One process calls this every few
        seconds if the adapter declares `shows_progress`.

        `positions` has the lowest unfinished offset of each subscription by queue. Nothing depends on it.
        """

    async def apply_retention(self, watermarks: Mapping[int, int]) -> None:
        """Delete batches as the adapter's retention settings allow. One process calls this every few seconds if the
        adapter is durable.

        `watermarks` maps a queue's index to the lowest unfinished offset of all subscriptions. A queue without a
        subscription is not in it. Raises CorruptRecord if a queue is so damaged that nothing can be deleted.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterContext:
    """The facts about a provider that its adapter needs to open."""

    provider: str
    """The provider's name."""
    queues: int
    """Its number of queues."""
    directory: Path | None = None
    """An existing directory for this adapter alone. None if the provider has no data on disk."""
    queue_of: Callable[[StreamId], int] | None = None
    """Returns the queue of a stream by the provider's mapper. None if the mapper is not known."""
    owner: str = ""
    """Identifies the provider's control store. With it an adapter can distinguish its queues from those of a provider
    with the same name and another control store. "" if the control store ends with the process."""
    used_before: bool = False
    """Whether the control store already knows the provider. If the queues in `directory` are then missing, the adapter
    raises DataDirectoryError and does not create them again."""
    location: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`QueueAdapter.location` of the last time, as defaults for options that are not given. Empty at first."""


class AdapterFactory(Protocol):
    """Opens an adapter. `options` is the provider's table of adapter options. Raises InvalidArgument, which names the
    option, if an option is unknown or wrong."""

    async def __call__(self, context: AdapterContext, options: Mapping[str, Any]) -> QueueAdapter: ...
