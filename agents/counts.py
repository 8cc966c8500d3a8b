"""Counts that only grow while the process runs, also when a queue's agent is replaced. Metrics are made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time

from ..streams.events import EventBatch
from ..streams.histograms import Histogram
from ..streams.transactions import EffectCounts

MEASURE_S = 0.01
"""Shortest time between two batches whose delivery is measured, in seconds. So measuring costs the same under load."""


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
    """Of these, attempts after failures of a dependency, which do not count against the event."""
    retries_held: int = 0
    """Of these, attempts after failures that do not count because the circuit breaker holds the subscription."""
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
    """From the time that an event has from its publisher to its delivery, of the batches that are measured."""
    handling: Histogram = field(default_factory=Histogram)
    """From the delivery of a batch until its handler returned, or its consumer acknowledged it, of those measured."""
    measure_at: float = 0.0
    """The next batch delivered from then on is measured, by the monotonic clock of the delivery."""

    def measure_delay(self, batch: EventBatch, now: float) -> None:
        """A batch is delivered at `now`, at or after `measure_at`: measure its delay."""
        self.measure_at = now + MEASURE_S
        self.delivery_delay.observe(time() - batch.first_timestamp_us() / 1e6)


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
