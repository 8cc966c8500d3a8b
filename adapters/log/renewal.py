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
from .blocks import MAX_BATCHES, BlockPlace, skipped_record
from .damage import RESTORED
from .environment import acquire, has_log, release
from .options import LogOptions
from .rows import TailRow
from .transactions import LogChanges, StoredGap


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

    `MAX_BATCHES` offsets are left out. Readers pass over them, and subscriptions get a gap record.
    """
    environment = acquire(directory / "log", LogOptions(), provider, queues, create=False)
    try:
        with environment.writing() as changes:
            for queue in range(queues):
                _leave_out(changes, queue)
    finally:
        release(environment)


def _leave_out(changes: LogChanges, queue: int) -> None:
    tail, low = changes.tail(queue), changes.end(queue)
    high = low + MAX_BATCHES
    record = skipped_record(BlockPlace(queue, low), MAX_BATCHES, tail.time_us, RESTORED)
    changes.put(queue, low, record)
    changes.put_gap(queue, StoredGap(low, high, time.time_ns() // 1000, RESTORED))
    changes.put_tail(queue, tail._replace(next=high, nbytes=tail.nbytes + len(record)))
