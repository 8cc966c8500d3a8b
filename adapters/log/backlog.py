"""Counts the unfinished batches and events of a queue."""

from __future__ import annotations

from ...streams.errors import CorruptRecord
from ..seam import Backlog
from .blocks import BlockHeader
from .limits import LogLimits
from .rows import TailRow
from .transactions import LogSnapshot


def backlog(snapshot: LogSnapshot, queue: int, offset: int, limits: LogLimits) -> Backlog:
    """Count the retained batches from `offset` on. Damaged and missing blocks count as empty: their readers get the
    error."""
    tail, stored = snapshot.tail(queue), snapshot.stored_first(queue)
    beginning = stored if tail.first is None else tail.first
    if beginning is None or (start := max(offset, beginning)) >= tail.next:
        return Backlog(0, 0)
    if stored is None or stored >= tail.next:  # all blocks are missing
        return Backlog(tail.next - start, 0)
    counted_from = max(start, stored)
    first = snapshot.block_holding(queue, counted_from)
    assert first is not None, "the first stored block is there, and there are no holes above it"
    header = _header(snapshot, queue, first)
    since_us = None if header is None or header.skipped else header.time_us
    events, counted_to = _counted(snapshot, queue, first, counted_from, tail.next, blocks=limits.counted_blocks)
    left = tail.next - counted_to
    events += _estimated(tail, stored, left)
    return Backlog(tail.next - start, events, estimated=left > 0, since_us=since_us)


def _counted(snapshot: LogSnapshot, queue: int, first: int, start: int, end: int, *, blocks: int) -> tuple[int, int]:
    """Count events from batch `start` on, which is in the block at `first`. Return them, and the offset up to which
    they were counted. At most `blocks` blocks are counted."""
    try:
        events = snapshot.events_from(queue, first, start)
    except CorruptRecord:
        events = 0
    at = snapshot.block_after(queue, first)
    for _ in range(blocks - 1):
        if at >= end:
            break
        header = _header(snapshot, queue, at)
        if header is None:
            at = snapshot.block_after(queue, at)
        else:
            events, at = events + header.events, at + header.batches
    return events, at


def _header(snapshot: LogSnapshot, queue: int, first: int) -> BlockHeader | None:
    """Return the header of a block, None if it is damaged or missing."""
    try:
        return snapshot.header(queue, first)
    except CorruptRecord:
        return None


def _estimated(tail: TailRow, oldest: int, batches: int) -> int:
    """Estimate the events of a number of batches by the average of the queue."""
    return round(batches * tail.events / (tail.next - oldest))
