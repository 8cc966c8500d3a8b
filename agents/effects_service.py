"""Delivery to handlers whose effects are applied exactly once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..streams.events import Event
from ..streams.handlers import Handler
from ..streams.lost_generations import CurrentGeneration, LostGenerations
from ..streams.options import EventFilter
from ..streams.subscriptions import Checkpoint, SubscriptionDefinition
from ..streams.transactions import EffectScope, HandlerEffects, ScopedEffects, StreamQueues
from .delivery.delivery import Delivery, FailureSink
from .delivery.handling import HandlerDelivery
from .served import HandlerService


class EffectsService(HandlerService):
    """Delivers to a handler that takes a transaction. `origin` is the id of the provider. `queues` says in which queues
    other programs must write a stream; None: headrace alone writes."""

    def __init__(
        self,
        handler: Callable[[Any, Any], Awaitable[None]],
        predicate: EventFilter | None,
        concurrency: int,
        effects: HandlerEffects[Any],
        origin: str,
        *,
        provider: str,
        batch: bool,
        queues: StreamQueues | None = None,
        current_generation: CurrentGeneration | None = None,
    ) -> None:
        super().__init__(Handler(None, None, None, None), predicate, concurrency, provider=provider)
        self._user_handler = handler
        self._effects = effects
        self._origin = origin
        self._batch = batch
        self._queues = queues
        self._current_generation = current_generation

    def deliver(
        self, definition: SubscriptionDefinition, queue: int, checkpoint: Checkpoint, sink: FailureSink, **options: Any
    ) -> Delivery:
        generation, current = options["generation"], self._current_generation
        lost = None if current is None else LostGenerations(definition.name, queue, generation, current)
        scope = EffectScope(self._origin, definition.name, queue, generation, self.provider, self._queues, lost)
        scoped = self._effects.scoped(self._user_handler, scope, options["counts"], batch=self._batch)
        on_event, on_batch = (None, scoped.call) if self._batch else (scoped.call, None)
        handler = Handler(on_event, on_batch, None, None, scoped.redrive)
        return HandlerDelivery(
            definition, queue, checkpoint, self.watch(definition.name, handler), PositionedFailures(sink, scoped),
            predicate=self.predicate, concurrency=self.concurrency, provider=self.provider, failures=self.failures,
            **options,
        )  # fmt: skip


class PositionedFailures:
    """Records failed events with the effects before `sink` records them, and moves the position of the effects past
    them afterwards. So after a crash in between, the events are delivered again, and a redrive knows whether their
    effects are applied."""

    def __init__(self, sink: FailureSink, scoped: ScopedEffects) -> None:
        self._sink = sink
        self._scoped = scoped

    async def dead_letter(self, delivery: Delivery, events: Sequence[Event], reason: str, attempts: int) -> None:
        await self._scoped.failed(events)
        await self._sink.dead_letter(delivery, events, reason, attempts)
        await self._scoped.given_up(events)

    async def skipped(self, delivery: Delivery, events: Sequence[Event], reason: str) -> None:
        await self._scoped.check_position(events)  # a gap must not be recorded for events that come again
        await self._sink.skipped(delivery, events, reason)
        await self._scoped.given_up(events)
