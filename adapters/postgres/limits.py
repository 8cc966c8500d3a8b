"""Limits of the adapter `postgres`."""

from __future__ import annotations

from typing import NamedTuple


class PostgresLimits(NamedTuple):
    """Times and bounds of one handle. They are not configured."""

    request_s: float = 5.0
    """Seconds after which a statement without an answer has failed."""
    acknowledge_s: float = 1.0
    """Interval of storing acknowledgements, in seconds."""
    connections: int = 4
    """Largest number of connections that read."""
    fetch_bytes: int = 1 << 20
    """Bytes that one query reads from a queue, or one larger block."""
    pending_bytes: int = 256 << 20
    """Bytes of publishes that may wait for the server."""
    literal_bytes: int = 32 << 10
    """Up to this number of bytes, a commit has its records in the text of its last statement, not in a `COPY`: this
    saves two round trips."""
    copy_bytes: int = 4 << 20
    """About so many bytes are sent by one `COPY`. Each has `request_s` to end."""
    counted_blocks: int = 256
    """Number of blocks whose events are counted one by one. The events of later blocks are estimated."""
    drop_wait_s: float = 0.2
    """How long dropping a segment waits for its readers, in seconds. New readers wait behind it."""
    producer_age_s: float = 7 * 24 * 3600
    """An idempotent producer is forgotten when it has stored nothing for this time, in seconds."""


POSTGRES_LIMITS = PostgresLimits()
