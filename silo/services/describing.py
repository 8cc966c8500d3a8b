"""Descriptions of the cluster, its silos and their queues for the cluster service."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...adapters import Backlog
from ...balancer.membership import Membership
from ...proto.v1 import cluster_pb2 as pb
from ...server.methods import ServiceCall
from ...streams.cluster import LIVING, ClusterView, SiloRecord, SiloState
from ...streams.errors import HeadraceError, PermissionDenied
from ..provider_core import ProviderCore
from ..views import QueueView, age_s, due_in_s, lag_of
from .agent_changes import AgentChanges, RunningSilo

if TYPE_CHECKING:
    from ..clustered_silo import ClusteredSilo

log = logging.getLogger("headrace.silo")

WATCH_S = 1.0
"""Interval at which a watcher gets changes, in seconds."""
ANSWER_S = 1.5
"""Time that an adapter has to answer for one queue, in seconds. Less than `ASK_S`: while the servers of an adapter are
away, a silo still describes itself in time."""
ASK_S = 2.0
"""Time that a silo has to describe itself, in seconds. A slower silo is shown as unreachable."""


class ClusterDescriptions:
    """Describes the cluster. With `counted`, a description has the lag of each queue, which costs reading."""

    def __init__(self, silo: RunningSilo, changes: AgentChanges, version: str) -> None:
        self._silo = silo
        self._changes = changes
        self._version = version
        self._looking = asyncio.Lock()
        self._recent: dict[bool, tuple[float, pb.Cluster]] = {}
        """The time of the last description and the description, by whether it is counted."""

    @property
    def silo_name(self) -> str:
        return name_of(self._silo)

    async def recent(self, counted: bool) -> pb.Cluster:
        """Return a description at most half of `WATCH_S` old: many may watch, and each description costs time."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if counted not in self._recent or now - self._recent[counted][0] > WATCH_S / 2:
                self._recent[counted] = now, await self.describe(counted)
            return self._recent[counted][1]

    async def describe(self, counted: bool, *, alone: bool = False) -> pb.Cluster:
        """Describe the whole cluster, or this silo alone."""
        clustered_silo = self._silo.clustered_silo
        if alone or clustered_silo is None or (view := clustered_silo.view) is None:
            return pb.Cluster(silos=[await self._describe_self(counted)])
        silos = [silo for silo in view.silos if silo.state != SiloState.LEFT]
        found = await asyncio.gather(*(self._describe_silo(clustered_silo, view, silo, counted) for silo in silos))
        return pb.Cluster(silos=found, unserved=_unserved(found, clustered_silo.membership, self._silo.providers))

    async def _describe_self(self, counted: bool) -> pb.Silo:
        return pb.Silo(
            name=self.silo_name,
            address=self._silo.grpc_address or "",
            state=self._changes.state,
            providers=await asyncio.gather(
                *(_described(provider, counted=counted) for provider in self._silo.providers.values())
            ),
            version=self._version,
        )

    async def _describe_silo(
        self, clustered_silo: ClusteredSilo, view: ClusterView, record: SiloRecord, counted: bool
    ) -> pb.Silo:
        """Return the silo's own description, or one from the cluster's store if the silo does not answer."""
        providers = self._silo.providers
        if record.state not in LIVING:
            return _silent(record, "dead", view, providers)
        is_self = record.name == self.silo_name
        found = await self._describe_self(counted) if is_self else await _ask(clustered_silo, record, counted)
        if found is None:
            return _silent(record, "unreachable", view, providers)
        found.address, found.silent_ms = record.address, _silent_ms(record, view)
        found.public_address = record.public_address or record.address
        found.settings.update(record.settings)
        return found


def name_of(silo: RunningSilo) -> str:
    """Return the silo's name in its cluster, else the name of its machine."""
    clustered_silo = silo.clustered_silo
    return socket.gethostname() if clustered_silo is None or clustered_silo.view is None else clustered_silo.name


