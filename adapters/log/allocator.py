"""Makes the C library's allocator keep large buffers for reuse.

glibc requests each allocation above a threshold, at first 128 KiB, from the kernel, and returns it when it is freed.
Every batch, block and page buffer of the log would then cause page faults again. They cost more than all other work:
docs/log.md has the numbers. The threshold adapts: it becomes the size of the largest such allocation freed so far, up
to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). So this module frees one of nearly that size. Its memory is never touched, so
it costs nothing.
"""

from __future__ import annotations

from functools import cache

_JUST_BELOW_LIMIT = 31 << 20


@cache
def prefer_reuse() -> None:
    """Make glibc keep up to 62 MiB of freed buffers for reuse. Runs once per process; has no effect without glibc."""
    bytes(_JUST_BELOW_LIMIT)
