"""Limits of the adapter `log`."""

from __future__ import annotations

from typing import NamedTuple


class LogLimits(NamedTuple):
    """Times and bounds of one handle. They are not configured."""

    fresh_bytes: int = 64 << 10
    """Up to this number of bytes at the end of a queue are read on the event loop. They were just written, so they are
    in memory, and a thread would first have to wait for the interpreter's lock."""
    counted_blocks: int = 256
    """Number of blocks whose events are counted one by one. The events of later blocks are estimated."""
    chores_s: float = 1.0
    """Interval of storing acknowledgements, and of fsync with relaxed durability, in seconds."""
    safety_poll_s: float = 1.0
    """Seconds after which a receiver reads again even if it was not woken up."""


LOG_LIMITS = LogLimits()
