"""Find a position by time."""

from __future__ import annotations

from .transactions import LogSnapshot


def offset_at(snapshot: LogSnapshot, queue: int, time_us: int) -> int:
    """Return the offset of the first retained batch stored at or after `time_us`, or the queue's end if there is none.

    This is a binary search: commit times never decrease within a queue, and the batches of a block share one time.
    """
    beginning, end = snapshot.beginning(queue), snapshot.tail(queue).next
    oldest = snapshot.stored_first(queue)
    low, high = oldest, end
    while low is not None and low < high:
        first = snapshot.block_holding(queue, (low + high) // 2)
        assert first is not None, "low is retained, and there are no holes above it"
        if snapshot.header(queue, first).time_us < time_us:
            low = snapshot.block_after(queue, first)
        else:
            high = first
    if low is None or low == oldest:  # it is the first stored block, so earlier ones may be missing
        return beginning
    return low
