"""ClusterService: describe the silos and their agents, and stop and start them.

A silo without a cluster describes only itself. In a cluster, a silo that is asked by another silo answers for itself. A
client gets an answer for all silos: the silo that it asked asks the others, and passes the client's changes on to them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Protocol

from google.protobuf.message import Message

from ...proto.v1 import cluster_pb2 as pb
from ...server.access import PEER, Permission
from ...server.guard import Call, Guard, Kind, Method, parsed
from ...streams.background import BackgroundTasks
from ...streams.cluster import LIVING, ClusterView, SiloRecord, SiloState
from ...streams.errors import HeadraceError, InvalidArgument, NotFound, PermissionDenied, Unavailable
from ..config import SiloConfig
from ..provider import Provider
from ..provider_core import ProviderCore
from . import consumer
from .describing import bare, described, differ, silent, silent_ms, unserved
from .lookup import TO_MANAGE, provider_of

if TYPE_CHECKING:
    from ..clustering import Clustering

log = logging.getLogger("headrace.silo")

SERVICE = "headrace.v1.ClusterService"
WATCH_S = 1.0
"""Interval at which a watcher gets changes, in seconds."""
ASK_S = 2.0
"""Time that a silo has to describe itself, in seconds. A slower silo is shown as unreachable."""
CALL_S = 30.0
"""Time that a silo has for a change, in seconds, besides the drain time of the events in flight."""


class RunningSilo(Protocol):
    """The parts of a silo that its services use."""

    @property
    def config(self) -> SiloConfig: ...

    @property
    def providers(self) -> Mapping[str, Provider]: ...

    @property
    def grpc_address(self) -> str | None: ...

    @property
    def clustering(self) -> Clustering | None: ...


class ClusterService:
    """Made by `opened`. It finishes each change that it began, also if the caller stops waiting."""

    def __init__(self, silo: RunningSilo, version: str) -> None:
        self._silo = silo
        self._version = version
        self._guard: Guard | None = None
        self._state = "running"
        self._changing = asyncio.Lock()
        self._changes = BackgroundTasks()
        self._looking = asyncio.Lock()
        self._descriptions: dict[bool, tuple[float, pb.Cluster]] = {}
        """The time of the last description and the description, by whether it has the lag."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, silo: RunningSilo) -> AsyncGenerator[ClusterService]:
        service = cls(silo, await asyncio.to_thread(metadata.version, "headrace"))
        try:
            yield service
        finally:
            await service._changes.join()

    def methods(self, guard: Guard) -> list[Method]:
        self._guard = guard
        return [
            Method(f"{SERVICE}/DescribeCluster", Kind.UNARY, self.describe),
            Method(f"{SERVICE}/WatchCluster", Kind.RESPONSES, self.watch),
            Method(f"{SERVICE}/StopAgents", Kind.UNARY, self.stop_agents),
            Method(f"{SERVICE}/StartAgents", Kind.UNARY, self.start_agents),
            Method(f"{SERVICE}/DrainSilo", Kind.UNARY, self.drain),
            Method(f"{SERVICE}/UndrainSilo", Kind.UNARY, self.undrain),
            Method(f"{SERVICE}/ForgetSilo", Kind.UNARY, self.forget),
            Method(f"{SERVICE}/ProbeSilo", Kind.UNARY, self.probe, probe=True),
        ]

    def _others(self, call: Call) -> Clustering | None:
        """The cluster if the call concerns all silos; None for a call of another silo, which concerns this one only."""
        return None if call.principal is PEER else self._silo.clustering

    # ---- descriptions ----------------------------------------------------------------------------------------------

    async def describe(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.DescribeClusterRequest, message)
        _require_any_permission(call)
        alone = request.here or self._others(call) is None
        counted = _may_see_all(call) and not request.here  # silos and clients only look for living silos that way
        cluster = (
            pb.Cluster(silos=[await self._describe_self(counted)]) if alone else await self._describe_cluster(counted)
        )
        return pb.DescribeClusterResponse(cluster=_shown(call, cluster)).SerializeToString()

    async def watch(self, call: Call, message: bytes) -> None:
        parsed(pb.WatchClusterRequest, message)
        _require_any_permission(call)
        last: pb.Cluster | None = None
        while not call.closing.is_set():
            cluster = _shown(call, await self._recent(_may_see_all(call)))
            if differ(last, cluster):
                await call.write(pb.WatchClusterResponse(cluster=cluster).SerializeToString())
                last = cluster
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await call.closing.wait()
            call.check_valid()
        raise Unavailable("the silo stops: watch again when it is back, or watch at another silo")

    async def _recent(self, counted: bool) -> pb.Cluster:
        """Return a description at most half of `WATCH_S` old: many may watch, and each description costs time."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if counted not in self._descriptions or now - self._descriptions[counted][0] > WATCH_S / 2:
                self._descriptions[counted] = now, await self._describe_cluster(counted)
            return self._descriptions[counted][1]

    async def _describe_self(self, counted: bool) -> pb.Silo:
        return pb.Silo(
            name=self._name,
            address=self._silo.grpc_address or "",
            state=self._present_state(),
            providers=[await described(provider, counted=counted) for provider in self._silo.providers.values()],
            version=self._version,
        )

    async def _describe_cluster(self, counted: bool) -> pb.Cluster:
        clustering = self._silo.clustering
        if clustering is None or (view := clustering.view) is None:
            return pb.Cluster(silos=[await self._describe_self(counted)])
        silos = [silo for silo in view.silos if silo.state != SiloState.LEFT]
        asking = [self._describe_silo(clustering, view, silo, counted) for silo in silos]
        found = await asyncio.gather(*asking)
        return pb.Cluster(silos=found, unserved=unserved(found, clustering.membership, self._silo.providers))

    async def _describe_silo(
        self, clustering: Clustering, view: ClusterView, record: SiloRecord, counted: bool
    ) -> pb.Silo:
        """Return the silo's own description, or one from the cluster's store if the silo does not answer."""
        providers = self._silo.providers
        if record.state not in LIVING:
            return silent(record, "dead", view, providers)
        is_self = record.name == self._name
        found = await self._describe_self(counted) if is_self else await _ask(clustering, record, counted)
        if found is None:
            return silent(record, "unreachable", view, providers)
        found.address, found.silent_ms = record.address, silent_ms(record, view)
        found.settings.update(record.settings)
        return found

    @property
    def _name(self) -> str:
        clustering = self._silo.clustering
        return socket.gethostname() if clustering is None or clustering.view is None else clustering.name

    def _present_state(self) -> str:
        clustering = self._silo.clustering
        if clustering is None or clustering.view is None or not clustering.membership.leaving:
            return self._state
        return "drained" if clustering.membership.drained else "draining"

    # ---- changes ---------------------------------------------------------------------------------------------------

    async def stop_agents(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.StopAgentsRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        provider = provider_of(call, self._silo.providers, request.provider, TO_MANAGE)
        queues, drain_s = _queues(provider, request.queues), self._drain_s(request.drain_ms)
        if (clustering := self._others(call)) is not None:
            await provider.store.stop_queues(provider.name, queues)
            await self._finish(_by_all(clustering, provider, "StopAgents", request, drain_s))
        elif self._silo.clustering is not None:
            await self._change(provider.manager.control_requests.apply(drain_s))
        else:
            await self._change(provider.manager.queue_host.stop_agents(queues, drain_s))
        return pb.StopAgentsResponse().SerializeToString()

    async def start_agents(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.StartAgentsRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        provider = provider_of(call, self._silo.providers, request.provider, TO_MANAGE)
        queues = _queues(provider, request.queues)
        if (clustering := self._others(call)) is not None:
            await provider.store.start_queues(provider.name, queues)
            await self._finish(_by_all(clustering, provider, "StartAgents", request, 0.0))
        elif self._silo.clustering is not None:
            await self._change(provider.manager.control_requests.apply())
        else:
            await self._change(self._start(provider, queues))
        return pb.StartAgentsResponse().SerializeToString()

    async def drain(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.DrainSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        drain_s = self._drain_s(request.drain_ms)
        if (other := self._cluster_of(request.silo)) is not None:
            await other.call(request.silo, "ClusterService/DrainSilo", message, timeout_s=drain_s + CALL_S)
        else:
            await self._change(self._drain(drain_s))
        return pb.DrainSiloResponse().SerializeToString()

    async def undrain(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.UndrainSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        if (other := self._cluster_of(request.silo)) is not None:
            await other.call(request.silo, "ClusterService/UndrainSilo", message)
        else:
            await self._change(self._undrain())
        return pb.UndrainSiloResponse().SerializeToString()

    async def forget(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.ForgetSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        clustering = self._silo.clustering
        if clustering is None:
            raise NotFound(f"there is no silo {request.silo!r} to forget: this silo is by itself")
        await clustering.forget(request.silo)
        return pb.ForgetSiloResponse().SerializeToString()

    async def probe(self, _: Call, message: bytes) -> bytes:
        """Answer without the store: a silo that cannot reach the store still serves."""
        request, clustering = parsed(pb.ProbeSiloRequest, message), self._silo.clustering
        is_self = request.silo == self._name if clustering is None else clustering.is_named(request.silo)
        return pb.ProbeSiloResponse(here=is_self).SerializeToString()

    def _cluster_of(self, name: str) -> Clustering | None:
        """Return the cluster if a request names another silo, None if it names this one. Raise NotFound."""
        if name in ("", self._name):
            return None
        clustering = self._silo.clustering
        living = sorted(clustering.silos) if clustering is not None else [self._name]
        if clustering is None or name not in living:
            raise NotFound(f"there is no living silo {name!r}: there is {', '.join(living)}")
        return clustering

    async def _start(self, provider: ProviderCore, queues: Sequence[int]) -> None:
        """Start agents of a silo without a cluster."""
        await provider.manager.queue_host.start_agents(queues)
        self._open_again()

    async def _drain(self, drain_s: float) -> None:
        self._state = "draining"
        self._doors.close(consumer.SERVICE)
        if (clustering := self._silo.clustering) is not None:
            await clustering.membership.drain(drain_s)
        else:
            providers = self._silo.providers.values()
            stopping = (one.manager.queue_host.stop_agents(range(one.queues), drain_s) for one in providers)
            await asyncio.gather(*stopping)
        self._state = "drained"

    async def _undrain(self) -> None:
        if (clustering := self._silo.clustering) is not None:
            await clustering.membership.undrain()
        else:
            for provider in self._silo.providers.values():
                await provider.manager.queue_host.start_agents(range(provider.queues))
        self._open_again()

    def _open_again(self) -> None:
        if self._state != "running":
            self._state = "running"
            self._doors.reopen(consumer.SERVICE)

    @property
    def _doors(self) -> Guard:
        assert self._guard is not None
        return self._guard

    def _drain_s(self, drain_ms: int) -> float:
        return drain_ms / 1000 if drain_ms else self._silo.config.drain_s

    async def _change(self, work: Awaitable[None]) -> None:
        """Make one change at a time, and finish it: no agent stays half stopped."""

        async def change() -> None:
            async with self._changing:
                await work

        await self._finish(change())

    async def _finish(self, work: Awaitable[None]) -> None:
        """Await `work` to its end, also if the caller is cancelled."""

        async def finish() -> None:
            await work

        await asyncio.shield(self._changes.start(finish(), "headrace change of agents"))


async def _ask(clustering: Clustering, record: SiloRecord, counted: bool) -> pb.Silo | None:
    """Ask a silo for its description. None if it does not answer, or if another silo answers at its address."""
    request = pb.DescribeClusterRequest(here=not counted).SerializeToString()
    try:
        answer = await clustering.call(record.name, "ClusterService/DescribeCluster", request, timeout_s=ASK_S)
    except HeadraceError as error:
        log.info("silo %s did not describe itself: %s", record.name, error)
        return None
    found = pb.DescribeClusterResponse.FromString(answer).cluster.silos
    return found[0] if [silo.name for silo in found] == [record.name] else None


async def _by_all(
    clustering: Clustering, provider: ProviderCore, method: str, request: Message, drain_s: float
) -> None:
    """Have each silo that serves the provider apply the change in the store. Raise Unavailable with the names of the
    silos that did not confirm it."""
    message = request.SerializeToString()
    silos = [silo.name for silo in clustering.silos.values() if provider.name in silo.serves]
    calls = (clustering.call(silo, f"ClusterService/{method}", message, timeout_s=drain_s + CALL_S) for silo in silos)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    _require_answers(method, zip(silos, answers, strict=True))


def _require_answers(method: str, answers: Iterable[tuple[str, bytes | BaseException]]) -> None:
    failed = {silo: answer for silo, answer in answers if isinstance(answer, BaseException)}
    for error in failed.values():
        if not isinstance(error, HeadraceError):
            raise error
    if failed:
        silo, error = next(iter(failed.items()))
        raise Unavailable(
            f"{method} is stored, and silos apply it within seconds; not confirmed by {', '.join(failed)} ({silo}: "
            f"{error}): see `headrace queues`, or repeat the command"
        )


def _require_any_permission(call: Call) -> None:
    if not call.principal.allows_anything():
        raise PermissionDenied(f"{call.principal} has no permission at all: to see the cluster it needs one")


def _may_see_all(call: Call) -> bool:
    """Whether the caller may see amounts: only a caller that may manage everything does."""
    return call.principal.allows_everywhere(Permission.MANAGE)


def _shown(call: Call, cluster: pb.Cluster) -> pb.Cluster:
    return cluster if _may_see_all(call) else bare(cluster)


def _queues(provider: ProviderCore, wanted: Sequence[int]) -> Sequence[int]:
    """Return the queues that a request names, or all."""
    if len(wanted) > provider.queues or max(wanted, default=0) >= provider.queues:
        raise InvalidArgument(
            f"queues: provider {provider.name!r} has {provider.queues} queues, from 0, and a request names each once"
        )
    return sorted(set(wanted)) or range(provider.queues)
