"""What people and dashboards see of a provider: plain snapshots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from ..adapters import Backlog, QueueAdapter
from ..agents import (
    AgentStatistics,
    BucketStatistics,
    DeliveryStatistics,
    Group,
    MemberStatistics,
    PullingManager,
    Service,
)
from ..streams.parking import Waiting


class CursorView(NamedTuple):
    """Where a subscription stands in one queue."""

    subscription: str
    watermark: int
    """Lowest offset not finished."""
    bucket: int | None
    """Index of the cache bucket that holds the watermark; None where it is outside the cache."""
    active: int
    """Streams with something undelivered in a cache."""
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
    consumers: int
    """Remote consumers that are attached; 0 where a handler in the silo consumes."""
    state: str
    reason: str


class ProviderStatistics(NamedTuple):
    queues: Sequence[QueueView]
    subscriptions: Sequence[SubscriptionView]
    published_events: int
    published_bytes: int
    parked_events: int = 0
    """Delayed events that this process parked."""
    released_events: int = 0
    """Delayed events that were due, and that this process published into their queues."""
    release_failing: bool = False
    """Those that are due cannot be published now."""


def age_s(backlog: Backlog) -> float | None:
    """How long ago the oldest of it was stored, or due, in seconds; 0 where there is none, None where nobody knows."""
    if not backlog.batches:
        return 0.0
    return None if backlog.since_us is None else max(time.time_ns() // 1000 - backlog.since_us, 0) / 1e6


def due_in_s(backlog: Backlog) -> float | None:
    """When the first of it is due that is not yet, in seconds; None where there is none, or that is not known."""
    return None if backlog.later_us is None else max(backlog.later_us - time.time_ns() // 1000, 0) / 1e6


async def lag_of(adapter: QueueAdapter, queue: int, unfinished: int | None, parked: Waiting | None = None) -> Backlog:
    """What is behind the lowest offset that some subscription has not finished. None: nobody reads the queue, so only
    what is not due yet is told. What is `parked` for the queue counts as not due yet, also where it is late."""
    lag = Backlog(0, 0)
    if unfinished is not None:
        lag = await adapter.backlog(queue, unfinished)
    elif adapter.capabilities.delay:
        lag = (await adapter.backlog(queue, 0))._replace(batches=0, events=0, estimated=False, since_us=None)
    return lag if parked is None else _with_parked(lag, parked)


def _with_parked(lag: Backlog, parked: Waiting) -> Backlog:
    due_us = time.time_ns() // 1000 + round(parked.due_in_s * 1e6)
    return lag._replace(
        later=lag.later + parked.batches,
        later_events=lag.later_events + parked.events,
        later_us=due_us if lag.later_us is None else min(due_us, lag.later_us),
    )


def provider_statistics(manager: PullingManager, published_events: int, published_bytes: int) -> ProviderStatistics:
    agents = manager.statistics()
    queues = [_queue(agent) for agent in agents]
    by_name: dict[str, list[tuple[DeliveryStatistics, AgentStatistics, bool]]] = {name: [] for name in manager.served}
    for agent in agents:
        for delivery, catching_up in agent.deliveries:
            by_name.setdefault(delivery.subscription, []).append((delivery, agent, catching_up))
    groups = {name: served.service for name, served in manager.served.items()}
    subscriptions = [_subscription(name, parts, groups.get(name)) for name, parts in by_name.items()]
    return ProviderStatistics(queues, subscriptions, published_events, published_bytes)


def _queue(agent: AgentStatistics) -> QueueView:
    cache = agent.cache
    cursors = [_cursor(delivery, cache.buckets, catching_up) for delivery, catching_up in agent.deliveries]
    return QueueView(
        agent.queue, agent.next_offset, cache.buckets, cache.events, cache.bytes, cache.max_events, cache.max_bytes,
        cache.pressure, agent.state, agent.reason, agent.received_events, agent.received_bytes, cursors,
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
    name: str, parts: list[tuple[DeliveryStatistics, AgentStatistics, bool]], service: Service | None
) -> SubscriptionView:
    total = {field: sum(getattr(d, field) for d, _, _ in parts) for field in _SUMMED}
    members = service.statistics() if isinstance(service, Group) else None
    state, reason = _state(total, parts, members)
    return SubscriptionView(name=name, consumers=len(members or ()), state=state, reason=reason, **total)


_SUMMED = (
    "delivered_events", "delivered_batches", "filtered", "retries", "dead_lettered", "skipped", "gaps", "in_flight",
    "ready", "waiting", "parked", "paused",
)  # fmt: skip


def _state(  # noqa: PLR0911 (one for each state)
    total: dict[str, int],
    parts: list[tuple[DeliveryStatistics, AgentStatistics, bool]],
    members: Sequence[MemberStatistics] | None,
) -> tuple[str, str]:
    faulted = [agent.queue for _, agent, _ in parts if agent.state == "faulted"]
    if faulted:
        return "faulted", f"queues {', '.join(map(str, faulted))} cannot be read"
    if total["paused"]:
        return "paused", f"{total['paused']} streams wait to be resumed"
    if members is not None and total["ready"] and (problem := _idle_members(members)):
        return "out of credit", f"{problem}, {total['ready']} streams are in line"
    if total["waiting"]:
        return "retrying", f"{total['waiting']} streams wait for their next attempt"
    if total["parked"] or any(catching_up for _, _, catching_up in parts):
        return "behind", f"catching up outside of the cache, {total['parked']} streams parked"
    if not total["ready"] and not total["in_flight"]:
        return "caught up", ""
    doing = "handlers run" if members is None else "parcels are in consumers' hands"
    return "running", f"{total['in_flight']} {doing}, {total['ready']} streams are in line"


def _idle_members(members: Sequence[MemberStatistics]) -> str:
    """Why nobody can be given anything, "" where somebody can."""
    connected = [member for member in members if member.connected]
    if not connected:
        return "no consumer is connected"
    if any(member.credit_events and member.credit_bytes and not member.needed_bytes for member in connected):
        return ""
    return f"none of {len(connected)} consumers has granted enough credit"
