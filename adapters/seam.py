"""The adapter seam: what a queue technology provides.

An adapter serves the N queues of one provider, numbered 0 to N-1. It is found by name through the entry point group
`headrace.adapters`; the entry point is an `AdapterFactory`. The package `headrace.adapters.conformance` holds the tests
that every adapter passes, as pytest classes to inherit from.

Offsets: an adapter gives each batch of a queue an integer offset, strictly increasing; first is 0 or above. Positions
are EXCLUSIVE everywhere: "next" is the first offset not yet read, finished, or given out, and "nothing yet" is 0.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..streams.errors import NotSupported
from ..streams.events import EventBatch
from ..streams.identity import StreamId
from ..streams.publishing import ProducerSequence, Receipt
from .reaching import Limits, Span, reach_by_reading


class Direction(enum.Enum):
    READ_WRITE = "read-write"
    READ_ONLY = "read-only"
    WRITE_ONLY = "write-only"


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an adapter can do. An option that needs a missing capability is refused when it is given."""

    rewindable: bool = False
    """A receiver can start at any retained offset, and several may read one queue independently."""
    durable: bool = False
    """What was enqueued survives the process."""
    delay: bool = False
    priority: bool = False
    idempotent: bool = False
    """`enqueue` honours `sequence`."""
    ordered: bool = True
    """Batches of a queue are received in the order in which they were stored, at the offsets of their receipts. Where
    not, a batch gets its offset when it is first received, and its receipt has one that is below."""
    direction: Direction = Direction.READ_WRITE


class Gap(NamedTuple):
    """Offsets `low` (inclusive) to `high` (exclusive) of a queue are gone, and `reason` says why."""

    low: int
    high: int
    reason: str


class Received(NamedTuple):
    """What one `receive` brought: batches in offset order, after `gap` where there is one.

    Every retained batch below `next_offset` has been returned by this receiver, in this answer or an earlier one.
    """

    batches: Sequence[EventBatch]
    next_offset: int
    gap: Gap | None = None


class Bounds(NamedTuple):
    """Retained offsets of a queue: `first` (inclusive) to `next` (exclusive, the offset of the next batch stored)."""

    first: int
    next: int


class QueueStatistics(NamedTuple):
    """A cheap snapshot of one queue."""

    bounds: Bounds
    events: int | None = None
    bytes: int | None = None


class Backlog(NamedTuple):
    """What of a queue is at or above an offset, and due."""

    batches: int
    events: int | None = None
    """None where the adapter does not know."""
    estimated: bool = False
    """Only the first of the events were counted; the others are estimated from the number of batches."""
    since_us: int | None = None
    """When the first of the batches was stored, or was due where it had a delay; None where there is none, or the
    adapter does not know."""
    later: int = 0
    """Batches that are not due yet, and not among the others."""
    later_events: int = 0
    """Their events; of many it is an estimate."""
    later_us: int | None = None
    """When the first of them is due; None where there is none, or the adapter does not know."""


class QueueReceiver(ABC):
    """Reads one queue. Not safe for two concurrent `receive` calls; open a second receiver instead."""

    @abstractmethod
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        """Return what is there at once, at least one batch or a gap; wait only while there is nothing.

        Stops after the batch with which either limit is reached or passed, so a batch above the limit is returned
        alone. Cancellation loses nothing: the next call returns the same batches.

        Raises StorageError where reading failed (position unchanged: call again), Closed after `aclose`.
        """

    @abstractmethod
    async def acknowledge(self, offset: int) -> None:
        """Every batch below `offset` is finished for everybody and may be deleted. Never moves backwards.

        Batches received but not acknowledged come again from the next receiver that is opened with `start=None`.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Stop. A waiting `receive` raises Closed. Idempotent."""


class QueueAdapter(ABC):
    """One provider's queues in some queue technology."""

    capabilities: Capabilities

    @abstractmethod
    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """Store batches, each in the queue of the given index, in order. Durable, as the adapter promises, on return.

        Called in order means stored in order, also without awaiting in between. Sets nothing on the batches. Where the
        adapter is idempotent, one call is atomic: all its batches are stored or none, and one without any counts, too.

        Raises QueueFull, StorageFull, StorageError (nothing of this call is acknowledged; retry with the same
        `sequence`), SequenceConflict, NotSupported (read-only adapter, or `sequence` without the capability), Closed.
        """

    @abstractmethod
    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        """Read queue `queue` from offset `start`, or where None from the first batch not acknowledged.

        Raises NotSupported for a `start` where the adapter is not rewindable. A `start` below what is retained makes
        the first `receive` return a Gap; one above the next offset is refused with InvalidArgument.
        """

    @abstractmethod
    async def bounds(self, queue: int) -> Bounds: ...

    async def resume_at(self, queue: int, offset: int) -> int:
        """Where who has everything below `offset` goes on: there, or at the queue's end where that is below, since a
        crash of the machine took what was there. Nothing is stored below the answer from now on."""
        return min(offset, (await self.bounds(queue)).next)

    @abstractmethod
    async def statistics(self, queue: int) -> QueueStatistics: ...

    @abstractmethod
    async def aclose(self) -> None:
        """Finish what was enqueued, close all receivers, release everything. Idempotent."""

    async def offset_at(self, queue: int, time_us: int) -> int:
        """The offset of the first batch stored at or after `time_us` (microseconds since 1970 UTC, the store's clock).

        Bounds.next where there is none. Raises NotSupported where the adapter is not rewindable.
        """
        raise NotSupported("this adapter cannot find a position by time: it is not rewindable")

    async def reach(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        """How far one may read from `start` on, at most to `end`: one behind the last of the batches that together have
        no more events and encoded bytes than that (None: no limit), or behind the first, where that alone has more.

        `start` where there is nothing. It may end before a damaged batch. Raises NotSupported where the adapter is not
        rewindable, OffsetsGone where `start` is not retained, CorruptRecord.
        """
        return await reach_by_reading(self, Span(queue, start, end), Limits(max_events, max_bytes))

    async def backlog(self, queue: int, offset: int) -> Backlog:
        """What is retained from `offset` on, counted in bounded time, however much it is."""
        bounds = await self.bounds(queue)
        return Backlog(max(bounds.next - max(offset, bounds.first), 0))

    async def due_end(self, queue: int) -> int | None:
        """The offset below which everything is that is due now. None where some of that has no offset yet, for nobody
        has received it; only an adapter that keeps no order has such."""
        return (await self.bounds(queue)).next

    async def last_sequence(self, producer: str) -> int:
        """The highest number stored for an idempotent producer, 0 where there is none."""
        raise NotSupported("this adapter does not support idempotent producers")

    async def apply_retention(self, watermarks: Mapping[int, int]) -> None:
        """Delete what the adapter's retention settings allow. `watermarks`: queue index to the lowest unfinished offset
        over all subscriptions; a queue without a subscription is missing. Called every few seconds by one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterContext:
    """What an adapter is given to open itself: the provider's name, its number of queues, a directory of its own where
    the provider has one on disk (it exists), and the queue that the provider's mapper gives a stream, where known.

    `owner` is a text that the provider's control store keeps, by which an adapter can tell its queues from those of a
    provider of the same name with another control store; "" where the control store ends with the process.
    """

    provider: str
    queues: int
    directory: Path | None = None
    queue_of: Callable[[StreamId], int] | None = None
    owner: str = ""


class AdapterFactory(Protocol):
    """Opens an adapter. `options` is the provider's table of adapter options; unknown or wrong ones are refused with
    InvalidArgument that names the option."""

    async def __call__(self, context: AdapterContext, options: Mapping[str, Any]) -> QueueAdapter: ...
