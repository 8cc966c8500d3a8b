"""SubscriptionService: definitions, positions, and what subscriptions gave up on or do not get."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message

from ...proto.v1 import subscriptions_pb2 as pb
from ...streams import wire
from ...streams.errors import Closed, InvalidArgument, NotFound, Unavailable
from ...streams.identity import StreamId
from ...streams.schema import MAX_POSITION
from ...streams.subscriptions import (
    CONSUMER_SEPARATOR,
    EPHEMERAL,
    Checkpoint,
    DeadLetter,
    SubscriptionDefinition,
    is_parent,
)
from ..access import PEER, Permission
from ..consumers import Consumers
from ..provider import Provider
from ..relay.relay import Silos
from .guard import Call, Kind, Method, parsed
from .lookup import TO_KNOW, TO_MANAGE, Providers, create_subscription, provider_of, subscription_of

SERVICE = "headrace.v1.SubscriptionService"
LIST_BYTES = 3 << 20
"""A list has no more, where it has more than one element: gRPC clients take messages of 4 MiB."""
LETTERS, MAX_LETTERS = 100, 1000
MAX_PAUSED = 100
MAX_IDS = 10_000
LETTERS_AT_ONCE = 20
"""So many are read from the store at a time, since each may have a MiB."""
LOOK_S = 0.25
"""How often the position of a subscription that is not served here is looked at."""

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)


class SubscriptionService:
    """`consumers` are the silo's, by provider. With `silos`, it is one of them."""

    def __init__(self, providers: Providers, consumers: Mapping[str, Consumers], silos: Silos | None = None) -> None:
        self._providers = providers
        self._consumers = consumers
        self._silos = silos

    def methods(self) -> list[Method]:
        handlers = {
            "CreateSubscription": self.create,
            "GetSubscription": self.get,
            "ListSubscriptions": self.list,
            "DeleteSubscription": self.delete,
            "SeekSubscription": self.seek,
            "AwaitCaughtUp": self.await_caught_up,
            "ResumeStream": self.resume,
            "ListDeadLetters": self.dead_letters,
            "RedriveDeadLetters": self.redrive,
            "DeleteDeadLetters": self.delete_dead_letters,
            "ListGaps": self.gaps,
        }
        return [Method(f"{SERVICE}/{name}", Kind.UNARY, handler) for name, handler in handlers.items()]

    # ---- definitions -----------------------------------------------------------------------------------------------

    async def create(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.CreateSubscriptionRequest, message)
        definition = wire.definition_of(request.definition)
        if definition.filter is not None:
            raise InvalidArgument("definition.filter names a function in the silo, which sets it itself: leave it out")
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        created = await create_subscription(call, provider, definition)
        return pb.CreateSubscriptionResponse(created=created).SerializeToString()

    async def get(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.GetSubscriptionRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        definition = await subscription_of(call, provider, request.name, TO_KNOW)
        found = pb.Subscription(
            definition=wire.definition_message(definition),
            progress=await _progress(provider, definition),
            consumers=_consumers(self._consumers[provider.name], definition),
            **await _left_behind(provider, definition),
        )
        return pb.GetSubscriptionResponse(subscription=found).SerializeToString()

    async def list(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.ListSubscriptionsRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        definitions = [
            wire.definition_message(definition)
            for definition in await provider.store.subscriptions(provider.name)
            if definition.name > request.after_name and _visible(call, definition)
        ]
        return pb.ListSubscriptionsResponse(definitions=_fitting(definitions)).SerializeToString()

    async def delete(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.DeleteSubscriptionRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        permissions = TO_KNOW if request.name.startswith(EPHEMERAL) else TO_MANAGE
        await subscription_of(call, provider, request.name, permissions)
        await provider.delete_subscription(request.name)
        return pb.DeleteSubscriptionResponse().SerializeToString()

    # ---- positions -------------------------------------------------------------------------------------------------

    async def seek(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.SeekSubscriptionRequest, message)
        start = wire.start_of(request.to, "to")
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        definition = await subscription_of(call, provider, request.name, TO_MANAGE)
        for name in await _holders(provider, definition):
            await provider.seek(name, start, f"asked for by {call.principal}")
        return pb.SeekSubscriptionResponse().SerializeToString()

    async def await_caught_up(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.AwaitCaughtUpRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        definition = await subscription_of(call, provider, request.name, TO_KNOW)
        await _unless_closing(call, _all_caught_up(provider, definition))
        return pb.AwaitCaughtUpResponse().SerializeToString()

    async def resume(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.ResumeStreamRequest, message)
        stream = StreamId(request.namespace, request.key)
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        definition = await subscription_of(call, provider, request.name, TO_MANAGE)
        if self._silos is not None and call.principal is not PEER:
            owner = self._silos.owner(provider.name, provider.queue_of(stream))
            if owner:
                return await self._silos.call(owner, "SubscriptionService/ResumeStream", message)
        resumed = [await provider.resume(name, stream) for name in await _holders(provider, definition)]
        return pb.ResumeStreamResponse(resumed=any(resumed)).SerializeToString()

    # ---- dead letters and gaps -------------------------------------------------------------------------------------

    async def dead_letters(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.ListDeadLettersRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        names = (
            await _names_of_letters(call, provider, request.subscription)
            if request.subscription
            else await _names_of_all_letters(call, provider)
        )
        limit = min(request.limit or LETTERS, MAX_LETTERS)
        letters = await _letters(provider, names, limit, min(request.after_id, MAX_POSITION))
        return pb.ListDeadLettersResponse(dead_letters=_fitting(letters)).SerializeToString()

    async def redrive(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.RedriveDeadLettersRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        definition = await subscription_of(call, provider, request.subscription, TO_MANAGE)
        ids = _ids(request.ids) if request.ids else None
        counts = [
            await provider.store.request_redrive(provider.name, name, ids)
            for name in await _holders(provider, definition)
        ]
        return pb.RedriveDeadLettersResponse(count=sum(counts)).SerializeToString()

    async def delete_dead_letters(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.DeleteDeadLettersRequest, message)
        if request.all == bool(request.ids):
            raise InvalidArgument("say which dead letters to delete: ids, or all, and not both")
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        names = await _names_of_letters(call, provider, request.subscription)
        ids = None if request.all else _ids(request.ids)
        counts = [await provider.store.delete_dead_letters(provider.name, name, ids) for name in names]
        return pb.DeleteDeadLettersResponse(count=sum(counts)).SerializeToString()

    async def gaps(self, call: Call, message: bytes) -> bytes:
        request = parsed(pb.ListGapsRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        definition = await subscription_of(call, provider, request.subscription, TO_MANAGE)
        names = await _holders(provider, definition)
        gaps = [gap for name in names for gap in await provider.store.gaps(provider.name, name)]
        return pb.ListGapsResponse(gaps=_fitting(map(wire.gap_message, gaps[request.skip :]))).SerializeToString()


async def _holders(provider: Provider, definition: SubscriptionDefinition) -> Sequence[str]:
    """Under which names positions are held: its own, or with mode broadcast those of its consumers."""
    if not is_parent(definition):
        return [definition.name]
    own = f"{definition.name}{CONSUMER_SEPARATOR}"
    stored = await provider.store.subscriptions(provider.name)
    return [each.name for each in stored if each.name.startswith(own)]


def _visible(call: Call, definition: SubscriptionDefinition) -> bool:
    """Whether it is listed: those of the consumers of another one are not."""
    allows = call.principal.allows_selector
    return CONSUMER_SEPARATOR not in definition.name and any(
        allows(permission, definition.selector.pattern) for permission in TO_KNOW
    )


async def _progress(provider: Provider, definition: SubscriptionDefinition) -> Sequence[pb.QueueProgress]:
    lowest: dict[int, Checkpoint] = {}
    for name in await _holders(provider, definition):
        for queue, at in (await _positions(provider, name)).items():
            if queue not in lowest or at.watermark < lowest[queue].watermark:
                lowest[queue] = at
    return [
        pb.QueueProgress(
            queue=queue,
            next_offset=at.next_offset,
            watermark=at.watermark,
            end_offset=(await provider.ends(queue, [at.watermark]))[at.watermark],
            streams_behind=len(at.behind),
            streams_paused=sum(bool(one.paused) for one in at.behind.values()),
            paused=islice(_paused(at), MAX_PAUSED),
        )
        for queue, at in sorted(lowest.items())
    ]


def _paused(at: Checkpoint) -> Iterator[pb.PausedStream]:
    for stream, behind in at.behind.items():
        if behind.paused:
            name = pb.StreamName(namespace=stream.namespace, key=stream.key)
            yield pb.PausedStream(stream=name, reason=behind.paused)


async def _left_behind(provider: Provider, definition: SubscriptionDefinition) -> dict[str, int]:
    counts = [await provider.store.left_behind(provider.name, name) for name in await _holders(provider, definition)]
    return {"dead_letters": sum(letters for letters, _ in counts), "gaps": sum(gaps for _, gaps in counts)}


async def _positions(provider: Provider, name: str) -> Mapping[int, Checkpoint]:
    """Where it stands: now, where it is served here, else as it was saved."""
    served = provider.manager.served.get(name)
    if served is None:
        return await provider.store.checkpoints(provider.name, name)
    now = {queue: delivery.checkpoint() for queue, delivery in served.deliveries.items()}
    if provider.leased and served.service.stored:  # other silos serve other queues
        return {**await provider.store.checkpoints(provider.name, name), **now}
    return served.saved | now


def _consumers(consumers: Consumers, definition: SubscriptionDefinition) -> list[pb.Consumer]:
    return [
        pb.Consumer(
            id=member.id,
            connected=member.connected,
            credit_events=max(member.credit_events, 0),
            credit_bytes=max(member.credit_bytes, 0),
            in_flight_events=member.in_flight_events,
            queues=member.queues,
        )
        for member in consumers.members(definition)
    ]


async def _all_caught_up(provider: Provider, definition: SubscriptionDefinition) -> None:
    ends = {queue: await provider.due_end(queue) for queue in range(provider.queues)}
    for name in await _holders(provider, definition):
        await caught_up(provider, name, ends)


async def caught_up(provider: Provider, name: str, ends: Mapping[int, int]) -> None:
    """Return when everything below `ends` is done, whoever does it."""
    left = dict(ends)
    while True:
        positions = await _positions(provider, name)
        queue = next((queue for queue, at in positions.items() if not _done(at, left[queue])), None)
        if queue is None:
            return
        served = provider.manager.served.get(name)
        delivery = served.deliveries.get(queue) if served else None
        if delivery is None:
            await asyncio.sleep(LOOK_S)
            continue
        try:
            await delivery.wait_until(left[queue])
            left[queue] = 0
        except Closed:  # it is moved, or its agent is stopped: look again
            await asyncio.sleep(LOOK_S)


def _done(at: Checkpoint, end: int) -> bool:
    return at.next_offset >= end and all(behind.paused or behind.token.offset >= end for behind in at.behind.values())


async def _unless_closing(call: Call, work: Coroutine[Any, Any, _T]) -> _T:
    """The outcome of a long wait. Raises Unavailable where the silo stops meanwhile."""
    working = asyncio.create_task(work, name="headrace call")
    closing = asyncio.create_task(call.closing.wait(), name="headrace call end")
    try:
        await asyncio.wait([working, closing], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Unavailable("the silo stops: ask again when it is back, or another one")
        return working.result()
    finally:
        for task in (working, closing):
            task.cancel()
        await asyncio.gather(working, closing, return_exceptions=True)


async def _names_of_letters(call: Call, provider: Provider, name: str) -> Sequence[str]:
    """Under which names a subscription's dead letters are, which stay when it is deleted. Then only who may manage all
    namespaces may know of them. Raises as `subscription_of`."""
    try:
        definition = await subscription_of(call, provider, name, TO_MANAGE)
    except NotFound:  # said only to who may know everything
        call.principal.require_everywhere(Permission.MANAGE)
        if not await provider.store.dead_letters(provider.name, name, limit=1):
            raise
        return [name]
    return await _holders(provider, definition)


async def _names_of_all_letters(call: Call, provider: Provider) -> Sequence[str] | None:
    """Of all that the caller may manage; None where that is every one, also those that are deleted."""
    if call.principal.allows_everywhere(Permission.MANAGE):
        return None
    allows = call.principal.allows_selector
    stored = await provider.store.subscriptions(provider.name)
    return [one.name for one in stored if allows(Permission.MANAGE, one.selector.pattern)]


async def _letters(provider: Provider, names: Sequence[str] | None, limit: int, after_id: int) -> list[pb.DeadLetter]:
    """The first ones under these names, or of all, by id: up to `limit`, and no more than fill a message."""
    name = names[0] if names and len(names) == 1 else None
    letters: list[pb.DeadLetter] = []
    size = 0
    while len(letters) < limit and size < LIST_BYTES:
        # Of several names together, for each by itself would end at another id.
        found = await provider.store.dead_letters(provider.name, name, limit=LETTERS_AT_ONCE, after_id=after_id)
        wanted = [letter for letter in found if names is None or letter.subscription in names]
        letters += map(_letter_message, wanted)
        size += sum(len(letter.payload) for letter in wanted)
        if len(found) < LETTERS_AT_ONCE:
            break
        after_id = found[-1].id
    return letters[:limit]


def _letter_message(letter: DeadLetter) -> pb.DeadLetter:
    message = wire.dead_letter_message(letter)
    message.subscription = letter.subscription.partition(CONSUMER_SEPARATOR)[0]
    return message


def _ids(given: Sequence[int]) -> list[int]:
    if len(given) > MAX_IDS:
        raise InvalidArgument(f"ids: at most {MAX_IDS:,} in one request, not {len(given):,}: send several")
    return [number for number in given if number <= MAX_POSITION]  # the store has no others


def _fitting(messages: Iterable[_M]) -> list[_M]:
    """As many of the first ones as fit into a message: at least one."""
    fitting: list[_M] = []
    size = 0
    for message in messages:
        size += message.ByteSize()
        if fitting and size > LIST_BYTES:
            break
        fitting.append(message)
    return fitting
