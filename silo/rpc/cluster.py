"""ClusterService: what runs where, and stopping and starting it. A cluster is this silo."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING

from ...proto.v1 import cluster_pb2 as pb
from ...streams.errors import InvalidArgument, PermissionDenied, Unavailable
from ..access import Permission
from ..provider import Provider
from ..views import QueueView
from . import consumer
from .guard import Call, Guard, Kind, Method, parsed
from .lookup import TO_MANAGE, provider_of

if TYPE_CHECKING:
    from ..host import Silo

log = logging.getLogger("headrace.silo")

SERVICE = "headrace.v1.ClusterService"
WATCH_S = 1.0
"""A watcher is told of changes so often, in seconds."""


class ClusterService:
    """Made by `opened`. What it was asked to do it does to the end, also where the caller does not wait for it."""

    def __init__(self, silo: Silo, version: str) -> None:
        self._silo = silo
        self._version = version
        self._guard: Guard | None = None
        self._state = "running"
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._looking = asyncio.Lock()
        self._seen: tuple[float, pb.Cluster] | None = None

    @classmethod
    @asynccontextmanager
    async def opened(cls, silo: Silo) -> AsyncGenerator[ClusterService]:
        service = cls(silo, await asyncio.to_thread(metadata.version, "headrace"))
        try:
            yield service
        finally:
            await asyncio.gather(*service._changes, return_exceptions=True)

    def methods(self, guard: Guard) -> list[Method]:
        self._guard = guard
        return [
            Method(f"{SERVICE}/DescribeCluster", Kind.UNARY, self.describe),
            Method(f"{SERVICE}/WatchCluster", Kind.RESPONSES, self.watch),
            Method(f"{SERVICE}/StopAgents", Kind.UNARY, self.stop_agents),
            Method(f"{SERVICE}/StartAgents", Kind.UNARY, self.start_agents),
            Method(f"{SERVICE}/DrainSilo", Kind.UNARY, self.drain),
        ]

    # ---- what is seen ----------------------------------------------------------------------------------------------

    async def describe(self, call: Call, message: bytes) -> bytes:
        parsed(pb.DescribeClusterRequest, message)
        _require_something(call)
        cluster = _shown(call, await self._describe())
        return pb.DescribeClusterResponse(cluster=cluster).SerializeToString()

    async def watch(self, call: Call, message: bytes) -> None:
        parsed(pb.WatchClusterRequest, message)
        _require_something(call)
        last: pb.Cluster | None = None
        while not call.closing.is_set():
            cluster = _shown(call, await self._recently())
            if cluster != last:
                await call.write(pb.WatchClusterResponse(cluster=cluster).SerializeToString())
                last = cluster
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await call.closing.wait()
            call.check_valid()
        raise Unavailable("the silo stops: watch again when it is back, or another one")

    async def _recently(self) -> pb.Cluster:
        """As it was within the last half of `WATCH_S`: many may watch, and looking costs something."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if self._seen is None or now - self._seen[0] > WATCH_S / 2:
                self._seen = now, await self._describe()
            return self._seen[1]

    async def _describe(self) -> pb.Cluster:
        silo = pb.Silo(
            name=socket.gethostname(),
            address=self._silo.grpc_address or "",
            state=self._state,
            providers=[await _described(provider) for provider in self._silo.providers.values()],
            version=self._version,
        )
        return pb.Cluster(silos=[silo])

    # ---- what is done ----------------------------------------------------------------------------------------------

    async def stop_agents(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.StopAgentsRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        provider = provider_of(call, self._silo.providers, request.provider, TO_MANAGE)
        queues = _queues(provider, request.queues)
        await self._change(provider.manager.stop_agents(queues, self._drain_s(request.drain_ms)))
        return pb.StopAgentsResponse().SerializeToString()

    async def start_agents(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.StartAgentsRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        provider = provider_of(call, self._silo.providers, request.provider, TO_MANAGE)
        await self._change(self._start(provider, _queues(provider, request.queues)))
        return pb.StartAgentsResponse().SerializeToString()

    async def drain(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.DrainSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        await self._change(self._drain(self._drain_s(request.drain_ms)))
        return pb.DrainSiloResponse().SerializeToString()

    async def _start(self, provider: Provider, queues: Sequence[int]) -> None:
        await provider.manager.start_agents(queues)
        if self._state != "running":
            self._state = "running"
            self._doors.reopen(consumer.SERVICE)

    async def _drain(self, drain_s: float) -> None:
        self._state = "draining"
        self._doors.close(consumer.SERVICE)
        providers = self._silo.providers.values()
        stopping = (one.manager.stop_agents(range(one.queues), drain_s) for one in providers)
        await asyncio.gather(*stopping)
        self._state = "drained"

    @property
    def _doors(self) -> Guard:
        assert self._guard is not None
        return self._guard

    def _drain_s(self, drain_ms: int) -> float:
        return drain_ms / 1000 if drain_ms else self._silo.config.drain_s

    async def _change(self, work: Awaitable[None]) -> None:
        """One after the other, each to its end: agents that are half stopped would be neither."""

        async def change() -> None:
            async with self._changing:
                await work

        task = asyncio.create_task(change(), name="headrace cluster change")
        self._changes.add(task)
        task.add_done_callback(self._changed)
        await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("agents could not be stopped or started: %s", error)


def _require_something(call: Call) -> None:
    if not call.principal.allows_anything():
        raise PermissionDenied(f"{call.principal} may do nothing, so it may not see the cluster either")


def _shown(call: Call, cluster: pb.Cluster) -> pb.Cluster:
    """How much there is of everything is only for who may manage everything."""
    if call.principal.allows_everywhere(Permission.MANAGE):
        return cluster
    shown = pb.Cluster()
    shown.CopyFrom(cluster)
    for silo in shown.silos:
        for provider in silo.providers:
            bare = [pb.Queue(index=queue.index, state=queue.state) for queue in provider.queues]
            del provider.queues[:]
            provider.queues.extend(bare)
    return shown


async def _described(provider: Provider) -> pb.Provider:
    adapters = {record.name: record.adapter for record in await provider.store.providers()}
    queues = [await _queue(provider, view) for view in provider.statistics().queues]
    return pb.Provider(name=provider.name, adapter=adapters[provider.name], queues=queues)


async def _queue(provider: Provider, view: QueueView) -> pb.Queue:
    stopped = view.index in provider.manager.stopped
    return pb.Queue(
        index=view.index,
        state="stopped" if stopped else view.state,
        reason="" if stopped else view.reason,
        read_offset=view.next_offset,
        end_offset=(await provider.adapter.bounds(view.index)).next,
        cached_events=view.cache_events,
        cached_bytes=view.cache_bytes,
    )


def _queues(provider: Provider, wanted: Sequence[int]) -> Sequence[int]:
    """Those that a request names, or all."""
    if len(wanted) > provider.queues or max(wanted, default=0) >= provider.queues:
        raise InvalidArgument(
            f"queues: provider {provider.name!r} has {provider.queues} queues, from 0, and a request names each once"
        )
    return sorted(set(wanted)) or range(provider.queues)
