"""The progress and the consumers of a subscription, as management shows them."""

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
    """The queue's end: the offset that the next batch will have. If offsets do not count batches, `lag` above the
    watermark."""
    streams_behind: int
    streams_paused: int
    """Those of them that wait to be resumed after a failure."""
    paused: Mapping[StreamId, str]
    """These, and why; of a silo the first 100."""
    fault: str = ""
    """The damaged record behind which the subscription cannot go on, with queue and offset. "": there is none."""

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
    blocked: str = ""
    """Why the silo sends it nothing although it has credit; empty if it would."""


class Held(NamedTuple):
    """A circuit breaker holds a subscription: deliveries of many streams failed, and nothing is given up on."""

    reason: str
    """The failure that held it last."""
    since_us: int
    """When it was held, in microseconds since 1970-01-01 UTC."""
    resuming: bool
    """Whether a delivery succeeded since, and deliveries begin again at a rate that grows."""


class SubscriptionState(NamedTuple):
    """A subscription, and how far it is."""

    definition: SubscriptionDefinition
    progress: Sequence[QueueProgress]
    consumers: Sequence[ConsumerState]
    """None if a handler in the silo serves the subscription, or if there is no consumer."""
    dead_letters: int
    """How many there are."""
    gaps: int
    """The same of gap records."""
    held: Held | None = None
    """Set while the silo that was asked holds the subscription. None from a stored state: only a process that serves
    the subscription knows."""
