"""A consumer that is served by all silos of the cluster, through this one.

It is a member of its subscription's group at each silo that may have queues for it, over one `Link` each: what they
deliver is passed on as it is, what the consumer says goes to the silo that it concerns, and its credit is divided among
them (`credit`). So nothing is kept here but what the consumer has credit for, and a few of its requests.

A link that ends in order, with nothing in the consumer's hands, is replaced without a word. Else the consumer's call
ends with Unavailable: a client that comes again under its id recognises what it had, and what of it was done. That is
so for a silo that dies, for a lease that was lost, and for a queue that moved before all of it was acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from ...client.transport import StreamCall
from ...proto.v1 import consumer_pb2 as pb
from ...proto.v1 import subscriptions_pb2
from ...store.rows import position_token
from ...streams.backoff import Backoff
from ...streams.cluster import SiloRecord
from ...streams.errors import HeadraceError, InvalidArgument, Unavailable
from ...streams.frames import Delivered
from ...streams.subscriptions import Checkpoint, SubscriptionDefinition
from .credit import Credit, Decision, Ledger
from .link import METHOD, Link

if TYPE_CHECKING:
    from ..provider_core import ProviderCore

log = logging.getLogger("headrace.silo")

OUTBOX_BYTES = 1 << 20
"""Nothing more is read from silos while so much waits for the consumer to take it."""
AGAIN_S, RARELY_S = 0.1, 1.0
"""A silo that could not be reached is tried again after this, and after longer each time, up to that."""
HEARTBEATS = 3
"""How often in a session timeout a silo is told that the consumer is there."""
OPEN_S = 5.0
"""How long a silo may take for its first response."""
TOLD_AT = 6
"""After so many failures in a row: a silo that ends, or was killed, is soon not there any more."""
SELDOM_S = 1.0
"""A consumer with which all is well is looked at so often, or at each of its heartbeats."""
ATTACH_S = 1.0
"""How long silos may take to answer a consumer that comes."""
ANSWER_S = 1.0
"""How long silos may take to give credit back."""
CLOSE_S = 1.0
"""How long silos may take to hear that the consumer is gone."""
MAX_REFUSED = 1000
MAX_GAPS = 100
AT_ONCE = 500
"""Acknowledgements that are passed on before others have their turn."""
ACKNOWLEDGE = "ConsumerService/Acknowledge"

MAX_MARKS = 100_000
"""What is acknowledged and rejected in one request."""

MOVED = "a queue moved to another silo: connect again"


def check_marks(count: int) -> None:
    """Raises InvalidArgument."""
    if count > MAX_MARKS:
        raise InvalidArgument(
            f"a request has at most {MAX_MARKS:,} acknowledgements and rejections, not {count:,}: send them in "
            "several, or acknowledge ranges (count, up_to)"
        )


class Silos(Protocol):
    """The cluster, as relays need it."""

    def with_queues(self, provider: str, queues: Collection[int] | None) -> Mapping[str, SiloRecord]:
        """Who may have queues of a provider, by name: those with one of `queues`, or all."""
        ...

    def owner(self, provider: str, queue: int) -> str:
        """Who has a queue, by name; "" where nobody has."""
        ...

    def stream(self, silo: SiloRecord, method: str) -> StreamCall:
        """Begin a call of a silo, which may be this one."""
        ...

    def is_alive(self, silo: str, incarnation: int) -> bool:
        """Whether it is there, as far as is known."""
        ...

    def report_unreachable(self, silo: str) -> None:
        """Nothing is heard of it: the connection to it may be dead."""
        ...

    async def call(self, silo: str, method: str, request: bytes) -> bytes:
        """Call a silo, which may be this one. Raises Unavailable, and what the silo raises."""
        ...


class Relay:
    """Between `attach` and `aclose`. `opening` is how the consumer opens at each silo."""

    def __init__(
        self, silos: Silos, opening: pb.Open, queues: Sequence[int], *, explicit: bool, timeout_s: float
    ) -> None:
        """`queues` are those that the subscription concerns; with `explicit` only their owners are asked."""
        self._silos = silos
        self._opening = opening
        self._queues = frozenset(queues)
        self._explicit = explicit
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, Link] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._not_before: dict[str, float] = {}
        self._at: dict[int, Link] = {}
        """Where what is delivered of a queue came from."""
        self._began_at: dict[int, str] = {}
        """Who had each queue when it began: where the consumer keeps its positions, they are those of that silo."""
        self._ledger = Ledger()
        self._number = 0
        self._lends = True
        self._closing = False
        self._silent = False
        self._ended = False
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self.outbox_limit = OUTBOX_BYTES
        self.heard_at = self.due_at = self._loop.time()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Its error is why it is over."""
        self.something = asyncio.Event()
        """There is something to collect, or to tell."""
        self.changed = asyncio.Event()
        """A silo has said something."""
        self.refused: list[pb.Refusal] = []
        self.gaps: deque[subscriptions_pb2.Gap] = deque(maxlen=MAX_GAPS)
        self.positions: dict[int, bytes] = {}
        """New ones, by queue, where the consumer keeps them."""
        self.moves = 0
        self.told_to_progress = False

    async def attach(self) -> None:
        """Return when every silo that can be reached knows the consumer. Raises why one refuses it."""
        self.look()
        until = self._loop.time() + ATTACH_S
        while not all(link.opened for link in self._links.values()) and not self.gone.done():
            self.something.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self.something.wait()
            except TimeoutError:
                break  # that one is slow, or about to be found dead
        if self.gone.done():
            self.gone.result()

    async def aclose(self) -> None:
        """Let go of the silos. The consumer is waited for there, unless it was closed in order."""
        self._ended = True
        tasks = list(self._tasks.values())
        if self._silent and tasks:  # it is not waited for any longer, so what it holds goes to others at once
            for link in self._links.values():
                link.close()
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self.gone.cancel() and not self.gone.cancelled():
            self.gone.exception()  # else asyncio says that nobody asked

    # ---- what the consumer says ------------------------------------------------------------------------------------

    def heard(self) -> None:
        self.heard_at = self._loop.time()

    async def apply(self, request: pb.SubscribeRequest) -> None:
        """Pass on what the consumer says, to whom it concerns. Others have their turn in between. Raises
        InvalidArgument."""
        self.heard()
        check_marks(len(request.acknowledgements) + len(request.rejections))
        concerned: set[Link] = set()
        for number, each in enumerate((*request.acknowledgements, *request.rejections), 1):
            self._pass_on(each, concerned)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        for link in concerned:  # with the last of them, or behind it
            link.number(link.next_request(), request.number)
        self._number = max(self._number, request.number)
        if request.HasField("credit"):
            self.grant(request.credit.events, request.credit.bytes)

    async def taken(self) -> None:
        """Return when silos have taken what the consumer said, but for little."""
        for link in list(self._links.values()):
            await link.empty.wait()

    def _pass_on(self, mark: pb.Acknowledgement | pb.Rejection, concerned: set[Link]) -> None:
        link = self._link_of(mark.queue)
        if link is not None:
            concerned.add(link)
            link.mark(mark)
        elif len(self.refused) < MAX_REFUSED:  # it comes again, from whoever has the queue next
            self.refused.append(pb.Refusal(queue=mark.queue, offset=mark.offset, index=mark.index))
            self.something.set()

    def _link_of(self, queue: int) -> Link | None:
        """Who delivered what is acknowledged of a queue: on an earlier call that may have been its present owner."""
        return self._at.get(queue) or self._links.get(self._silos.owner(self._opening.provider, queue))

    def grant(self, events: int, size: int) -> None:
        """The consumer may be sent more."""
        self._ledger.granted(events, size)
        self._lend()

    def reclaim(self) -> None:
        """Ask for all credit back, and lend nothing more: each silo answers, and says how things are."""
        self._lends = False
        for link in self._open_links():
            if not link.answering:
                link.answering = True
                link.next_request().reclaim = True

    async def take_back(self) -> Credit:
        """The consumer takes back the credit that is left. Returns how much that is."""
        self.reclaim()
        try:
            async with asyncio.timeout(ANSWER_S):
                while not self.answered and not self.gone.done():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            log.info("a silo is slow to give back the credit of consumer %r", self._opening.consumer)
        self._lends = True
        return self._ledger.take_free()

    @property
    def answered(self) -> bool:
        """After `reclaim`: nothing is on its way from a silo any more."""
        return not any(link.answering for link in self._open_links())

    @property
    def settled(self) -> bool:
        """After `reclaim`: nothing is in the consumer's hands, and all that it acknowledged is saved."""
        known = [link.progress for link in self._open_links()]
        empty = all(progress is not None and not progress.in_flight_events for progress in known)
        return self.answered and empty and not self._outbox and self.saved >= self._number

    @property
    def full(self) -> bool:
        """There is something to collect."""
        return bool(self._outbox)

    @property
    def needed_bytes(self) -> int:
        """More than the whole credit is needed for an event that waits."""
        return self._ledger.needed

    async def close(self) -> None:
        """End in order: every silo saves what was acknowledged. Raises Unavailable where one could not."""
        self._closing = True
        waiting = list(self._tasks.values())
        for silo, link in list(self._links.items()):
            if link.opened:
                link.close()
            else:
                self._tasks[silo].cancel()
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=self._timeout_s)
            if late:
                raise Unavailable("a silo does not say that it has saved what was acknowledged: connect again")
        if self.gone.done():
            self.gone.result()

    # ---- credit ----------------------------------------------------------------------------------------------------

    def _lend(self, *, patient: bool = True) -> None:
        if self._lends and not (self._ended or self._closing):
            self._do(self._ledger.decide(patient=patient))

    def _do(self, decision: Decision) -> None:
        for loan in decision.loans:
            credit = self._links[loan.silo].next_request().credit
            credit.events += loan.events
            credit.bytes += loan.bytes
        for silo in decision.reclaim:
            self._links[silo].next_request().reclaim = True
        if self._ledger.needed:
            self.told_to_progress = True
            self.something.set()

    # ---- silos come and go -----------------------------------------------------------------------------------------

    def _open_links(self) -> Sequence[Link]:
        return [link for link in self._links.values() if link.opened]

    def look(self) -> None:
        """See who is there, and how time goes by. To be called now and then, and when the cluster has changed."""
        if self._ended or self.gone.done():
            return
        now = self._loop.time()
        self.due_at = now + min(SELDOM_S, self._timeout_s / HEARTBEATS / 2)
        self._look_at_links(now)
        if not self._closing:
            self._look_at_silos(now)
        if self._ledger.is_hungry:
            self._lend(patient=False)

    def _look_at_silos(self, now: float) -> None:
        if now - self.heard_at > self._timeout_s:
            self._silent = True
            self._end(Unavailable(f"consumer {self._opening.consumer!r} was not heard for {self._timeout_s:g} s"))
            return
        there = self._silos.with_queues(self._opening.provider, self._queues if self._explicit else None)
        self._not_before = {name: at for name, at in self._not_before.items() if name in there}
        for name, silo in there.items():
            if name not in self._links and now >= self._not_before.get(name, 0.0):
                self._attach(name, silo)
        if self._explicit and there:  # one that had the queue before keeps no credit
            for name, link in self._links.items():
                if name not in there and link.opened and not link.owing:
                    link.close()
        self._look_at_positions()

    def extend_timeouts(self, late_s: float) -> None:
        """It was this process that did not listen."""
        self.heard_at += late_s
        for link in self._links.values():
            link.heard_at += late_s

    @property
    def impatient(self) -> bool:
        """It is not to wait for the next time at which all are looked at."""
        return self._ledger.is_hungry or bool(self._not_before)

    def _look_at_positions(self) -> None:
        """Where the consumer keeps its positions, a queue that moved begins at what the consumer says next."""
        if not self._opening.keeps_positions:
            return
        for queue in self._queues:
            owner = self._silos.owner(self._opening.provider, queue)
            if owner and self._began_at.setdefault(queue, owner) != owner:
                self._end(Unavailable(MOVED))

    def _look_at_links(self, now: float) -> None:
        for link in list(self._links.values()):
            limit_s = self._timeout_s if link.opened else OPEN_S
            if link.abandoned:
                continue
            if not self._silos.is_alive(link.silo, link.incarnation):
                link.abandon()
            elif now - link.heard_at > limit_s and link.room.is_set():
                link.abandon()
                self._silos.report_unreachable(link.silo)
            elif link.opened and now - link.said_at > self._timeout_s / HEARTBEATS / 2 and self._is_alive(now):
                link.beat()

    def _is_alive(self, now: float) -> bool:
        return now - self.heard_at < self._timeout_s / 2

    def _attach(self, name: str, silo: SiloRecord) -> None:
        if not self._is_alive(self._loop.time()):
            return  # it may have come back elsewhere, and would be taken over
        call = self._silos.stream(silo, METHOD)
        link = self._links[name] = Link(name, silo.incarnation, call, self._delivered, self._told)
        task = self._tasks[name] = self._loop.create_task(self._keep(link), name=f"headrace link to {name}")
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _keep(self, link: Link) -> None:
        """Until it ends, for whatever reason."""
        try:
            await link.run(self._opening)
            if link.closed:
                return  # all is saved
            error: HeadraceError = Unavailable(f"silo {link.silo} ended the call")
        except HeadraceError as failure:
            error = failure
        except Exception as failure:
            log.exception("a consumer's link to silo %s failed", link.silo)
            error = Unavailable(f"silo {link.silo} cannot be understood: {failure}")
        finally:
            self._forget(link)
        if link.owing:
            log.info("consumer %r connects again: %s", self._opening.consumer, error)
            self._end(Unavailable(f"silo {link.silo} delivers no more: {error}") if error.retryable else error)
        elif not error.retryable:
            self._end(error)
        else:
            backoff = self._backoffs.setdefault(link.silo, Backoff(AGAIN_S, RARELY_S))
            pause_s = backoff.next_s()
            if backoff.failures == TOLD_AT:
                log.warning("consumer %r gets nothing of silo %s: %s", self._opening.consumer, link.silo, error)
            self._not_before[link.silo] = self._loop.time() + pause_s

    def _forget(self, link: Link) -> None:
        if self._links.get(link.silo) is link:
            del self._links[link.silo]
        link.empty.set()
        self._ledger.left(link.silo)
        self.something.set()
        self.changed.set()
        self._at = {queue: at for queue, at in self._at.items() if at is not link}
        self._lend()

    def _end(self, error: HeadraceError) -> None:
        if not self.gone.done():
            self.gone.set_exception(error)
        self.something.set()
        self.changed.set()

    # ---- what silos say --------------------------------------------------------------------------------------------

    def _delivered(self, link: Link, frames: bytes, delivered: Sequence[Delivered]) -> None:
        if self.gone.done():
            return  # it comes again, where the consumer does
        events = 0
        for each in delivered:
            events += each.batch.count
            if self._at.setdefault(each.queue, link) is not link or self._is_stale(each.queue, link):
                self._end(Unavailable(MOVED))
                return
        self._ledger.used(link.silo, events, len(frames))
        link.delivered_since += events
        self._outbox.append(frames)
        self._outbox_bytes += len(frames)
        if self._outbox_bytes > self.outbox_limit:
            link.room.clear()
        self.something.set()

    def _is_stale(self, queue: int, link: Link) -> bool:
        """The consumer keeps its position, and the silo has an older one."""
        return self._opening.keeps_positions and self._began_at.setdefault(queue, link.silo) != link.silo

    def _told(self, link: Link, response: pb.SubscribeResponse) -> None:
        if response.HasField("opened"):
            self._opened(link, response.opened)
        if response.HasField("returned"):
            link.answering = False
            self._ledger.returned(link.silo, response.returned.events, response.returned.bytes)
        if response.HasField("progress"):
            self._progressed(link, response.progress)
        if response.HasField("assignment"):
            link.queues = frozenset(response.assignment.queues)
        if len(self.refused) < MAX_REFUSED:
            self.refused.extend(response.refused)
        self.gaps.extend(response.gaps)
        self.moves = max(self.moves, response.moves)
        for position in response.positions:
            self.positions[position.queue] = position.token
        self._lend()
        self.something.set()
        self.changed.set()

    def _opened(self, link: Link, opened: pb.Opened) -> None:
        link.opened = True
        self._not_before.pop(link.silo, None)
        self._backoffs.pop(link.silo, None)
        self._ledger.joined(link.silo)
        self.moves = max(self.moves, opened.moves)
        if self._closing:
            link.close()

    def _progressed(self, link: Link, progress: pb.Progress) -> None:
        has = set(progress.queues)
        self._at = {queue: at for queue, at in self._at.items() if at is not link or queue in has}
        if progress.waiting or progress.needed_bytes:
            self._ledger.hungry(link.silo, progress.needed_bytes, progress.needed_events)

    # ---- what the consumer is told ---------------------------------------------------------------------------------

    def collect(self) -> bytes:
        """Take what is next for the consumer; empty where there is nothing."""
        if not self._outbox:
            return b""
        frames = self._outbox.popleft()
        self._outbox_bytes -= len(frames)
        if self._outbox_bytes <= self.outbox_limit:
            for link in self._links.values():
                link.room.set()
        return frames

    @property
    def saved(self) -> int:
        """Up to which of the consumer's numbers everything that was acknowledged is saved; 0 once the call is over,
        for a link that is gone may have taken what it was told with it."""
        if self.gone.done():
            return 0
        return min((link.saved_before(self._number) for link in self._links.values()), default=self._number)

    @property
    def assignment(self) -> frozenset[int]:
        """Mode bound: the queues that are the consumer's."""
        return frozenset[int]().union(*(link.queues for link in self._links.values()))

    def progress(self) -> pb.Progress:
        """How things are at all silos together."""
        known = [link.progress for link in self._open_links() if link.progress is not None]
        total, since = self._ledger.total, sum(link.delivered_since for link in self._open_links())
        covered = {queue for each in known for queue in each.queues}
        return pb.Progress(
            credit_events=max(total.events, 0),
            credit_bytes=max(total.bytes, 0),
            in_flight_events=sum(each.in_flight_events for each in known) + since,
            in_flight_bytes=sum(each.in_flight_bytes for each in known),
            caught_up=self._queues <= covered and all(each.caught_up for each in known) and not since,
            needed_bytes=self._ledger.needed,
        )


