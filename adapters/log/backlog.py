"""Counting what of a queue is not finished."""

from __future__ import annotations

from ..seam import Backlog
from .rows import Tail
from .transactions import Snapshot

COUNTED_BLOCKS = 256
"""So many blocks are counted one by one; of what is behind them the events are estimated."""


def backlog(snapshot: Snapshot, queue: int, offset: int) -> Backlog:
    """What is retained from `offset` on."""
    tail = snapshot.tail(queue)
    oldest = snapshot.first(queue)
    if oldest is None or offset >= tail.next:
        return Backlog(0, 0)
    start = max(offset, oldest)
    first = snapshot.block_holding(queue, start)
    assert first is not None, "oldest is retained, and there are no holes above it"
    since_us = snapshot.header(queue, first).time_us
    events, counted_to = _counted(snapshot, queue, first, start, tail.next)
    left = tail.next - counted_to
    events += _estimated(tail, oldest, left)
    return Backlog(tail.next - start, events, estimated=left > 0, since_us=since_us)


def _counted(snapshot: Snapshot, queue: int, first: int, start: int, end: int) -> tuple[int, int]:
    """Events from batch `start` on, which the block at `first` holds, and up to where they were counted."""
    events = snapshot.events_from(queue, first, start)
    at = snapshot.block_after(queue, first)
    for _ in range(COUNTED_BLOCKS - 1):
        if at >= end:
            break
        header = snapshot.header(queue, at)
        events, at = events + header.events, at + header.batches
    return events, at


def _estimated(tail: Tail, oldest: int, batches: int) -> int:
    """As many events as so many batches of the queue have on average."""
    return round(batches * tail.events / (tail.next - oldest))
