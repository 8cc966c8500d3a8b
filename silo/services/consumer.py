"""ConsumerService: consuming through sessions, or by pulling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from ...client.routing import SessionCalls
from ...client.transport import StreamCall
from ...proto.v1 import consumer_pb2 as pb
from ...server.access import PEER
from ...server.methods import MethodKind, ServiceCall, ServiceMethod, parsed
from ...streams.errors import InvalidArgument, Unavailable
from ..consumer_groups import ConsumerGroups
from ..in_process import InProcessCall, InProcessStreamCall
from . import reports
from .consumer_session import ConsumerSession, PlacementSource
from .consumer_target import ConsumerTarget, ConsumerTargets
from .lookup import Providers
from .pulling import PullingConsumers
from .visible import VisibleBounds

SERVICE = "headrace.v1.ConsumerService"


class Gateways(Protocol):
    """Serves consumers that have one session for all silos of the cluster."""

    @property
    def placements(self) -> PlacementSource: ...

    async def serve(self, call: ServiceCall, request: pb.SubscribeRequest, target: ConsumerTarget) -> None:
        """Converse with a consumer. `request` is the first one."""
        ...

    @property
    def pulls(self) -> PullingConsumers:
        """The consumers that pull from this silo."""
        ...

    async def report(self, target: ConsumerTarget, reports: Sequence[pb.QueueReport]) -> Sequence[pb.Refusal]:
        """Apply reports of a consumer that pulls. Return the refusals."""
        ...


class _OwnSessions(SessionCalls):
    """Sessions with this silo, which has all queues. `peer` is the address of their consumer."""

    def __init__(self, subscribe: Callable[[ServiceCall], Awaitable[None]], peer: str) -> None:
        self._subscribe = subscribe
        self._peer = peer

    @property
    def direct(self) -> bool:
        return True

    def first(self) -> StreamCall:
        return InProcessStreamCall(self._subscribe, InProcessCall(asyncio.Event(), None, peer=self._peer))

    def to_owner(self, silo: str, address: str) -> StreamCall:
        return self.first()


class ConsumerService:
    """`consumers` are the silo's, by provider. `gateways` is None if the silo is alone: then it has all queues."""

    def __init__(
        self,
        providers: Providers,
        consumers: Mapping[str, ConsumerGroups],
        visible: VisibleBounds,
        gateways: Gateways | None = None,
    ) -> None:
        self._gateways = gateways
        self._pulls = PullingConsumers(partial(_OwnSessions, self.subscribe)) if gateways is None else gateways.pulls
        self._targets = ConsumerTargets(providers, consumers, visible, self._pulls.subscription)

    async def aclose(self) -> None:
        await self._pulls.aclose()

    def methods(self) -> Sequence[ServiceMethod]:
        return (
            ServiceMethod(f"{SERVICE}/Subscribe", MethodKind.STREAM, self.subscribe),
            ServiceMethod(f"{SERVICE}/Pull", MethodKind.UNARY, self.pull),
            ServiceMethod(f"{SERVICE}/Acknowledge", MethodKind.UNARY, self.acknowledge, while_closing=True),
        )

    def _check_joined(self) -> None:
        """Raise Unavailable before the silo joins its cluster: it has no name yet that its sessions could tell."""
        if self._gateways is not None and not self._gateways.placements.silo:
            raise Unavailable("the silo has not joined its cluster yet: connect again, to this one or to another")

    def _gateway_for(self, call: ServiceCall, *, direct: bool = False) -> Gateways | None:
        """None: the consumer is served with the queues of this silo only."""
        return None if direct or call.principal is PEER else self._gateways

    async def subscribe(self, call: ServiceCall) -> None:
        message = await call.read()
        self._check_joined()
        request = parsed(pb.SubscribeRequest, message or b"")
        if not request.HasField("open"):
            raise InvalidArgument("the first request of Subscribe says what to subscribe to: set its field open")
        target = await self._targets.of_open(call, request.open)
        gateway = self._gateway_for(call, direct=request.open.direct)
        if gateway is not None:
            await gateway.serve(call, request, target)
            return
        place = await target.consumers.join(
            target.definition,
            target.consumer,
            target.timeout_s,
            target.positions,
            pulls=request.open.pulls,
            concurrent=request.open.concurrent,
            started_us=request.open.started_us,
            divides_credit=self._gateways is not None,
            client=_client(call),
        )
        placements = None if self._gateways is None else self._gateways.placements
        session = ConsumerSession(call, request.open, target, place, placements)
        await session.run(request)

    # ---- Pull and Acknowledge --------------------------------------------------------------------------------------

    async def pull(self, call: ServiceCall, encoded: bytes) -> bytes:
        request = parsed(pb.PullRequest, encoded)
        reports.check_count(request.reports)
        self._check_joined()
        target = await self._targets.of_pull(call, request)
        refused = await self._report(call, target, request.reports)
        answer = await self._pulls.pull(call, request, target)
        return answer + pb.PullResponse(refused=refused).SerializeToString()

    async def acknowledge(self, call: ServiceCall, encoded: bytes) -> bytes:
        request = parsed(pb.AcknowledgeRequest, encoded)
        reports.check_count(request.reports)
        target = await self._targets.of_acknowledge(call, request)
        refused = await self._report(call, target, request.reports)
        return pb.AcknowledgeResponse(refused=refused).SerializeToString()

    async def _report(
        self, call: ServiceCall, target: ConsumerTarget, queue_reports: Sequence[pb.QueueReport]
    ) -> Sequence[pb.Refusal]:
        gateway = self._gateway_for(call)
        if gateway is not None:
            return await gateway.report(target, queue_reports)
        place = target.consumers.find(target.definition, target.consumer)
        if place is None:
            return reports.refuse_all(queue_reports)
        place.group.heard(place.member)
        return await reports.apply(place, queue_reports)


def _client(call: ServiceCall) -> str | None:
    """Return the connection to which unsent bytes are charged. None for a consumer of another silo: all consumers of
    that silo share its connection, so each is charged by itself."""
    return None if call.principal is PEER else call.peer
