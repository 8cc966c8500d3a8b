"""Finds how far a queue can be read within limits by reading it, for adapters that have no faster way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..streams.errors import CorruptRecord, OffsetsGone
from ..streams.events import EventBatch
from ..streams.identity import StreamId
from .receiving import Bounds, QueueReceiver

READ_EVENTS, READ_BYTES = 1 << 20, 1 << 20
"""Limits of one `receive`: events, and encoded bytes."""


def every_stream(_: StreamId) -> bool:
    return True


class OffsetRange(NamedTuple):
    """Offsets of a queue, from `start` (inclusive) to `end` (exclusive)."""

    queue: int
    start: int
    end: int


class RangeLimits(NamedTuple):
    """Largest numbers of events and encoded bytes; None: no limit."""

    events: int | None
    nbytes: int | None

    def allow(self, events: int, nbytes: int) -> bool:
        """Return whether this many are within the limits."""
        return (self.events is None or events <= self.events) and (self.nbytes is None or nbytes <= self.nbytes)

    def minus(self, events: int, nbytes: int) -> RangeLimits:
        """Return the limits that are left after this many."""
        left = None if self.events is None else self.events - events
        return RangeLimits(left, None if self.nbytes is None else self.nbytes - nbytes)


class ReadableQueues(Protocol):
    """The part of a `QueueAdapter` that reads."""

    async def bounds(self, queue: int) -> Bounds: ...

    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver: ...


async def end_by_reading(
    adapter: ReadableQueues,
    span: OffsetRange,
    limits: RangeLimits,
    *,
    counted: Callable[[StreamId], bool] = every_stream,
    read_bytes: int | None = None,
) -> int:
    """See QueueAdapter.end_within. Batches of streams that are not `counted` do not count against the limits.

    `read_bytes` ends the search once this many encoded bytes are read, counted or not. Raises NotSupported if the
    adapter is not rewindable.
    """
    queue, start, end = span
    end = min(end, (await adapter.bounds(queue)).next)
    if start >= end or limits == (None, None):
        return max(start, end)
    receiver = await adapter.open_receiver(queue, start)
    try:
        return await _read_to(receiver, OffsetRange(queue, start, end), _CountedLimits(limits, counted), read_bytes)
    finally:
        await receiver.aclose()


async def _read_to(receiver: QueueReceiver, span: OffsetRange, limits: _CountedLimits, read_bytes: int | None) -> int:
    queue, at, end = span
    read = 0
    while at < end and (read_bytes is None or read < read_bytes):
        try:
            batches, next_offset = await _receive(receiver, queue)
        except (CorruptRecord, OffsetsGone):
            if at > span.start:  # the next call begins here and raises the error
                return at
            raise
        for batch in batches:
            if batch.offset >= end:
                return end
            if not limits.take(batch):
                return batch.offset
            read += batch.nbytes
        at = next_offset
    return min(at, end)


async def _receive(receiver: QueueReceiver, queue: int) -> tuple[Sequence[EventBatch], int]:
    batches, next_offset, gap = await receiver.receive(READ_EVENTS, READ_BYTES)
    if gap is not None and not gap.skipped:
        raise OffsetsGone(queue, gap.low, gap.high)
    return batches, next_offset


class _CountedLimits:
    """The limits that are left, for batches of counted streams. The first batch is always allowed."""

    def __init__(self, limits: RangeLimits, counted: Callable[[StreamId], bool]) -> None:
        self._limits = limits
        self._counted = counted
        self._empty = True

    def take(self, batch: EventBatch) -> bool:
        """Subtract the batch from the limits. Return whether they allowed it."""
        first, self._empty = self._empty, False
        if not self._counted(batch.stream):
            return True
        fits = first or self._limits.allow(batch.count, batch.nbytes)
        self._limits = self._limits.minus(batch.count, batch.nbytes)
        return fits
