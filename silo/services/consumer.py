"""ConsumerService: consuming through a stream of credit and batches, or by pulling.

A session is a member of its subscription's group for the length of a `Subscribe` call. It reads what the consumer says
and applies it at once; one task writes, whenever there is something to say or to deliver. Batches go from cache to wire
as they were published.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from ...agents import Events, Group, Member, Parcel, taken_over
from ...proto.v1 import consumer_pb2 as pb
from ...server.access import PEER
from ...server.guard import Call, Kind, Method, check_fields, parsed
from ...store.rows import checkpoint_of_token, position_token
from ...streams import wire
from ...streams.errors import HeadraceError, InvalidArgument, LimitExceeded, Unavailable
from ...streams.identity import SequenceToken
from ...streams.subscriptions import Checkpoint, GapRecord, Mode, SubscriptionDefinition, check_consumer
from ..consumers import AttachedConsumer, Consumers
from ..provider_core import ProviderCore
from ..relay.pulls import LOOK_S, PULL_BYTES, PULL_EVENTS, RelayPulls, pull_wait_s
from ..relay.relay import AT_ONCE, HEARTBEATS, Relay, Relays, check_marks
from ..relay.session import SETTLE_S, STOPS, RelaySession
from .lookup import TO_CONSUME, Providers, create_subscription, provider_of, subscription_of
from .visible import VisibleBounds

SERVICE = "headrace.v1.ConsumerService"
MAX_DELAY_MS = 7 * 24 * 3600 * 1000
MAX_REASON = 4096
MAX_REFUSED = 1000
"""Refusals that wait to be told; more are dropped."""
MAX_GAPS = 100
LOST_END = "the position is past the end of its queue, which has lost it or is another one"


class Opening(NamedTuple):
    provider: ProviderCore
    consumers: Consumers
    definition: SubscriptionDefinition
    place: AttachedConsumer
    gaps: Sequence[GapRecord]
    """That show from where the client wants to go on."""
    moves: int
    """How often the subscription was moved so far."""


class Wanted(NamedTuple):
    """What a consumer asks for."""

    provider: ProviderCore
    definition: SubscriptionDefinition
    consumer: str
    timeout_s: float
    positions: dict[int, Checkpoint] | None
    """Where the client keeps them."""
    gaps: Sequence[GapRecord]


class ConsumerService:
    """`consumers` are the silo's, by provider. With `relays`, the silo is one of several: consumers are served by all
    of them, and other silos speak for theirs here."""

    def __init__(
        self,
        providers: Providers,
        consumers: Mapping[str, Consumers],
        visible: VisibleBounds,
        relays: Relays | None = None,
    ) -> None:
        self._providers = providers
        self._visible = visible
        self._consumers = consumers
        self._relays = relays
        self._pulls: dict[Member, Pulls] = {}
        self._joining = set[tuple[Consumers, str, str]]()
        """Consumers whose first Pull is joining the group: subscription and consumer."""
        self._relay_pulls: dict[tuple[str, str, str], RelayPulls] = {}

    async def aclose(self) -> None:
        await asyncio.gather(*(pulls.aclose() for pulls in list(self._relay_pulls.values())))

    def methods(self) -> Sequence[Method]:
        return (
            Method(f"{SERVICE}/Subscribe", Kind.STREAM, self.subscribe),
            Method(f"{SERVICE}/Pull", Kind.UNARY, self.pull),
            Method(f"{SERVICE}/Acknowledge", Kind.UNARY, self.acknowledge, while_closing=True),
        )

    # ---- Subscribe -------------------------------------------------------------------------------------------------

    async def subscribe(self, call: Call) -> None:
        message = await call.read()
        request = parsed(pb.SubscribeRequest, message or b"")
        if not request.HasField("open"):
            raise InvalidArgument("the first request of Subscribe says what to subscribe to: set its field open")
        check_fields(request.open)
        if self._relays is not None and call.principal is not PEER:
            await self._relay(call, request, self._relays)
            return
        opening = await self._open(call, request.open)
        session = Session(call, opening, keeps=request.open.keeps_positions)
        await session.run(request)

    async def _open(self, call: Call, request: pb.Open) -> Opening:
        """Whoever is refused has created nothing."""
        wanted = await self._wanted(call, request)
        provider, definition, consumer, timeout_s, positions, found = wanted
        consumers = self._consumers[provider.name]
        place = await consumers.join(
            definition,
            consumer,
            timeout_s,
            positions,
            pulls=request.pulls,
            concurrent=request.concurrent,
            client=_client(call),
        )
        connection, gaps = place.member.connections, list(found)
        place.member.on_gap = gaps.append  # until there is a session to tell
        moves = await provider.moves(place.group.definition.name)
        if place.member.connections != connection:  # nobody could be told: there was no session yet
            raise taken_over(consumer)
        return Opening(provider, consumers, definition, place, gaps, moves)

    async def _wanted(self, call: Call, request: pb.Open) -> Wanted:
        """What the consumer asks for, which is allowed, and exists."""
        provider = provider_of(call, self._providers, request.provider, TO_CONSUME)
        definition = await self._definition(call, provider, request)
        consumers, consumer = self._consumers[provider.name], _consumer(request, definition)
        timeout_s = request.session_timeout_ms / 1000
        consumers.check(definition, consumer, timeout_s, keeps_positions=request.keeps_positions)
        positions = _positions(request, provider, definition)
        gaps = [] if positions is None else await _step_back(positions, provider, definition)
        if request.HasField("definition"):
            await create_subscription(call, provider, definition, self._visible)
        return Wanted(provider, definition, consumer, timeout_s, positions, gaps)

    async def _definition(self, call: Call, provider: ProviderCore, request: pb.Open) -> SubscriptionDefinition:
        """The one that the request has, which may have to be created, or that of the subscription it names."""
        if not request.HasField("definition"):
            return await subscription_of(call, provider, request.subscription, TO_CONSUME)
        definition = wire.definition_of(request.definition)
        if request.subscription not in ("", definition.name):
            raise InvalidArgument(
                f"open names subscription {request.subscription!r} and defines {definition.name!r}: leave one out"
            )
        # Both may be needed: to subscribe is needed to consume, whoever may create it.
        call.principal.require_selector(TO_CONSUME[0], definition.selector.pattern)
        return definition

    async def _relay(self, call: Call, request: pb.SubscribeRequest, relays: Relays) -> None:
        """All silos deliver to the consumer, through this one."""
        wanted = await self._wanted(call, request.open)
        consumers = self._consumers[wanted.provider.name]
        positions = await consumers.prepare(wanted.definition, wanted.consumer, wanted.positions)
        timeout_s = consumers.timeout(wanted.timeout_s)
        opened = pb.Opened(
            consumer=wanted.consumer,
            session_timeout_ms=round(timeout_s * 1000),
            heartbeat_ms=round(timeout_s / HEARTBEATS * 1000),
            definition=wire.definition_message(wanted.definition),
            moves=await consumers.moves(wanted.definition, wanted.consumer),
        )
        async with relays.opened(
            wanted.provider,
            wanted.definition,
            wanted.consumer,
            timeout_s,
            positions,
            concurrent=request.open.concurrent,
        ) as relay:
            relay.gaps.extend(map(wire.gap_message, wanted.gaps))
            bound = wanted.definition.mode is Mode.BOUND
            await RelaySession(call, relay, opened, bound=bound).run(request)

    # ---- Pull and Acknowledge --------------------------------------------------------------------------------------

    async def pull(self, call: Call, encoded: bytes) -> bytes:
        request = parsed(pb.PullRequest, encoded)
        check_consumer(request.consumer)
        provider = provider_of(call, self._providers, request.provider, TO_CONSUME)
        definition = await subscription_of(call, provider, request.subscription, TO_CONSUME)
        consumers = self._consumers[provider.name]
        if request.leave:
            return await self._leave(request, provider, definition)
        if self._relays is not None:
            return await self._relay_pull(call, request, provider, definition, self._relays)
        place = consumers.find(definition, request.consumer)
        pulls = None if place is None else self._pulls.get(place.member)
        if place is None or pulls is None:
            place = await self._join(call, request, consumers, definition)
            pulls = self._pulls[place.member] = Pulls(place, self._pulls)
        place.member.timeout_s = consumers.timeout(request.session_timeout_ms / 1000)
        refused = await pulls.apply(request.acknowledgements, request.rejections)
        frames = await pulls.wait(call, request)
        notices = pb.PullResponse(refused=refused, gaps=map(wire.gap_message, pulls.take_gaps()))
        return b"".join((*frames, notices.SerializeToString()))

    async def _join(
        self, call: Call, request: pb.PullRequest, consumers: Consumers, definition: SubscriptionDefinition
    ) -> AttachedConsumer:
        """Make the caller a member. A second call that joins meanwhile is refused; it would take over the first."""
        key = consumers, definition.name, request.consumer
        if key in self._joining:
            raise waits_already(request.consumer)
        self._joining.add(key)
        try:
            timeout_s = request.session_timeout_ms / 1000
            return await consumers.join(definition, request.consumer, timeout_s, client=_client(call))
        finally:
            self._joining.discard(key)

    async def _leave(
        self, request: pb.PullRequest, provider: ProviderCore, definition: SubscriptionDefinition
    ) -> bytes:
        """A consumer that pulls ends in order. Acknowledgements of a consumer that is not known are refused."""
        consumers = self._consumers[provider.name]
        relayed = self._relay_pulls.get((provider.name, definition.name, request.consumer))
        if relayed is not None and not relayed.over:
            return await relayed.leave(request)
        place = consumers.find(definition, request.consumer)
        pulls = None if place is None else self._pulls.get(place.member)
        if pulls is None:
            refused = list(map(_refusal, (*request.acknowledgements, *request.rejections)))
        else:
            refused = await pulls.apply(request.acknowledgements, request.rejections)
            pulls.leave()
            await consumers.save()
        return pb.PullResponse(refused=refused).SerializeToString()

    async def _relay_pull(
        self,
        call: Call,
        request: pb.PullRequest,
        provider: ProviderCore,
        definition: SubscriptionDefinition,
        relays: Relays,
    ) -> bytes:
        consumers, timeout_s = self._consumers[provider.name], request.session_timeout_ms / 1000
        key = provider.name, definition.name, request.consumer
        pulls = self._relay_pulls.get(key)
        if pulls is None or pulls.over:
            consumers.check(definition, request.consumer, timeout_s, keeps_positions=False)
            timeout_s = consumers.timeout(timeout_s)

            @asynccontextmanager
            async def opening() -> AsyncGenerator[Relay]:
                await consumers.prepare(definition, request.consumer, None)
                async with relays.opened(provider, definition, request.consumer, timeout_s, None, pulls=True) as relay:
                    yield relay

            pulls = self._relay_pulls[key] = RelayPulls(opening(), timeout_s)
            pulls.on_over = partial(self._forget_pulls, key, pulls)
        return await pulls.pull(call, request)

    def _forget_pulls(self, key: tuple[str, str, str], pulls: RelayPulls) -> None:
        if self._relay_pulls.get(key) is pulls:
            del self._relay_pulls[key]

    async def acknowledge(self, call: Call, encoded: bytes) -> bytes:
        request = parsed(pb.AcknowledgeRequest, encoded)
        provider = provider_of(call, self._providers, request.provider, TO_CONSUME)
        definition = await subscription_of(call, provider, request.subscription, TO_CONSUME)
        if self._relays is not None and call.principal is not PEER:
            return await self._relays.acknowledge(request)
        place = self._consumers[provider.name].find(definition, request.consumer)
        if place is None:
            everything = (*request.acknowledgements, *request.rejections)
            return pb.AcknowledgeResponse(refused=map(_refusal, everything)).SerializeToString()
        place.group.heard(place.member)
        refused = await apply(place, request.acknowledgements, request.rejections)
        return pb.AcknowledgeResponse(refused=refused).SerializeToString()


async def apply(
    place: AttachedConsumer, acknowledgements: Sequence[pb.Acknowledgement], rejections: Sequence[pb.Rejection]
) -> list[pb.Refusal]:
    """What a consumer says about what it holds. Returns what it does not hold. Others have their turn in between.

    Raises InvalidArgument for what cannot be meant; what is before it counts.
    """
    check_marks(len(acknowledgements) + len(rejections))
    refused: list[pb.Refusal] = []
    for first in range(0, len(acknowledgements), AT_ONCE):
        some = acknowledgements[first : first + AT_ONCE]
        refused += [_refusal(each) for each in some if not _acknowledge(place, each)]
        if len(some) == AT_ONCE:
            await asyncio.sleep(0)
    for first in range(0, len(rejections), AT_ONCE):
        some = rejections[first : first + AT_ONCE]
        refused += [_refusal(each) for each in some if not _reject(place, each)]
        if len(some) == AT_ONCE:
            await asyncio.sleep(0)
    return refused


def _acknowledge(place: AttachedConsumer, each: pb.Acknowledgement) -> bool:
    events = Events(each.queue, each.offset, each.index, each.count)
    return place.group.acknowledge(place.member, events, up_to=each.up_to)


def _reject(place: AttachedConsumer, each: pb.Rejection) -> bool:
    if each.delay_ms > MAX_DELAY_MS:
        raise InvalidArgument(f"delay_ms of a rejection is at most {MAX_DELAY_MS:,}, not {each.delay_ms:,}")
    events = Events(each.queue, each.offset, each.index, each.count)
    delay_s = each.delay_ms / 1000 if each.HasField("delay_ms") else None
    reason = each.reason[:MAX_REASON] or "rejected by its consumer"
    return place.group.reject(place.member, events, reason, delay_s, unavailable=each.unavailable)


def waits_already(consumer: str) -> LimitExceeded:
    return LimitExceeded(f"consumer {consumer!r} waits in another call already: wait for that one first")


def _client(call: Call) -> str | None:
    """The connection for which bytes count that wait to be sent. A consumer of another silo counts by itself, because
    all consumers of that silo share its connection."""
    return None if call.principal is PEER else call.peer


def _refusal(each: pb.Acknowledgement | pb.Rejection) -> pb.Refusal:
    return pb.Refusal(queue=each.queue, offset=each.offset, index=each.index)


def _consumer(request: pb.Open, definition: SubscriptionDefinition) -> str:
    """The consumer's id, or one that is made for it."""
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
    """A token may name streams, and its bearer may write it: it must not lead to others than the subscription's."""
    selects = definition.selector.matcher()
    for queue, checkpoint in positions.items():
        for stream in checkpoint.behind:
            if not selects(stream) or provider.queue_of(stream) != queue:
                raise InvalidArgument(
                    f"open.positions: the token for queue {queue} is of another subscription: give each back as it came"
                )


