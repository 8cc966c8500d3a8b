"""ClusterService: describe the silos and their agents, and stop and start them.

A silo without a cluster describes only itself. In a cluster, a silo that is asked by another silo answers for itself. A
client gets an answer for all silos: the silo that it asked asks the others, and passes the client's changes on to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING

from ...proto.v1 import cluster_pb2 as pb
from ...server.access import PEER, Permission
from ...server.guard import CallGuard
from ...server.methods import MethodKind, ServiceCall, ServiceMethod, parsed
from ...streams.errors import InvalidArgument, NotFound, Unavailable
from ..provider_core import ProviderCore
from .agent_changes import CALL_S, AgentChanges, RunningSilo
from .describing import WATCH_S, ClusterDescriptions, bare, differ, require_any_permission
from .lookup import TO_MANAGE, provider_of

if TYPE_CHECKING:
    from ..clustered_silo import ClusteredSilo

SERVICE = "headrace.v1.ClusterService"


class ClusterService:
    """Made by `opened`. It finishes each change that it began, also if the caller stops waiting."""

    def __init__(self, silo: RunningSilo, changes: AgentChanges, version: str) -> None:
        self._silo = silo
        self._changes = changes
        self._descriptions = ClusterDescriptions(silo, changes, version)

    @classmethod
    @asynccontextmanager
    async def opened(cls, silo: RunningSilo) -> AsyncGenerator[ClusterService]:
        async with AgentChanges.opened(silo) as changes:
            yield cls(silo, changes, await asyncio.to_thread(metadata.version, "headrace"))

    def methods(self, guard: CallGuard) -> list[ServiceMethod]:
        self._changes.served_by(guard)
        return [
            ServiceMethod(f"{SERVICE}/DescribeCluster", MethodKind.UNARY, self.describe),
            ServiceMethod(f"{SERVICE}/WatchCluster", MethodKind.RESPONSES, self.watch),
            ServiceMethod(f"{SERVICE}/StopAgents", MethodKind.UNARY, self.stop_agents),
            ServiceMethod(f"{SERVICE}/StartAgents", MethodKind.UNARY, self.start_agents),
            ServiceMethod(f"{SERVICE}/DrainSilo", MethodKind.UNARY, self.drain),
            ServiceMethod(f"{SERVICE}/UndrainSilo", MethodKind.UNARY, self.undrain),
            ServiceMethod(f"{SERVICE}/ForgetSilo", MethodKind.UNARY, self.forget),
            ServiceMethod(f"{SERVICE}/ProbeSilo", MethodKind.UNARY, self.probe, probe=True),
        ]

    def _others(self, call: ServiceCall) -> ClusteredSilo | None:
        """The cluster if the call concerns all silos; None for a call of another silo, which concerns this one only."""
        return None if call.principal is PEER else self._silo.clustered_silo

    # ---- descriptions ----------------------------------------------------------------------------------------------

    async def describe(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.DescribeClusterRequest, message)
        require_any_permission(call)
        alone = request.here or self._others(call) is None
        counted = _may_see_all(call) and not request.here  # silos and clients only look for living silos that way
        cluster = await self._descriptions.describe(counted, alone=alone)
        return pb.DescribeClusterResponse(cluster=_shown(call, cluster)).SerializeToString()

    async def watch(self, call: ServiceCall, message: bytes) -> None:
        parsed(pb.WatchClusterRequest, message)
        require_any_permission(call)
        last: pb.Cluster | None = None
        while not call.closing.is_set():
            cluster = _shown(call, await self._descriptions.recent(_may_see_all(call)))
            if differ(last, cluster):
                await call.write(pb.WatchClusterResponse(cluster=cluster).SerializeToString())
                last = cluster
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await call.closing.wait()
            call.check_valid()
        raise Unavailable("the silo stops: watch again when it is back, or watch at another silo")

    # ---- changes ---------------------------------------------------------------------------------------------------

    async def stop_agents(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.StopAgentsRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        provider = provider_of(call, self._silo.providers, request.provider, TO_MANAGE)
        queues, drain_s = _queues(provider, request.queues), self._drain_s(request.drain_ms)
        if (clustered_silo := self._others(call)) is not None:
            await provider.store.stop_queues(provider.name, queues)
            await self._changes.apply_everywhere(clustered_silo, provider, "StopAgents", request, drain_s)
        else:
            await self._changes.stop(provider, queues, drain_s)
        return pb.StopAgentsResponse().SerializeToString()

    async def start_agents(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.StartAgentsRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        provider = provider_of(call, self._silo.providers, request.provider, TO_MANAGE)
        queues = _queues(provider, request.queues)
        if (clustered_silo := self._others(call)) is not None:
            await provider.store.start_queues(provider.name, queues)
            await self._changes.apply_everywhere(clustered_silo, provider, "StartAgents", request)
        else:
            await self._changes.start(provider, queues)
        return pb.StartAgentsResponse().SerializeToString()

    async def drain(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.DrainSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        drain_s = self._drain_s(request.drain_ms)
        if (other := self._cluster_of(request.silo)) is not None:
            await other.call(request.silo, "ClusterService/DrainSilo", message, timeout_s=drain_s + CALL_S)
        else:
            await self._changes.drain(drain_s)
        return pb.DrainSiloResponse().SerializeToString()

    async def undrain(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.UndrainSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        if (other := self._cluster_of(request.silo)) is not None:
            await other.call(request.silo, "ClusterService/UndrainSilo", message)
        else:
            await self._changes.undrain()
        return pb.UndrainSiloResponse().SerializeToString()

    async def forget(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.ForgetSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        clustered_silo = self._silo.clustered_silo
        if clustered_silo is None:
            raise NotFound(f"there is no silo {request.silo!r} to forget: this silo is by itself")
        await clustered_silo.forget(request.silo)
        return pb.ForgetSiloResponse().SerializeToString()

    async def probe(self, _: ServiceCall, message: bytes) -> bytes:
        """Answer without the store: a silo that cannot reach the store still serves."""
        request, clustered_silo = parsed(pb.ProbeSiloRequest, message), self._silo.clustered_silo
        own_name = self._descriptions.silo_name
        is_self = request.silo == own_name if clustered_silo is None else clustered_silo.is_named(request.silo)
        return pb.ProbeSiloResponse(here=is_self).SerializeToString()

    def _cluster_of(self, name: str) -> ClusteredSilo | None:
        """Return the cluster if a request names another silo, None if it names this one. Raise NotFound."""
        if name in ("", self._descriptions.silo_name):
            return None
        clustered_silo = self._silo.clustered_silo
        living = sorted(clustered_silo.silos) if clustered_silo is not None else [self._descriptions.silo_name]
        if clustered_silo is None or name not in living:
            raise NotFound(f"there is no living silo {name!r}: there is {', '.join(living)}")
        return clustered_silo

    def _drain_s(self, drain_ms: int) -> float:
        return drain_ms / 1000 if drain_ms else self._silo.config.drain_s


def _may_see_all(call: ServiceCall) -> bool:
    """Whether the caller may see amounts: only a caller that may manage everything does."""
    return call.principal.allows_everywhere(Permission.MANAGE)


def _shown(call: ServiceCall, cluster: pb.Cluster) -> pb.Cluster:
    return cluster if _may_see_all(call) else bare(cluster)


def _queues(provider: ProviderCore, wanted: Sequence[int]) -> Sequence[int]:
    """Return the queues that a request names, or all."""
    if len(wanted) > provider.queues or max(wanted, default=0) >= provider.queues:
        raise InvalidArgument(
            f"queues: provider {provider.name!r} has {provider.queues} queues, from 0, and a request names each once"
        )
    return sorted(set(wanted)) or range(provider.queues)
