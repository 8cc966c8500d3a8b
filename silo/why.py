"""Decide why the next event of a stream is not delivered. Pure: facts in, causes out.

None in a fact means that it is not known, for example because a part of the system does not answer. A check that needs
an unknown fact finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..streams.wording import counted
from .why_causes import CAUSES, Cause


class OwnerState(Enum):
    """The silo that has the lease of a queue."""

    LIVING = "living"
    UNREACHABLE = "unreachable"
    DEAD = "dead"


class AgentState(Enum):
    RUNNING = "running"
    STOPPED = "stopped"
    FAULTED = "faulted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamQueueFacts:
    """The queue of the stream, and its owner."""

    queue: int
    silos: int | None = None
    """Living silos that serve the provider."""
    has_lease: bool | None = None
    owner: str = ""
    owner_state: OwnerState = OwnerState.LIVING
    owner_heard_s: float | None = None
    """Seconds since the last heartbeat of the owner."""
    lease_ends_s: float | None = None
    agent: AgentState | None = None
    agent_reason: str = ""
    damage: str = ""
    """The damaged record at the subscription's position; "" if there is none."""
    end: int | None = None
    """The offset after the last batch of the queue."""
    pressure: bool = False
    """Whether the cache is full."""
    holders: Sequence[str] = ()
    """Subscriptions with their streams that hold the oldest bucket of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """The stored events of the stream."""

    last: int | None = None
    """Offset of the last batch that was found. -1: the queue has none. None: the search ended before it found one."""
    searched_from: int | None = None
    """The search has seen all batches of the stream from this offset on. None: it has seen nothing."""

    @property
    def is_last(self) -> bool:
        """Whether `last` is the last batch. Otherwise later ones may be in the part that was not searched."""
        return self.last is not None and self.searched_from is not None and self.searched_from <= self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerFacts:
    """A consumer of the subscription."""

    id: str
    connected: bool
    has_credit: bool
    blocked: str = ""


class Position(Enum):
    """The state of the subscription in the stream."""

    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    PARKED = "parked"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionFacts:
    """A subscription, and its state in the stream at the silo that has the queue."""

    name: str
    pattern: str
    matches: bool
    next_offset: int | None = None
    """Every event of the stream below this offset is done."""
    held: str = ""
    """Why its circuit breaker holds it; "" if it does not."""
    served: bool | None = None
    """Whether the asked process serves it with a handler or has a group of consumers."""
    standby: str = ""
    """Which process serves the subscription, if the asked one stands by for it."""
    handler: bool = False
    consumers: Sequence[ConsumerFacts] = ()
    assigned: bool = True
    """Mode bound: whether a connected consumer has the queue."""
    position: Position | None = None
    """None: no event of the stream is in its hands."""
    reason: str = ""
    """The failure, if the stream is paused or waits."""
    attempts: int = 0
    max_attempts: int | None = None
    next_in_s: float | None = None
    held_by: str = ""
    """The consumer that holds events of the stream."""
    running_s: float | None = None
    """Seconds since the handler began, or since the last acknowledgement of the consumer."""
    workers_full: bool = False
    catch_up: bool = False
    """A catch-up reads for the stream."""
    fault: str = ""
    """The error that stops reading for the subscription; "" without one."""
    gap: str = ""
    """A gap record that covers the event; "" without one."""
    dead_letter: str = ""
    """The reason of the dead letter of the stream's last event; "" without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyFacts:
    """The facts about a stream, for one subscription or for none."""

    stream: str
    stream_facts: StreamFacts
    queue: StreamQueueFacts
    subscription: SubscriptionFacts | None = None
    asked_for: str = ""
    """The name of the subscription that the caller asked for."""
    patterns: Sequence[str] = field(default=())
    """Without a subscription: the patterns of those that the caller may see."""
    store_error: str = ""
    is_asked: bool = True
    """Whether the facts are those of the process that may serve the subscription. False: of a data directory alone."""


def explain(facts: WhyFacts) -> list[Cause]:
    """Return the causes that apply, the one that stops most first. Never empty."""
    found = {code: evidence for check in _CHECKS for code, evidence in check(facts)}
    if not found:
        return [Cause("undetermined", f"all facts about {facts.stream} were checked{_how_far(facts)}")]
    return [Cause(code, found[code]) for code in CAUSES if code in found]