async def _step_back(
    positions: dict[int, Checkpoint], provider: ProviderCore, definition: SubscriptionDefinition
) -> list[GapRecord]:
    """A position past the end of its queue goes back to it: what is published next gets those offsets again."""
    gaps: list[GapRecord] = []
    for queue, at in positions.items():
        end = (await provider.adapter.bounds(queue)).next
        if at.next_offset > end:
            behind = {stream: each for stream, each in at.behind.items() if each.token.offset < end}
            positions[queue] = Checkpoint(end, behind)
            low, high = SequenceToken(end), SequenceToken(at.next_offset)
            now_us = time.time_ns() // 1000
            gaps.append(GapRecord(provider.name, definition.name, queue, None, low, high, LOST_END, now_us))
    return gaps


class Session:
    """One `Subscribe` call."""

    def __init__(self, call: Call, opening: Opening, *, keeps: bool) -> None:
        self._call = call
        self._opening = opening
        self._group: Group = opening.place.group
        self._member: Member = opening.place.member
        self._keeps = keeps
        self._loop = asyncio.get_running_loop()
        self._heartbeat_s = self._member.timeout_s / HEARTBEATS
        self._something = asyncio.Event()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        """Its error is what the call ends with."""
        self._heart = self._loop.call_later(self._heartbeat_s, self._beat)
        self._wrote = False
        self._closing = False
        self._progress = False
        self._saved = 0
        self._moves = self._member.moves = opening.moves
        self._moves_told = 0
        """Responses that said so on this call."""
        self._queues: tuple[int, ...] | None = None
        self._told: pb.SubscribeResponse | None = self._opened()
        self._refused: list[pb.Refusal] = []
        self._gaps = deque(opening.gaps, maxlen=MAX_GAPS)
        self._member.on_outbox = self._something.set
        self._member.on_notice = self._notice
        self._member.on_gone = self._end_with
        self._member.on_gap = self._gap
        self._relayed = call.principal is PEER
        self._told_queues: frozenset[int] | None = None
        self._returned: tuple[int, int] | None = None
        if self._relayed:
            self._group.relay(self._member)

    def _opened(self) -> pb.SubscribeResponse:
        opened = pb.Opened(
            consumer=self._member.id,
            session_timeout_ms=round(self._member.timeout_s * 1000),
            heartbeat_ms=round(self._heartbeat_s * 1000),
            definition=wire.definition_message(self._opening.definition),
            resumed=self._member.resumed,
            moves=self._opening.moves,
        )
        return pb.SubscribeResponse(opened=opened)

    async def run(self, first: pb.SubscribeRequest) -> None:
        """Converse until either side ends it. What the consumer holds then stays in its hands until it is back or its
        time is up; where it closed in order, it goes to others at once."""
        self._something.set()
        writing = self._loop.create_task(self._write(), name="headrace session writes")
        reading = self._loop.create_task(self._read(first), name="headrace session reads")
        settling = self._loop.create_task(self._settle(), name="headrace session settles")
        tasks = (reading, writing, settling)
        try:
            await asyncio.wait({*tasks, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            self._raise(*tasks)
        finally:
            self._heart.cancel()
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._let_go()
        await self._opening.consumers.save()

    def _raise(self, *tasks: asyncio.Task[None]) -> None:
        """What ended it, where that was not the consumer's wish."""
        for ended in (self._gone, *tasks):
            if ended.done():
                ended.result()

    def _let_go(self) -> None:
        if not self._gone.cancel() and not self._gone.cancelled():
            self._gone.exception()  # else asyncio says that nobody asked
        if self._member.on_gone == self._end_with:  # else it is another session's, or nobody's
            self._group.disconnect(self._member)
            if self._closing:
                self._group.leave(self._member)

    def _end_with(self, error: HeadraceError) -> None:
        if not self._gone.done():
            self._gone.set_exception(error)

    # ---- what the consumer says ------------------------------------------------------------------------------------

    async def _read(self, request: pb.SubscribeRequest) -> None:
        await self._apply(request)
        while not self._closing:
            message = await self._call.read()
            if message is None:  # also where the connection is lost: only who says so is not waited for
                return
            self._group.heard(self._member)
            if message:
                await self._apply(self._next(message))

    def _next(self, message: bytes) -> pb.SubscribeRequest:
        request = parsed(pb.SubscribeRequest, message)
        if request.HasField("open"):
            raise InvalidArgument("only the first request of Subscribe has the field open: leave it out, or call again")
        return request

    async def _apply(self, request: pb.SubscribeRequest) -> None:
        if request.acknowledgements or request.rejections:
            acknowledgements, rejections, refused = request.acknowledgements, request.rejections, list[pb.Refusal]()
            if not self._is_current(request):
                acknowledgements, rejections, refused = self._redriven(request)
            refused += await apply(self._opening.place, acknowledgements, rejections)
            if refused:
                self._refused = [*self._refused, *refused][:MAX_REFUSED]
                self._something.set()
        if self._gone.done():  # meanwhile: the member is another's
            return
        self._member.applied = max(self._member.applied, request.number)
        if request.HasField("credit"):
            self._group.grant(self._member, request.credit.events, request.credit.bytes)
        if request.reclaim:
            self._give_back()
        self._closing = request.close

    def _is_current(self, request: pb.SubscribeRequest) -> bool:
        """Whether the consumer knew of all moves of the subscription, where it says of how many it knew."""
        moves = self._moves_told + (self._member.moves != self._moves)
        return not request.HasField("moves_heard") or request.moves_heard >= moves

    def _redriven(
        self, request: pb.SubscribeRequest
    ) -> tuple[Sequence[pb.Acknowledgement], Sequence[pb.Rejection], list[pb.Refusal]]:
        """What a request says of dead letters, which no move touches; the rest is refused."""
        redriven = self._member.redriven

        def meant(each: pb.Acknowledgement | pb.Rejection) -> bool:
            return (each.queue, each.offset, each.index) in redriven

        said = (*request.acknowledgements, *request.rejections)
        refused = [_refusal(each) for each in said if not meant(each)]
        return list(filter(meant, request.acknowledgements)), list(filter(meant, request.rejections)), refused

    def _give_back(self) -> None:
        before, left = self._returned or (0, 0), self._member.reclaim()
        self._returned = before[0] + left[0], before[1] + left[1]
        if self._relayed:
            self._group.relay(self._member)  # what waits, waits again
        self._progress = True
        self._something.set()

    # ---- what the silo says ----------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            more = True
            while more and not self._gone.done():  # else what is in the outbox is another session's
                more = await self._write_next()

    async def _write_next(self) -> bool:
        """Write the next message, if there is any. Whether there may be another."""
        frames, notices = self._member.collect(), self._notices()
        message = b"".join((*frames, notices)) if notices or len(frames) != 1 else frames[0]
        has_frames = bool(frames)
        del frames  # else a second copy of the message stays until the consumer takes it
        if message:
            self._wrote = True
            self._call.check_valid()  # here, too: a consumer that says nothing is sent what it has credit for
            await self._call.write(message)
        return has_frames and not self._gone.done() and self._group.sent(self._member)

    def _notices(self) -> bytes:
        """Everything but batches that is to be told, encoded; empty where there is nothing."""
        member = self._member
        response, self._told = self._told or pb.SubscribeResponse(), None
        if member.saved > self._saved:
            response.saved = self._saved = member.saved
        if self._opening.definition.mode is Mode.BOUND and member.queues != self._queues:
            self._queues = member.queues
            response.assignment.queues.extend(member.queues)
            response.assignment.SetInParent()
        if member.moves != self._moves:
            response.moves = self._moves = member.moves
            self._moves_told += 1
        if self._refused:
            response.refused.extend(self._refused)
            self._refused.clear()
        while self._gaps:
            response.gaps.append(wire.gap_message(self._gaps.popleft()))
        if self._returned is not None:
            response.returned.events, response.returned.bytes = self._returned
            response.returned.SetInParent()
            self._returned = None
        if self._progress:
            self._progress = False
            response.progress.CopyFrom(self._state())
        if self._keeps and response.saved:
            for queue, checkpoint in self._group.positions().items():
                response.positions.add(queue=queue, token=position_token(checkpoint))
        return response.SerializeToString()

    def _state(self) -> pb.Progress:
        member = self._member
        return pb.Progress(
            credit_events=member.credit_events,
            credit_bytes=member.credit_bytes,
            in_flight_events=member.in_flight_events,
            in_flight_bytes=member.in_flight_bytes,
            caught_up=self._group.caught_up,
            needed_bytes=member.needed_bytes,
            needed_events=member.needed_events,
            waiting=member.waiting,
            queues=sorted(self._group.deliveries) if self._relayed else (),
        )

    def _notice(self) -> None:
        if self._member.needed_bytes or self._member.waiting or self._has_other_queues():
            self._progress = True
        self._something.set()

    def _has_other_queues(self) -> bool:
        """Than it had when another silo that speaks for the consumer was told so last."""
        if not self._relayed:
            return False
        before, self._told_queues = self._told_queues, frozenset(self._group.deliveries)
        return before != self._told_queues

    def _gap(self, record: GapRecord) -> None:
        self._gaps.append(record)
        self._something.set()

    def _beat(self) -> None:
        """Say how things are where nothing else was said."""
        if not self._wrote:
            self._progress = True
            self._something.set()
        self._wrote = False
        self._heart = self._loop.call_later(self._heartbeat_s, self._beat)

    async def _settle(self) -> None:
        """The silo stops: tell the consumer, give it nothing more, and wait for what it holds."""
        await self._call.closing.wait()
        self._member.connected = False
        self._told = self._told or pb.SubscribeResponse()
        self._told.closing.reason = STOPS
        self._something.set()
        while self._member.in_flight:  # noqa: ASYNC110 (it ends once, and acknowledging need not tell anybody)
            await asyncio.sleep(SETTLE_S)
        await self._opening.consumers.save()
        if self._relayed:
            await self._tell_settled()
        raise Unavailable(STOPS)

    async def _tell_settled(self) -> None:
        """That nothing is left, before the call ends."""
        last = pb.SubscribeResponse()
        last.closing.settled = True
        self._told = last
        self._something.set()
        while self._told is last:  # noqa: ASYNC110 (once in its life)
            await asyncio.sleep(SETTLE_S)


class Pulls:
    """A consumer that pulls: a member that has credit only while a call waits. What a call returned comes again when
    it was not acknowledged within the session timeout."""

    def __init__(self, place: AttachedConsumer, others: dict[Member, Pulls]) -> None:
        self._place = place
        self._group, self._member = place
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._waiting = False
        self._error: HeadraceError | None = None
        self._gaps: deque[GapRecord] = deque(maxlen=MAX_GAPS)
        self._something = asyncio.Event()
        self._member.connected = self._member.attached = False
        self._member.pulls = True
        self._member.on_gone = self._end
        self._member.on_gap = self._gaps.append

    def _end(self, error: HeadraceError) -> None:
        self._others.pop(self._member, None)
        self._error = error
        self._something.set()

    def leave(self) -> None:
        """The events that it holds go to other consumers. Idempotent."""
        self._end(Unavailable("the consumer left: pull again to come back"))
        self._group.leave(self._member)

    def take_gaps(self) -> list[GapRecord]:
        gaps = list(self._gaps)
        self._gaps.clear()
        return gaps

    async def apply(
        self, acknowledgements: Sequence[pb.Acknowledgement], rejections: Sequence[pb.Rejection]
    ) -> list[pb.Refusal]:
        self._group.heard(self._member)
        return await apply(self._place, acknowledgements, rejections)

    async def wait(self, call: Call, request: pb.PullRequest) -> Sequence[bytes]:
        """The frames of what is there, at once or after a wait. Empty where nothing came."""
        member = self._member
        if self._waiting:
            raise waits_already(member.id)
        self._waiting = True
        before = set[Parcel]() if member.resending else set(member.in_flight.values())
        frames: Sequence[bytes] = ()
        try:
            self._open(request)
            await self._first(call, request.wait_ms / 1000)
            frames = member.collect_all()
            return frames
        finally:
            self._waiting = False
            if self._error is None:  # else the member is another's now, or nobody's
                self._close()
                new = [parcel for parcel in member.parcels() if parcel not in before]
                self._loop.call_later(member.timeout_s if frames else 0, self._take_back, new)

    def _open(self, request: pb.PullRequest) -> None:
        member = self._member
        member.connected = True
        member.on_outbox = member.on_notice = self._something.set
        self._something.clear()
        self._group.heard(member)
        self._group.grant(member, request.max_events or PULL_EVENTS, request.max_bytes or PULL_BYTES)

    async def _first(self, call: Call, wait_s: float) -> None:
        """Return when something is there, or the wait is over. Whoever waits is heard."""
        member = self._member
        ends = self._loop.time() + pull_wait_s(wait_s, call.remaining_s())
        while not member.outbox and not call.closing.is_set() and (left := ends - self._loop.time()) > 0:
            self._group.heard(member)
            call.check_valid()
            try:
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self._something.wait()
            except TimeoutError:
                continue
            self._something.clear()
            self._check_mine()
            if member.needed_bytes and not member.outbox:
                self._group.grant(member, 0, member.needed_bytes)
        await asyncio.sleep(0)  # other queues may have something as well
        self._check_mine()

    def _check_mine(self) -> None:
        if self._error is not None:
            raise self._error

    def _close(self) -> None:
        member = self._member
        member.connected = False
        member.charge(member.credit_events, member.credit_bytes)
        member.collect_all()  # there is something only where the call was cancelled: then it is taken back
        self._group.sent(member)

    def _take_back(self, parcels: Sequence[Parcel]) -> None:
        if self._error is not None:
            return
        for parcel in parcels:
            if parcel in parcel.delivery.parcels:
                parcel.delivery.take_back(parcel)
