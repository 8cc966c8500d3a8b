"""SubscriptionService: definitions, positions, dead letters and gaps of subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NoReturn, Protocol, TypeVar

from google.protobuf.message import Message

from ...proto.v1 import subscriptions_pb2 as pb
from ...server.access import PEER, Permission
from ...server.methods import MethodKind, ServiceCall, ServiceMethod, parsed
from ...store.schema import MAX_POSITION
from ...streams import wire
from ...streams.background import first_of
from ...streams.errors import Closed, HeadraceError, InvalidArgument, NotFound, Unavailable
from ...streams.identity import StreamId
from ...streams.subscriptions import (
    CONSUMER_SEPARATOR,
    EPHEMERAL,
    Checkpoint,
    DeadLetter,
    Selector,
    SubscriptionDefinition,
    is_consumers_position,
    lowest_positions,
    position_names,
)
from ..consumer_groups import ConsumerGroups
from ..provider_core import ProviderCore
from ..service_limits import SERVICE_LIMITS, ServiceLimits
from ..views import fault_at
from .lookup import TO_KNOW, TO_MANAGE, Providers, create_subscription, provider_of, subscription_of
from .visible import VisibleBounds, sees_everything

SERVICE = "headrace.v1.SubscriptionService"
LETTERS, MAX_LETTERS = 100, 1000
QUEUES_AT_ONCE = 8
"""Queues that one call reads at the same time."""
MAX_PAUSED = 100
MAX_IDS = 10_000
POLL_S = 0.25
"""How often a call that waits reads the position of a subscription that another silo serves, and checks whether its
token was revoked, in seconds."""

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)
_Selectors = Mapping[str, Selector | None]
"""Which dead letters a caller gets: by the subscription's name, a selector of their streams. None: all of that name."""


class QueueOwners(Protocol):
    """The owners of queues in a cluster."""

    def owner(self, provider: str, queue: int) -> str:
        """Return the name of a queue's owner, "" if it has none."""
        ...

    async def call(self, silo: str, method: str, request: bytes) -> bytes:
        """Call a silo, which may be this one. Raise Unavailable, and the errors that the silo raises."""
        ...


