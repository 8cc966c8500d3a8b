"""Explain why the next event of a stream is not delivered. The owner of the stream's queue answers.

A caller learns only about subscriptions that it may see. Each silo asks the owner for these by name, so the owner needs
no permissions of the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial

from ...proto.v1 import observation_pb2 as pb
from ...server.access import PEER, Permission
from ...server.methods import ServiceCall
from ...streams.cluster import LIVING
from ...streams.errors import HeadraceError, InvalidArgument
from ...streams.identity import StreamId
from ..clustered_silo import ClusteredSilo
from ..provider_core import ProviderCore
from ..time_limit import LONGEST_S, time_limit
from ..why import OwnerState, StreamQueueFacts
from ..why_causes import Cause
from ..why_gathering import (
    QueueExplanation,
    StreamExplanation,
    chosen_of,
    explain_queues,
    merged_explanations,
    queue_facts,
    visible_subscriptions,
)
from .agent_changes import RunningSilo
from .lookup import TO_KNOW, provider_of
from .subscriptions import is_listed
from .visible import sees_everything

log = logging.getLogger("headrace.silo")

OWNER_S = 0.7
"""Time that the owner of the queue has to answer, in seconds."""
MOST = 100
"""Subscriptions that one answer explains."""
SHARED_EVIDENCE = frozenset(
    {
        "agent_faulted", "corrupt_record", "dead_lettered", "nothing_pending", "retained_away", "throttled",
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
    if name not in silo.providers and _has_no_silo(silo.clustered_silo, name):
        call.principal.require_somewhere(*TO_KNOW)
        found = [StreamExplanation("", [Cause("no_silo_for_provider", f"0 living silos serve provider {name!r}")])]
        return pb.ExplainStreamResponse(explanations=[_message(one, everything=True) for one in found])
    provider = provider_of(call, silo.providers, request.provider, TO_KNOW)
    if request.queues or request.subscriptions:
        return await _for_silo(call, provider, stream, request)
    found = await _explanations(silo, call, provider, stream, request.subscription)
    everything = sees_everything(call.principal)
    return pb.ExplainStreamResponse(explanations=[_message(one, everything=everything) for one in found])


def _has_no_silo(clustered_silo: ClusteredSilo | None, provider: str) -> bool:
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


async def _for_silo(
    call: ServiceCall, provider: ProviderCore, stream: StreamId, request: pb.ExplainStreamRequest
) -> pb.ExplainStreamResponse:
    """Explain a stream to another silo, in queues that this silo has."""
    if call.principal is not PEER:
        raise InvalidArgument("queues, subscriptions: only silos give them")
    queues = sorted(set(request.queues) & set(range(provider.queues)))
    visible = await visible_subscriptions(provider, lambda _: True)
    facts = [queue_facts(provider, queue) for queue in queues]
    found = await explain_queues(provider, stream, request.subscriptions, visible, facts)
    messages = [_message(StreamExplanation(one.subscription, one.causes), everything=True) for one in found]
    for message, one in zip(messages, found, strict=True):
        message.queue = one.queue
    return pb.ExplainStreamResponse(explanations=messages)


async def _explanations(
    silo: RunningSilo, call: ServiceCall, provider: ProviderCore, stream: StreamId, name: str
) -> list[StreamExplanation]:
    visible = await visible_subscriptions(provider, partial(is_listed, call))
    names = [one.name for one in chosen_of(visible.definitions, stream, name)][:MOST]
    queues = provider.queues_with(stream)
    if silo.clustered_silo is None:
        known, found = [queue_facts(provider, queue) for queue in queues], list[QueueExplanation]()
    else:
        known, found = await _of_owners(silo.clustered_silo, provider, stream, names, queues)
    found += await explain_queues(provider, stream, names, visible, known, asked_for=name)
    return merged_explanations(found)


async def _of_owners(
    clustered_silo: ClusteredSilo, provider: ProviderCore, stream: StreamId, names: Sequence[str], queues: Sequence[int]
) -> tuple[list[StreamQueueFacts], list[QueueExplanation]]:
    """Ask the owners of queues. Return the facts about the queues that are left for this silo, and the answers."""
    known: list[StreamQueueFacts] = []
    owned: dict[str, list[StreamQueueFacts]] = {}
    for queue in queues:
        facts, owner = _owner(clustered_silo, provider.name, queue)
        is_here = queue in (provider.manager.leases or ())  # the view is older than a lease that has just begun
        if is_here or owner == clustered_silo.name:
            known.append(queue_facts(provider, queue))
        elif names and owner and facts.owner_state is OwnerState.LIVING:
            owned.setdefault(owner, []).append(facts)
        else:
            known.append(facts)
    asking: list[Awaitable[list[QueueExplanation] | None]] = []
    for owner, queues_of_owner in owned.items():
        request = pb.ExplainStreamRequest(provider=provider.name, subscriptions=names)
        request.stream.namespace, request.stream.key = stream.namespace, stream.key
        request.queues.extend(one.queue for one in queues_of_owner)
        asking.append(_ask(clustered_silo, owner, request))
    found: list[QueueExplanation] = []
    for queues_of_owner, answer in zip(owned.values(), await asyncio.gather(*asking), strict=True):
        if answer is None:
            known += [replace(one, owner_state=OwnerState.UNREACHABLE) for one in queues_of_owner]
        elif len(answer) < len(names) * len(queues_of_owner):  # it does not know all of them, or has an older release
            known += queues_of_owner
        else:
            found += answer
    return known, found


async def _ask(
    clustered_silo: ClusteredSilo, owner: str, request: pb.ExplainStreamRequest
) -> list[QueueExplanation] | None:
    """Ask the owner of queues. None: it does not answer."""
    method = "ObservationService/ExplainStream"
    try:
        async with time_limit(OWNER_S):
            answer = await clustered_silo.call(owner, method, request.SerializeToString(), timeout_s=LONGEST_S)
    except (TimeoutError, HeadraceError) as error:
        log.info("silo %r did not explain a stream of provider %r: %r", owner, request.provider, error)
        return None
    return [
        QueueExplanation(one.subscription, one.queue, [Cause(cause.code, cause.evidence) for cause in one.causes])
        for one in pb.ExplainStreamResponse.FromString(answer).explanations
        if one.subscription in request.subscriptions and one.queue in request.queues
    ]


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
