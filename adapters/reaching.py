"""How far one may read of a queue within limits, found out by reading it: for adapters that know no better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..streams.errors import CorruptRecord, NotSupported, OffsetsGone
from ..streams.events import EventBatch
from ..streams.identity import StreamId

if TYPE_CHECKING:
    from .seam import QueueAdapter, QueueReceiver

READ_EVENTS, READ_BYTES = 1 << 20, 1 << 20
"""Read at a time."""


def every_stream(_: StreamId) -> bool:
    return True


class Span(NamedTuple):
    """Offsets of a queue, from `start` (inclusive) to `end` (exclusive)."""

    queue: int
    start: int
    end: int


class Limits(NamedTuple):
    """At most so many events and encoded bytes; None: no limit."""

    events: int | None
    nbytes: int | None

    def allow(self, events: int, nbytes: int) -> bool:
        return (self.events is None or events <= self.events) and (self.nbytes is None or nbytes <= self.nbytes)

    def less(self, events: int, nbytes: int) -> Limits:
        left = None if self.events is None else self.events - events
        return Limits(left, None if self.nbytes is None else self.nbytes - nbytes)


async def reach_by_reading(
    adapter: QueueAdapter,
    span: Span,
    limits: Limits,
    *,
    counted: Callable[[StreamId], bool] = every_stream,
    read_bytes: int | None = None,
) -> int:
    """See QueueAdapter.reach. Batches of streams that are not `counted` take nothing of the limits; whoever leaves out
    some may say with `read_bytes` after how much it is enough."""
    if not adapter.capabilities.rewindable:
        raise NotSupported("this adapter cannot be read by ranges of offsets: it is not rewindable")
    queue, start, end = span
    end = min(end, (await adapter.bounds(queue)).next)
    if start >= end or limits == (None, None):
        return max(start, end)
    receiver = await adapter.open_receiver(queue, start)
    try:
        return await _reach(receiver, Span(queue, start, end), _Room(limits, counted), read_bytes)
    finally:
        await receiver.aclose()


async def _reach(receiver: QueueReceiver, span: Span, room: _Room, read_bytes: int | None) -> int:
    queue, at, end = span
    read = 0
    while at < end and (read_bytes is None or read < read_bytes):
        try:
            batches, next_offset = await _receive(receiver, queue)
        except (CorruptRecord, OffsetsGone):
            if at > span.start:  # whoever goes on from there is told
                return at
            raise
        for batch in batches:
            if batch.offset >= end:
                return end
            if not room.takes(batch):
                return batch.offset
            read += batch.nbytes
        at = next_offset
    return min(at, end)


async def _receive(receiver: QueueReceiver, queue: int) -> tuple[Sequence[EventBatch], int]:
    batches, next_offset, gap = await receiver.receive(READ_EVENTS, READ_BYTES)
    if gap is not None:
        raise OffsetsGone(queue, gap.low, gap.high)
    return batches, next_offset


class _Room:
    """What is left of the limits. The first batch always fits."""

    def __init__(self, limits: Limits, counted: Callable[[StreamId], bool]) -> None:
        self._limits = limits
        self._counted = counted
        self._empty = True

    def takes(self, batch: EventBatch) -> bool:
        """Whether the batch fits; then it is in."""
        first, self._empty = self._empty, False
        if not self._counted(batch.stream):
            return True
        fits = first or self._limits.allow(batch.count, batch.nbytes)
        self._limits = self._limits.less(batch.count, batch.nbytes)
        return fits
