"""Options of handlers and of subscriptions, as type checkers see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from .events import Event
from .subscriptions import OnFailure, RetryPolicy, SlowConsumer, Start

EventFilter = Callable[[Event], bool]
"""Return True to deliver the event. If the filter raises, the event is delivered: losing it would be worse."""


class DefinitionOptions(TypedDict, total=False):
    """Options that become part of a subscription's definition."""

    start: Start | str | None
    """The first position. Text is read as by `Start.parse`. None: latest."""
    retry: RetryPolicy | None
    """The times at which a failed event is delivered again. None: the defaults of `RetryPolicy`."""
    on_failure: OnFailure
    slow_consumer: SlowConsumer | None
    """None: detach if the queue can rewind, else throttle."""
    circuit_breaker: bool
    """Hold the subscription while deliveries of many streams fail, instead of giving up on their events. True by
    default."""


class HandlerOptions(DefinitionOptions, total=False):
    """Options of a handler, in a silo or in a client."""

    concurrency: int
    """Number of handlers that run at a time: per queue in a silo, per subscription in a client. 2,000 by default."""


class LocalHandlerOptions(HandlerOptions, total=False):
    """Options of a handler in a silo."""

    filter: EventFilter | None
    """Events for which it returns False are not delivered."""
