"""Gather the facts about a stream from a provider in this process, within a second, and explain them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..adapters import Bounds
from ..agents import Group, HandlerService, PullingAgent, ServedSubscription
from ..agents.cursor import CursorState, StreamCursor
from ..agents.delivery.delivery import Delivery
from ..agents.delivery.group_delivery import GroupDelivery
from ..streams.errors import CorruptRecord, HeadraceError
from ..streams.identity import StreamId
from ..streams.subscriptions import CONSUMER_SEPARATOR, Checkpoint, Mode, SubscriptionDefinition, is_consumers_position
from .provider_core import ProviderCore
from .views import fault_at
from .why import (
    AgentState,
    ConsumerFacts,
    Position,
    StreamFacts,
    StreamQueueFacts,
    SubscriptionFacts,
    WhyFacts,
    explain,
)
from .why_causes import Cause

STORE_S = 0.3
"""Time that the control store has for all answers, in seconds."""
READ_S = 0.3
"""Time to look for events of the stream in its queue, in seconds."""
SHORT_READ_S = 0.1
"""The same if the control store did not answer: its time is used up, and the queue may be in the same database."""
PIECE_EVENTS, PIECE_BYTES = 10_000, 1 << 20
WINDOW = 4096
"""Offsets that are read together, from the end backwards."""


class VisibleSubscriptions(NamedTuple):
    """The subscriptions that a caller may see, as far as they are known."""

    definitions: Sequence[SubscriptionDefinition]
    error: str
    """The error of the control store; "" if it answered. Otherwise only subscriptions that this process serves are
    known."""


class StreamExplanation(NamedTuple):
    """The causes that hold the next event of a stream, for one subscription."""

    subscription: str
    """"": no subscription matches the stream."""
    causes: Sequence[Cause]


async def explain_stream(
    provider: ProviderCore,
    stream: StreamId,
    name: str = "",
    *,
    is_visible: Callable[[SubscriptionDefinition], bool] = lambda _: True,
    visible: VisibleSubscriptions | None = None,
    queue: StreamQueueFacts | None = None,
    is_asked: bool = True,
) -> list[StreamExplanation]:
    """Explain a stream for the subscription `name`, or for each that matches it.

    Only subscriptions that are visible are named; a caller that has looked them up gives them as `visible`. `queue` has
    the facts about an owner in another process; None: this process has the queue. `is_asked`: this process is the one
    that may serve the subscriptions.
    """
    index = provider.queues_with(stream)[0]
    definitions, error = visible or await visible_subscriptions(provider, is_visible)
    chosen = chosen_of(definitions, stream, name)
    facts = WhyFacts(
        stream=str(stream),
        stream_facts=StreamFacts(),
        queue=queue or _queue(provider, index),
        asked_for=name,
        patterns=[one.selector.pattern for one in definitions],
        store_error=error,
        is_asked=is_asked,
    )
    if not chosen:
        return [StreamExplanation("", explain(facts))]
    found = [_Gathering(provider, stream, one, facts).explained() for one in chosen]
    return list(await asyncio.gather(*found))


def chosen_of(
    definitions: Sequence[SubscriptionDefinition], stream: StreamId, name: str
) -> list[SubscriptionDefinition]:
    """Return the subscription `name`; without a name, those that match the stream."""
    return [one for one in definitions if (one.name == name if name else one.selector.matcher()(stream))]


async def visible_subscriptions(
    provider: ProviderCore, is_visible: Callable[[SubscriptionDefinition], bool]
) -> VisibleSubscriptions:
    """Look up the subscriptions for which `is_visible` is true."""
    try:
        async with asyncio.timeout(STORE_S):
            stored = await provider.store.subscriptions(provider.name)
            chosen = [one for one in stored if is_visible(one) and not is_consumers_position(one)]
            return VisibleSubscriptions(chosen, "")
    except TimeoutError:
        error = f"no answer within {STORE_S:g} s"
    except HeadraceError as failure:
        error = str(failure)
    served = [one.definition for name, one in provider.manager.served.items() if CONSUMER_SEPARATOR not in name]
    return VisibleSubscriptions([one for one in served if is_visible(one)], error)


def _queue(provider: ProviderCore, index: int) -> StreamQueueFacts:
    """The facts about a queue of this process."""
    leases = provider.manager.leases
    if leases is not None and index not in leases:
        return StreamQueueFacts(queue=index)
    if index in provider.manager.stopped:
        return StreamQueueFacts(queue=index, has_lease=True, agent=AgentState.STOPPED)
    agent = provider.manager.agents[index]
    pressure = agent.statistics().cache.pressure
    return StreamQueueFacts(
        queue=index,
        has_lease=True,
        agent=AgentState.RUNNING,
        pressure=pressure,
        holders=_holders(agent, provider) if pressure else (),
    )


def _holders(agent: PullingAgent, provider: ProviderCore) -> list[str]:
    """The subscriptions with the lowest watermark in a queue, each with a stream that holds it."""
    found: list[tuple[int, str]] = []
    for name, one in provider.manager.served.items():
        delivery = one.deliveries.get(agent.queue)
        if delivery is not None and delivery.progress.cursors:
            oldest = min(delivery.progress.cursors.values(), key=lambda cursor: cursor.token)
            found.append((oldest.token.offset, f"{name}: {oldest.stream}"))
    return [text for _, text in sorted(found)[:5]]


class _Gathering:
    """Gathers the facts about one subscription in one stream."""

    def __init__(
        self, provider: ProviderCore, stream: StreamId, definition: SubscriptionDefinition, facts: WhyFacts
    ) -> None:
        self._provider = provider
        self._stream = stream
        self._definition = definition
        self._facts = facts
        self._index = facts.queue.queue

    async def explained(self) -> StreamExplanation:
        one = self._served()
        delivery = None if one is None else one.deliveries.get(self._index)
        found = SubscriptionFacts(
            name=self._definition.name,
            pattern=self._definition.selector.pattern,
            matches=self._definition.selector.matcher()(self._stream),
            max_attempts=self._definition.retry.max_attempts,
        )
        facts = self._facts
        if facts.queue.agent is AgentState.RUNNING:
            agent = self._provider.manager.agents[self._index]
            name = self._definition.name if delivery is None else delivery.name
            if fault := agent.fault_of(name):
                facts = replace(facts, queue=replace(facts.queue, agent=AgentState.FAULTED, agent_reason=fault))
            found = replace(found, catch_up=agent.is_catching_up(name))
        if one is not None:
            found = _with_consumers(found, one, self._index)
        elif facts.queue.has_lease and facts.queue.agent is not None:
            waiting = self._provider.standby.waiting.get(self._definition.name)
            found = replace(found, served=False, standby="" if waiting is None else waiting.reason)
        if found.matches:
            saved = None if delivery is not None or facts.store_error else await self._saved()
            if delivery is not None:
                found = _with_cursor(found, delivery, delivery.progress.cursors.get(self._stream))
            elif saved is not None:
                found = _with_saved(found, saved, self._stream)
            facts = await self._with_events(facts, found)
            found = await self._with_left_behind(found, facts.stream_facts.last)
        return StreamExplanation(found.name, explain(replace(facts, subscription=found)))

    def _served(self) -> ServedSubscription | None:
        served = self._provider.manager.served
        prefix = self._definition.name + CONSUMER_SEPARATOR
        return served.get(self._definition.name) or next(
            (one for name, one in served.items() if name.startswith(prefix)), None
        )

    async def _saved(self) -> Checkpoint | None:
        try:
            async with asyncio.timeout(STORE_S):
                found = await self._provider.store.checkpoints(self._provider.name, self._definition.name)
        except (TimeoutError, HeadraceError):
            return None
        return found.get(self._index)

    async def _with_events(self, facts: WhyFacts, one: SubscriptionFacts) -> WhyFacts:
        """Add the stored events, and damage at the position of the subscription."""
        adapter = self._provider.adapter
        if one.position is not None or not adapter.capabilities.rewindable:
            return facts
        bounds, damage = None, ""
        limit_s = SHORT_READ_S if facts.store_error else READ_S
        try:
            async with asyncio.timeout(limit_s):
                bounds = await adapter.bounds(self._index)
                last = await self._last(bounds, one.next_offset)
                if facts.queue.agent is AgentState.FAULTED and one.next_offset is not None:
                    damage = await fault_at(adapter, self._index, [Checkpoint(one.next_offset)])
        except CorruptRecord as found:
            return replace(facts, queue=replace(facts.queue, damage=str(found)))
        except TimeoutError:
            return facts if bounds is not None else _without_answer(facts, f"it does not answer within {limit_s:g} s")
        except HeadraceError as error:
            return facts if bounds is not None else _without_answer(facts, str(error))
        stream_facts, queue = replace(facts.stream_facts, last=last), replace(facts.queue, damage=damage)
        return replace(facts, stream_facts=stream_facts, queue=queue)

    async def _last(self, bounds: Bounds, position: int | None) -> int | None:
        """Offset of a batch of the stream from `position` on, else of its last one, else -1. None: it may be in a
        damaged record below the position."""
        first, end = bounds
        start = first if position is None else max(first, position)
        found, damage = await self._search(start, end)
        if damage is not None:
            raise damage
        is_whole = True
        while found < 0 and start > first:
            start, stop = max(first, start - WINDOW), start
            found, damage = await self._search(start, stop)
            while damage is not None and damage.next_offset is not None and damage.next_offset < stop:
                is_whole = False
                later, damage = await self._search(damage.next_offset, stop)
                found = max(found, later)
            is_whole = is_whole and damage is None
        return found if found >= 0 or is_whole else None

    async def _search(self, start: int, end: int) -> tuple[int, CorruptRecord | None]:
        """Offset of the last batch of the stream in a range, -1 without one; and the damage that ended the search."""
        found = -1
        if start >= end:
            return found, None
        receiver = await self._provider.adapter.open_receiver(self._index, start)
        try:
            while start < end:
                received = await receiver.receive(PIECE_EVENTS, PIECE_BYTES)
                if received.next_offset <= start:
                    break
                start = received.next_offset
                for batch in received.batches:
                    if batch.stream == self._stream and batch.offset < end:
                        found = batch.offset
        except CorruptRecord as damage:
            return found, damage
        finally:
            await receiver.aclose()
        return found, None

    async def _with_left_behind(self, one: SubscriptionFacts, last: int | None) -> SubscriptionFacts:
        """Add the dead letter of the stream's last event, and a gap record from the subscription's position on."""
        store, provider = self._provider.store, self._provider.name
        if one.position is not None or last is None or self._facts.store_error:
            return one
        try:
            async with asyncio.timeout(STORE_S):
                letters = await store.dead_letters_at(provider, one.name, self._index, last) if last >= 0 else []
                gaps = await store.gaps(provider, one.name)
        except (TimeoutError, HeadraceError):
            return one
        letter = next((each for each in letters if each.stream == self._stream), None)
        gap = next((each for each in gaps if each.queue == self._index and each.stream in (None, self._stream)), None)
        if letter is not None:
            redrive = ", a redrive is requested" if letter.redrive else ""
            text = f"dead letter {letter.id}, {letter.attempts} attempts: {letter.reason}{redrive}"
            one = replace(one, dead_letter=text)
        if gap is not None and last < 0:
            one = replace(one, gap=f"offsets {gap.low} to {gap.high}: {gap.reason}")
        return one


def _without_answer(facts: WhyFacts, reason: str) -> WhyFacts:
    """The queue cannot be read now. If its agent reads here, the agent has met the fault or will meet it."""
    if facts.queue.agent is not AgentState.RUNNING:
        return facts
    return replace(facts, queue=replace(facts.queue, agent=AgentState.FAULTED, agent_reason=reason))


def _with_consumers(found: SubscriptionFacts, one: ServedSubscription, queue: int) -> SubscriptionFacts:
    held = one.gate.held
    delivery = one.deliveries.get(queue)
    reason = "" if held is None else f"for {time.time() - held.since_us / 1e6:.1f} s: {held.reason}"
    if not isinstance(one.service, Group):
        concurrency = one.service.concurrency if isinstance(one.service, HandlerService) else None
        in_flight = 0 if delivery is None else delivery.statistics().in_flight
        full = concurrency is not None and in_flight >= concurrency
        return replace(found, served=True, handler=True, held=reason, workers_full=full)
    members = one.service.statistics()
    consumers = [
        ConsumerFacts(
            id=each.id,
            connected=each.connected,
            has_credit=each.credit_events > 0 and each.credit_bytes > 0 and not each.needed_bytes,
            blocked=each.blocked,
        )
        for each in members
    ]
    bound = one.definition.mode is Mode.BOUND
    assigned = not bound or any(queue in each.queues for each in members if each.connected)
    return replace(found, served=True, held=reason, consumers=consumers, assigned=assigned)


def _with_cursor(found: SubscriptionFacts, delivery: Delivery, cursor: StreamCursor | None) -> SubscriptionFacts:
    """Add the state of the stream's cursor. Without a cursor, all events below the position are done."""
    found = replace(found, next_offset=delivery.progress.position)
    if cursor is None:
        return found
    found = replace(found, position=Position(cursor.state.value), attempts=cursor.failures.attempts)
    now = asyncio.get_running_loop().time()
    if cursor.state is CursorState.PAUSED:
        return replace(found, reason=cursor.failures.paused)
    if (attempt := delivery.retries.waiting.get(cursor)) is not None:
        return replace(found, reason=attempt.reason, next_in_s=max(attempt.timer.when() - now, 0.0))
    if isinstance(delivery, GroupDelivery) and (parcel := delivery.parcels.of(cursor)) is not None:
        return replace(found, held_by=parcel.member.id, running_s=now - parcel.handed_at)
    return replace(found, catch_up=cursor.feed is not None)


def _with_saved(found: SubscriptionFacts, saved: Checkpoint, stream: StreamId) -> SubscriptionFacts:
    behind = saved.behind.get(stream)
    if behind is not None and behind.paused:
        return replace(found, position=Position.PAUSED, reason=behind.paused)
    return replace(found, next_offset=saved.next_offset if behind is None else behind.token.offset)
