"""Find the subscription and the positions that a consumer asks for, and check them before anything is created."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...proto.v1 import consumer_pb2 as pb
from ...server.methods import ServiceCall, check_fields
from ...store.rows import checkpoint_of_token, position_token
from ...streams import wire
from ...streams.errors import InvalidArgument, StorageError
from ...streams.identity import SequenceToken
from ...streams.subscriptions import Checkpoint, GapRecord, Mode, SubscriptionDefinition, check_consumer
from ..consumer_groups import ConsumerGroups
from ..provider_core import ProviderCore
from .lookup import (
    TO_CONSUME,
    Providers,
    create_subscription,
    provider_of,
    require_subscription,
    stored_definition,
    subscription_of,
)
from .visible import VisibleBounds

_PAST_END = "the position is past the end of its queue: the queue lost its end, or was made anew"


class ConsumerKey(NamedTuple):
    """Names one consumer of a silo or cluster."""

    provider: str
    subscription: str
    consumer: str


class ConsumerTarget(NamedTuple):
    """A consumer and its subscription. The caller may consume, and the subscription exists."""

    provider: ProviderCore
    consumers: ConsumerGroups
    """Of this provider, in this silo."""
    definition: SubscriptionDefinition
    consumer: str
    timeout_s: float
    """The session timeout; 0: the silo's."""
    positions: Mapping[int, Checkpoint] | None = None
    """From where a client that keeps positions goes on. None: it keeps none."""
    gaps: Sequence[GapRecord] = ()
    """Gaps behind these positions."""

    @property
    def key(self) -> ConsumerKey:
        return ConsumerKey(self.provider.name, self.definition.name, self.consumer)


def session_open(
    target: ConsumerTarget,
    positions: Mapping[int, Checkpoint] | None,
    *,
    pulls: bool = False,
    concurrent: bool = False,
    started_us: int = 0,
) -> pb.Open:
    """Return how the sessions begin that this silo opens for a consumer."""
    opening = pb.Open(
        provider=target.provider.name,
        subscription=target.definition.name,
        consumer=target.consumer,
        session_timeout_ms=round(target.consumers.timeout(target.timeout_s) * 1000),
        keeps_positions=positions is not None,
        pulls=pulls,
        concurrent=concurrent,
        started_us=started_us,
    )
    for queue, checkpoint in (positions or {}).items():
        opening.positions.add(queue=queue, token=position_token(checkpoint))
    return opening


class ConsumerTargets:
    """Finds the targets of requests. `consumers` are the silo's, by provider. `pulled` returns the definition with
    which a consumer pulls from this silo; None if it does not."""

    def __init__(
        self,
        providers: Providers,
        consumers: Mapping[str, ConsumerGroups],
        visible: VisibleBounds,
        pulled: Callable[[ConsumerKey], SubscriptionDefinition | None],
    ) -> None:
        self._providers = providers
        self._consumers = consumers
        self._visible = visible
        self._pulled = pulled

    async def of_open(self, call: ServiceCall, request: pb.Open) -> ConsumerTarget:
        """Return the target of a session. Create the subscription if the request has its definition."""
        check_fields(request)
        if request.pulls and not request.direct:
            raise InvalidArgument("open.pulls is for direct sessions: set open.direct, too, or call Pull")
        provider = provider_of(call, self._providers, request.provider, TO_CONSUME)
        definition = await _definition(call, provider, request)
        consumers, consumer = self._consumers[provider.name], _consumer(request, definition)
        timeout_s = request.session_timeout_ms / 1000
        consumers.check(definition, consumer, timeout_s, keeps_positions=request.keeps_positions)
        positions = _positions(request, provider, definition)
        gaps = [] if positions is None else await _step_back(positions, provider, definition)
        if request.HasField("definition"):
            await create_subscription(call, provider, definition, self._visible)
        return ConsumerTarget(provider, consumers, definition, consumer, timeout_s, positions, gaps)

    async def of_pull(self, call: ServiceCall, request: pb.PullRequest) -> ConsumerTarget:
        check_consumer(request.consumer)
        return await self._existing(call, request, request.session_timeout_ms / 1000)

    async def of_acknowledge(self, call: ServiceCall, request: pb.AcknowledgeRequest) -> ConsumerTarget:
        return await self._existing(call, request, 0.0)

    async def _existing(
        self, call: ServiceCall, request: pb.PullRequest | pb.AcknowledgeRequest, timeout_s: float
    ) -> ConsumerTarget:
        """While the store is away, the definition that the consumer has here is the right one."""
        provider, name = provider_of(call, self._providers, request.provider, TO_CONSUME), request.subscription
        consumers = self._consumers[provider.name]
        try:
            definition = await stored_definition(provider, name)
        except StorageError:
            definition = self._pulled(ConsumerKey(provider.name, name, request.consumer))
            definition = definition or consumers.joined(name, request.consumer)
            if definition is None:
                raise
        definition = require_subscription(call, provider, name, TO_CONSUME, definition)
        return ConsumerTarget(provider, consumers, definition, request.consumer, timeout_s)


