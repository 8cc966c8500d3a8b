"""Counts that only grow while the process runs, also when a queue's agent is replaced. Metrics are made of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from time import time
from typing import Any

from ..streams.errors import InvalidArgument
from ..streams.events import EventBatch
from ..streams.histograms import Histogram
from ..streams.transactions import EffectCounts

MEASURE_S = 0.01
"""Shortest time between two batches whose delivery is measured, in seconds. It bounds the cost of measuring."""
MAX_DELAY_S = 86400.0
"""A longer delay counts as this long: the time of an event may be any year."""


@dataclass(slots=True)
class DeliveryCounts(EffectCounts):
    """Counts of the events of one subscription in one queue, by their outcome."""

    delivered_events: int = 0
    delivered_batches: int = 0
    filtered: int = 0
    """Events that the filter held back."""
    retries: int = 0
    """Attempts that were put off after a failure."""
    retries_unavailable: int = 0
    """Part of `retries`: attempts after failures of a dependency, which do not count against the event."""
    retries_held: int = 0
    """Part of `retries`: attempts after failures that do not count because the breaker holds the subscription."""
    dead_lettered: int = 0
    """Events given up on and kept."""
    skipped: int = 0
    """Events given up on and skipped."""
    gaps: int = 0
    """Ranges of events that were gone before they were delivered."""
    returned: int = 0
    """Events taken back from a consumer that was gone or silent, or lost the queue. They are delivered again."""
    detached: int = 0
    """Streams taken out of the cache because their consumer was slow."""
    delivery_delay: Histogram = field(default_factory=Histogram)
    """Time from an event's timestamp to its first delivery, of the batches that are measured."""
    handling: Histogram = field(default_factory=Histogram)
    """Time from the delivery of a measured batch until its handler returned, or its consumer acknowledged it."""
    measure_at: float = 0.0
    """The next batch delivered from this monotonic time on is measured."""

    def measure_delay(self, batch: EventBatch, now: float, *, first: bool) -> None:
        """A batch is delivered at `now`, at or after `measure_at`: measure its delay if this is its `first` delivery. A
        batch that cannot be read is not measured: its delivery reports that."""
        self.measure_at = now + MEASURE_S
        if first:
            with suppress(InvalidArgument):
                self.delivery_delay.observe(min(time() - batch.first_timestamp_us() / 1e6, MAX_DELAY_S))

    @classmethod
    def sum_of(cls, counts: Iterable[DeliveryCounts]) -> DeliveryCounts:
        """Return the counts of several deliveries together."""
        parts = list(counts)
        sums: dict[str, Any] = {
            each.name: sum(getattr(one, each.name) for one in parts) for each in fields(cls) if each.type == "int"
        }
        delay = Histogram.sum_of(one.delivery_delay for one in parts)
        return cls(**sums, delivery_delay=delay, handling=Histogram.sum_of(one.handling for one in parts))


@dataclass(slots=True)
class LeaseCounts:
    """Counts of the leases of one provider's queues in this process."""

    gained: int = 0
    """Leases that began."""
    given_back: int = 0
    """Leases given back in order: the queue went to another silo, or this one stopped."""
    cut: int = 0
    """Leases that ended before they could be given back."""


@dataclass(slots=True)
class ReceivedCounts:
    """Counts of one queue's feeds."""

    events: int = 0
    """Events received."""
    bytes: int = 0
    """Bytes received."""
    pressure_s: float = 0.0
    """Time in which reading waited because a cache was full, in seconds."""
    errors: int = 0
    """Failed attempts to read."""