class SubscriptionService:
    """`consumers` are the silo's, by provider. `owners` are those of the silo's cluster, None without one."""

    def __init__(
        self,
        providers: Providers,
        consumers: Mapping[str, ConsumerGroups],
        visible: VisibleBounds,
        owners: QueueOwners | None = None,
        limits: ServiceLimits = SERVICE_LIMITS,
    ) -> None:
        self._limits = limits
        self._providers = providers
        self._visible = visible
        self._consumers = consumers
        self._owners = owners

    def methods(self) -> list[ServiceMethod]:
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
        return [ServiceMethod(f"{SERVICE}/{name}", MethodKind.UNARY, handler) for name, handler in handlers.items()]

    # ---- definitions -----------------------------------------------------------------------------------------------

    async def create(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.CreateSubscriptionRequest, message)
        definition = wire.definition_of(request.definition)
        if definition.filter is not None:
            raise InvalidArgument("definition.filter names a function in the silo, which sets it itself: leave it out")
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        created = await create_subscription(call, provider, definition, self._visible)
        return pb.CreateSubscriptionResponse(created=created).SerializeToString()

    async def get(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.GetSubscriptionRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        definition = await subscription_of(call, provider, request.name, TO_KNOW)
        found = pb.Subscription(
            definition=wire.definition_message(definition),
            progress=await self._progress(call, provider, definition),
            consumers=consumer_messages(self._consumers[provider.name], definition),
            **await left_behind(call, provider, definition),
            held=await _held(provider, definition),
            generation=await provider.store.generation(provider.name, definition.name),
        )
        return pb.GetSubscriptionResponse(subscription=found).SerializeToString()

    async def _progress(
        self, call: ServiceCall, provider: ProviderCore, definition: SubscriptionDefinition
    ) -> Sequence[pb.QueueProgress]:
        progress = await _progress(provider, definition)
        if not sees_everything(call.principal):
            for each in progress:
                end = (await self._visible.bounds(call.principal, provider, each.queue)).next
                each.next_offset = min(each.next_offset, end)
                each.watermark = min(each.watermark, end)
                each.end_offset = min(each.end_offset, end)
        return progress

    async def list(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.ListSubscriptionsRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        definitions = [
            wire.definition_message(definition)
            for definition in await provider.store.subscriptions(provider.name)
            if definition.name > request.after_name and is_listed(call, definition)
        ]
        return pb.ListSubscriptionsResponse(definitions=_fitting(definitions, self._limits)).SerializeToString()

    async def delete(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.DeleteSubscriptionRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        permissions = TO_KNOW if request.name.startswith(EPHEMERAL) else TO_MANAGE
        await subscription_of(call, provider, request.name, permissions)
        await provider.delete_subscription(request.name)
        return pb.DeleteSubscriptionResponse().SerializeToString()

    # ---- positions -------------------------------------------------------------------------------------------------

    async def seek(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.SeekSubscriptionRequest, message)
        start = wire.start_of(request.to, "to")
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        definition = await subscription_of(call, provider, request.name, TO_MANAGE)
        await self._visible.check_start(call.principal, provider, definition.selector, start)
        not_moved = await provider.seek(request.name, start, f"asked for by {call.principal}")
        return pb.SeekSubscriptionResponse(not_moved=not_moved).SerializeToString()

    async def await_caught_up(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.AwaitCaughtUpRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_KNOW)
        definition = await subscription_of(call, provider, request.name, TO_KNOW)
        await _while_open(call, _all_caught_up(provider, definition))
        return pb.AwaitCaughtUpResponse().SerializeToString()

    async def resume(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.ResumeStreamRequest, message)
        stream = StreamId(request.namespace, request.key)
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        definition = await subscription_of(call, provider, request.name, TO_MANAGE)
        if self._owners is not None and call.principal is not PEER:
            queues = provider.queues_with(stream)
            owners = {owner for queue in queues if (owner := self._owners.owner(provider.name, queue))}
            if owners:
                answers = [
                    await self._owners.call(owner, "SubscriptionService/ResumeStream", message) for owner in owners
                ]
                resumed = [pb.ResumeStreamResponse.FromString(answer).resumed for answer in answers]
                return pb.ResumeStreamResponse(resumed=any(resumed)).SerializeToString()
        resumed = [await provider.resume(name, stream) for name in await _position_names(provider, definition)]
        return pb.ResumeStreamResponse(resumed=any(resumed)).SerializeToString()

    # ---- dead letters and gaps -------------------------------------------------------------------------------------

    async def dead_letters(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.ListDeadLettersRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        selectors = (
            await _selectors_of_letters(call, provider, request.subscription)
            if request.subscription
            else await _selectors_of_all_letters(call, provider)
        )
        limit = min(request.limit or LETTERS, MAX_LETTERS)
        letters = await _letters(provider, selectors, limit, min(request.after_id, MAX_POSITION), self._limits)
        return pb.ListDeadLettersResponse(dead_letters=_fitting(letters, self._limits)).SerializeToString()

    async def redrive(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.RedriveDeadLettersRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        definition = await subscription_of(call, provider, request.subscription, TO_MANAGE)
        ids = _ids(request.ids) if request.ids else None
        counts = [
            await provider.store.request_redrive(provider.name, name, ids)
            for name in await _position_names(provider, definition)
        ]
        return pb.RedriveDeadLettersResponse(count=sum(counts)).SerializeToString()

    async def delete_dead_letters(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.DeleteDeadLettersRequest, message)
        if request.all == bool(request.ids):
            raise InvalidArgument("say which dead letters to delete: ids, or all, and not both")
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        selectors = await _selectors_of_letters(call, provider, request.subscription)
        ids = None if request.all else _ids(request.ids)
        counts = [
            await provider.store.delete_dead_letters(provider.name, name, ids, selector)
            for name, selector in selectors.items()
        ]
        return pb.DeleteDeadLettersResponse(count=sum(counts)).SerializeToString()

    async def gaps(self, call: ServiceCall, message: bytes) -> bytes:
        request = parsed(pb.ListGapsRequest, message)
        provider = provider_of(call, self._providers, request.provider, TO_MANAGE)
        definition = await subscription_of(call, provider, request.subscription, TO_MANAGE)
        names = await _position_names(provider, definition)
        gaps = [gap for name in names for gap in await provider.store.gaps(provider.name, name)]
        return pb.ListGapsResponse(
            gaps=_fitting(map(wire.gap_message, gaps[request.skip :]), self._limits)
        ).SerializeToString()


async def _position_names(provider: ProviderCore, definition: SubscriptionDefinition) -> Sequence[str]:
    return position_names(definition, await provider.store.subscriptions(provider.name))


def is_listed(call: ServiceCall, definition: SubscriptionDefinition) -> bool:
    """Whether the caller sees it in a list. Subscriptions of single consumers are never listed."""
    allows = call.principal.allows_selector
    return not is_consumers_position(definition) and any(
        allows(permission, definition.selector.pattern) for permission in TO_KNOW
    )


async def positions_of(provider: ProviderCore, definition: SubscriptionDefinition) -> Mapping[int, int]:
    """Return the lowest unfinished offset of each queue, without paused streams. Of several consumers with mode
    broadcast, the last one counts."""
    lowest: dict[int, int] = {}
    for name in await _position_names(provider, definition):
        for queue, at in (await _positions(provider, name)).items():
            lowest[queue] = min(at.awaited, lowest.get(queue, at.awaited))
    return lowest


async def _progress(provider: ProviderCore, definition: SubscriptionDefinition) -> Sequence[pb.QueueProgress]:
    names = await _position_names(provider, definition)
    lowest = lowest_positions([await _positions(provider, name) for name in names])
    some = asyncio.Semaphore(QUEUES_AT_ONCE)

    async def one(queue: int, at: Checkpoint) -> pb.QueueProgress:
        async with some:
            return await _progress_in(provider, queue, names, at)

    return await asyncio.gather(*(one(queue, at) for queue, at in lowest.items()))


async def _progress_in(provider: ProviderCore, queue: int, names: Sequence[str], at: Checkpoint) -> pb.QueueProgress:
    try:
        end = (await provider.ends(queue, [at.watermark]))[at.watermark]
        fault = await _fault(provider, queue, names, at)
    except HeadraceError as error:
        end, fault = 0, f"its end is not known: {error}"
    return pb.QueueProgress(
        queue=queue,
        next_offset=at.next_offset,
        watermark=at.watermark,
        end_offset=end,
        streams_behind=len(at.behind),
        streams_paused=sum(bool(one.paused) for one in at.behind.values()),
        paused=islice(_paused(at), MAX_PAUSED),
        fault=fault,
    )


async def _fault(provider: ProviderCore, queue: int, names: Sequence[str], at: Checkpoint) -> str:
    """Return the fault that stops a subscription in a queue, "" without one. `names`: the names of its positions.

    The agent knows the fault of a subscription that this process serves there. Otherwise the queue is read.
    """
    agent = provider.manager.agents[queue]
    if all(name in agent.deliveries for name in names):
        return next((fault for name in names if (fault := agent.fault_of(name))), "")
    return await fault_at(provider.adapter, queue, [at])


def _paused(at: Checkpoint) -> Iterator[pb.PausedStream]:
    for stream, behind in at.behind.items():
        if behind.paused:
            name = pb.StreamName(namespace=stream.namespace, key=stream.key)
            yield pb.PausedStream(stream=name, reason=behind.paused)


async def _held(provider: ProviderCore, definition: SubscriptionDefinition) -> pb.Held | None:
    """Why this silo's circuit breaker holds it, or one of its consumers with mode broadcast; None if it does not."""
    for name in await _position_names(provider, definition):
        served = provider.manager.served.get(name)
        if served is not None and (held := served.gate.held) is not None:
            return pb.Held(**held._asdict())
    return None


async def left_behind(call: ServiceCall, provider: ProviderCore, definition: SubscriptionDefinition) -> dict[str, int]:
    """Count the dead letters that the caller gets, and the gap records."""
    selector = _selector_of_letters(call, definition)
    counts = [
        await provider.store.count_left_behind(provider.name, name, selector)
        for name in await _position_names(provider, definition)
    ]
    return {"dead_letters": sum(letters for letters, _ in counts), "gaps": sum(gaps for _, gaps in counts)}


async def _positions(provider: ProviderCore, name: str) -> Mapping[int, Checkpoint]:
    """The positions: the present ones if this process serves the subscription, otherwise the saved ones."""
    served = provider.manager.served.get(name)
    if served is None:
        return await provider.store.checkpoints(provider.name, name)
    now = {queue: delivery.progress.checkpoint() for queue, delivery in served.deliveries.items()}
    if provider.leased and served.service.stored:  # other silos serve other queues
        return {**await provider.store.checkpoints(provider.name, name), **now}
    return {**served.saved, **now}


def consumer_messages(consumers: ConsumerGroups, definition: SubscriptionDefinition) -> list[pb.Consumer]:
    """Describe the consumers that are attached at this silo."""
    return [
        pb.Consumer(
            id=member.id,
            connected=member.connected,
            credit_events=max(member.credit_events, 0),
            credit_bytes=max(member.credit_bytes, 0),
            in_flight_events=member.in_flight_events,
            queues=member.queues,
            blocked=member.blocked,
        )
        for member in consumers.members(definition)
    ]


async def _all_caught_up(provider: ProviderCore, definition: SubscriptionDefinition) -> None:
    ends = {queue: await provider.due_end(queue) for queue in range(provider.queues)}
    for name in await _position_names(provider, definition):
        await caught_up(provider, name, ends)


async def caught_up(provider: ProviderCore, name: str, ends: Mapping[int, int]) -> None:
    """Return when all events below `ends` are done, in any process."""
    left = dict(ends)
    while True:
        positions = await _positions(provider, name)
        queue = next((queue for queue, at in positions.items() if not _done(at, left[queue])), None)
        if queue is None:
            return
        served = provider.manager.served.get(name)
        delivery = served.deliveries.get(queue) if served else None
        if delivery is None:
            await asyncio.sleep(POLL_S)
            continue
        try:
            await delivery.waiters.wait_until(left[queue])
            left[queue] = 0
        except Closed:  # it was moved, or its agent stopped: look again
            await asyncio.sleep(POLL_S)


def _done(at: Checkpoint, end: int) -> bool:
    return at.next_offset >= end and all(behind.paused or behind.token.offset >= end for behind in at.behind.values())


async def _while_open(call: ServiceCall, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a long wait. Raise Unavailable if the silo stops meanwhile, Unauthenticated if the token is
    revoked."""

    async def refuse() -> NoReturn:
        while not call.closing.is_set():
            call.check_valid()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await call.closing.wait()
        raise Unavailable("the silo stops: ask again when it is back, or ask another silo")

    return await first_of(work, refuse(), name="headrace call")


async def _selectors_of_letters(call: ServiceCall, provider: ProviderCore, name: str) -> _Selectors:
    """Return the dead letters of one subscription that the caller gets. If the subscription was deleted, its dead
    letters stay, and only a caller that may manage all namespaces gets them. Raises as `subscription_of`."""
    try:
        definition = await subscription_of(call, provider, name, TO_MANAGE)
    except NotFound:  # raised only if the caller may know all names
        call.principal.require_everywhere(Permission.MANAGE)
        if not await provider.store.dead_letters(provider.name, name, limit=1):
            raise
        return {name: None}
    return dict.fromkeys(await _position_names(provider, definition), _selector_of_letters(call, definition))


async def _selectors_of_all_letters(call: ServiceCall, provider: ProviderCore) -> _Selectors | None:
    """Return the dead letters of all subscriptions that the caller gets. None: all, also of deleted subscriptions."""
    if call.principal.allows_everywhere(Permission.MANAGE):
        return None
    allows = call.principal.allows_selector
    stored = await provider.store.subscriptions(provider.name)
    return {one.name: one.selector for one in stored if allows(Permission.MANAGE, one.selector.pattern)}


def _selector_of_letters(call: ServiceCall, definition: SubscriptionDefinition) -> Selector | None:
    """Return the selector of the dead letters that the caller gets; None if it gets all of the subscription's name.

    Dead letters that the subscription does not select are of a deleted subscription of the same name. They may be of
    any namespace, so only a caller that may manage all namespaces gets them.
    """
    return None if call.principal.allows_everywhere(Permission.MANAGE) else definition.selector


async def _letters(
    provider: ProviderCore, selectors: _Selectors | None, limit: int, after_id: int, limits: ServiceLimits
) -> list[pb.DeadLetter]:
    """Return the first of these dead letters, by id: at most `limit`, and at most one message."""
    name = next(iter(selectors)) if selectors and len(selectors) == 1 else None
    matchers = {name: selector and selector.matcher() for name, selector in (selectors or {}).items()}
    letters: list[pb.DeadLetter] = []
    size = 0
    while len(letters) < limit and size < limits.list_bytes:
        # Several names together: pages of single names would end at different ids.
        found = await provider.store.dead_letters(provider.name, name, limit=limits.letters_at_once, after_id=after_id)
        wanted = [letter for letter in found if selectors is None or _is_matched(letter, matchers)]
        letters += map(_letter_message, wanted)
        size += sum(len(letter.payload) for letter in wanted)
        if len(found) < limits.letters_at_once:
            break
        after_id = found[-1].id
    return letters[:limit]


def _is_matched(letter: DeadLetter, matchers: Mapping[str, Callable[[StreamId], bool] | None]) -> bool:
    if letter.subscription not in matchers:
        return False
    matches = matchers[letter.subscription]
    return matches is None or matches(letter.stream)


def _letter_message(letter: DeadLetter) -> pb.DeadLetter:
    message = wire.dead_letter_message(letter)
    message.subscription = letter.subscription.partition(CONSUMER_SEPARATOR)[0]
    return message


def _ids(given: Sequence[int]) -> list[int]:
    if len(given) > MAX_IDS:
        raise InvalidArgument(f"ids: at most {MAX_IDS:,} in one request, not {len(given):,}: send several")
    return [number for number in given if number <= MAX_POSITION]  # the store has no others


def _fitting(messages: Iterable[_M], limits: ServiceLimits) -> list[_M]:
    """Return the first messages that fit into one response: at least one."""
    fitting: list[_M] = []
    size = 0
    for message in messages:
        size += message.ByteSize()
        if fitting and size > limits.list_bytes:
            break
        fitting.append(message)
    return fitting
