"""Snapshots of a provider for people, dashboards and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import NamedTuple

from ..adapters import Backlog, QueueAdapter
from ..agents import (
    AgentStatistics,
    BucketStatistics,
    DeliveryCounts,
    DeliveryStatistics,
    Group,
    MemberStatistics,
    PullingManager,
    ServedSubscription,
)
from ..streams import clock
from ..streams.errors import CorruptRecord
from ..streams.histograms import Histogram
from ..streams.states import SubscriptionHold
from ..streams.subscriptions import Checkpoint
from ..streams.wording import counted


class CursorView(NamedTuple):
    """The position of a subscription in one queue."""

    subscription: str
    watermark: int
    """Lowest unfinished offset."""
    bucket: int | None
    """Index of the cache bucket that holds the watermark; None if it is outside the cache."""
    active: int
    """Streams with undelivered events in a cache."""
    parked: int
    """Streams that left the cache."""
    catching_up: bool


class QueueView(NamedTuple):
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)
    next_offset: int
    """Read position, exclusive."""
    buckets: Sequence[BucketStatistics]
    cache_events: int
    cache_bytes: int
    max_events: int
    max_bytes: int
    pressure: bool
    state: str
    reason: str
    received_events: int
    received_bytes: int
    cursors: Sequence[CursorView]
    pressure_s: float
    """Time in which reading waited because a cache was full, in seconds."""
    read_errors: int
    """Failed attempts to read."""
    epoch: int | None
    """The epoch of the lease; None if the queue is not read here."""


class SubscriptionView(NamedTuple):
    """A subscription over all queues."""

    name: str
    delivered_events: int
    delivered_batches: int
    filtered: int
    retries: int
    dead_lettered: int
    skipped: int
    gaps: int
    in_flight: int
    ready: int
    waiting: int
    parked: int
    paused: int
    already_applied: int
    """Events whose effects had been committed before, so that their handler was not called."""
    returned: int
    """Events taken back from a consumer that was gone or silent, or lost the queue."""
    detached: int
    """Streams taken out of the cache because their consumer was slow."""
    retries_unavailable: int
    """Retries after failures of a dependency."""
    retries_held: int
    """Retries after failures that did not count because the circuit breaker held the subscription."""
    catch_ups: int
    """Queues in which it catches up outside of the main cache."""
    delivery_delay: Histogram
    handling: Histogram
    consumers: int
    """Remote consumers that are attached; 0 if a handler in the silo consumes."""
    credit_events: int
    """Events that remote consumers may still be sent."""
    held_events: int
    """Events that remote consumers hold."""
    held: bool
    """Whether its circuit breaker holds the subscription, or the subscription resumes after that."""
    state: str
    reason: str


class OutboxView(NamedTuple):
    """The outbox that a provider moves."""

    moved_events: int
    """Events that this process moved."""
    waiting_events: int
    """Events that are committed and not published yet, as of the last count."""
    age_s: float
    """The age of the oldest of them, in seconds."""
    refused_batches: int
    """Batches that the queue refused: their streams wait."""
    problem: str
    """Why nothing can be moved; "" if it can."""

    @property
    def is_failing(self) -> bool:
        return bool(self.problem)


class ProviderStatistics(NamedTuple):
    """The state of a provider in this process, and its counts since the provider was opened."""

    queues: Sequence[QueueView]
    subscriptions: Sequence[SubscriptionView]
    published_events: int
    published_bytes: int
    delays_stored_events: int = 0
    """Delayed events that this process stored."""
    released_events: int = 0
    """Delayed events that were due, and that this process published into their queues."""
    release_failing: bool = False
    """Delayed events that are due cannot be published now."""
    outbox: OutboxView | None = None
    """None: the provider moves none."""


def age_s(backlog: Backlog) -> float | None:
    """The time since the oldest event was stored or due, in seconds; 0 without events, None if it is not known."""
    if not backlog.batches:
        return 0.0
    return None if backlog.since_us is None else max(clock.now_us() - backlog.since_us, 0) / 1e6


def due_in_s(backlog: Backlog) -> float | None:
    """The time until the first delayed event is due, in seconds; None without one, or if it is not known."""
    return None if backlog.later_us is None else max(backlog.later_us - clock.now_us(), 0) / 1e6


async def lag_of(adapter: QueueAdapter, queue: int, unfinished: int | None) -> Backlog:
    """Return the backlog from `unfinished` on, the lowest unfinished offset of all subscriptions.

    None: no subscription reads the queue, so only events that are not due yet count.
    """
    if unfinished is not None:
        return await adapter.backlog(queue, unfinished)
    if not adapter.capabilities.delay:
        return Backlog(0, 0)
    end = (await adapter.bounds(queue)).next
    return (await adapter.backlog(queue, end))._replace(batches=0, events=0, estimated=False, since_us=None)


async def fault_at(adapter: QueueAdapter, queue: int, positions: Iterable[Checkpoint]) -> str:
    """Describe the damaged record at one of the positions in a queue, or at the queue's end, with queue and offset; ""
    without one."""
    if not adapter.capabilities.rewindable:
        return ""
    first, end = await adapter.bounds(queue)
    for offset in sorted({offset for at in positions for offset in (at.watermark, at.next_offset)}):
        if first <= offset < end:
            receiver = await adapter.open_receiver(queue, offset)
            try:
                await receiver.receive(1, 1)
            except CorruptRecord as damage:
                return str(damage)
            finally:
                await receiver.aclose()
    try:
        await adapter.resume_at(queue, first)
    except CorruptRecord as damage:
        return str(damage)
    return ""


def provider_statistics(
    manager: PullingManager, published_events: int, published_bytes: int, standing_by: Mapping[str, str] | None = None
) -> ProviderStatistics:
    """`standing_by`: subscriptions that this process takes over when another one ends, with the reason."""
    agents = manager.statistics()
    queues = [_queue(agent, _epoch(manager, agent.queue)) for agent in agents]
    by_name: dict[str, list[tuple[DeliveryStatistics, AgentStatistics, bool]]] = {name: [] for name in manager.served}
    for agent in agents:
        for delivery, catching_up in agent.deliveries:
            by_name.setdefault(delivery.subscription, []).append((delivery, agent, catching_up))
    subscriptions = [
        _subscription(name, manager.state.counts(name), parts, manager.served.get(name))
        for name, parts in by_name.items()
    ]
    subscriptions += [
        _subscription(name, manager.state.counts(name), [], None)._replace(state="standing by", reason=reason)
        for name, reason in (standing_by or {}).items()
        if name not in by_name
    ]
    return ProviderStatistics(queues, subscriptions, published_events, published_bytes)


def _epoch(manager: PullingManager, queue: int) -> int | None:
    """The epoch under which this process reads a queue: 0 without leases, None if it does not read the queue."""
    if not manager.state.reads(queue):
        return None
    return 0 if manager.leases is None else manager.leases[queue]


def _queue(agent: AgentStatistics, epoch: int | None) -> QueueView:
    cache = agent.cache
    cursors = [_cursor(delivery, cache.buckets, catching_up) for delivery, catching_up in agent.deliveries]
    return QueueView(
        agent.queue, agent.next_offset, cache.buckets, cache.events, cache.bytes, cache.max_events, cache.max_bytes,
        cache.pressure, agent.state, agent.reason, agent.received.events, agent.received.bytes, cursors,
        agent.received.pressure_s, agent.received.errors, epoch,
    )  # fmt: skip


def _cursor(delivery: DeliveryStatistics, buckets: Sequence[BucketStatistics], catching_up: bool) -> CursorView:
    held = [index for index, bucket in enumerate(buckets) if bucket.low <= delivery.watermark <= bucket.high]
    return CursorView(
        delivery.subscription,
        delivery.watermark,
        held[0] if held else None,
        delivery.ready + delivery.in_flight + delivery.waiting,
        delivery.parked,
        catching_up,
    )


def _subscription(
    name: str,
    counts: Sequence[DeliveryCounts],
    parts: list[tuple[DeliveryStatistics, AgentStatistics, bool]],
    served: ServedSubscription | None,
) -> SubscriptionView:
    total = {field: sum(getattr(one, field) for one in counts) for field in _COUNTED}
    total |= {field: sum(getattr(d, field) for d, _, _ in parts) for field in _SUMMED}
    members = served.service.statistics() if served is not None and isinstance(served.service, Group) else None
    held = served.gate.held if served is not None else None
    state, reason = _state(total, parts, members) if held is None else _held(held)
    return SubscriptionView(
        name=name,
        catch_ups=sum(catching_up for _, _, catching_up in parts),
        delivery_delay=Histogram.sum_of(one.delivery_delay for one in counts),
        handling=Histogram.sum_of(one.handling for one in counts),
        consumers=len(members or ()),
        credit_events=sum(member.credit_events for member in members or () if member.connected),
        held_events=sum(member.in_flight_events for member in members or ()),
        held=held is not None,
        state=state,
        reason=reason,
        **total,
    )  # fmt: skip


def _held(held: SubscriptionHold) -> tuple[str, str]:
    since = datetime.fromtimestamp(held.since_us / 1e6, UTC).isoformat(timespec="seconds")
    return "resuming" if held.resuming else "held", f"since {since}: {held.reason}"


_COUNTED = tuple(field.name for field in fields(DeliveryCounts) if field.type == "int")
_SUMMED = ("in_flight", "ready", "waiting", "parked", "paused")


def _state(
    total: dict[str, int],
    parts: list[tuple[DeliveryStatistics, AgentStatistics, bool]],
    members: Sequence[MemberStatistics] | None,
) -> tuple[str, str]:
    """What the subscription does as a whole, and the reason. Streams that stand still are named in the reason; only if
    nothing else is left, they are the state."""
    state, reason = _moving(total, parts, members)
    waiting = f"{counted(total['waiting'], 'stream')} waiting for the next attempt" if total["waiting"] else ""
    paused = f"{counted(total['paused'], 'stream')} paused until resumed" if total["paused"] else ""
    if state == "caught up" and (waiting or paused):
        state = "retrying" if waiting else "paused"
    return state, ", ".join(filter(None, (reason, waiting, paused)))


def _moving(
    total: dict[str, int],
    parts: list[tuple[DeliveryStatistics, AgentStatistics, bool]],
    members: Sequence[MemberStatistics] | None,
) -> tuple[str, str]:
    """The state and the reason, without a look at the streams that stand still."""
    faulted = [agent.queue for _, agent, _ in parts if agent.state == "faulted"]
    if faulted:
        return "faulted", f"queues {', '.join(map(str, faulted))} cannot be read"
    if members and (blocked := [member for member in members if member.blocked]) and len(blocked) == len(members):
        return "blocked", f"consumer {blocked[0].id} gets no events: {blocked[0].blocked}"
    if members is not None and total["ready"] and (problem := _idle_members(members)):
        return "out of credit", f"{problem}, {counted(total['ready'], 'ready stream')}"
    if total["parked"] or any(catching_up for _, _, catching_up in parts):
        return "behind", f"catching up outside of the cache, {total['parked']} streams parked"
    if not total["ready"] and not total["in_flight"]:
        return "caught up", ""
    busy, ready = total["in_flight"], counted(total["ready"], "ready stream")
    work = counted(busy, "running handler") if members is None else f"{counted(busy, 'parcel')} in consumers' hands"
    return "running", f"{work}, {ready}"


def _idle_members(members: Sequence[MemberStatistics]) -> str:
    """Why no consumer can get events; "" if one can."""
    connected = [member for member in members if member.connected]
    if not connected:
        return "no consumer is connected"
    if any(member.credit_events and member.credit_bytes and not member.needed_bytes for member in connected):
        return ""
    return f"none of {len(connected)} consumers has granted enough credit"
