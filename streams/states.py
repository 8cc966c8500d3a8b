"""How far a subscription is, and who consumes it: what management shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .identity import StreamId
from .subscriptions import SubscriptionDefinition


class QueueProgress(NamedTuple):
    """How far a subscription is in a queue."""

    queue: int
    next_offset: int
    """Everything below is done, except for `streams_behind` streams."""
    watermark: int
    """The lowest offset that is not done."""
    end_offset: int
    """Where the queue ends: the offset of what is stored next. Where offsets do not count batches, `lag` above the
    watermark."""
    streams_behind: int
    streams_paused: int
    """Those of them that wait to be resumed after a failure."""
    paused: Mapping[StreamId, str]
    """These, and why; of a silo the first 100."""

    @property
    def lag(self) -> int:
        """Batches from the first that is not done to the queue's end."""
        return max(self.end_offset - self.watermark, 0)


class ConsumerState(NamedTuple):
    """A consumer of a subscription, as the silo sees it."""

    id: str
    connected: bool
    """Whether it has a connection now; one without is waited for."""
    credit_events: int
    credit_bytes: int
    in_flight_events: int
    queues: Sequence[int]
    """Mode bound: those that are its own."""


class SubscriptionState(NamedTuple):
    """A subscription, and how far it is."""

    definition: SubscriptionDefinition
    progress: Sequence[QueueProgress]
    consumers: Sequence[ConsumerState]
    """None where a handler in the silo is served, or nobody."""
    dead_letters: int
    """How many there are."""
    gaps: int
    """The same of gap records."""
