"""ClusterService: what runs where, and stopping and starting it.

A silo by itself is the whole cluster. Where it is one of several, it answers another silo for itself, and a client for
all: it asks them, and passes on to them what is to be done.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from ...proto.v1 import cluster_pb2 as pb
from ...streams.cluster import LIVING, ClusterView, SiloRecord, SiloState
from ...streams.errors import HeadraceError, InvalidArgument, NotFound, PermissionDenied, Unavailable
from ..access import PEER, Permission
from ..provider import Provider
from . import consumer
from .describing import bare, described, differ, silent, silent_ms
from .guard import Call, Guard, Kind, Method, parsed
from .lookup import TO_MANAGE, provider_of

if TYPE_CHECKING:
    from ..clustering import Clustering
    from ..host import Silo

log = logging.getLogger("headrace.silo")

SERVICE = "headrace.v1.ClusterService"
WATCH_S = 1.0
"""A watcher is told of changes so often, in seconds."""
ASK_S = 2.0
"""How long a silo may take to describe itself; one that takes longer is shown as unreachable."""
CALL_S = 30.0
"""How long it may take to do what it is told, besides the time that what is in flight may take to end."""


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
        self._seen: dict[bool, tuple[float, pb.Cluster]] = {}
        """When, and what, by whether lag is counted."""

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
            Method(f"{SERVICE}/UndrainSilo", Kind.UNARY, self.undrain),
        ]

    def _others(self, call: Call) -> Clustering | None:
        """The cluster, where the call is to be answered for all of it: another silo asks about this one alone."""
        return None if call.principal is PEER else self._silo.clustering

    # ---- what is seen ----------------------------------------------------------------------------------------------

    async def describe(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.DescribeClusterRequest, message)
        _require_something(call)
        alone = request.here or self._others(call) is None
        counted = _may_see_all(call) and not request.here  # which is how silos and clients look who is there
        cluster = pb.Cluster(silos=[await self._here(counted)]) if alone else await self._whole(counted)
        return pb.DescribeClusterResponse(cluster=_shown(call, cluster)).SerializeToString()

    async def watch(self, call: Call, message: bytes) -> None:
        parsed(pb.WatchClusterRequest, message)
        _require_something(call)
        last: pb.Cluster | None = None
        while not call.closing.is_set():
            cluster = _shown(call, await self._recently(_may_see_all(call)))
            if differ(last, cluster):
                await call.write(pb.WatchClusterResponse(cluster=cluster).SerializeToString())
                last = cluster
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await call.closing.wait()
            call.check_valid()
        raise Unavailable("the silo stops: watch again when it is back, or another one")

    async def _recently(self, counted: bool) -> pb.Cluster:
        """As it was within the last half of `WATCH_S`: many may watch, and looking costs something."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if counted not in self._seen or now - self._seen[counted][0] > WATCH_S / 2:
                self._seen[counted] = now, await self._whole(counted)
            return self._seen[counted][1]

    async def _here(self, counted: bool) -> pb.Silo:
        return pb.Silo(
            name=self._name,
            address=self._silo.grpc_address or "",
            state=self._present_state(),
            providers=[await described(provider, counted=counted) for provider in self._silo.providers.values()],
            version=self._version,
        )

    async def _whole(self, counted: bool) -> pb.Cluster:
        clustering = self._silo.clustering
        if clustering is None or (view := clustering.view) is None:
            return pb.Cluster(silos=[await self._here(counted)])
        silos = [silo for silo in view.silos if silo.state != SiloState.LEFT]
        asking = [self._seen_from_here(clustering, view, silo, counted) for silo in silos]
        return pb.Cluster(silos=await asyncio.gather(*asking))

    async def _seen_from_here(
        self, clustering: Clustering, view: ClusterView, record: SiloRecord, counted: bool
    ) -> pb.Silo:
        """A silo as it says itself, or as it is known where it says nothing."""
        providers = self._silo.providers
        if record.state not in LIVING:
            return silent(record, "dead", view, providers)
        here = record.name == self._name
        found = await self._here(counted) if here else await _asked(clustering, record, counted)
        if found is None:
            return silent(record, "unreachable", view, providers)
        found.address, found.silent_ms = record.address, silent_ms(record, view)
        return found

    @property
    def _name(self) -> str:
        clustering = self._silo.clustering
        return socket.gethostname() if clustering is None or clustering.view is None else clustering.name

    def _present_state(self) -> str:
        clustering = self._silo.clustering
        if clustering is None or clustering.view is None or not clustering.membership.leaving:
            return self._state
        return "draining" if clustering.membership.held else "drained"

    # ---- what is done ----------------------------------------------------------------------------------------------

    async def stop_agents(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.StopAgentsRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        provider = provider_of(call, self._silo.providers, request.provider, TO_MANAGE)
        queues, drain_s = _queues(provider, request.queues), self._drain_s(request.drain_ms)
        if (clustering := self._others(call)) is not None:
            await provider.store.stop_queues(provider.name, queues)
            await self._finish(_by_all(clustering, provider, "StopAgents", request, drain_s))
        elif self._silo.clustering is not None:
            await self._change(provider.manager.obey(drain_s))
        else:
            await self._change(provider.manager.stop_agents(queues, drain_s))
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
            await self._change(provider.manager.obey())
        else:
            await self._change(self._start(provider, queues))
        return pb.StartAgentsResponse().SerializeToString()

    async def drain(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.DrainSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        drain_s = self._drain_s(request.drain_ms)
        if (other := self._another(request.silo)) is not None:
            await other.call(request.silo, "ClusterService/DrainSilo", message, timeout_s=drain_s + CALL_S)
        else:
            await self._change(self._drain(drain_s))
        return pb.DrainSiloResponse().SerializeToString()

    async def undrain(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.UndrainSiloRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        if (other := self._another(request.silo)) is not None:
            await other.call(request.silo, "ClusterService/UndrainSilo", message)
        else:
            await self._change(self._undrain())
        return pb.UndrainSiloResponse().SerializeToString()

    def _another(self, name: str) -> Clustering | None:
        """The way to the silo that a request names; None where it is this one. Raises NotFound."""
        if name in ("", self._name):
            return None
        clustering = self._silo.clustering
        living = sorted(clustering.silos) if clustering is not None else [self._name]
        if clustering is None or name not in living:
            raise NotFound(f"there is no silo {name!r} that lives: there is {', '.join(living)}")
        return clustering

    async def _start(self, provider: Provider, queues: Sequence[int]) -> None:
        """Of a silo by itself."""
        await provider.manager.start_agents(queues)
        self._open_again()

    async def _drain(self, drain_s: float) -> None:
        self._state = "draining"
        self._doors.close(consumer.SERVICE)
        if (clustering := self._silo.clustering) is not None:
            await clustering.membership.drain(drain_s)
            if left := sorted(queue for _, queue in clustering.membership.held):
                raise Unavailable(
                    f"silo {self._name!r} could not give back queues {', '.join(map(str, left))} yet, and goes on "
                    "trying: see its log, and `headrace queues`"
                )
        else:
            providers = self._silo.providers.values()
            stopping = (one.manager.stop_agents(range(one.queues), drain_s) for one in providers)
            await asyncio.gather(*stopping)
        self._state = "drained"

    async def _undrain(self) -> None:
        if (clustering := self._silo.clustering) is not None:
            await clustering.membership.undrain()
        else:
            for provider in self._silo.providers.values():
                await provider.manager.start_agents(range(provider.queues))
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
        """One after the other, each to its end: agents that are half stopped would be neither."""

        async def change() -> None:
            async with self._changing:
                await work

        await self._finish(change())

    async def _finish(self, work: Awaitable[None]) -> None:
        """To its end, also where nobody waits for it any more."""

        async def finish() -> None:
            await work

        task = asyncio.create_task(finish(), name="headrace cluster change")
        self._changes.add(task)
        task.add_done_callback(self._changed)
        await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("agents could not be stopped or started: %s", error)


async def _asked(clustering: Clustering, record: SiloRecord, counted: bool) -> pb.Silo | None:
    """What a silo says of itself; None where it does not answer, or another one does."""
    request = pb.DescribeClusterRequest(here=not counted).SerializeToString()
    try:
        answer = await clustering.call(record.name, "ClusterService/DescribeCluster", request, timeout_s=ASK_S)
    except HeadraceError as error:
        log.info("silo %s does not say how it is: %s", record.name, error)
        return None
    found = pb.DescribeClusterResponse.FromString(answer).cluster.silos
    return found[0] if [silo.name for silo in found] == [record.name] else None


async def _by_all(clustering: Clustering, provider: Provider, what: str, request: Message, drain_s: float) -> None:
    """Have each silo that serves the provider do what is noted in the store. Raises Unavailable, naming those that did
    not say that they have."""
    message = request.SerializeToString()
    silos = [silo.name for silo in clustering.silos.values() if provider.name in silo.serves]
    calls = (clustering.call(silo, f"ClusterService/{what}", message, timeout_s=drain_s + CALL_S) for silo in silos)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    _require_answers(what, zip(silos, answers, strict=True))


def _require_answers(what: str, answers: Iterable[tuple[str, bytes | BaseException]]) -> None:
    failed = {silo: answer for silo, answer in answers if isinstance(answer, BaseException)}
    for error in failed.values():
        if not isinstance(error, HeadraceError):
            raise error
    if failed:
        silo, error = next(iter(failed.items()))
        raise Unavailable(
            f"{what} is noted, and silos do it within seconds; {', '.join(failed)} did not say so ({silo}: {error}): "
            "see `headrace queues`, or ask again"
        )


def _require_something(call: Call) -> None:
    if not call.principal.allows_anything():
        raise PermissionDenied(f"{call.principal} may do nothing, so it may not see the cluster either")


def _may_see_all(call: Call) -> bool:
    """How much there is of everything is only for who may manage everything."""
    return call.principal.allows_everywhere(Permission.MANAGE)


def _shown(call: Call, cluster: pb.Cluster) -> pb.Cluster:
    return cluster if _may_see_all(call) else bare(cluster)


def _queues(provider: Provider, wanted: Sequence[int]) -> Sequence[int]:
    """Those that a request names, or all."""
    if len(wanted) > provider.queues or max(wanted, default=0) >= provider.queues:
        raise InvalidArgument(
            f"queues: provider {provider.name!r} has {provider.queues} queues, from 0, and a request names each once"
        )
    return sorted(set(wanted)) or range(provider.queues)