def merged(found: Sequence[Sequence[Cause]]) -> list[Cause]:
    """Return the causes of a stream, from the causes in each queue that may have its events.

    A queue in which nothing waits does not count, unless nothing waits in any queue.
    """
    for nothing_waits in (_is_empty, _is_finished):
        found = [causes for causes in found if not nothing_waits(causes)] or found
    evidence: dict[str, list[str]] = {}
    for cause in (cause for causes in found for cause in causes):
        texts = evidence.setdefault(cause.code, [])
        if cause.evidence not in texts:
            texts.append(cause.evidence)
    if len(evidence) > 1:
        evidence.pop("undetermined", None)
    return [Cause(code, _joined(evidence[code])) for code in CAUSES if code in evidence]


def _is_empty(causes: Sequence[Cause]) -> bool:
    """Whether the queue has, and had, no event of the stream."""
    codes = {cause.code for cause in causes}
    return "no_such_stream" in codes and "retained_away" not in codes


def _is_finished(causes: Sequence[Cause]) -> bool:
    return any(cause.code == "nothing_pending" for cause in causes)


def _joined(texts: Sequence[str], most: int = 3) -> str:
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def _how_far(facts: WhyFacts) -> str:
    """How far the subscription has come in the queue, for people; "" if it is not known."""
    one, end = facts.subscription, facts.queue.end
    if one is None or one.next_offset is None or end is None:
        return ""
    return f"; it is at offset {one.next_offset} of queue {facts.queue.queue}, which ends at {end}"


_Found = Iterator[tuple[str, str]]


def _environment(facts: WhyFacts) -> _Found:
    if facts.store_error:
        yield "store_unreachable", facts.store_error


def _owner(facts: WhyFacts) -> _Found:
    queue = facts.queue
    if queue.silos == 0:
        yield "no_silo_for_provider", f"queue {queue.queue}: 0 living silos serve the provider"
    if queue.has_lease is False:
        yield "no_lease", f"queue {queue.queue}: the row of its lease names no silo"
    if queue.has_lease is not True:
        return
    heard = "" if queue.owner_heard_s is None else f", last heartbeat {queue.owner_heard_s:.1f} s ago"
    ends = "" if queue.lease_ends_s is None else f", lease ends in {queue.lease_ends_s:.1f} s"
    if queue.owner_state is not OwnerState.LIVING:
        yield f"owner_{queue.owner_state.value}", f"queue {queue.queue}: silo {queue.owner!r}{heard}{ends}"


def _agent(facts: WhyFacts) -> _Found:
    queue = facts.queue
    if queue.damage:
        yield "corrupt_record", queue.damage
    if queue.agent is AgentState.STOPPED or (queue.agent is AgentState.FAULTED and _has_to_be_read(facts)):
        yield f"agent_{queue.agent.value}", f"queue {queue.queue}: {queue.agent_reason or queue.agent.value}"


def _has_to_be_read(facts: WhyFacts) -> bool:
    """Whether the next event is in no cache, as far as it is known."""
    one, last = facts.subscription, facts.stream_facts.last
    if one is None or one.position is not None:
        return one is None or one.position is Position.PARKED
    return last is None or last < 0 or _has_more(facts)


def _subscribed(facts: WhyFacts) -> _Found:
    one = facts.subscription
    if one is None and not facts.store_error:
        if facts.asked_for:
            yield "subscription_missing", f"no subscription {facts.asked_for!r}"
        else:
            checked = f"{counted(len(facts.patterns), 'pattern')} checked: {_list(facts.patterns)}"
            yield "no_subscription", checked if facts.patterns else "there is no subscription"
    if one is not None and not one.matches:
        yield "pattern_does_not_match", f"subscription {one.name!r} has the pattern {one.pattern!r}"


def _stored(facts: WhyFacts) -> _Found:
    stream, one = facts.stream_facts, facts.subscription
    if stream.last == -1:
        yield "no_such_stream", f"queue {facts.queue.queue} has no event of {facts.stream}"
    if one is None or not one.matches:
        return
    if one.gap:
        yield "retained_away", one.gap
    if stream.last == -1 or one.position is not None:
        return
    if one.dead_letter and stream.is_last:
        yield "dead_lettered", one.dead_letter
    elif _has_all(facts):
        last = f"last event at offset {stream.last}"
        if not stream.is_last:
            last = f"no event from offset {stream.searched_from} on"
        letter = f"; the last dead letter of the stream: {one.dead_letter}" if one.dead_letter else ""
        done = f"everything below {one.next_offset} is done"
        yield "nothing_pending", f"queue {facts.queue.queue}: {last}, {done}{letter}"


