"""The progress and the consumers of a subscription, as management shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .identity import StreamId
from .subscriptions import SubscriptionDefinition


class QueueProgress(NamedTuple):
    """The progress of a subscription in one queue."""

    queue: int
    next_offset: int
    """All events below it are done, except in `streams_behind` streams."""
    watermark: int
    """The lowest offset that is not done."""
    end_offset: int
    """The queue's end: the offset that the next batch will have. If offsets do not count batches, it is `watermark`
    plus `lag`."""
    streams_behind: int
    streams_paused: int
    """Number of these streams that are paused after a failure and wait to be resumed."""
    paused: Mapping[StreamId, str]
    """Paused streams, with the reason; from a silo, only the first 100."""
    fault: str = ""
    """The damaged record at which the subscription has stopped, with queue and offset; "" if there is none."""

    @property
    def lag(self) -> int:
        """Number of batches from the first unfinished one to the queue's end."""
        return max(self.end_offset - self.watermark, 0)


class ConsumerState(NamedTuple):
    """A consumer of a subscription, as the silo sees it."""

    id: str
    connected: bool
    """Whether it has a connection now. If not, the silo waits for it until its session timeout."""
    credit_events: int
    credit_bytes: int
    in_flight_events: int
    queues: Sequence[int]
    """Mode bound: the queues that are assigned to it."""
    blocked: str = ""
    """The reason why the silo sends it nothing although it has credit; empty if it is not blocked."""


class SubscriptionHold(NamedTuple):
    """State of a subscription that its circuit breaker holds: deliveries of many streams failed, or a dependency is
    unavailable. No event is given up on."""

    reason: str
    """The latest failure that caused the hold."""
    since_us: int
    """Begin of the hold, in microseconds since 1970-01-01 UTC."""
    resuming: bool
    """Whether a delivery has succeeded since, so that deliveries begin again at a growing rate."""


class SubscriptionState(NamedTuple):
    """A subscription and its progress."""

    definition: SubscriptionDefinition
    progress: Sequence[QueueProgress]
    consumers: Sequence[ConsumerState]
    """Empty if a handler in the silo serves the subscription, or if there is no consumer."""
    dead_letters: int
    """Number of its dead letters."""
    gaps: int
    """Number of its gap records."""
    held: SubscriptionHold | None = None
    """Set while the asked silo holds the subscription. None in a stored state, because only a process that serves the
    subscription knows."""
