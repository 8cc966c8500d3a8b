"""Find damaged blocks of a queue, and skip them: replace them by records that readers pass over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, Protocol

from .blocks import BlockPlace, DamagedBlockError, check_block, read_header, skipped_record
from .environment import LogEnvironment
from .transactions import LogChanges, LogSnapshot, StoredGap

SKIPPED = "damaged, and skipped by an operator"
"""The beginning of the reason of a gap that was skipped."""
RESTORED = "a backup was restored: events that were published after it, if any, are lost"
"""The reason of a gap at the end of a restored queue."""
MISSING = "the block is missing"

_READ_BYTES = 8 << 20
"""Bytes that are checked in one transaction."""


class DamagedRange(NamedTuple):
    """Batches `low` (inclusive) to `high` (exclusive) of a queue cannot be read."""

    low: int
    high: int
    why: str

    @property
    def reason(self) -> str:
        """The reason of the gap, once it is skipped."""
        return f"{SKIPPED} ({self.why})"

    @property
    def offsets(self) -> str:
        """The range as text for messages."""
        last = self.high - 1
        return f"offset {self.low}" if self.low == last else f"offsets {self.low} to {last}"


class CheckedRange(NamedTuple):
    """A part of a queue that was checked."""

    end: int
    """Offset at which the next check begins."""
    nbytes: int
    damages: list[DamagedRange]


OnProgress = Callable[[int], None]
"""Called with the number of bytes checked since the last call."""


class ReadableLog(Protocol):
    """An open log."""

    def reading(self) -> AbstractContextManager[LogSnapshot]:
        """Open a read transaction."""
        ...


def find_damage(environment: ReadableLog, queue: int, on_progress: OnProgress = lambda _: None) -> list[DamagedRange]:
    """Read a whole queue, in short transactions, and return its damaged and missing ranges, in order."""
    with environment.reading() as snapshot:
        end = snapshot.tail(queue).next
    found: list[DamagedRange] = []
    at = 0
    while at < end:
        with environment.reading() as snapshot:
            checked = check_range(snapshot, queue, at, end)
        found += checked.damages
        at = checked.end
        on_progress(checked.nbytes)
    return merge_adjacent(found)


def check_range(snapshot: LogSnapshot, queue: int, start: int, end: int) -> CheckedRange:
    """Check the blocks from offset `start` up to `end`, at most about 8 MiB of them."""
    oldest = snapshot.tail(queue).first
    if oldest is None:  # not known
        oldest = snapshot.stored_first(queue)
        if oldest is None or oldest >= end:  # all blocks are behind the queue's end, which `skip_damage` corrects
            return CheckedRange(end, 0, [])
    damages: list[DamagedRange] = []
    at, nbytes = max(start, oldest), 0
    for first, record in snapshot.blocks(queue, at):
        if nbytes >= _READ_BYTES:
            return CheckedRange(at, nbytes, damages)
        if first > at:
            damages.append(DamagedRange(at, min(first, end), MISSING))
        if first >= end:
            return CheckedRange(end, nbytes, damages)
        after = snapshot.block_after(queue, first)
        at, why = _checked(record, BlockPlace(queue, first), after)
        if why:
            damages.append(DamagedRange(first, after, why))
        nbytes += len(record)
    if at < end:
        damages.append(DamagedRange(at, end, MISSING))
    return CheckedRange(end, nbytes, damages)


def _checked(record: memoryview, place: BlockPlace, after: int) -> tuple[int, str]:
    """Return the end of the block at `place`, and its damage or "". The next block begins at `after`."""
    try:
        header = check_block(record, place)
    except DamagedBlockError as damage:
        return after, str(damage)
    if place.first + header.batches > after:
        return after, f"it has {header.batches} batches, but the next block begins at offset {after}"
    return place.first + header.batches, ""


def skipped_ranges(snapshot: LogSnapshot, queue: int, start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges of offsets from `start` up to `end` (exclusive) that an operator skipped: because they are
    damaged, or because a backup was restored."""
    gaps = [gap for gap in snapshot.gaps(queue) if gap.reason.startswith((SKIPPED, RESTORED))]
    cut = [(max(gap.low, start), min(gap.high, end)) for gap in gaps]
    return [(low, high) for low, high in cut if low < high]


def merge_adjacent(damages: list[DamagedRange]) -> list[DamagedRange]:
    """Merge damages that follow each other without a hole."""
    found: list[DamagedRange] = []
    for damage in damages:
        if found and found[-1].high == damage.low:
            found[-1] = found[-1]._replace(high=damage.high)
        else:
            found.append(damage)
    return found


def skip_damage(environment: LogEnvironment, queue: int, damages: list[DamagedRange]) -> list[DamagedRange]:
    """Replace damaged blocks by skipped ones. Return the damages that were skipped.

    A range that was deleted or repaired in the meantime is left as it is. The queue's end and its numbers of events and
    bytes are corrected too.
    """
    now_us = time.time_ns() // 1000
    skipped: list[DamagedRange] = []
    with environment.writing() as changes:
        for damage in damages:
            if damage in still_damaged(changes, queue, damage):
                _skip(changes, queue, damage, now_us)
                skipped.append(damage)
        _recount(changes, queue)
    return skipped


def still_damaged(snapshot: LogSnapshot, queue: int, damage: DamagedRange) -> list[DamagedRange]:
    """Check a damaged range again. Return the damage that is left in it."""
    found: list[DamagedRange] = []
    at = damage.low
    while at < damage.high:
        checked = check_range(snapshot, queue, at, damage.high)
        found += checked.damages
        at = max(checked.end, at + 1)
    return merge_adjacent(found)


def _skip(changes: LogChanges, queue: int, damage: DamagedRange, now_us: int) -> None:
    time_us = _time_before(changes, queue, damage.low)
    for first in [first for first, _ in changes.blocks(queue, damage.low) if first < damage.high]:
        changes.delete(queue, first)
    place = BlockPlace(queue, damage.low)
    changes.put(queue, damage.low, skipped_record(place, damage.high - damage.low, time_us, damage.reason))
    changes.put_gap(queue, StoredGap(damage.low, damage.high, now_us, damage.reason))


def _time_before(changes: LogChanges, queue: int, offset: int) -> int:
    """Return the time of the last block below `offset`, 0 if there is none. Times never decrease within a queue."""
    before = changes.block_holding(queue, offset - 1) if offset else None
    if before is None:
        return 0
    try:
        return read_header(changes.record(queue, before)).time_us
    except DamagedBlockError:
        return 0


def _recount(changes: LogChanges, queue: int) -> None:
    """Store the queue's end and its numbers of events and bytes anew: a damaged block's number of events is unknown."""
    tail = changes.tail(queue)
    events, nbytes = count_blocks(changes.blocks(queue, 0))
    end = tail.next
    for first, record in changes.blocks(queue, tail.next):
        with suppress(DamagedBlockError):
            end = first + check_block(record, BlockPlace(queue, first)).batches
    stored = changes.stored_first(queue)
    first = end if stored is None else stored
    if tail.first is not None:  # blocks may be missing that were there when the damage was looked for
        first = min(tail.first, first)
    corrected = tail._replace(next=end, events=events, nbytes=nbytes, first=first)
    if corrected != tail:
        changes.put_tail(queue, corrected)


def count_blocks(blocks: Iterator[tuple[int, memoryview]]) -> tuple[int, int]:
    """Return the numbers of events and bytes of blocks. A block with a damaged header counts as one without events."""
    events = nbytes = 0
    for _, record in blocks:
        nbytes += len(record)
        try:
            events += read_header(record).events
        except DamagedBlockError:
            continue
    return events, nbytes
