"""Handlers in a client whose effects are applied exactly once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..streams.errors import NotSupported, Unavailable
from ..streams.events import Event
from ..streams.transactions import EffectCounts, EffectScope, HandlerEffects, ScopedEffects
from .received import ReceivedBatch


class HandlerWithEffects:
    """A handler that takes an event, or with `batch` a batch, and a transaction."""

    def __init__(
        self, effects: HandlerEffects[Any], handler: Callable[[Any, Any], Awaitable[None]], *, batch: bool
    ) -> None:
        self.batch = batch
        self.counts = EffectCounts()
        self._effects = effects
        self._handler = handler
        self._scoped: dict[int, tuple[EffectScope, ScopedEffects]] = {}
        """Scope and effects, by queue."""

    async def check(self) -> None:
        """Raise the errors of `HandlerEffects.check`."""
        await self._effects.check()

    def begin(self, batch: ReceivedBatch) -> BatchInHandler:
        """The handler begins with this batch. Call this first, without an await in between: after a seek, the batch is
        void, and its effects must not count as those of the new generation. Raises Unavailable if the silo or the mode
        of the subscription does not support effects."""
        try:
            scope = batch.holder.effect_scope()
        except NotSupported as error:
            raise Unavailable(str(error)) from None  # the event is not to blame
        known = self._scoped.get(scope.queue)
        if known is None or known[0] is not scope:
            made = self._effects.scoped(self._handler, scope, self.counts, batch=self.batch)
            known = self._scoped[scope.queue] = scope, made
        return BatchInHandler(known[1], redriven=batch.redriven)


class BatchInHandler:
    """Applies the events of one batch."""

    def __init__(self, scoped: ScopedEffects, *, redriven: bool) -> None:
        self._scoped = scoped
        self._redriven = redriven

    async def call(self, delivered: Event | ReceivedBatch) -> None:
        """Apply an event of the batch, or the batch itself, unless its effects are committed. Raises RedriveRefused for
        a dead letter if that is not known."""
        if not self._redriven:
            await self._scoped.call(delivered)
            return
        for event in [delivered] if isinstance(delivered, Event) else delivered.events():
            await self._scoped.redrive(event)

    async def failed(self, events: Sequence[Event], error: BaseException) -> BaseException:
        """Note that these events failed, because the silo may give up on them. Return the error of the rejection:
        Unavailable if this cannot be noted."""
        if isinstance(error, Unavailable) or self._redriven:
            return error
        try:
            await self._scoped.failed(events)
        except Unavailable as outage:
            return outage
        return error
