"""Dividing the ranges to read into Spark's partitions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from .access import RetainedRange

_FEWEST, _MOST = 100_000, 500_000
"""Bounds of a partition's events. A Spark task costs tens of milliseconds, so fewer events share a task. More events
bring no gain, and a failed attempt loses more work."""
_PARTITIONS = 4
"""Between these bounds there are about so many partitions: enough for a few cores."""
_UNKNOWN_EVENTS = 1
"""Estimated events of a batch, if the adapter does not know."""


class QueueRange(NamedTuple):
    """Batches of a queue from `start` up to `end` (exclusive)."""

    queue: int
    start: int
    end: int


def ranges(starts: Sequence[int], ends: Sequence[int]) -> list[QueueRange]:
    """Return the range of each queue that has something to read."""
    both = zip(starts, ends, strict=True)
    return [QueueRange(queue, start, end) for queue, (start, end) in enumerate(both) if start < end]


def estimated_events(wanted: QueueRange, state: RetainedRange) -> int:
    """Estimate the events of a range by the average batch of its queue."""
    batches = state.next - state.first
    each = state.events / batches if state.events is not None and batches else _UNKNOWN_EVENTS
    return max(round((wanted.end - wanted.start) * each), 1)


def plan(wanted: Sequence[tuple[QueueRange, int]], per_partition: int | None = None) -> list[list[QueueRange]]:
    """Cut large ranges and put small ones together, so that each partition has about `per_partition` events.

    `wanted` has each range with its events. Within a partition a queue's events stay in order.
    """
    per_partition = per_partition or min(max(sum(events for _, events in wanted) // _PARTITIONS, _FEWEST), _MOST)
    partitions: list[list[QueueRange]] = []
    small: list[QueueRange] = []
    left = per_partition
    for whole, events in wanted:
        if events >= per_partition:
            partitions += [[piece] for piece in _cut(whole, -(-events // per_partition))]
            continue
        if events > left and small:
            partitions.append(small)
            small, left = [], per_partition
        small.append(whole)
        left -= events
    return [*partitions, small] if small else partitions


def _cut(whole: QueueRange, pieces: int) -> list[QueueRange]:
    """Cut a range into at most `pieces` ranges of nearly the same number of batches."""
    batches = whole.end - whole.start
    pieces = min(pieces, batches)
    edges = [whole.start + batches * piece // pieces for piece in range(pieces + 1)]
    return [QueueRange(whole.queue, start, end) for start, end in pairwise(edges)]
