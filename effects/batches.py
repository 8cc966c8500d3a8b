"""Effects of batches that a consumer takes one after the other, perhaps in another process than the silo."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..streams.errors import Closed, Unavailable
from ..streams.events import Event
from ..streams.failure_log import described
from ..streams.transactions import EffectCounts, EffectScope, RedriveRefused
from .database import is_outage
from .effects import Effects, EffectsInScope
from .transaction import Transaction


class BatchToApply(Protocol):
    """A batch that was delivered to a consumer."""

    @property
    def redriven(self) -> bool: ...

    def ack(self) -> Awaitable[None]: ...

    def nack(self, reason: str = "", *, unavailable: bool = False) -> Awaitable[None]: ...


@asynccontextmanager
async def batch_effects(
    effects: Effects | AsyncEngine | AsyncConnection, batch: BatchToApply, events: Sequence[Event], scope: EffectScope
) -> AsyncGenerator[Transaction]:
    """Open the transaction of these events of a batch. See `ReceivedBatch.effects`."""
    try:
        chosen = effects if isinstance(effects, Effects) else Effects.sharing(effects)
        scoped = chosen.scoped(None, scope, EffectCounts(), batch=True)
        await chosen.check_once()
    except Exception as error:
        with suppress(Closed):
            await batch.nack(described(error), unavailable=True)  # the events are not to blame
        raise
    try:
        async with AsyncExitStack() as stack:
            yield await _open(stack, scoped, batch, events)
    except Exception as error:
        with suppress(Closed):
            await _reject(scoped, batch, events, error)
        raise
    await batch.ack()


async def _open(
    stack: AsyncExitStack, scoped: EffectsInScope, batch: BatchToApply, events: Sequence[Event]
) -> Transaction:
    if not events:  # they are void, for example after a seek
        return await stack.enter_async_context(scoped.without_events())
    try:
        return await stack.enter_async_context(scoped.transaction(events, redriven=batch.redriven))
    except RedriveRefused as refused:
        await scoped.note_unknown(events[0])
        await batch.nack(str(refused), unavailable=True)  # this is no attempt
        return await stack.enter_async_context(scoped.without_events())


async def _reject(scoped: EffectsInScope, batch: BatchToApply, events: Sequence[Event], error: Exception) -> None:
    outage = isinstance(error, Unavailable) or is_outage(error)
    if not outage and not batch.redriven:  # a dead letter is noted already, perhaps as applied
        try:
            await scoped.failed(events)  # the silo may give up on them
        except Unavailable:
            outage = True
    await batch.nack(described(error), unavailable=outage)
