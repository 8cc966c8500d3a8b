"""ConsumerService: consuming through sessions, or by pulling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from ...agents import Member
from ...proto.v1 import consumer_pb2 as pb
from ...server.access import PEER
from ...server.guard import MethodKind, ServiceCall, ServiceMethod, parsed
from ...streams.errors import InvalidArgument
from ..consumer_groups import AttachedConsumer, ConsumerGroups
from . import reports
from .consumer_session import ConsumerSession, PlacementSource
from .consumer_target import ConsumerTarget, ConsumerTargets
from .lookup import Providers
from .pulling import PullingConsumer, waits_already
from .visible import VisibleBounds

SERVICE = "headrace.v1.ConsumerService"


class Gateways(Protocol):
    """Serves consumers that have one session for all silos of the cluster."""

    @property
    def placements(self) -> PlacementSource: ...

    async def serve(self, call: ServiceCall, request: pb.SubscribeRequest, target: ConsumerTarget) -> None:
        """Converse with a consumer. `request` is the first one."""
        ...

    async def pull(self, call: ServiceCall, request: pb.PullRequest, target: ConsumerTarget) -> bytes:
        """Return the encoded answer to any `Pull`, also to one that leaves."""
        ...

    async def acknowledge(self, call: ServiceCall, request: pb.AcknowledgeRequest, target: ConsumerTarget) -> bytes:
        """Return the encoded answer."""
        ...

    async def aclose(self) -> None: ...


class ConsumerService:
    """`consumers` are the silo's, by provider. `gateways` is None if the silo is alone: then it has all queues."""

    def __init__(
        self,
        providers: Providers,
        consumers: Mapping[str, ConsumerGroups],
        visible: VisibleBounds,
        gateways: Gateways | None = None,
    ) -> None:
        self._targets = ConsumerTargets(providers, consumers, visible)
        self._gateways = gateways
        self._pulling: dict[Member, PullingConsumer] = {}
        self._joining = set[tuple[ConsumerGroups, str, str]]()
        """Consumers whose first Pull is joining the group: subscription and consumer."""

    async def aclose(self) -> None:
        if self._gateways is not None:
            await self._gateways.aclose()

    def methods(self) -> Sequence[ServiceMethod]:
        return (
            ServiceMethod(f"{SERVICE}/Subscribe", MethodKind.STREAM, self.subscribe),
            ServiceMethod(f"{SERVICE}/Pull", MethodKind.UNARY, self.pull),
            ServiceMethod(f"{SERVICE}/Acknowledge", MethodKind.UNARY, self.acknowledge, while_closing=True),
        )

    def _gateway_for(self, call: ServiceCall, *, direct: bool = False) -> Gateways | None:
        """None: the consumer is served with the queues of this silo only."""
        return None if direct or call.principal is PEER else self._gateways

    async def subscribe(self, call: ServiceCall) -> None:
        message = await call.read()
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
        target = await self._targets.of_pull(call, request)
        gateway = self._gateway_for(call)
        if gateway is not None:
            return await gateway.pull(call, request, target)
        if request.leave:
            return await self._leave(request, target)
        place = target.consumers.find(target.definition, target.consumer)
        pulling = None if place is None else self._pulling.get(place.member)
        timeout_s = target.consumers.timeout(target.timeout_s)
        if pulling is None:
            pulling = await self._join(call, target)
        return await pulling.pull(call, request, timeout_s)

    async def _join(self, call: ServiceCall, target: ConsumerTarget) -> PullingConsumer:
        """Make the caller a member. Another call that joins meanwhile is refused: otherwise it would take over."""
        key = target.consumers, target.definition.name, target.consumer
        if key in self._joining:
            raise waits_already(target.consumer)
        self._joining.add(key)
        try:
            place = await target.consumers.join(
                target.definition, target.consumer, target.timeout_s, client=_client(call)
            )
        finally:
            self._joining.discard(key)
        on_end = partial(self._pulling.pop, place.member, None)
        pulling = self._pulling[place.member] = PullingConsumer(place, on_end)
        return pulling

    async def _leave(self, request: pb.PullRequest, target: ConsumerTarget) -> bytes:
        """End a consumer that pulls. Acknowledgements of an unknown consumer are refused."""
        place = target.consumers.find(target.definition, target.consumer)
        pulling = None if place is None else self._pulling.get(place.member)
        if pulling is None:
            return pb.PullResponse(refused=reports.refuse_all(request.reports)).SerializeToString()
        refused = await pulling.apply(request.reports)
        pulling.leave()
        await target.consumers.save()
        return pb.PullResponse(refused=refused).SerializeToString()

    async def acknowledge(self, call: ServiceCall, encoded: bytes) -> bytes:
        request = parsed(pb.AcknowledgeRequest, encoded)
        reports.check_count(request.reports)
        target = await self._targets.of_acknowledge(call, request)
        gateway = self._gateway_for(call)
        if gateway is not None:
            return await gateway.acknowledge(call, request, target)
        place = target.consumers.find(target.definition, target.consumer)
        refused = await _apply(place, request.reports) if place is not None else reports.refuse_all(request.reports)
        return pb.AcknowledgeResponse(refused=refused).SerializeToString()


async def _apply(place: AttachedConsumer, queue_reports: Sequence[pb.QueueReport]) -> list[pb.Refusal]:
    place.group.heard(place.member)
    return await reports.apply(place, queue_reports)


def _client(call: ServiceCall) -> str | None:
    """Return the connection to which unsent bytes are charged. None for a consumer of another silo: all consumers of
    that silo share its connection, so each is charged by itself."""
    return None if call.principal is PEER else call.peer
