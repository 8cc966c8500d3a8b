"""Limits of the gRPC services of a silo."""

from __future__ import annotations

from typing import NamedTuple


class ServiceLimits(NamedTuple):
    """Bounds of single calls and of all calls together. They are not configured."""

    stream_requests: int = 1_000
    """Most unanswered requests of one stream of `PublishStream`."""
    list_bytes: int = 3 << 20
    """Most bytes of a list with more than one element: gRPC clients accept messages of 4 MiB."""
    letters_at_once: int = 20
    """Dead letters read from the store at a time: each may have a MiB."""
    silent_bytes: int = 16 << 20
    """Bytes without a selected batch after which a call of `Read` gets its position."""
    end_within_bytes: int = 64 << 20
    """Upper bound of bytes read to find the end position of a reader that may not read all streams."""
    unsent_bytes: int = 32 << 20
    """Upper bound of bytes that all calls of `Read` have read and not sent yet. A client may have half of it."""


SERVICE_LIMITS = ServiceLimits()
