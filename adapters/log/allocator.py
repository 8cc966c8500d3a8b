"""Telling the C library's allocator that this process works with large buffers.

glibc asks the kernel for each allocation above a threshold, 128 KiB at first, and gives it back when it is freed: every
batch, block and page buffer of the log would then fault its memory in anew, which costs more than everything else
(docs/log.md has the numbers). The threshold adapts: it becomes the size of the largest such allocation freed so far, up
to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). So free one of nearly that size; it is never touched, hence costs nothing.
"""

from __future__ import annotations

from functools import cache

_JUST_BELOW_LIMIT = 31 << 20


@cache
def prefer_reuse() -> None:
    """Make the allocator keep freed buffers for reuse, up to 62 MiB. Once per process; elsewhere without effect."""
    bytes(_JUST_BELOW_LIMIT)
