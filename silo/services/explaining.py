"""Explain why the next event of a stream is not delivered. The owner of the stream's queue answers.

A caller learns only about subscriptions that it may see. Each silo asks the owner for these by name, so the owner needs
no permissions of the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from ...proto.v1 import observation_pb2 as pb
from ...server.access import PEER, Permission
from ...server.methods import ServiceCall
from ...streams.cluster import LIVING
from ...streams.errors import HeadraceError, InvalidArgument
from ...streams.identity import StreamId
from ...streams.subscriptions import SubscriptionDefinition
from ..clustered_silo import ClusteredSilo
from ..provider_core import ProviderCore
from ..why import OwnerState, StreamQueueFacts, merged
from ..why_causes import Cause
from ..why_gathering import StreamExplanation, chosen_of, explain_stream, queue_facts, visible_subscriptions
from .agent_changes import RunningSilo
from .lookup import TO_KNOW, provider_of
from .subscriptions import is_listed
from .visible import sees_everything

log = logging.getLogger("headrace.silo")

OWNER_S = 0.5
"""Time that the owner of the queue has to answer, in seconds."""
MOST = 100
"""Subscriptions that one answer explains."""
SHARED_EVIDENCE = frozenset(
    {
        "corrupt_record", "dead_lettered", "nothing_pending", "retained_away", "throttled",
        "undetermined",
    }
)  # fmt: skip
"""Causes whose evidence describes events of other clients in the same queue: offsets, subscriptions and streams."""


async def explained(silo: RunningSilo, call: ServiceCall, request: pb.ExplainStreamRequest) -> pb.ExplainStreamResponse:
    """Answer a request. Raises PermissionDenied, NotFound, InvalidArgument."""
    if not request.stream.namespace or not request.stream.key:
        raise InvalidArgument("stream: give namespace and key")
    stream = StreamId(request.stream.namespace, request.stream.key)
    if not call.principal.allows(Permission.MANAGE, stream.namespace):
        call.principal.require(Permission.SUBSCRIBE, stream.namespace)
    name = request.provider or "default"
    if name not in silo.providers and _is_left_alone(silo.clustered_silo, name):
        call.principal.require_somewhere(*TO_KNOW)
        found = [StreamExplanation("", [Cause("no_silo_for_provider", f"0 living silos serve provider {name!r}")])]
        return pb.ExplainStreamResponse(explanations=[_message(one, everything=True) for one in found])
    provider = provider_of(call, silo.providers, request.provider, TO_KNOW)
    queues = request.queues or provider.queues_with(stream)
    if max(queues) >= provider.queues:
        raise InvalidArgument(f"queues: provider {provider.name!r} has the queues 0 to {provider.queues - 1}")
    found = await _explanations(silo, call, provider, stream, name=request.subscription, queues=queues)
    everything = sees_everything(call.principal)
    return pb.ExplainStreamResponse(explanations=[_message(one, everything=everything) for one in found])


def _is_left_alone(clustered_silo: ClusteredSilo | None, provider: str) -> bool:
    """Whether the cluster has queues of a provider that no living silo serves."""
    view = None if clustered_silo is None else clustered_silo.view
    if view is None or not any(lease.provider == provider for lease in view.leases):
        return False
    return not any(one.state in LIVING and provider in one.serves for one in view.silos)


def _message(explanation: StreamExplanation, *, everything: bool) -> pb.StreamExplanation:
    return pb.StreamExplanation(
        subscription=explanation.subscription,
        causes=[
            pb.StreamCause(
                code=cause.code, evidence=cause.evidence if everything or cause.code not in SHARED_EVIDENCE else ""
            )
            for cause in explanation.causes
        ],
    )


async def _explanations(
    silo: RunningSilo, call: ServiceCall, provider: ProviderCore, stream: StreamId, *, name: str, queues: Sequence[int]
) -> list[StreamExplanation]:
    def is_visible(definition: SubscriptionDefinition) -> bool:
        return is_listed(call, definition)

    clustered_silo = None if call.principal is PEER else silo.clustered_silo
    if clustered_silo is None:
        here = [queue_facts(provider, index) for index in queues]
        return (await explain_stream(provider, stream, name, is_visible=is_visible, queues=here))[:MOST]
    visible = await visible_subscriptions(provider, is_visible)
    chosen = chosen_of(visible.definitions, stream, name)[:MOST]
    known: list[StreamQueueFacts] = []
    elsewhere: dict[str, list[StreamQueueFacts]] = {}
    for index in queues:
        queue, owner = _owner(clustered_silo, provider.name, index)
        is_here = index in (provider.manager.leases or ())  # the view is older than a lease that has just begun
        if is_here or owner == clustered_silo.name:
            known.append(queue_facts(provider, index))
        elif chosen and owner and queue.owner_state is OwnerState.LIVING:
            elsewhere.setdefault(owner, []).append(queue)
        else:
            known.append(queue)
    asked: list[Awaitable[list[StreamExplanation] | None]] = []
    for owner, of in elsewhere.items():
        request = pb.ExplainStreamRequest(provider=provider.name, queues=[queue.queue for queue in of])
        request.stream.namespace, request.stream.key = stream.namespace, stream.key
        asked.append(_ask(clustered_silo, owner, request, [one.name for one in chosen]))
    answers: list[list[StreamExplanation]] = []
    for of, answer in zip(elsewhere.values(), await asyncio.gather(*asked), strict=True):
        if answer is None:
            known += [replace(queue, owner_state=OwnerState.UNREACHABLE) for queue in of]
        else:
            answers.append(answer)
    if known:
        answers.append((await explain_stream(provider, stream, name, visible=visible, queues=known))[:MOST])
    together = zip(*answers, strict=True)
    return [StreamExplanation(each[0].subscription, merged([one.causes for one in each])) for each in together]


async def _ask(
    clustered_silo: ClusteredSilo, owner: str, request: pb.ExplainStreamRequest, names: Sequence[str]
) -> list[StreamExplanation] | None:
    """Ask the owner of queues for each subscription. None: it does not answer."""

    async def ask(name: str) -> StreamExplanation:
        request.subscription = name
        method = "ObservationService/ExplainStream"
        answer = await clustered_silo.call(owner, method, request.SerializeToString(), timeout_s=OWNER_S)
        one = pb.ExplainStreamResponse.FromString(answer).explanations[0]
        return StreamExplanation(name, [Cause(cause.code, cause.evidence) for cause in one.causes])

    try:
        async with asyncio.timeout(OWNER_S):
            return list(await asyncio.gather(*map(ask, names)))
    except (TimeoutError, HeadraceError) as error:
        log.info("silo %r did not explain a stream of provider %r: %s", owner, request.provider, error)
        return None


def _owner(clustered_silo: ClusteredSilo, provider: str, index: int) -> tuple[StreamQueueFacts, str]:
    """The facts about the owner of a queue, and its name; "" without one."""
    view = clustered_silo.view
    if view is None:
        return StreamQueueFacts(queue=index), ""
    silos = sum(one.state in LIVING and provider in one.serves for one in view.silos)
    lease = next((one for one in view.leases if (one.provider, one.queue) == (provider, index) and one.owner), None)
    if lease is None:
        return StreamQueueFacts(queue=index, silos=silos, has_lease=False), ""
    record = next((one for one in view.silos if one.name == lease.owner), None)
    state = OwnerState.LIVING if record is not None and record.state in LIVING else OwnerState.DEAD
    heard_s = None if record is None else max(view.now_us - record.heartbeat_at_us, 0) / 1e6
    facts = StreamQueueFacts(
        queue=index, silos=silos, has_lease=True, owner=lease.owner, owner_state=state, owner_heard_s=heard_s
    )
    return facts, lease.owner