def _standing(facts: WhyFacts) -> _Found:
    """The subscription or the stream stands still."""
    one = facts.subscription
    if one is None or not one.matches:
        return
    if one.held:
        yield "held_by_breaker", one.held
    if one.position is Position.PAUSED:
        yield "stream_paused", one.reason
    if one.position is Position.WAITING:
        limit = "" if one.max_attempts is None else f" of {one.max_attempts}"
        when = "" if one.next_in_s is None else f", the next in {one.next_in_s:.1f} s"
        yield "stream_retrying", f"attempt {one.attempts}{limit} failed{when}: {one.reason}"
    if one.position is Position.PARKED or (one.catch_up and _is_behind(facts)):
        reads = "reads" if one.catch_up else "waits for a catch-up to read"
        yield "catching_up", f"subscription {one.name!r} {reads} queue {facts.queue.queue} again"
    if one.position is Position.RUNNING:
        since = "" if one.running_s is None else f" for {one.running_s:.1f} s"
        disconnected = any(each.id == one.held_by and not each.connected for each in one.consumers)
        if disconnected:
            yield "consumer_disconnected", f"consumer {one.held_by!r}{since}"
        elif one.held_by:
            yield "consumer_silent", f"consumer {one.held_by!r}, no acknowledgement{since}"
        else:
            yield "handler_running", f"the handler of subscription {one.name!r} runs{since}"


def _consumers(facts: WhyFacts) -> _Found:
    """No handler or consumer takes the next event."""
    one = facts.subscription
    if one is None or not one.matches or one.position in (Position.RUNNING, Position.PAUSED):
        return
    if one.served is False and _has_all(facts):
        return
    if one.served is False and not facts.is_asked:
        yield "not_asked", f"subscription {one.name!r} has events that are not finished, as of its saved progress"
    elif one.standby:
        yield "standing_by", one.standby
    elif one.served is False:
        yield "not_served", f"subscription {one.name!r} has no handler and no consumer"
    elif one.served and not one.handler and _has_more(facts):
        yield from _idle(facts, one)
    if one.handler and one.workers_full and (one.position is Position.READY or _is_behind(facts)):
        yield "concurrency_full", f"all workers of subscription {one.name!r} are in use"


def _idle(facts: WhyFacts, one: SubscriptionFacts) -> _Found:
    connected = [each for each in one.consumers if each.connected]
    if not connected:
        yield "not_served", f"none of {counted(len(one.consumers), 'consumer')} is connected"
    elif not one.assigned:
        yield "queue_not_assigned", f"queue {facts.queue.queue}: {counted(len(connected), 'consumer')} connected"
    elif blocked := [each for each in connected if each.blocked]:
        if len(blocked) == len(connected):
            yield "consumer_blocked", f"consumer {blocked[0].id!r}: {blocked[0].blocked}"
    elif not any(each.has_credit for each in connected):
        yield "out_of_credit", f"{counted(len(connected), 'consumer')} connected, none with credit"


def _has_all(facts: WhyFacts) -> bool:
    """Whether the subscription has finished all events of the stream, as far as it is known."""
    one, searched_from = facts.subscription, facts.stream_facts.searched_from
    assert one is not None
    if one.position is not None or one.next_offset is None or searched_from is None or facts.queue.damage:
        return False
    return searched_from <= one.next_offset and not _has_more(facts)


def _has_more(facts: WhyFacts) -> bool:
    """Whether an event of the stream waits for the subscription."""
    one, last = facts.subscription, facts.stream_facts.last
    assert one is not None
    if one.position is not None:
        return True
    return last is not None and one.next_offset is not None and one.next_offset <= last


def _is_behind(facts: WhyFacts) -> bool:
    """Whether the subscription has not come to the stream's next event."""
    return facts.subscription is not None and facts.subscription.position is None and _has_more(facts)


def _cache(facts: WhyFacts) -> _Found:
    one = facts.subscription
    if one is not None and one.matches and facts.queue.pressure and _is_behind(facts):
        yield "throttled", f"the oldest events are held by {_list(facts.queue.holders) or 'unknown streams'}"


def _list(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


_CHECKS: tuple[Callable[[WhyFacts], _Found], ...] = (
    _environment, _owner, _agent, _subscribed, _stored, _standing, _consumers, _cache,
)  # fmt: skip
