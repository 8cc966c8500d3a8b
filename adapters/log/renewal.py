"""Make a new, empty log in the place of a log that was deleted or emptied, and prepare a log that was restored."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...streams.durable import sync_path
from ...streams.errors import InvalidArgument
from ...streams.remedies import remedy
from .blocks import BlockPlace, skipped_record
from .damage import RESTORED
from .environment import acquire, has_log, release
from .options import LogOptions
from .rows import TailRow
from .transactions import LogChanges, StoredGap

_EPOCH_2026_US = 1_767_225_600_000_000
"""2026-01-01 UTC, in microseconds since 1970."""
_CLOCK_BEHIND_GAP = 1 << 32
"""How many offsets are left out if the clock is behind the offsets in use."""


def renewed_start(lowest_unused: int, now_us: int) -> int:
    """Return the first offset of a restored or new log: the microseconds from 2026 to `now_us`, which counts from 1970.

    A queue stores less than one batch per microsecond. So all offsets that were used before are lower, also those of
    logs that are lost. If the clock is behind `lowest_unused`, return an offset above that.
    """
    by_clock = now_us - _EPOCH_2026_US
    return by_clock if by_clock > lowest_unused else lowest_unused + _CLOCK_BEHIND_GAP


@contextmanager
def new_log(directory: Path, provider: str, starts: Mapping[int, int]) -> Generator[str]:
    """Make an empty log whose queues begin at the offsets `starts`. Yield the identity of the log.

    The log is put into `directory` at the end of the `with`; if the body raises, `directory` still has none. Raises
    InvalidArgument if `directory` has a log already.
    """
    log, made = directory / "log", directory / "log.new"
    if has_log(log):
        raise InvalidArgument(
            f"'{log}': provider {provider!r} has a log, so no new one is made: "
            f"{remedy('check', data=directory.parents[1])} names its faults; to give up all of it, move it away first"
        )
    shutil.rmtree(made, ignore_errors=True)
    environment = acquire(made, LogOptions(), provider, len(starts))
    try:
        with environment.writing() as changes:
            for queue, offset in starts.items():
                changes.put_tail(queue, TailRow(next=offset, acknowledged=offset, first=offset))
        identity = str(environment.created_us)
    finally:
        release(environment)
    yield identity
    shutil.rmtree(log, ignore_errors=True)
    made.rename(log)
    sync_path(directory)


def leave_out_offsets(directory: Path, provider: str, queues: int) -> None:
    """Let the next event of each queue of a restored log get an offset that no event had after the backup.

    Offsets that were used after an earlier restore of this backup are left out, too: see `renewed_start`. Readers pass
    over them, and subscriptions get a gap record.
    """
    now_us = time.time_ns() // 1000
    environment = acquire(directory / "log", LogOptions(), provider, queues, create=False)
    try:
        with environment.writing() as changes:
            for queue in range(queues):
                _leave_out(changes, queue, now_us)
    finally:
        release(environment)


def _leave_out(changes: LogChanges, queue: int, now_us: int) -> None:
    tail, low = changes.tail(queue), changes.end(queue)
    high = renewed_start(low, now_us)
    record = skipped_record(BlockPlace(queue, low), high - low, tail.time_us, RESTORED)
    changes.put(queue, low, record)
    changes.put_gap(queue, StoredGap(low, high, now_us, RESTORED))
    changes.put_tail(queue, tail._replace(next=high, nbytes=tail.nbytes + len(record)))
