"""Retention: deletes old blocks, and producers that have not published for a long time."""

from __future__ import annotations

import time
from itertools import islice
from typing import NamedTuple

from .blocks import DamagedBlockError, read_header
from .environment import LogEnvironment
from .options import LogOptions
from .rows import TailRow
from .transactions import LogChanges, LogSnapshot, StoredGap

REASON = "retention removed them before they were finished"

PRODUCER_AGE_S = 7 * 24 * 3600
"""An idempotent producer is forgotten when it has stored nothing for this time, in seconds."""

_BLOCKS_PER_COMMIT = 64
_BYTES_PER_COMMIT = 64 << 20
_PRODUCERS_PER_RUN = 1000


class RetentionLimits(NamedTuple):
    """Which blocks of a queue may be deleted. Times are microseconds since 1970 UTC."""

    before_us: int | None
    nbytes: int | None
    keep_from: int | None
    """No batch at or above this offset may be deleted. None: no such bound."""

    def allow(self, tail: TailRow, time_us: int, end: int) -> bool:
        """Return whether a queue's oldest block may be deleted, which was committed at `time_us` and ends at `end`."""
        if self.keep_from is not None and end > self.keep_from:
            return False
        old = self.before_us is not None and time_us < self.before_us
        return old or (self.nbytes is not None and tail.nbytes > self.nbytes)


def retention_limits(options: LogOptions, watermark: int | None, now_us: int) -> RetentionLimits:
    """Return the limits of a queue. `watermark` is None if the queue has no subscriptions."""
    before_us = None if options.retain_age_s is None else now_us - round(options.retain_age_s * 1_000_000)
    return RetentionLimits(before_us, options.retain_bytes, watermark if options.retain_unfinished else None)


def trim(environment: LogEnvironment, queue: int, watermark: int | None) -> bool:
    """Delete some of a queue's oldest blocks by one short transaction. Return whether there may be more to delete."""
    options, now_us = environment.options, time.time_ns() // 1000
    limits = retention_limits(options, watermark, now_us)
    if limits.before_us is None and limits.nbytes is None:
        return False
    with environment.reading() as snapshot:
        oldest = _oldest(snapshot, queue)
        if oldest is None or not limits.allow(snapshot.tail(queue), oldest.time_us, oldest.end):
            return False
    with environment.writing() as changes:
        return _delete_oldest(changes, queue, limits, watermark, now_us)


def expire_producers(environment: LogEnvironment, after: bytes) -> bytes:
    """Delete some of the producers that have not published for `PRODUCER_AGE_S`. Return the producer at which the next
    call begins, b"" after the last one."""
    before_us = time.time_ns() // 1000 - PRODUCER_AGE_S * 1_000_000
    with environment.reading() as snapshot:
        checked = list(islice(snapshot.producers(after), _PRODUCERS_PER_RUN))
    expired = [key for key, row in checked if row.time_us < before_us]
    if expired:
        with environment.writing() as changes:
            for key in expired:
                row = changes.producer(key)
                if row is not None and row.time_us < before_us:
                    changes.delete_producer(key)
    return checked[-1][0] + b"\0" if len(checked) == _PRODUCERS_PER_RUN else b""


class _OldestBlock(NamedTuple):
    first: int
    end: int
    time_us: int
    events: int
    nbytes: int


def _oldest(snapshot: LogSnapshot, queue: int) -> _OldestBlock | None:
    """Return the oldest block. If its header is damaged, it has time 0, so that it does not stop retention for ever.
    Raises CorruptRecord if blocks before it are missing."""
    first = snapshot.first(queue)
    if first is None:
        return None
    record = snapshot.record(queue, first)
    end = snapshot.block_after(queue, first)
    try:
        header = read_header(record)
    except DamagedBlockError:
        return _OldestBlock(first, end, 0, 0, len(record))
    return _OldestBlock(first, end, header.time_us, header.events, len(record))


def _delete_oldest(
    changes: LogChanges, queue: int, limits: RetentionLimits, watermark: int | None, now_us: int
) -> bool:
    tail = changes.tail(queue)
    nbytes = _BYTES_PER_COMMIT
    blocks = _BLOCKS_PER_COMMIT
    while blocks and nbytes > 0:
        oldest = _oldest(changes, queue)
        if oldest is None or not limits.allow(tail, oldest.time_us, oldest.end):
            break
        changes.delete(queue, oldest.first)
        tail = tail._replace(events=tail.events - oldest.events, nbytes=tail.nbytes - oldest.nbytes, first=oldest.end)
        changes.put_tail(queue, tail)
        if watermark is not None and oldest.end > watermark:
            _note_gap(changes, queue, max(oldest.first, watermark), oldest.end, now_us)
        nbytes -= oldest.nbytes
        blocks -= 1
    return not blocks or nbytes <= 0


def _note_gap(changes: LogChanges, queue: int, low: int, high: int, now_us: int) -> None:
    """Record that unfinished batches were deleted. Ranges that follow each other share one record."""
    for gap in changes.gaps(queue):
        if gap.high == low:
            low = gap.low
    changes.put_gap(queue, StoredGap(low, high, now_us, REASON))
