"""The wall clock of this process. Tests in virtual time replace it.

Timestamps of events, delays, and the times of dead letters, gap records and states of streams come from here. Intervals
come from `loop.time()`, and the leases of a cluster from the clock of their store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

_replacement: Callable[[], int] | None = None


def now_us() -> int:
    """Return microseconds since 1970 UTC."""
    return time.time_ns() // 1000 if _replacement is None else _replacement()


@contextmanager
def replaced_clock(clock: Callable[[], int]) -> Generator[None]:
    """Use `clock` in the whole process, for the length of a `with`. It is called in several threads."""
    global _replacement  # noqa: PLW0603 (a process has one wall clock)
    before, _replacement = _replacement, clock
    try:
        yield
    finally:
        _replacement = before
