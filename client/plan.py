"""The arguments of `subscribe` for a consumer, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..streams.arguments import (
    check_callable,
    check_flag,
    check_integer,
    check_options,
    check_seconds,
    refused,
)
from ..streams.errors import InvalidArgument
from ..streams.handlers import HANDLER_OPTIONS, check_no_definition_options, define
from ..streams.subscriptions import (
    GapRecord,
    Mode,
    Selector,
    SubscriptionDefinition,
    check_consumer,
    check_subscription_name,
)
from .held_account import MAX_BYTES, MAX_EVENTS
from .options import ConsumerOptions, SessionState


@dataclass(frozen=True, kw_only=True)
class ConsumerPlan:
    """The checked arguments of `subscribe`."""

    name: str
    definition: SubscriptionDefinition | None
    consumer: str
    session_timeout_s: float | None
    keeps_positions: bool
    positions: Mapping[int, bytes]
    max_events: int
    max_bytes: int
    timeout_s: float | None
    on_state: Callable[[SessionState], None] | None
    on_gap: Callable[[GapRecord], None] | None
    concurrent: bool = False
    """It works on many streams at once: a silo sends a few events of many streams, not many events of a few."""

    def __post_init__(self) -> None:
        if self.consumer != "":
            check_consumer(self.consumer)
        for name, value in (("session_timeout_s", self.session_timeout_s), ("timeout_s", self.timeout_s)):
            if value is not None:
                check_seconds(name, value, above_zero=True)
        check_integer("max_events", self.max_events, 1)
        check_integer("max_bytes", self.max_bytes, 1)
        check_callable("on_state", self.on_state)
        check_callable("on_gap", self.on_gap)
        check_flag("keeps_positions", self.keeps_positions)
        if not isinstance(self.positions, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] (users may err)
            raise refused("positions", self.positions, "a mapping of queues to the positions of a consumer")
        if self.positions and not self.keeps_positions:
            raise InvalidArgument("positions are for a consumer that keeps them: give keeps_positions=True, too")


def plan_of(call: str, name: str, selector: Selector | None, options: Mapping[str, Any]) -> ConsumerPlan:
    """The plan of a consumer from the options of `call`. Raises InvalidArgument."""
    check_options(call, options, ConsumerOptions.__annotations__, HANDLER_OPTIONS)
    check_subscription_name(name)
    definition = None
    if selector is not None:
        mode = Mode.of(options.get("mode", Mode.SHARED))
        definition = define(name, selector, {**options, "mode": mode})
    else:
        check_no_definition_options(name, options)
    return ConsumerPlan(
        name=name,
        definition=definition,
        consumer=options.get("consumer", ""),
        session_timeout_s=options.get("session_timeout_s"),
        keeps_positions=options.get("keeps_positions", False),
        positions={} if options.get("positions") is None else options["positions"],
        max_events=options.get("max_events", MAX_EVENTS),
        max_bytes=options.get("max_bytes", MAX_BYTES),
        timeout_s=options.get("timeout_s"),
        on_state=options.get("on_state"),
        on_gap=options.get("on_gap"),
    )
