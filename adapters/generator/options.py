"""Options of a provider's generator."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...streams.events import MAX_BATCH_EVENTS, MAX_EVENT_BYTES

MAX_BLOCK_BYTES = 16 << 20
"""Limit of the payload of one generated batch, in bytes."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
_PayloadSize = Annotated[int, msgspec.Meta(ge=0, le=MAX_EVENT_BYTES)]


class GeneratorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adapter `generator`. The same options give the same data."""

    namespace: str = "generated"
    """Namespace of the streams."""
    streams: Annotated[int, msgspec.Meta(ge=1)] = 100
    """Streams in each queue."""
    events: _Count | None = None
    """Total number of events in each queue; None for no end."""
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Events per second in each queue; None for as fast as they are read."""
    batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH_EVENTS)] = 1000
    """Events in a batch."""
    payload_bytes: _PayloadSize = 100
    """Size of a payload in bytes; the smallest size if `payload_bytes_max` is set."""
    payload_bytes_max: _PayloadSize | None = None
    """Largest size of a payload in bytes; sizes are evenly distributed. None: all payloads have the same size."""
    skew: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    """Zipf exponent: the share of stream number n (from 1) is proportional to 1 / n ** skew. 0: equal shares."""
    seed: int = 0
    """Another seed gives other payloads and another choice of streams."""
    start_us: int = 1_577_836_800_000_000
    """Time of the first batch, in microseconds since 1970 UTC. The others follow at `rate`, or at 1,000,000 events per
    second without a rate. Generated times are part of the data; they do not follow the clock."""

    read_errors: _Probability = 0.0
    """Share of reads that raise StorageError and leave the position unchanged; 1 for an outage."""
    poison: _Probability = 0.0
    """Share of events that carry the header `poison` with the value `true`."""
    stall_every: _Count = 0
    """Each receiver stops for `stall_s` before every batch whose offset is a multiple of this, except offset 0. 0:
    never."""
    stall_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Length of a stop, in seconds."""

    def __post_init__(self) -> None:
        low, high = self.payload_range
        if low > high:
            raise ValueError(f"payload_bytes, {low:,}, is above payload_bytes_max, {high:,}")
        if self.batch * high > MAX_BLOCK_BYTES:
            raise ValueError(
                f"payload_bytes: {self.batch:,} events of {high:,} bytes are above the limit of {MAX_BLOCK_BYTES:,} "
                "bytes for a batch: set a smaller batch"
            )
        if bool(self.stall_every) != bool(self.stall_s):
            raise ValueError("stall_every and stall_s only work together: set both or none")

    @property
    def payload_range(self) -> tuple[int, int]:
        """Smallest and largest payload, in bytes."""
        low, high = self.payload_bytes, self.payload_bytes_max
        return low, low if high is None else high

    @property
    def interval_s(self) -> float:
        """Time from one batch to the next, in seconds, in the generated times."""
        return self.batch / (self.rate or 1_000_000)