class Relays:
    """All consumers that are served through this silo. `look` is to be called a few times a second."""

    def __init__(self, silos: Silos) -> None:
        self._silos = silos
        self._open: set[Relay] = set()

    @asynccontextmanager
    async def opened(
        self,
        provider: ProviderCore,
        definition: SubscriptionDefinition,
        consumer: str,
        timeout_s: float,
        positions: Mapping[int, Checkpoint] | None,
        *,
        pulls: bool = False,
        concurrent: bool = False,
    ) -> AsyncGenerator[Relay]:
        """A consumer that may join at every silo, for the length of an `async with`. `positions` are those of all
        queues, where its client keeps them; `pulls` and `concurrent` are as in `Group.join`."""
        opening = pb.Open(
            provider=provider.name,
            subscription=definition.name,
            consumer=consumer,
            session_timeout_ms=round(timeout_s * 1000),
            keeps_positions=positions is not None,
            pulls=pulls,
            concurrent=concurrent,
        )
        for queue, checkpoint in (positions or {}).items():
            opening.positions.add(queue=queue, token=position_token(checkpoint))
        explicit, queues = definition.selector.explicit, provider.queues_of(definition.selector)
        relay = Relay(self._silos, opening, queues, explicit=explicit, timeout_s=timeout_s)
        relay.positions.update({each.queue: each.token for each in opening.positions})
        self._open.add(relay)
        try:
            await relay.attach()
            yield relay
        finally:
            self._open.discard(relay)
            await relay.aclose()

    def look(self, late_s: float = 0.0) -> None:
        """`late_s`: nobody could be heard for so long."""
        now = asyncio.get_running_loop().time()
        for relay in list(self._open):
            if late_s:
                relay.extend_timeouts(late_s)
            if relay.impatient or now >= relay.due_at:
                relay.look()

    def changed(self) -> None:
        """The cluster has."""
        for relay in list(self._open):
            relay.look()

    async def acknowledge(self, request: pb.AcknowledgeRequest) -> bytes:
        """Each silo is told what concerns its queues; what it refuses, the others: a queue may have moved just now, and
        who had it has not saved yet. What nobody takes is refused: it comes again."""
        check_marks(len(request.acknowledgements) + len(request.rejections))
        parts: dict[str, pb.AcknowledgeRequest] = {}
        for each in request.acknowledgements:
            self._part(request, each.queue, parts).acknowledgements.append(each)
        for each in request.rejections:
            self._part(request, each.queue, parts).rejections.append(each)
        answers = await asyncio.gather(*(self._acknowledged(silo, part) for silo, part in parts.items()))
        refused = [each for some in answers for each in some]
        return pb.AcknowledgeResponse(refused=refused).SerializeToString()

    async def _acknowledged(self, owner: str, part: pb.AcknowledgeRequest) -> Sequence[pb.Refusal]:
        """What nobody took."""
        others = [name for name in self._silos.with_queues(part.provider or "default", None) if name != owner]
        for silo in filter(None, (owner, *others)):
            refused = await self._told(silo, part)
            part = _of_positions(part, {(each.queue, each.offset, each.index) for each in refused})
            if not (part.acknowledgements or part.rejections):
                break
        return _refusals(part)

    def _part(
        self, whole: pb.AcknowledgeRequest, queue: int, parts: dict[str, pb.AcknowledgeRequest]
    ) -> pb.AcknowledgeRequest:
        silo = self._silos.owner(whole.provider or "default", queue)
        if silo not in parts:
            parts[silo] = pb.AcknowledgeRequest(
                provider=whole.provider, subscription=whole.subscription, consumer=whole.consumer
            )
        return parts[silo]

    async def _told(self, silo: str, part: pb.AcknowledgeRequest) -> Sequence[pb.Refusal]:
        """What it refused."""
        try:
            answer = await self._silos.call(silo, ACKNOWLEDGE, part.SerializeToString())
            return pb.AcknowledgeResponse.FromString(answer).refused
        except HeadraceError as error:
            log.info("silo %s was not told what consumer %r acknowledged: %s", silo, part.consumer, error)
        return _refusals(part)


def _refusals(request: pb.AcknowledgeRequest) -> Sequence[pb.Refusal]:
    every = (*request.acknowledgements, *request.rejections)
    return [pb.Refusal(queue=each.queue, offset=each.offset, index=each.index) for each in every]


def _of_positions(request: pb.AcknowledgeRequest, positions: Collection[tuple[int, int, int]]) -> pb.AcknowledgeRequest:
    """Only what a request says of these events."""
    return pb.AcknowledgeRequest(
        provider=request.provider,
        subscription=request.subscription,
        consumer=request.consumer,
        acknowledgements=[each for each in request.acknowledgements if _position(each) in positions],
        rejections=[each for each in request.rejections if _position(each) in positions],
    )


def _position(mark: pb.Acknowledgement | pb.Rejection) -> tuple[int, int, int]:
    return mark.queue, mark.offset, mark.index
