"""Make a new, empty log in the place of a log that was deleted or emptied."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...streams.durable import sync_path
from ...streams.errors import InvalidArgument
from ...streams.remedies import remedy
from .environment import acquire, has_log, release
from .options import LogOptions
from .rows import TailRow


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
                changes.put_tail(queue, TailRow(next=offset, acknowledged=offset))
        identity = str(environment.created_us)
    finally:
        release(environment)
    yield identity
    shutil.rmtree(log, ignore_errors=True)
    made.rename(log)
    sync_path(directory)
