"""Consumers that pull: they have credit only while a call waits.

Such a consumer has sessions with the owners of queues, as any other one, as long as it pulls. The credit that is left
is taken back before a call is answered, so the answer has everything that was sent. Events that a call returned and
that are not acknowledged are taken back by their silos when the session timeout has passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from ...client.routing import ATTACH_S, ENDED, LinkUser, QueueStatus, Router, SessionCalls, SiloLink
from ...proto.v1 import consumer_pb2 as pb
from ...proto.v1 import subscriptions_pb2
from ...server.methods import ServiceCall
from ...streams import wire
from ...streams.background import end
from ...streams.errors import Fenced, HeadraceError, LimitExceeded, Unavailable
from ...streams.frames import BATCHES, DeliveredBatch, element_frame, elements, split
from ...streams.subscriptions import SubscriptionDefinition
from ..placement import LeaseOwner
from .consumer_session import MAX_GAPS
from .consumer_target import ConsumerKey, ConsumerTarget, session_open

log = logging.getLogger("headrace.silo")

PULL_EVENTS, PULL_BYTES = 1000, 1 << 20
"""Default limits of the events and bytes that a pull returns."""
MIN_WAIT_S = 0.005
"""A pull waits at least so long, in seconds: cached events are handed out in turns."""
CHECK_S = 0.25
"""How often a pull that waits checks whether the silo stops, or the token was revoked, in seconds."""
ANSWER_SHARE, ANSWER_S = 0.25, 1.0
"""A pull ends before its caller's deadline, so that its answer arrives in time: by a quarter of the time, at most 1 s.
"""
RETURN_S = 1.0
"""Time that silos have to give credit back, in seconds."""
CLOSE_S = 1.0
"""Time that silos have to save when the consumer leaves, in seconds."""
MAX_CONSUMERS = 10_000
"""The most consumers of one client that pull at a time. Each has sessions, which take about 50 KiB."""


def check_definition(opened: pb.Opened, allowed: SubscriptionDefinition) -> None:
    """Raise Fenced if a session is one of another subscription than the one that the consumer may consume. Sessions
    name a subscription: it may have been deleted, and created again with another selector."""
    if opened.definition != wire.definition_message(allowed):
        raise Fenced(f"subscription {allowed.name!r} was created anew: connect again")


def pull_wait_s(wait_s: float, remaining_s: float | None) -> float:
    """Return how long a pull waits for events. The caller asks for `wait_s`, and its deadline is in `remaining_s`."""
    if remaining_s is not None:
        wait_s = min(wait_s, remaining_s - min(remaining_s * ANSWER_SHARE, ANSWER_S))
    return max(wait_s, MIN_WAIT_S)


class PullingConsumers:
    """The consumers that pull from this silo. `calls_for` returns the calls of the sessions for a caller's address."""

    def __init__(self, calls_for: Callable[[str], SessionCalls], most: int = MAX_CONSUMERS) -> None:
        self._calls_for = calls_for
        self._most = most
        self._present: dict[ConsumerKey, PullingConsumer] = {}
        self._clients: Counter[str] = Counter()
        """Number of consumers of each client."""

    async def aclose(self) -> None:
        await asyncio.gather(*(each.aclose() for each in list(self._present.values())))

    def subscription(self, key: ConsumerKey) -> SubscriptionDefinition | None:
        """Return the definition with which a consumer pulls from this silo; None if it does not."""
        found = self._present.get(key)
        return None if found is None else found.definition

    def owner(self, key: ConsumerKey, queue: int) -> LeaseOwner | None:
        """Return the silo that sends a queue's events to a consumer that pulls from here; None if no session does."""
        found = self._present.get(key)
        return None if found is None else found.owner(queue)

    async def pull(self, call: ServiceCall, request: pb.PullRequest, target: ConsumerTarget) -> bytes:
        """Return the encoded answer to a `Pull`, also to one that leaves, without refusals. Raises LimitExceeded if
        another call of the consumer waits, or the client has too many consumers."""
        opening, key = session_open(target, None, pulls=True), target.key
        while not request.leave and (known := self._present.get(key)) is not None and known.differs(opening):
            await known.aclose()
        if key not in self._present:
            target.consumers.check(target.definition, target.consumer, target.timeout_s, keeps_positions=False)
            await target.consumers.prepare(target.definition, target.consumer, None)
        known = self._present.get(key)  # another call may have come before
        if known is None:
            known = self._present[key] = self._made(call, target, opening)
        return await (known.leave() if request.leave else known.pull(call, request))

    def _made(self, call: ServiceCall, target: ConsumerTarget, opening: pb.Open) -> PullingConsumer:
        client, key = call.client, target.key
        if self._clients[client] >= self._most:
            raise LimitExceeded(f"{self._most:,} consumers of {client} pull already: let some of them leave")

        def ended() -> None:
            del self._present[key]
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

        self._clients[client] += 1
        return PullingConsumer(target.definition, opening, self._calls_for(call.peer), ended)


