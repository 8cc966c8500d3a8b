"""ObservationService: the present state of queues and subscriptions in detail, for people.

A silo that is asked by another silo answers for itself. A client gets an answer for all silos.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message

from ...agents import CursorState, ServedSubscription
from ...proto.v1 import observation_pb2 as pb
from ...proto.v1 import subscriptions_pb2
from ...server.access import PEER, Permission
from ...server.methods import MethodKind, ServiceCall, ServiceMethod, parsed
from ...streams.errors import HeadraceError, InvalidArgument
from ...streams.subscriptions import CONSUMER_SEPARATOR, SubscriptionDefinition
from ..consumer_groups import ConsumerGroups
from ..lag_history import LagHistory
from ..provider_core import ProviderCore
from ..views import SubscriptionView
from .agent_changes import RunningSilo
from .describing import ASK_S, name_of, queue_amounts, queue_message, require_any_permission
from .explaining import explained
from .lookup import TO_KNOW, TO_MANAGE, provider_of
from .subscriptions import consumer_messages, is_listed, left_behind
from .visible import sees_everything

log = logging.getLogger("headrace.silo")

SERVICE = "headrace.v1.ObservationService"
MAX_BLOCKED = 100

_M = TypeVar("_M", bound=Message)


class ObservationService:
    """`consumers` are the silo's, by provider."""

    def __init__(self, silo: RunningSilo, consumers: Mapping[str, ConsumerGroups], history: LagHistory) -> None:
        self._silo = silo
        self._consumers = consumers
        self._history = history

    def methods(self) -> list[ServiceMethod]:
        handlers: Mapping[str, Callable[[ServiceCall, bytes], Awaitable[bytes]]] = {
            "DescribeQueue": self.queue,
            "DescribeSubscriptions": self.subscriptions,
            "ListMoves": self.moves,
            "ExplainStream": self.explain,
        }
        return [ServiceMethod(f"{SERVICE}/{name}", MethodKind.UNARY, handler) for name, handler in handlers.items()]

    async def queue(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.DescribeQueueRequest, message)
        call.principal.require_everywhere(Permission.MANAGE)
        provider = provider_of(call, self._silo.providers, request.provider, TO_MANAGE)
        if request.queue >= provider.queues:
            raise InvalidArgument(f"queue: provider {provider.name!r} has {provider.queues} queues, from 0")
        clustered_silo = None if call.principal is PEER else self._silo.clustered_silo
        if clustered_silo is not None:
            owner = clustered_silo.owner(provider.name, request.queue)
            if not owner:
                return pb.DescribeQueueResponse(queue_count=provider.queues).SerializeToString()
            return await clustered_silo.call(owner, "ObservationService/DescribeQueue", message, timeout_s=ASK_S)
        return (await self._queue(provider, request.queue)).SerializeToString()

    async def _queue(self, provider: ProviderCore, queue: int) -> pb.DescribeQueueResponse:
        view = next((view for view in provider.statistics().queues if view.index == queue), None)
        if view is None:
            return pb.DescribeQueueResponse(queue_count=provider.queues)
        amounts = await queue_amounts(provider, [queue])
        return pb.DescribeQueueResponse(
            silo=name_of(self._silo),
            queue=queue_message(provider, view, amounts[queue]),
            cache_limit_events=view.max_events,
            pressure=view.pressure,
            buckets=[pb.CacheBucket(**bucket._asdict()) for bucket in view.buckets],
            cursors=[pb.QueueCursor(**cursor._asdict()) for cursor in view.cursors],
            received_events=view.received_events,
            received_bytes=view.received_bytes,
            queue_count=provider.queues,
        )

    async def subscriptions(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.DescribeSubscriptionsRequest, message)
        provider = provider_of(call, self._silo.providers, request.provider, TO_KNOW)
        stored = await provider.store.subscriptions(provider.name)
        listed = {one.name: one for one in stored if request.name in ("", one.name) and is_listed(call, one)}
        if call.principal is PEER or self._silo.clustered_silo is None:
            parts = self._parts(provider, listed, request)
            unserved = [
                pb.UnservedLag(name=name, lag=pb.LagSample(**lag._asdict()))
                for name, lag in self._history.unserved(provider.name).items()
                if name in listed
            ]
        else:
            method = "ObservationService/DescribeSubscriptions"
            answers = await self._ask_all(method, message, pb.DescribeSubscriptionsResponse)
            parts = [part for answer in answers for part in answer.parts if part.name in listed]
            parts.sort(key=lambda part: (part.name, part.silo))
            unserved = [one for answer in answers for one in answer.unserved if one.name in listed]
            unserved.sort(key=lambda one: one.name)
        if not sees_everything(call.principal):
            _hide_amounts([*(lag for part in parts for lag in part.lags), *(one.lag for one in unserved)])
        counts: list[pb.LeftBehind] = []
        if request.counted and call.principal is not PEER:
            counts = [pb.LeftBehind(name=name, **await left_behind(call, provider, listed[name])) for name in listed]
        answer = pb.DescribeSubscriptionsResponse(parts=parts, left_behind=counts, unserved=unserved)
        return answer.SerializeToString()

    def _parts(
        self,
        provider: ProviderCore,
        listed: Mapping[str, SubscriptionDefinition],
        request: pb.DescribeSubscriptionsRequest,
    ) -> list[pb.SubscriptionPart]:
        since_us = time.time_ns() // 1000 - request.history_ms * 1000
        views: dict[str, list[SubscriptionView]] = {}
        for view in provider.statistics().subscriptions:
            views.setdefault(view.name.partition(CONSUMER_SEPARATOR)[0], []).append(view)
        parts = [_part(name, of_name) for name, of_name in sorted(views.items()) if name in listed]
        for part in parts:
            part.silo = name_of(self._silo)
            part.consumers.extend(consumer_messages(self._consumers[provider.name], listed[part.name]))
            part.lags.extend(
                pb.LagSample(**lag._asdict()) for lag in self._history.lags(provider.name, part.name, since_us)
            )
            served = [
                one
                for name, one in provider.manager.served.items()
                if name.partition(CONSUMER_SEPARATOR)[0] == part.name
            ]
            part.queues = max((len(one.deliveries) for one in served), default=0)
            if part.waiting or part.paused:
                part.blocked.extend(islice(_blocked(served), min(request.blocked, MAX_BLOCKED)))
        return parts

    async def moves(self, call: ServiceCall, message: bytes) -> bytes:
        parsed(pb.ListMovesRequest, message)
        require_any_permission(call)
        clustered_silo = self._silo.clustered_silo
        if clustered_silo is None:
            return pb.ListMovesResponse().SerializeToString()
        if call.principal is PEER:
            own = [pb.QueueMove(**move._asdict()) for move in clustered_silo.moves.moves]
            return pb.ListMovesResponse(moves=own).SerializeToString()
        answers = await self._ask_all("ObservationService/ListMoves", message, pb.ListMovesResponse)
        # Each silo has seen the same moves, at slightly different times, since it began.
        found = {
            (move.provider, move.queue, move.epoch, move.to_silo): move for answer in answers for move in answer.moves
        }
        moves = sorted(found.values(), key=lambda move: move.at_us, reverse=True)
        return pb.ListMovesResponse(moves=moves[:1000]).SerializeToString()

    async def explain(self, call: ServiceCall, message: bytes) -> bytes:
        return (await explained(self._silo, call, parsed(pb.ExplainStreamRequest, message))).SerializeToString()

    async def _ask_all(self, method: str, message: bytes, kind: type[_M]) -> list[_M]:
        """Ask all living silos. One that does not answer is left out: the description of the cluster shows it."""
        clustered_silo = self._silo.clustered_silo
        assert clustered_silo is not None

        async def ask(silo: str) -> _M | None:
            try:
                return kind.FromString(await clustered_silo.call(silo, method, message, timeout_s=ASK_S))
            except HeadraceError as error:
                log.info("silo %r did not answer %s: %s", silo, method, error)
                return None

        answers = await asyncio.gather(*map(ask, clustered_silo.silos))
        return [answer for answer in answers if answer is not None]


