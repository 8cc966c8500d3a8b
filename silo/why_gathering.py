"""Gather the facts about a stream from a provider in this process, within a second, and explain them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..agents import Group, HandlerService, PullingAgent, ServedSubscription
from ..agents.cursor import CursorState, StreamCursor
from ..agents.delivery.delivery import Delivery
from ..agents.delivery.group_delivery import GroupDelivery
from ..streams.errors import CorruptRecord, HeadraceError
from ..streams.identity import StreamId
from ..streams.subscriptions import (
    CONSUMER_SEPARATOR,
    Checkpoint,
    GapRecord,
    Mode,
    SubscriptionDefinition,
    is_consumers_position,
)
from .last_event import LastEvent
from .provider_core import ProviderCore
from .time_limit import time_limit
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
    merged,
)
from .why_causes import Cause

STORE_S = 0.3
"""Time that the control store has for all answers, in seconds."""
READ_S = 0.3
"""Time to look for events of the stream in its queue, in seconds."""
SHORT_READ_S = 0.1
"""The same if the control store did not answer: its time is used up, and the queue may be in the same database."""


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
    queues: Sequence[StreamQueueFacts] = (),
    is_asked: bool = True,
) -> list[StreamExplanation]:
    """Explain a stream for the subscription `name`, or for each that matches it.

    Only subscriptions that are visible are named; a caller that has looked them up gives them as `visible`. `queues`
    has the facts about the queues to look into; empty: all that may have events of the stream, and this process has
    them. `is_asked`: this process is the one that may serve the subscriptions.
    """
    definitions, error = visible or await visible_subscriptions(provider, is_visible)
    chosen = chosen_of(definitions, stream, name)
    facts = [
        WhyFacts(
            stream=str(stream),
            stream_facts=StreamFacts(),
            queue=queue,
            asked_for=name,
            patterns=[one.selector.pattern for one in definitions],
            store_error=error,
            is_asked=is_asked,
        )
        for queue in queues or [queue_facts(provider, index) for index in provider.queues_with(stream)]
    ]
    if not chosen:
        return [StreamExplanation("", merged([explain(one) for one in facts]))]
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
        async with time_limit(STORE_S):
            stored = await provider.store.subscriptions(provider.name)
            chosen = [one for one in stored if is_visible(one) and not is_consumers_position(one)]
            return VisibleSubscriptions(chosen, "")
    except TimeoutError:
        error = f"no answer within {STORE_S:g} s"
    except HeadraceError as failure:
        error = str(failure)
    served = [one.definition for name, one in provider.manager.served.items() if CONSUMER_SEPARATOR not in name]
    return VisibleSubscriptions([one for one in served if is_visible(one)], error)


def queue_facts(provider: ProviderCore, index: int) -> StreamQueueFacts:
    """Return the facts about a queue of this process."""
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
        self, provider: ProviderCore, stream: StreamId, definition: SubscriptionDefinition, facts: Sequence[WhyFacts]
    ) -> None:
        """`facts`: those that are known, one for each queue."""
        self._provider = provider
        self._stream = stream
        self._definition = definition
        self._facts = facts
        self._store_answers = not any(one.store_error for one in facts)

    async def explained(self) -> StreamExplanation:
        one, matches = self._served(), self._definition.selector.matcher()(self._stream)
        saved: Mapping[int, Checkpoint] = {}
        gaps: Sequence[GapRecord] = ()
        if matches and self._store_answers:
            is_here = one is not None and all(facts.queue.queue in one.deliveries for facts in self._facts)
            saved, gaps = await asyncio.gather(self._saved(is_needed=not is_here), self._gaps())
        found = SubscriptionFacts(
            name=self._definition.name,
            pattern=self._definition.selector.pattern,
            matches=matches,
            max_attempts=self._definition.retry.max_attempts,
        )
        causes = [self._explained_in(facts, found, one, saved, gaps) for facts in self._facts]
        return StreamExplanation(found.name, merged(await asyncio.gather(*causes)))

    async def _explained_in(
        self,
        facts: WhyFacts,
        found: SubscriptionFacts,
        one: ServedSubscription | None,
        saved: Mapping[int, Checkpoint],
        gaps: Sequence[GapRecord],
    ) -> list[Cause]:
        """The causes in one queue."""
        index = facts.queue.queue
        delivery = None if one is None else one.deliveries.get(index)
        if facts.queue.agent is AgentState.RUNNING:
            agent = self._provider.manager.agents[index]
            name = self._definition.name if delivery is None else delivery.name
            if fault := agent.fault_of(name):
                facts = replace(facts, queue=replace(facts.queue, agent=AgentState.FAULTED, agent_reason=fault))
            found = replace(found, catch_up=agent.is_catching_up(name))
        if one is not None:
            found = _with_consumers(found, one, index)
        elif facts.queue.has_lease and facts.queue.agent is not None:
            waiting = self._provider.standby.waiting.get(self._definition.name)
            found = replace(found, served=False, standby="" if waiting is None else waiting.reason)
        if found.matches:
            if delivery is not None:
                found = _with_cursor(found, delivery, delivery.progress.cursors.get(self._stream))
            elif index in saved:
                found = _with_saved(found, saved[index], self._stream)
            facts = await self._with_events(facts, found)
            found = await self._with_left_behind(found, facts, gaps)
        return explain(replace(facts, subscription=found))

    def _served(self) -> ServedSubscription | None:
        served = self._provider.manager.served
        prefix = self._definition.name + CONSUMER_SEPARATOR
        return served.get(self._definition.name) or next(
            (one for name, one in served.items() if name.startswith(prefix)), None
        )

    async def _saved(self, *, is_needed: bool) -> Mapping[int, Checkpoint]:
        if not is_needed:
            return {}
        try:
            async with time_limit(STORE_S):
                return await self._provider.store.checkpoints(self._provider.name, self._definition.name)
        except (TimeoutError, HeadraceError):
            return {}

    async def _gaps(self) -> Sequence[GapRecord]:
        try:
            async with time_limit(STORE_S):
                return await self._provider.store.gaps(self._provider.name, self._definition.name)
        except (TimeoutError, HeadraceError):
            return ()

    async def _with_events(self, facts: WhyFacts, one: SubscriptionFacts) -> WhyFacts:
        """Add the stored events, and damage at the position of the subscription."""
        adapter, index = self._provider.adapter, facts.queue.queue
        if one.position is not None or not adapter.capabilities.rewindable:
            return facts
        bounds, damage = None, ""
        search = LastEvent(adapter, index, self._stream)
        limit_s = SHORT_READ_S if facts.store_error else READ_S
        try:
            async with time_limit(limit_s):
                bounds = await adapter.bounds(index)
                facts = replace(facts, queue=replace(facts.queue, end=bounds[1]))
                await search.run(bounds, one.next_offset)
                if facts.queue.agent is AgentState.FAULTED and one.next_offset is not None:
                    damage = await fault_at(adapter, index, [Checkpoint(one.next_offset)])
        except CorruptRecord as found:
            return replace(facts, queue=replace(facts.queue, damage=str(found)))
        except (TimeoutError, HeadraceError) as error:
            if bounds is None:
                late = isinstance(error, TimeoutError)
                return _without_answer(facts, f"it does not answer within {limit_s:g} s" if late else str(error))
        return replace(facts, stream_facts=search.found, queue=replace(facts.queue, damage=damage))

    async def _with_left_behind(
        self, one: SubscriptionFacts, facts: WhyFacts, gaps: Sequence[GapRecord]
    ) -> SubscriptionFacts:
        """Add the dead letter of the stream's last event, and a gap record from the subscription's position on."""
        store, provider = self._provider.store, self._provider.name
        index, last = facts.queue.queue, facts.stream_facts.last
        if one.position is not None or last is None or not self._store_answers:
            return one
        try:
            async with time_limit(STORE_S):
                letters = await store.dead_letters_at(provider, one.name, index, last) if last >= 0 else []
        except (TimeoutError, HeadraceError):
            return one
        letter = next((each for each in letters if each.stream == self._stream), None)
        gap = next((each for each in gaps if each.queue == index and each.stream in (None, self._stream)), None)
        if letter is not None:
            redrive = ", a redrive is requested" if letter.redrive else ""
            text = f"dead letter {letter.id}, {letter.attempts} attempts: {letter.reason}{redrive}"
            one = replace(one, dead_letter=text)
        if gap is not None and last < 0:
            one = replace(one, gap=f"queue {index}: offsets {gap.low} to {gap.high}: {gap.reason}")
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