class PullingConsumer(LinkUser):
    """One consumer, as long as it pulls. `on_end` is called when it has ended."""

    def __init__(
        self, definition: SubscriptionDefinition, opening: pb.Open, calls: SessionCalls, on_end: Callable[[], object]
    ) -> None:
        self.definition = definition
        self._on_end = on_end
        self._opening = opening
        self._timeout_s = opening.session_timeout_ms / 1000
        self._router = Router(self, calls, stays_direct=True)
        self._loop = asyncio.get_running_loop()
        self._error: HeadraceError | None = None
        self._called_at = self._loop.time()
        self._is_waiting = False
        self._arrived = asyncio.Event()
        """Batches, other news of the sessions, or their end."""
        self._batches: list[tuple[QueueStatus, bytes]] = []
        """Batches that wait for the answer: the status of the queue under which each came, and its frame."""
        self._released: dict[SiloLink, list[pb.QueueReport]] = {}
        self._gaps: deque[subscriptions_pb2.Gap] = deque(maxlen=MAX_GAPS)
        self._task = self._loop.create_task(self._run(), name="headrace consumer pulls")

    def differs(self, opening: pb.Open) -> bool:
        """Whether its next call needs other sessions, and no call waits."""
        return opening != self._opening and not self._is_waiting

    async def pull(self, call: ServiceCall, request: pb.PullRequest) -> bytes:
        """Return the encoded answer, without refusals. Raise LimitExceeded if another call waits."""
        if self._is_waiting:
            consumer = self._opening.consumer
            raise LimitExceeded(f"consumer {consumer!r} waits in another call already: wait for that one first")
        self._is_waiting = True
        try:
            await self._wait(call, request)
            return self._answer()
        finally:
            self._is_waiting = False
            self._called_at = self._loop.time()
            self._release()

    def owner(self, queue: int) -> LeaseOwner | None:
        """Return the silo that sends a queue's events, with the epoch of its lease; None if no session does."""
        link = self._router.link_of(queue)
        return None if link is None else LeaseOwner(link.queues[queue].epoch, link.silo)

    async def leave(self) -> bytes:
        """End in order: the silos save the acknowledgements, and other consumers get the events in flight."""
        await self._router.attached(ATTACH_S)
        self._router.close()
        await asyncio.wait([self._task], timeout=CLOSE_S)
        return pb.PullResponse(gaps=self._gaps).SerializeToString()

    async def aclose(self) -> None:
        """End without leaving: its silos wait for its next session, until its session timeout is over."""
        await end(self._task)

    async def _wait(self, call: ServiceCall, request: pb.PullRequest) -> None:
        ends = self._loop.time() + pull_wait_s(request.wait_ms / 1000, call.remaining_s())
        await self._router.attached(ATTACH_S)
        self._check()
        self._router.grant(request.max_events or PULL_EVENTS, request.max_bytes or PULL_BYTES)
        try:
            while not self._batches and not call.closing.is_set() and (left := ends - self._loop.time()) > 0:
                call.check_valid()
                try:
                    async with asyncio.timeout(min(left, CHECK_S)):
                        await self._arrived.wait()
                except TimeoutError:
                    continue
                self._arrived.clear()
                self._check()
                if needed_bytes := self._router.progress().needed_bytes:
                    self._router.grant(0, needed_bytes)
        finally:
            await self._router.take_back(RETURN_S)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _answer(self) -> bytes:
        response = pb.PullResponse(gaps=self._gaps)
        self._gaps.clear()
        for _, status in sorted({status.queue: status for status, _ in self._batches}.items()):
            response.queues.append(pb.QueueStatus(**status._asdict()))
        frames = b"".join([frame for _, frame in self._batches])
        self._batches.clear()
        return frames + response.SerializeToString()

    def _release(self) -> None:
        """Give back the batches of a call that was cancelled."""
        for (queue, _, epoch, generation, _), frame in self._batches:
            if (link := self._router.link_of(queue)) is not None:
                [delivered], _ = split(frame)
                index = delivered.indexes[0] if delivered.indexes else 0
                report = pb.QueueReport(queue=queue, epoch=epoch, generation=generation)
                report.released.add(offset=delivered.batch.offset, index=index)
                self._released.setdefault(link, []).append(report)
                link.wake()
        self._batches.clear()

    async def _run(self) -> None:
        """Keep the sessions until the consumer has not called for its session timeout."""
        routing = self._loop.create_task(self._router.run(), name="headrace routes of a consumer that pulls")
        try:
            while not routing.done() and (left := self._left_s()) > 0:
                await asyncio.wait([routing], timeout=max(left, CHECK_S))
            if not routing.done():
                self._give_up()
                await asyncio.wait([routing])
            self._error = Unavailable("the consumer left: pull again to come back")
            routing.result()
        except HeadraceError as error:
            self._error = error
            log.info("the sessions of consumer %r, which pulls, have ended: %s", self._opening.consumer, error)
        finally:
            await end(routing)
            self._arrived.set()
            self._on_end()

    def _left_s(self) -> float:
        """Return after how many seconds the consumer is given up, if it does not call before."""
        return self._timeout_s if self._is_waiting else self._called_at + self._timeout_s - self._loop.time()

    def _give_up(self) -> None:
        opening = self._opening
        log.warning(
            "subscription %r: nothing was heard from consumer %r for %.1f s",
            opening.subscription, opening.consumer, self._timeout_s,
        )  # fmt: skip
        self._router.close()

    # ---- sessions with owners ----------------------------------------------------------------------------------------

    def open(self) -> pb.Open:
        opening = pb.Open()
        opening.CopyFrom(self._opening)
        return opening

    def opened(self, link: SiloLink, opened: pb.Opened) -> None:
        check_definition(opened, self.definition)

    def changed(self, link: SiloLink, status: QueueStatus) -> None:
        """Drop the batches of another lease, or from before a seek: they come again."""
        queue, fence = status.queue, (status.epoch, status.generation)
        self._batches = [
            (came, frame)
            for came, frame in self._batches
            if came.queue != queue or (status.state != ENDED and (came.epoch, came.generation) == fence)
        ]

    def request(self, link: SiloLink) -> pb.SubscribeRequest | None:
        released = self._released.pop(link, None)
        return pb.SubscribeRequest(reports=released) if released else None

    def take(self, link: SiloLink, delivered: Sequence[DeliveredBatch], frames: bytes) -> None:
        found = map(element_frame, elements(frames, BATCHES)[0])
        for each, frame in zip(delivered, found, strict=True):
            if (status := link.queues.get(each.queue)) is not None:
                self._batches.append((status, frame))
        self._arrived.set()

    def handle_response(self, link: SiloLink, response: pb.SubscribeResponse) -> None:
        self._gaps.extend(response.gaps)
        self._arrived.set()

    def ended(self, link: SiloLink) -> None:
        self._released.pop(link, None)
        self._arrived.set()
