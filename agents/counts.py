"""Counts that only grow while the process runs, also when a queue's agent is replaced. Metrics are made of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..streams.transactions import EffectCounts


@dataclass(slots=True)
class DeliveryCounts(EffectCounts):
    """Counts of the events of one subscription in one queue, by their outcome."""

    delivered_events: int = 0
    delivered_batches: int = 0
    filtered: int = 0
    """Events that the filter held back."""
    retries: int = 0
    """Attempts that were put off after a failure."""
    dead_lettered: int = 0
    """Events given up on and kept."""
    skipped: int = 0
    """Events given up on and skipped."""
    gaps: int = 0
    """Ranges of events that were gone before they were delivered."""


@dataclass(slots=True)
class ReceivedCounts:
    """Counts of the events and bytes that the feeds of one queue have received."""

    events: int = 0
    bytes: int = 0