def _part(name: str, views: Sequence[SubscriptionView]) -> pb.SubscriptionPart:
    """The sum over a subscription and its consumers, if its mode is broadcast. Its state is the first unusual one."""
    shown = next((view for view in views if view.state not in ("caught up", "running")), views[0])
    sums: dict[str, Any] = {field: sum(getattr(view, field) for view in views) for field in _SUMMED}
    return pb.SubscriptionPart(name=name, state=shown.state, reason=shown.reason, **sums)


_SUMMED = (
    "delivered_events", "retries", "dead_lettered", "skipped", "gaps", "in_flight", "ready", "waiting", "parked",
    "paused",
)  # fmt: skip


def _blocked(served: Sequence[ServedSubscription]) -> Iterator[pb.BlockedStream]:
    """The streams that wait for their next attempt, then those that are paused."""
    now = asyncio.get_running_loop().time()
    for one in served:
        for queue, delivery in one.deliveries.items():
            for cursor, attempt in delivery.retries.waiting.items():
                yield pb.BlockedStream(
                    stream=subscriptions_pb2.StreamName(namespace=cursor.stream.namespace, key=cursor.stream.key),
                    queue=queue,
                    offset=cursor.token.offset,
                    index=cursor.token.index,
                    state="waiting",
                    reason=attempt.reason,
                    attempts=cursor.failures.attempts,
                    next_in_ms=round(1000 * max(attempt.timer.when() - now, 0.0)),
                )
    for one in served:
        for queue, delivery in one.deliveries.items():
            for cursor in delivery.progress.cursors.values():
                if cursor.state is CursorState.PAUSED:
                    yield pb.BlockedStream(
                        stream=subscriptions_pb2.StreamName(namespace=cursor.stream.namespace, key=cursor.stream.key),
                        queue=queue,
                        offset=cursor.token.offset,
                        index=cursor.token.index,
                        state="paused",
                        reason=cursor.failures.paused,
                        attempts=cursor.failures.attempts,
                    )


def _hide_amounts(lags: Sequence[pb.LagSample]) -> None:
    """Remove the numbers that count the events of other clients in the same queues, too."""
    for lag in lags:
        lag.batches = 0
        lag.ClearField("events")
        lag.ClearField("age_ms")
