"""Calls of the services of silos for the dashboard and `headrace top`, with the viewer's permissions."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

from ...client.transport import Transport
from ...proto.v1 import cluster_pb2, observation_pb2, subscriptions_pb2
from ...streams.errors import InvalidArgument
from ...streams.identity import StreamId

CALL_S = 10.0

_M = TypeVar("_M", bound=Message)


class ServiceCalls:
    """One method for each call that the dashboard makes. They raise the errors of the services."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def _ask(self, method: str, request: Message, kind: type[_M]) -> _M:
        answer = await self._transport.unary(method, request.SerializeToString(), timeout_s=CALL_S)
        return kind.FromString(answer)

    async def cluster(self) -> cluster_pb2.Cluster:
        request = cluster_pb2.DescribeClusterRequest()
        method = "ClusterService/DescribeCluster"
        return (await self._ask(method, request, cluster_pb2.DescribeClusterResponse)).cluster

    async def queue(self, provider: str, queue: int) -> observation_pb2.DescribeQueueResponse:
        request = observation_pb2.DescribeQueueRequest(provider=provider, queue=queue)
        return await self._ask("ObservationService/DescribeQueue", request, observation_pb2.DescribeQueueResponse)

    async def parts(
        self, provider: str, name: str = "", *, blocked: int = 0, history_ms: int = 0, counted: bool = False
    ) -> observation_pb2.DescribeSubscriptionsResponse:
        request = observation_pb2.DescribeSubscriptionsRequest(
            provider=provider, name=name, blocked=blocked, history_ms=history_ms, counted=counted
        )
        kind = observation_pb2.DescribeSubscriptionsResponse
        return await self._ask("ObservationService/DescribeSubscriptions", request, kind)

    async def explanations(
        self, provider: str, stream: StreamId, subscription: str
    ) -> list[observation_pb2.StreamExplanation]:
        request = observation_pb2.ExplainStreamRequest(provider=provider, subscription=subscription)
        request.stream.namespace, request.stream.key = stream.namespace, stream.key
        kind = observation_pb2.ExplainStreamResponse
        return list((await self._ask("ObservationService/ExplainStream", request, kind)).explanations)

    async def moves(self) -> list[observation_pb2.QueueMove]:
        request = observation_pb2.ListMovesRequest()
        return list((await self._ask("ObservationService/ListMoves", request, observation_pb2.ListMovesResponse)).moves)

    async def subscriptions(self, provider: str) -> list[subscriptions_pb2.SubscriptionDefinition]:
        found: list[subscriptions_pb2.SubscriptionDefinition] = []
        while True:
            request = subscriptions_pb2.ListSubscriptionsRequest(
                provider=provider, after_name=found[-1].name if found else ""
            )
            kind = subscriptions_pb2.ListSubscriptionsResponse
            page = (await self._ask("SubscriptionService/ListSubscriptions", request, kind)).definitions
            if not page:
                return found
            found += page

    async def subscription(self, provider: str, name: str) -> subscriptions_pb2.Subscription:
        request = subscriptions_pb2.GetSubscriptionRequest(provider=provider, name=name)
        kind = subscriptions_pb2.GetSubscriptionResponse
        return (await self._ask("SubscriptionService/GetSubscription", request, kind)).subscription

    async def resume(self, provider: str, name: str, namespace: str, key: str) -> bool:
        request = subscriptions_pb2.ResumeStreamRequest(provider=provider, name=name, namespace=namespace, key=key)
        kind = subscriptions_pb2.ResumeStreamResponse
        return (await self._ask("SubscriptionService/ResumeStream", request, kind)).resumed

    async def dead_letters(
        self, provider: str, name: str, after_id: int, limit: int
    ) -> list[subscriptions_pb2.DeadLetter]:
        request = subscriptions_pb2.ListDeadLettersRequest(
            provider=provider, subscription=name, after_id=after_id, limit=limit
        )
        kind = subscriptions_pb2.ListDeadLettersResponse
        return list((await self._ask("SubscriptionService/ListDeadLetters", request, kind)).dead_letters)

    async def redrive(self, provider: str, name: str, ids: list[int]) -> int:
        request = subscriptions_pb2.RedriveDeadLettersRequest(provider=provider, subscription=name, ids=ids)
        kind = subscriptions_pb2.RedriveDeadLettersResponse
        return (await self._ask("SubscriptionService/RedriveDeadLetters", request, kind)).count

    async def discard(self, provider: str, name: str, ids: list[int]) -> int:
        request = subscriptions_pb2.DeleteDeadLettersRequest(provider=provider, subscription=name, ids=ids)
        kind = subscriptions_pb2.DeleteDeadLettersResponse
        return (await self._ask("SubscriptionService/DeleteDeadLetters", request, kind)).count


def number_of(text: str, name: str) -> int:
    """Return a whole number from 0 on. Raise InvalidArgument for another text."""
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidArgument(f"{name}: expected a whole number, not {text[:40]!r}")
    return int(text)


def optional(message: Any, field: str) -> int | None:
    """Return a field with presence; None if it is absent."""
    return getattr(message, field) if message.HasField(field) else None
