"""Gather the facts about a stream from a provider in this process, and explain them. Every wait has a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from ..agents import Group, HandlerService, PullingAgent, ServedSubscription
from ..agents.cursor import CursorState, StreamCursor
from ..agents.delivery.delivery import Delivery
from ..agents.delivery.group_delivery import GroupDelivery
from ..streams.errors import HeadraceError
from ..streams.identity import StreamId
from ..streams.subscriptions import (
    CONSUMER_SEPARATOR,
    Checkpoint,
    DeadLetter,
    GapRecord,
    Mode,
    SubscriptionDefinition,
    is_consumers_position,
    is_position_of,
)
from .last_event import LastEventSearch
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
_LATE_STORE = f"no answer within {STORE_S:g} s"


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


class QueueExplanation(NamedTuple):
    """The causes in one queue, for one subscription."""

    subscription: str
    queue: int
    causes: Sequence[Cause]


async def explain_stream(
    provider: ProviderCore, stream: StreamId, name: str = "", *, is_asked: bool = True
) -> list[StreamExplanation]:
    """Explain a stream for the subscription `name`, or for each that matches it.

    `is_asked`: this process is the one that may serve the subscriptions.
    """
    visible = await visible_subscriptions(provider, lambda _: True)
    names = [one.name for one in chosen_of(visible.definitions, stream, name)]
    queues = [queue_facts(provider, index) for index in provider.queues_with(stream)]
    found = await explain_queues(provider, stream, names, visible, queues, asked_for=name, is_asked=is_asked)
    return merged_explanations(found)


def merged_explanations(found: Iterable[QueueExplanation]) -> list[StreamExplanation]:
    """Return one explanation for each subscription, from those of its queues."""
    by_name: dict[str, list[Sequence[Cause]]] = {}
    for one in found:
        by_name.setdefault(one.subscription, []).append(one.causes)
    return [StreamExplanation(name, merged(causes)) for name, causes in by_name.items()]


async def explain_queues(
    provider: ProviderCore,
    stream: StreamId,
    names: Sequence[str],
    visible: VisibleSubscriptions,
    queues: Sequence[StreamQueueFacts],
    *,
    asked_for: str = "",
    is_asked: bool = True,
) -> list[QueueExplanation]:
    """Explain a stream in each of these queues, for the subscriptions `names` of `visible`.

    If `names` is empty, explain why no subscription gets the stream; `asked_for` is the name that the caller gave.
    """
    definitions, error = visible
    facts = [
        WhyFacts(
            stream=str(stream),
            stream_facts=StreamFacts(),
            queue=queue,
            asked_for=asked_for,
            patterns=[one.selector.pattern for one in definitions],
            store_error=error,
            is_asked=is_asked,
        )
        for queue in queues
    ]
    chosen = [one for one in definitions if one.name in names]
    if not chosen:
        return [QueueExplanation("", one.queue.queue, explain(one)) for one in facts]
    gathered = [_Gathering(provider, stream, one, store_answers=not error) for one in chosen]
    await asyncio.gather(*(one.load([queue.queue for queue in queues]) for one in gathered))
    found = await asyncio.gather(*(_in_queue(provider, stream, one, gathered) for one in facts))
    return [explanation for in_queue in found for explanation in in_queue]


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
        error = _LATE_STORE
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


async def _in_queue(
    provider: ProviderCore, stream: StreamId, facts: WhyFacts, gathered: Sequence[_Gathering]
) -> list[QueueExplanation]:
    """Explain one queue for each subscription. It is searched once for all of them."""
    queue = facts.queue.queue
    states = [each.state(facts.queue) for each in gathered]
    search = LastEventSearch(provider.adapter, queue, stream, provider.closing_receivers)
    read_error = ""
    searching = [one for one in states if one.matches and one.position is None]
    if searching:
        positions = [one.next_offset for one in searching]
        known = [position for position in positions if position is not None]
        limit_s = SHORT_READ_S if facts.store_error else READ_S
        try:
            async with time_limit(limit_s):
                await search.run(min(known) if len(known) == len(positions) else None)
        except TimeoutError:
            read_error = f"it does not answer within {limit_s:g} s" if search.end is None else ""
        except HeadraceError as error:
            read_error = str(error) if search.end is None else ""
    found = await asyncio.gather(
        *(each.causes(facts, one, search, read_error) for each, one in zip(gathered, states, strict=True))
    )
    return [QueueExplanation(one.name, queue, causes) for one, causes in zip(states, found, strict=True)]


class _Gathering:
    """Gathers the facts about one subscription in one stream."""

    def __init__(
        self, provider: ProviderCore, stream: StreamId, definition: SubscriptionDefinition, *, store_answers: bool
    ) -> None:
        self._provider = provider
        self._stream = stream
        self._definition = definition
        self._store_answers = store_answers
        self._store_error = ""
        """Why facts of the control store are missing."""
        self._matches = definition.selector.matcher()(stream)
        self._served = _served(provider, definition.name)
        self._saved: Mapping[int, Checkpoint] = {}
        self._gaps: Sequence[GapRecord] = ()

    async def load(self, queues: Sequence[int]) -> None:
        """Read what the control store has about the subscription. Facts that do not come in time are left out."""
        if not self._matches or not self._store_answers:
            return
        store, provider, name = self._provider.store, self._provider.name, self._definition.name
        with suppress(HeadraceError):
            async with self._store_limit():
                if self._served is None or not all(queue in self._served.deliveries for queue in queues):
                    self._saved = await store.checkpoints(provider, name)
                self._gaps = await self._load_gaps()

    async def _load_gaps(self) -> Sequence[GapRecord]:
        """Read the gaps of the subscription. In mode broadcast, each consumer has gaps of its own."""
        store, provider, name = self._provider.store, self._provider.name, self._definition.name
        if self._definition.mode is not Mode.BROADCAST:
            return await store.gaps(provider, name)
        return [gap for gap in await store.gaps(provider) if is_position_of(gap.subscription, name)]

    @asynccontextmanager
    async def _store_limit(self) -> AsyncGenerator[None]:
        """End the block after the time that the control store has, and keep that the store did not answer."""
        try:
            async with time_limit(STORE_S):
                yield
        except TimeoutError:
            self._store_error = _LATE_STORE

    def state(self, queue: StreamQueueFacts) -> SubscriptionFacts:
        """Return the state of the subscription in a queue, as this process has it in memory, or as it is saved."""
        served = self._served
        delivery = None if served is None else served.deliveries.get(queue.queue)
        found = SubscriptionFacts(
            name=self._definition.name,
            pattern=self._definition.selector.pattern,
            matches=self._matches,
            max_attempts=self._definition.retry.max_attempts,
        )
        if queue.agent is AgentState.RUNNING:
            agent = self._provider.manager.agents[queue.queue]
            name = self._definition.name if delivery is None else delivery.name
            found = replace(found, catch_up=agent.is_catching_up(name), fault=agent.fault_of(name))
        if served is not None:
            found = _with_consumers(found, served, queue.queue)
        elif queue.has_lease and queue.agent is not None:
            waiting = self._provider.standby.waiting.get(self._definition.name)
            found = replace(found, served=False, standby="" if waiting is None else waiting.reason)
        if not found.matches:
            return found
        if delivery is not None:
            return _with_cursor(found, delivery, delivery.progress.cursors.get(self._stream))
        if (saved := self._saved.get(queue.queue)) is not None:
            return _with_saved(found, saved, self._stream)
        return found

    async def causes(
        self, facts: WhyFacts, one: SubscriptionFacts, search: LastEventSearch, read_error: str
    ) -> list[Cause]:
        """Explain one queue. `read_error`: the reason why it could not be read."""
        queue = facts.queue
        if one.fault:
            queue = replace(queue, agent=AgentState.FAULTED, agent_reason=one.fault)
        elif read_error and queue.agent is AgentState.RUNNING:
            # The agent reads here: it has met the fault, or will meet it.
            queue = replace(queue, agent=AgentState.FAULTED, agent_reason=read_error)
        if one.matches and one.position is None:
            queue = replace(queue, end=search.end, damage=await self._damage(queue, one, search))
            one = await self._with_left_behind(one, queue.queue, search.found)
            facts = replace(facts, stream_facts=search.found)
        store_error = facts.store_error or self._store_error
        return explain(replace(facts, queue=queue, subscription=one, store_error=store_error))

    async def _damage(self, queue: StreamQueueFacts, one: SubscriptionFacts, search: LastEventSearch) -> str:
        """The damaged record that stops the subscription: not one after an event that waits."""
        at, last = one.next_offset, search.found.last
        for damage in search.damages:
            offset = damage.offset
            if at is None or offset is None:
                return str(damage)
            waits_before = last is not None and at <= last < offset
            if offset >= at and not waits_before:
                return str(damage)
        if queue.agent is AgentState.FAULTED and at is not None and search.end is not None:
            with suppress(TimeoutError, HeadraceError):
                async with time_limit(READ_S):
                    return await fault_at(self._provider.adapter, queue.queue, [Checkpoint(at)])
        return ""

    async def _with_left_behind(self, one: SubscriptionFacts, queue: int, found: StreamFacts) -> SubscriptionFacts:
        """Add the dead letter of the stream's last event, and a gap record from the subscription's position on.

        If the search has not come to the last event, the last dead letter of the stream counts.
        """
        if not self._store_answers or found.searched_from is None:
            return one
        store, provider = self._provider.store, self._provider.name
        letter: DeadLetter | None = None
        with suppress(HeadraceError):
            async with self._store_limit():
                if found.last is not None and found.is_last:
                    letters = await store.dead_letters_at(provider, one.name, queue, found.last)
                    letter = next((each for each in letters if each.stream == self._stream), None)
                elif found.last != -1:
                    letter = await store.last_dead_letter(provider, one.name, queue, self._stream)
        if letter is not None:
            redrive = ", a redrive is requested" if letter.redrive else ""
            text = f"dead letter {letter.id}, {letter.attempts} attempts: {letter.reason}{redrive}"
            one = replace(one, dead_letter=text)
        gap = next((each for each in self._gaps if each.queue == queue and each.stream in (None, self._stream)), None)
        if gap is not None and found.last == -1:
            one = replace(one, gap=f"queue {queue}: offsets {gap.low} to {gap.high}: {gap.reason}")
        return one


def _served(provider: ProviderCore, name: str) -> ServedSubscription | None:
    served = provider.manager.served
    return served.get(name) or next((one for each, one in served.items() if is_position_of(each, name)), None)


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
