"""Settings of the interpreter and the allocator that suit a process whose main work is moving events."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys

YOUNG = 50_000
"""Allocations before the youngest generation is looked at. Events and batches die young and without cycles, so the
default of 700 spends a quarter of the time (measured at 10,000 streams) on objects that are still in the cache."""
SWITCH_S = 0.0005
"""How long a thread may keep the interpreter while another thread waits for it, in seconds. The log is read in a
thread. With the default of 5 ms, each read would wait that long for a busy event loop."""
MMAP_BYTES = 768 << 10
"""Freed blocks of this size and more go back to the system. Measured over gRPC, this threshold costs no processor time
beyond the noise; a threshold of 512 KiB did in one of two series."""
TRIM_BYTES = 4 << 20
"""The free end of the heap goes back to the system when it is larger."""
HEAPS = 2
"""By default each thread may get a heap of its own, with free memory that the others do not use."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""From malloc.h."""


def share_heaps() -> None:
    """Let all threads share a few heaps. Call it before there are threads. Not for libraries."""
    _set_malloc(M_ARENA_MAX, HEAPS)


def tune_interpreter() -> None:
    """Set the interpreter for a process of headrace's own, when all long-lived objects exist. Not for libraries."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 50)
    _fix_malloc_thresholds()


def _fix_malloc_thresholds() -> None:
    """By default glibc raises its threshold for mmap to the largest block that was freed. Then freed batches of
    megabytes stay in the heap between smaller blocks: 100 MB were measured."""
    _set_malloc(M_MMAP_THRESHOLD, MMAP_BYTES)
    _set_malloc(M_TRIM_THRESHOLD, TRIM_BYTES)


def _set_malloc(setting: int, value: int) -> None:
    """Without glibc, nothing is changed."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(setting, value)
