"""Applies the events of a received batch in a transaction of the user's database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..streams.errors import Closed, InvalidArgument, PayloadInvalid, Unavailable
from ..streams.events import Event
from ..streams.failure_log import described
from ..streams.transactions import EffectCounts, EffectScope, RedriveRefused
from .effects import Effects, EffectsInScope
from .outages import is_outage
from .transaction import Transaction

WAIT_FOR_EARLIER_S = 30.0
"""How long a batch waits for the earlier ones of its stream that the consumer holds, in seconds."""
POLL_S = 0.01


class BatchToApply(Protocol):
    """A batch that was delivered to a consumer."""

    @property
    def redriven(self) -> bool: ...

    @property
    def is_next(self) -> bool: ...

    in_effects: bool

    def open_events(self) -> Sequence[Event]: ...

    def ack(self) -> Awaitable[None]: ...

    def nack(self, reason: str = "", *, unavailable: bool = False, invalid: bool = False) -> Awaitable[None]: ...


@asynccontextmanager
async def batch_effects(
    effects: Effects | AsyncEngine | AsyncConnection, batch: BatchToApply, scope: EffectScope
) -> AsyncGenerator[Transaction]:
    """Open the transaction of the open events of a batch. See `ReceivedBatch.effects`."""
    if batch.in_effects:
        raise InvalidArgument(f"{batch!r}: its block of `batch.effects(...)` is open already: use its transaction")
    try:
        await _wait_for_turn(batch)
        chosen = effects if isinstance(effects, Effects) else Effects.sharing(effects)
        scoped = chosen.scoped(None, scope, EffectCounts(), batch=True)
        await chosen.check_once()
    except BaseException as error:  # the events are not to blame; perhaps cancelled, and rejecting needs no await
        with suppress(Closed):
            _ = batch.nack(described(error), unavailable=True)
        raise
    events = batch.open_events()
    try:
        async with AsyncExitStack() as stack:
            transaction = await _open(stack, scoped, batch, events)
            batch.in_effects = True
            try:
                yield transaction
            finally:
                batch.in_effects = False
    except Exception as error:
        with suppress(Closed):
            await _reject(scoped, batch, events, error)
        raise
    except BaseException as error:  # cancelled, for example by a time limit
        with suppress(Closed):
            # Without this, the next batch of the stream would be applied before these events. Rejecting needs no await.
            _ = batch.nack(described(error), unavailable=True)
        raise
    await batch.ack()


async def _wait_for_turn(batch: BatchToApply) -> None:
    """Wait until the earlier events of the stream are acknowledged or rejected: the position that is committed with a
    batch passes them. Raises InvalidArgument after `WAIT_FOR_EARLIER_S`."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + WAIT_FOR_EARLIER_S
    while not batch.is_next:
        if loop.time() > ends_at:
            raise InvalidArgument(
                f"earlier events of the stream of {batch!r} are neither acknowledged nor rejected for "
                f"{WAIT_FOR_EARLIER_S:g} s: apply the batches of a stream one after the other"
            )
        await asyncio.sleep(POLL_S)


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
    await batch.nack(described(error), unavailable=outage, invalid=isinstance(error, PayloadInvalid))
