"""How far one may read within limits of events and bytes, from the blocks' headers and columns alone."""

from __future__ import annotations

from array import array

from ...streams.errors import CorruptRecord, OffsetsGone
from ..reaching import Limits
from .blocks import COLUMNS_BYTES, HEADER_BYTES, DamagedBlockError, columns
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
    at, after = start, first
    while at == max(after, start) and at < end:
        try:
            at, after, limits = _reach_in_block(snapshot, queue, after, range(at, end), limits)
        except CorruptRecord:
            if at > start:  # whoever reads on from there is told
                break
            raise
    return max(at, start + 1)


def _reach_in_block(
    snapshot: Snapshot, queue: int, first: int, wanted: range, limits: Limits
) -> tuple[int, int, Limits]:
    """The first batch that the limits do not allow, or is not of the block, or not wanted; where the block ends; and
    what the limits are then."""
    header = snapshot.header(queue, first)
    nbytes = snapshot.size(queue, first) - HEADER_BYTES - COLUMNS_BYTES * header.batches
    after = first + header.batches
    if wanted.start == first and after <= wanted.stop and limits.allow(header.events, nbytes):
        return after, after, limits.less(header.events, nbytes)
    at, limits = _reach_within(snapshot, queue, first, range(wanted.start, min(after, wanted.stop)), limits)
    return at, after, limits


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