async def _definition(call: ServiceCall, provider: ProviderCore, request: pb.Open) -> SubscriptionDefinition:
    """Return the request's definition, or the stored one of the subscription that it names."""
    if not request.HasField("definition"):
        return await subscription_of(call, provider, request.subscription, TO_CONSUME)
    definition = wire.definition_of(request.definition)
    if request.subscription not in ("", definition.name):
        raise InvalidArgument(
            f"open names subscription {request.subscription!r} and defines {definition.name!r}: leave one out"
        )
    # Consuming needs this permission, also if the permission to manage is enough to create the subscription.
    call.principal.require_selector(TO_CONSUME[0], definition.selector.pattern)
    return definition


def _consumer(request: pb.Open, definition: SubscriptionDefinition) -> str:
    """Return the consumer's id, or a new one."""
    if not request.consumer and definition.mode is Mode.BROADCAST and not request.keeps_positions:
        raise InvalidArgument(
            f"subscription {definition.name!r} has mode broadcast, which keeps a position under each consumer's "
            "id: name one, or let the consumer keep its positions"
        )
    return request.consumer or f"c-{uuid.uuid4().hex[:16]}"


def _positions(
    request: pb.Open, provider: ProviderCore, definition: SubscriptionDefinition
) -> dict[int, Checkpoint] | None:
    if not request.keeps_positions:
        if request.positions:
            raise InvalidArgument("open has positions, but not keeps_positions: set it, or leave them out")
        return None
    positions: dict[int, Checkpoint] = {}
    for position in request.positions:
        if position.queue >= provider.queues:
            raise InvalidArgument(
                f"open.positions: the provider has no queue {position.queue}, it has {provider.queues}"
            )
        if position.queue in positions:
            raise InvalidArgument(f"open.positions: there are two for queue {position.queue}: leave one out")
        positions[position.queue] = checkpoint_of_token(position.token)
    _check_streams(positions, provider, definition)
    return positions


def _check_streams(
    positions: Mapping[int, Checkpoint], provider: ProviderCore, definition: SubscriptionDefinition
) -> None:
    """A client may forge a token: refuse streams that the subscription does not select."""
    selects = definition.selector.matcher()
    for queue, checkpoint in positions.items():
        for stream in checkpoint.behind:
            if not selects(stream) or queue not in provider.queues_with(stream):
                raise InvalidArgument(
                    f"open.positions: the token for queue {queue} is of another subscription: give each back as it came"
                )


async def _step_back(
    positions: dict[int, Checkpoint], provider: ProviderCore, definition: SubscriptionDefinition
) -> list[GapRecord]:
    """Move positions past the end of their queue back to it: the next published events get those offsets again."""
    gaps: list[GapRecord] = []
    for queue, at in positions.items():
        end = (await provider.adapter.bounds(queue)).next
        if at.next_offset > end:
            behind = {stream: each for stream, each in at.behind.items() if each.token.offset < end}
            positions[queue] = Checkpoint(end, behind)
            low, high = SequenceToken(end), SequenceToken(at.next_offset)
            now_us = time.time_ns() // 1000
            gaps.append(GapRecord(provider.name, definition.name, queue, None, low, high, _PAST_END, now_us))
    return gaps