def require_any_permission(call: ServiceCall) -> None:
    if not call.principal.allows_anything():
        raise PermissionDenied(f"{call.principal} has no permission at all: to see the cluster it needs one")


async def _ask(clustered_silo: ClusteredSilo, record: SiloRecord, counted: bool) -> pb.Silo | None:
    """Ask a silo for its description. None if it does not answer, or if another silo answers at its address."""
    request = pb.DescribeClusterRequest(here=not counted).SerializeToString()
    try:
        answer = await clustered_silo.call(record.name, "ClusterService/DescribeCluster", request, timeout_s=ASK_S)
    except HeadraceError as error:
        log.info("silo %r did not describe itself: %s", record.name, error)
        return None
    found = pb.DescribeClusterResponse.FromString(answer).cluster.silos
    return found[0] if [silo.name for silo in found] == [record.name] else None


async def _described(provider: ProviderCore, *, counted: bool) -> pb.Provider:
    """Describe a provider with the queues that this silo reads. With `counted`, ask the adapter for their ends and lag.

    Without it, the adapter is not asked: clients look for living silos that way.
    """
    leases = provider.manager.leases
    views = [view for view in provider.statistics().queues if leases is None or view.index in leases]
    indexes = [view.index for view in views] if counted else []
    amounts = await queue_amounts(provider, indexes)
    queues = [queue_message(provider, view, amounts.get(view.index)) for view in views]
    return pb.Provider(name=provider.name, adapter=provider.adapter_name, queues=queues, queue_count=provider.queues)


class QueueAmounts(NamedTuple):
    """What the adapter knows of a queue."""

    end: int = 0
    lag: Backlog | None = None
    """The batches that some subscription has not finished. None: not known."""
    problem: str = ""
    """The reason why nothing is known."""


async def queue_amounts(provider: ProviderCore, queues: Sequence[int]) -> Mapping[int, QueueAmounts]:
    """Ask the adapter for the ends of queues, and read them to count the lag."""
    unfinished = await _unfinished(provider) if queues else {}
    found = await asyncio.gather(*(_amounts(provider, queue, unfinished.get(queue)) for queue in queues))
    return dict(zip(queues, found, strict=True))


async def _amounts(provider: ProviderCore, queue: int, lowest: int | None) -> QueueAmounts:
    try:
        async with asyncio.timeout(ANSWER_S):
            end = (await provider.adapter.bounds(queue)).next
            return QueueAmounts(end, await _backlog(provider, queue, lowest, end))
    except TimeoutError:
        return QueueAmounts(problem=f"its end is not known: the adapter {provider.adapter_name!r} does not answer")
    except HeadraceError as error:
        return QueueAmounts(problem=f"its end is not known: {error}")


async def _unfinished(provider: ProviderCore) -> dict[int, int]:
    """The lowest unfinished offset of all subscriptions, by queue. For subscriptions that this process serves it is the
    present one, for others the saved one. A queue that no subscription reads is missing."""
    served = provider.manager.served
    lowest = await provider.store.watermarks(provider.name, apart_from=list(served))
    for one in served.values():
        for queue, saved in one.saved.items():
            delivery = one.deliveries.get(queue)
            at = saved.watermark if delivery is None else delivery.progress.watermark
            lowest[queue] = min(at, lowest.get(queue, at))
    return lowest


def queue_message(provider: ProviderCore, view: QueueView, amounts: QueueAmounts | None) -> pb.Queue:
    """Describe a queue. `amounts`: None if they were not counted."""
    stopped = view.index in provider.manager.stopped
    leases = provider.manager.leases
    state, reason = ("stopped", "") if stopped else (view.state, view.reason)
    end, lag, problem = amounts or QueueAmounts()
    if problem and state != "faulted":
        state, reason = "stopped" if stopped else "faulted", problem
    return pb.Queue(
        index=view.index,
        state=state,
        reason=reason,
        read_offset=view.next_offset,
        end_offset=end,
        cached_events=view.cache_events,
        cached_bytes=view.cache_bytes,
        cache_limit_bytes=view.max_bytes,
        epoch=0 if leases is None else leases.get(view.index, 0),
        **({} if lag is None else _counted(lag)),
    )


