"""How far one may read within limits of events and bytes, from the blocks' headers and columns alone."""

from __future__ import annotations

from array import array

from ...streams.errors import CorruptRecord, OffsetsGone
from ..reaching import Limits
from .blocks import DamagedBlockError, columns
from .transactions import Snapshot


def reach(snapshot: Snapshot, queue: int, start: int, end: int, limits: Limits) -> int:
    """The exclusive end of as many batches from `start` on, up to `end`, as the limits allow; at least one.

    Raises OffsetsGone where `start` is not retained, CorruptRecord.
    """
    end = min(end, snapshot.tail(queue).next)
    if start >= end or limits == (None, None):
        return max(start, end)
    first = snapshot.block_holding(queue, start)
    if first is None:
        raise OffsetsGone(queue, start, snapshot.first(queue) or end)
    at = start
    while at < end:
        header, nbytes = snapshot.header(queue, first), snapshot.size(queue, first)
        after = first + header.batches
        if at == first and after <= end and limits.allow(header.events, nbytes):
            limits = limits.less(header.events, nbytes)
            at = first = after
        else:
            at, limits = _reach_within(snapshot, queue, first, range(at, min(after, end)), limits)
            if at < after:
                break
            first = after
    return max(at, start + 1)


def _reach_within(snapshot: Snapshot, queue: int, first: int, batches: range, limits: Limits) -> tuple[int, Limits]:
    """The first of these batches of a block that the limits do not allow, and what they are there."""
    sizes, counts = _columns(snapshot, queue, first)
    for at in batches:
        events, nbytes = counts[at - first], sizes[at - first]
        if not limits.allow(events, nbytes):
            return at, limits
        limits = limits.less(events, nbytes)
    return batches.stop, limits


def _columns(snapshot: Snapshot, queue: int, first: int) -> tuple[array[int], array[int]]:
    try:
        return columns(snapshot.record(queue, first))
    except DamagedBlockError as damage:
        raise CorruptRecord(queue, first, str(damage), snapshot.block_after(queue, first)) from None
