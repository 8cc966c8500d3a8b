"""What is shown of silos and their queues."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ...adapters import Backlog
from ...proto.v1 import cluster_pb2 as pb
from ...streams.cluster import ClusterView, SiloRecord
from ...streams.errors import HeadraceError
from ...streams.parking import Waiting
from ..provider import Provider
from ..views import QueueView, age_s, due_in_s, lag_of


async def described(provider: Provider, *, counted: bool) -> pb.Provider:
    """A provider with the queues that are read here, and where it is `counted`, which reads, how far they lag."""
    adapters = {record.name: record.adapter for record in await provider.store.providers()}
    leases = provider.manager.leases
    views = [view for view in provider.statistics().queues if leases is None or view.index in leases]
    lags = await _lags(provider, [view.index for view in views]) if counted else {}
    queues = [await _queue(provider, view, lags.get(view.index, Backlog(0, 0))) for view in views]
    return pb.Provider(name=provider.name, adapter=adapters[provider.name], queues=queues, queue_count=provider.queues)


async def _lags(provider: Provider, queues: Sequence[int]) -> dict[int, Backlog]:
    unfinished, parked = await _unfinished(provider), dict[int, Waiting]()
    with suppress(HeadraceError):  # where it is parked does not answer, which is in the log
        parked.update(await provider.waiting())
    return {queue: await _backlog(provider, queue, unfinished, parked) for queue in queues}


async def _unfinished(provider: Provider) -> dict[int, int]:
    """By queue the lowest offset that some subscription has not finished: now, where it is served here, else as it was
    saved. A queue that no subscription reads is missing."""
    served = provider.manager.served
    lowest = await provider.store.watermarks(provider.name, apart_from=list(served))
    for one in served.values():
        for queue, saved in one.saved.items():
            delivery = one.deliveries.get(queue)
            at = saved.watermark if delivery is None else delivery.watermark
            lowest[queue] = min(at, lowest.get(queue, at))
    return lowest


async def _queue(provider: Provider, view: QueueView, lag: Backlog) -> pb.Queue:
    stopped = view.index in provider.manager.stopped
    leases = provider.manager.leases
    return pb.Queue(
        index=view.index,
        state="stopped" if stopped else view.state,
        reason="" if stopped else view.reason,
        read_offset=view.next_offset,
        end_offset=(await provider.adapter.bounds(view.index)).next,
        cached_events=view.cache_events,
        cached_bytes=view.cache_bytes,
        cache_limit_bytes=view.max_bytes,
        epoch=0 if leases is None else leases.get(view.index, 0),
        lag_batches=lag.batches,
        lag_events=lag.events or 0,
        lag_estimated=lag.estimated,
        lag_ms=round(1000 * (age_s(lag) or 0.0)),
        delayed_events=lag.later_events,
        due_in_ms=math.ceil(1000 * (due_in_s(lag) or 0.0)),
    )


async def _backlog(
    provider: Provider, queue: int, unfinished: Mapping[int, int], parked: Mapping[int, Waiting]
) -> Backlog:
    lowest = unfinished.get(queue)
    try:
        return await lag_of(provider.adapter, queue, lowest, parked.get(queue))
    except HeadraceError:  # it is damaged there, which the queue's state says
        end = (await provider.adapter.bounds(queue)).next
        return Backlog(0, 0) if lowest is None else Backlog(max(end - lowest, 0))


def silent(record: SiloRecord, state: str, view: ClusterView, providers: Mapping[str, Provider]) -> pb.Silo:
    """A silo that says nothing itself, as the others know it."""
    return pb.Silo(
        name=record.name,
        address=record.address,
        state=state,
        providers=[_silent_provider(record, name, view, providers.get(name)) for name in record.serves],
        silent_ms=silent_ms(record, view),
    )


def _silent_provider(record: SiloRecord, name: str, view: ClusterView, here: Provider | None) -> pb.Provider:
    queues = [
        pb.Queue(index=lease.queue, state="unknown", reason="its silo does not answer", epoch=lease.epoch)
        for lease in view.leases
        if (lease.provider, lease.owner) == (name, record.name) and lease.expires_at_us > view.now_us
    ]
    return pb.Provider(name=name, queues=queues, queue_count=0 if here is None else here.queues)


def silent_ms(record: SiloRecord, view: ClusterView) -> int:
    """Since when nothing was heard of a silo, as the store has it."""
    return max(view.now_us - record.heartbeat_at_us, 0) // 1000


def bare(cluster: pb.Cluster) -> pb.Cluster:
    """Without how much there is of everything."""
    shown = pb.Cluster()
    shown.CopyFrom(cluster)
    for silo in shown.silos:
        for provider in silo.providers:
            queues = [pb.Queue(index=queue.index, state=queue.state) for queue in provider.queues]
            del provider.queues[:]
            provider.queues.extend(queues)
    return shown


def differ(one: pb.Cluster | None, other: pb.Cluster) -> bool:
    """Whether there is something to tell: that time goes by is nothing."""
    return one is None or _timeless(one) != _timeless(other)


def _timeless(cluster: pb.Cluster) -> pb.Cluster:
    same = pb.Cluster()
    same.CopyFrom(cluster)
    for silo in same.silos:
        silo.silent_ms = 0
    return same