def _counted(lag: Backlog) -> dict[str, Any]:
    """The fields of a queue that describe its lag. What the adapter does not know is left out."""
    age = age_s(lag)
    return {
        "lag_batches": lag.batches,
        "lag_events": lag.events,
        "lag_estimated": lag.estimated,
        "lag_ms": None if age is None else round(1000 * age),
        "delayed_events": lag.later_events,
        "due_in_ms": math.ceil(1000 * (due_in_s(lag) or 0.0)),
    }


async def _backlog(provider: ProviderCore, queue: int, lowest: int | None, end: int) -> Backlog:
    try:
        return await lag_of(provider.adapter, queue, lowest)
    except HeadraceError:  # a damaged record: the queue's state reports it
        return Backlog(0, 0) if lowest is None else Backlog(max(end - lowest, 0))


def _silent(record: SiloRecord, state: str, view: ClusterView, providers: Mapping[str, ProviderCore]) -> pb.Silo:
    """Describe a silo that does not answer, from the view of the cluster."""
    return pb.Silo(
        name=record.name,
        address=record.address,
        public_address=record.public_address or record.address,
        state=state,
        providers=[_silent_provider(record, name, view, providers.get(name)) for name in record.serves],
        silent_ms=_silent_ms(record, view),
        settings=record.settings,
    )


def _silent_provider(record: SiloRecord, name: str, view: ClusterView, own: ProviderCore | None) -> pb.Provider:
    queues = [
        pb.Queue(index=lease.queue, state="unknown", reason="its silo does not answer", epoch=lease.epoch)
        for lease in view.valid
        if (lease.provider, lease.owner) == (name, record.name)
    ]
    return pb.Provider(name=name, queues=queues, queue_count=0 if own is None else own.queues)


def _unserved(
    silos: Sequence[pb.Silo], membership: Membership, providers: Mapping[str, ProviderCore]
) -> list[pb.UnservedQueue]:
    """The queues that none of these silos serves, with the reason and for how long."""
    served = {
        (provider.name, queue.index)
        for silo in silos
        if silo.state not in ("dead", "unreachable")
        for provider in silo.providers
        for queue in provider.queues
    }
    missing = [
        (name, queue)
        for name, provider in sorted(providers.items())
        for queue in range(provider.queues)
        if (name, queue) not in served
    ]
    return [
        pb.UnservedQueue(provider=name, index=queue, reason=reason, since_ms=max(round(1000 * since_s), 0))
        for (name, queue), (reason, since_s) in zip(missing, membership.why_unserved(missing), strict=True)
    ]


def _silent_ms(record: SiloRecord, view: ClusterView) -> int:
    """The time since a silo's last heartbeat in the store, in milliseconds."""
    return max(view.now_us - record.heartbeat_at_us, 0) // 1000


def bare(cluster: pb.Cluster) -> pb.Cluster:
    """Return the description without amounts."""
    shown = pb.Cluster()
    shown.CopyFrom(cluster)
    for silo in shown.silos:
        for provider in silo.providers:
            queues = [pb.Queue(index=queue.index, state=queue.state) for queue in provider.queues]
            del provider.queues[:]
            provider.queues.extend(queues)
    return shown


def differ(one: pb.Cluster | None, other: pb.Cluster) -> bool:
    """Whether two descriptions differ, apart from the passing of time."""
    return one is None or _timeless(one) != _timeless(other)


def _timeless(cluster: pb.Cluster) -> pb.Cluster:
    same = pb.Cluster()
    same.CopyFrom(cluster)
    for silo in same.silos:
        silo.silent_ms = 0
    for queue in same.unserved:
        queue.since_ms = 0
    return same
