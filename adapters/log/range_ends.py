"""Find how far a range can be read within limits of events and bytes, from headers and columns of the blocks only."""

from __future__ import annotations

from array import array

from ...streams.errors import CorruptRecord, OffsetsGone
from ..range_ends import RangeLimits
from .blocks import COLUMNS_BYTES, HEADER_BYTES, DamagedBlockError, columns
from .transactions import LogSnapshot


def end_within(snapshot: LogSnapshot, queue: int, start: int, end: int, limits: RangeLimits) -> int:
    """Return the exclusive end of the batches from `start` on, up to `end`, that the limits allow; at least one batch.

    Raises OffsetsGone if `start` is not retained, CorruptRecord if its block is damaged.
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
            at, after, limits = _end_in_block(snapshot, queue, after, range(at, end), limits)
        except CorruptRecord:
            if at > start:  # the next call begins at the damage and raises the error
                break
            raise
    return max(at, start + 1)


def _end_in_block(
    snapshot: LogSnapshot, queue: int, first: int, wanted: range, limits: RangeLimits
) -> tuple[int, int, RangeLimits]:
    """Return the end of the wanted batches of a block that the limits allow, the end of the block, and the limits that
    are left."""
    header = snapshot.header(queue, first)
    if header.skipped:
        after = first + header.batches
        return min(after, wanted.stop), after, limits
    nbytes = snapshot.size(queue, first) - HEADER_BYTES - COLUMNS_BYTES * header.batches
    after = first + header.batches
    if wanted.start == first and after <= wanted.stop and limits.allow(header.events, nbytes):
        return after, after, limits.minus(header.events, nbytes)
    at, limits = _end_in_columns(snapshot, queue, first, range(wanted.start, min(after, wanted.stop)), limits)
    return at, after, limits


def _end_in_columns(
    snapshot: LogSnapshot, queue: int, first: int, batches: range, limits: RangeLimits
) -> tuple[int, RangeLimits]:
    """Return the first of these batches of a block that the limits do not allow, and the limits that are left."""
    sizes, counts = _columns(snapshot, queue, first)
    for at in batches:
        events, nbytes = counts[at - first], sizes[at - first]
        if not limits.allow(events, nbytes):
            return at, limits
        limits = limits.minus(events, nbytes)
    return batches.stop, limits


def _columns(snapshot: LogSnapshot, queue: int, first: int) -> tuple[array[int], array[int]]:
    try:
        return columns(snapshot.record(queue, first))
    except DamagedBlockError as damage:
        raise snapshot.corrupt(queue, first, damage, snapshot.block_after(queue, first)) from None
