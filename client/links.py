"""The sessions of one consumer, and which of them serves each queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from ..proto.v1 import consumer_pb2 as pb
from ..streams.frames import BATCHES, DeliveredBatch, element_frame, elements
from .credit import CreditAmount, CreditLedger
from .subscribe_call import SubscribeCall
from .transport import StreamCall

log = logging.getLogger("headrace.client")

SERVED = pb.QueueStatus.STATE_SERVED
DRAINING = pb.QueueStatus.STATE_DRAINING
ENDED = pb.QueueStatus.STATE_ENDED


class QueueStatus(NamedTuple):
    """The status of a queue in a session, as in `consumer.proto`."""

    queue: int
    state: int
    """SERVED, DRAINING or ENDED."""
    epoch: int
    generation: int
    assigned: bool = True


class LinkUser(Protocol):
    """The consumer for which a router has sessions: the holdings of a client, or a gateway."""

    def open(self) -> pb.Open:
        """Return how a session begins. The router sets `direct`."""
        ...

    def opened(self, link: SiloLink, opened: pb.Opened) -> None:
        """A silo has accepted the consumer."""

    def changed(self, link: SiloLink, status: QueueStatus) -> None:
        """The status of a queue changed. When a link ends, each of its queues is ENDED."""

    def request(self, link: SiloLink) -> pb.SubscribeRequest | None:
        """Return the next reports for this link; None if there are none. The router adds credit."""
        ...

    def take(self, link: SiloLink, delivered: Sequence[DeliveredBatch], frames: bytes) -> None:
        """Take batches. Their credit is accounted already: `len(frames)` bytes."""

    def handle_response(self, link: SiloLink, response: pb.SubscribeResponse) -> None:
        """Take confirmations, refusals, gaps, progress, and the announcement of the call's end."""

    def ended(self, link: SiloLink) -> None:
        """The link has ended. It has no queues any more."""


class SiloLink:
    """One session, made by a router."""

    def __init__(self, links: SiloLinks, number: int, expected: str) -> None:
        self.silo = ""
        """The silo's name; "" until the session is open, and for a silo that is alone."""
        self.number = number
        self.expected = expected
        """The silo that is called; "" if any may answer."""
        self.is_open = False
        self.is_closing = False
        self.idle_since: float | None = None
        """Loop time since which the silo has no queues."""
        self.superseded = False
        """A newer session with the same silo replaces it."""
        self.queues: dict[int, QueueStatus] = {}
        """Queues that are SERVED or DRAINING."""
        self.progress: pb.Progress | None = None
        """As the silo reported last."""
        self.placement: pb.Placement | None = None
        """As the silo sent it last."""
        self.delivered_since = 0
        """Events that were delivered since `progress` was reported."""
        self.is_reclaiming = False
        """The silo has not answered `reclaim` yet."""
        self._links = links
        self._void: set[int] = set()
        """Queues that have a newer owner: batches of them that this silo still delivers are dropped."""
        self._credit = CreditAmount()
        self._reclaim = False
        self._call: SubscribeCall | None = None

    def __repr__(self) -> str:
        return f"SiloLink({self.silo or self.expected!r}, {sorted(self.queues)})"

    @property
    def has_begun(self) -> bool:
        """Whether the call has begun, so that the silo may know the session."""
        return self._call is not None

    def wake(self) -> None:
        """There is something to send: `LinkUser.request` is called in the next turn of the loop."""
        if self._call is not None:
            self._call.wake()

    def lend(self, events: int, size: int) -> None:
        """Give credit to the silo, with the next request."""
        self._credit = CreditAmount(self._credit.events + events, self._credit.bytes + size)
        self.wake()

    def reclaim(self) -> None:
        """Ask for all unused credit, with the next request."""
        self._reclaim = self.is_reclaiming = True
        self.wake()

    def close(self) -> None:
        """Send everything, and end in order. Idempotent."""
        self.is_closing = True
        if self._call is not None:
            self._call.close()

    async def run(self, call: StreamCall, opening: pb.Open, space: asyncio.Event) -> None:
        """Converse until the end. Raise the HeadraceError that ended it, unless it ended in order."""
        self._call = SubscribeCall(call, self, space)
        first = self.next_request() or pb.SubscribeRequest()
        first.open.CopyFrom(opening)
        await self._call.run(first)

    def next_request(self) -> pb.SubscribeRequest | None:
        request = self._links.user.request(self) if self.is_open else None
        if any(self._credit) or self._reclaim:
            request = request or pb.SubscribeRequest()
            if any(self._credit):
                request.credit.events, request.credit.bytes = self._credit
            request.reclaim = self._reclaim
            self._credit, self._reclaim = CreditAmount(), False
        return request

    def receive(
        self, response: pb.SubscribeResponse | None, delivered: Sequence[DeliveredBatch], frames: bytes
    ) -> None:
        if delivered:
            events = sum([each.batch.count for each in delivered])
            self.delivered_since += events
            self._links.ledger.use(self.number, events, len(frames))
        if response is not None:
            self._hear(response)
        if delivered and self._void:
            delivered, frames = self._without_void(delivered, frames)
        if not delivered:
            return
        if self.is_closing:  # the silo gives these events to other consumers
            self._links.ledger.grant(sum([each.batch.count for each in delivered]), len(frames))
        else:
            self._links.user.take(self, delivered, frames)

    def _hear(self, response: pb.SubscribeResponse) -> None:
        links = self._links
        if response.HasField("opened"):
            self.is_open, self.silo = True, response.opened.silo
            links.opened(self, response.opened)
        if response.HasField("returned"):
            self.is_reclaiming = False
            links.ledger.give_back(self.number, response.returned.events, response.returned.bytes)
        if response.queues and (response.saved or response.refused):  # they are about earlier statuses
            links.user.handle_response(self, pb.SubscribeResponse(saved=response.saved, refused=response.refused))
            response.ClearField("saved")
            response.ClearField("refused")
        for status in response.queues:
            state = QueueStatus(status.queue, status.state, status.epoch, status.generation, status.assigned)
            links.change(self, state)
        if response.HasField("progress"):
            self.progress, self.delivered_since = response.progress, 0
            if response.progress.waiting or response.progress.needed_bytes:
                needed = CreditAmount(response.progress.needed_events, response.progress.needed_bytes)
                wanted = CreditAmount(response.progress.wanted_events, response.progress.wanted_bytes)
                links.ledger.starve(self.number, needed, wanted)
        if response.HasField("closing") and self._call is not None:
            log.info("silo %r is going to end the call (%s)", self.silo, response.closing.reason)
            self._call.leave()
        links.note_response(self, response)
        links.user.handle_response(self, response)

    def void(self, queue: int) -> None:
        """Drop everything that the silo still delivers of this queue."""
        self._void.add(queue)

    def is_void(self, queue: int) -> bool:
        """Whether the queue has a newer owner. It is asked when its status comes, which ends that."""
        known = queue in self._void
        self._void.discard(queue)
        return known

    def _without_void(
        self, delivered: Sequence[DeliveredBatch], frames: bytes
    ) -> tuple[Sequence[DeliveredBatch], bytes]:
        kept: list[DeliveredBatch] = []
        encoded: list[bytes] = []
        for each, element in zip(delivered, elements(frames, BATCHES)[0], strict=True):
            if each.queue not in self._void:
                kept.append(each)
                encoded.append(element_frame(element))
        left = b"".join(encoded)
        dropped = sum(each.batch.count for each in delivered) - sum(each.batch.count for each in kept)
        self._links.ledger.grant(dropped, len(frames) - len(left))
        return kept, left


class SiloLinks:
    """The sessions of a router, their queues and their credit."""

    def __init__(self, user: LinkUser, on_opened: Callable[[SiloLink], None], on_placement: Callable[[], None]) -> None:
        self.user = user
        self.ledger = CreditLedger()
        self.present: list[SiloLink] = []
        self.queues = 0
        """Number of queues that the subscription reads; 0 if that is not known."""
        self.state_changed = asyncio.Event()
        """A silo has sent something else than batches, or a session has ended."""
        self.lends = True
        self._waits, self._waits_since = 0, 0.0
        """The longest wait for credit, and since when it is that one."""
        self._numbers = count(1)
        self._serving: dict[int, SiloLink] = {}
        """The session that serves each queue."""
        self._on_opened = on_opened
        self._on_placement = on_placement

    def add(self, expected: str) -> SiloLink:
        link = SiloLink(self, next(self._numbers), expected)
        if not self.present:
            self.ledger.join(link.number)  # its first request has credit
        self.present.append(link)
        self.lend()
        return link

    def remove(self, link: SiloLink) -> None:
        """A session has ended."""
        self.present.remove(link)
        self.ledger.leave(link.number)
        for status in list(link.queues.values()):
            self._end_queue(link, status)
        self.user.ended(link)
        self.lend()
        self.state_changed.set()

    @property
    def open(self) -> Sequence[SiloLink]:
        return [link for link in self.present if link.is_open]

    def addresses(self) -> Mapping[str, str]:
        """The addresses of the silos that own queues, by name.

        Silos learn of changes at different times: of each queue, the placement with the highest epoch is right."""
        latest: dict[int, pb.Placement.Owner] = {}
        for link in self.open:
            for owner in link.placement.owners if link.placement is not None else ():
                known = latest.get(owner.queue)
                if known is None or (owner.epoch, owner.silo != "") > (known.epoch, known.silo != ""):
                    latest[owner.queue] = owner
        return {owner.silo: owner.address for owner in latest.values() if owner.silo}

    def serving(self, queue: int) -> SiloLink | None:
        return self._serving.get(queue)

    def opened(self, link: SiloLink, opened: pb.Opened) -> None:
        for other in self.present:
            other.superseded |= other is not link and other.is_open and other.silo == link.silo
        self.ledger.join(link.number)
        self._on_opened(link)
        self.user.opened(link, opened)

    def change(self, link: SiloLink, status: QueueStatus) -> None:
        """A silo sent the status of a queue. A newer owner replaces an older one, of which nothing counts any more."""
        was_void = link.is_void(status.queue)
        if status.state == ENDED:
            if status.queue in link.queues:
                self._end_queue(link, status)
            return
        other = self._serving.get(status.queue)
        if other is not None and other is not link:
            known = other.queues[status.queue]
            if known.epoch > status.epoch or (was_void and known.epoch == status.epoch):
                link.void(status.queue)
                return
            self._end_queue(other, known)
            other.void(status.queue)
        link.queues[status.queue] = status
        self._serving[status.queue] = link
        self.user.changed(link, status)

    def _end_queue(self, link: SiloLink, status: QueueStatus) -> None:
        del link.queues[status.queue], self._serving[status.queue]
        self.user.changed(link, status._replace(state=ENDED))

    def note_response(self, link: SiloLink, response: pb.SubscribeResponse) -> None:
        if response.HasField("placement"):
            self.queues = response.placement.queues
            link.placement = response.placement
            self._on_placement()
        self.lend()
        self.state_changed.set()

    def lend(self, *, patient: bool = True) -> None:
        """Give free credit to the sessions that need it."""
        if not self.lends:
            return
        decision = self.ledger.decide(patient=patient)
        if decision.loans or decision.reclaim:
            links = {link.number: link for link in self.present}
            for loan in decision.loans:
                links[loan.session].lend(loan.events, loan.bytes)
            for number in decision.reclaim:
                links[number].reclaim()

    def be_impatient(self, now: float, wait_s: float) -> None:
        """If a session has waited for credit longer than `wait_s` seconds, take unused credit from all others."""
        waits = self.ledger.longest_wait
        if waits != self._waits:
            self._waits, self._waits_since = waits, now
        elif waits and now - self._waits_since >= wait_s:
            self.lend(patient=False)

    async def take_back(self, timeout_s: float) -> CreditAmount:
        """As `Router.take_back`."""
        self.lends = False
        for link in self.open:
            if not link.is_reclaiming:
                link.reclaim()
        try:
            async with asyncio.timeout(timeout_s):
                while any(link.is_reclaiming for link in self.open):
                    self.state_changed.clear()
                    await self.state_changed.wait()
        except TimeoutError:
            log.info("a silo is slow to give back credit")
        finally:
            self.lends = True
        return self.ledger.take_free()

    def progress(self) -> pb.Progress:
        """The progress of all sessions together."""
        known = [link.progress for link in self.open if link.progress is not None]
        total, since = self.ledger.total, sum(link.delivered_since for link in self.open)
        complete = len(known) == len(self.open) > 0 and len(self._serving) >= self.queues
        return pb.Progress(
            credit_events=max(total.events, 0),
            credit_bytes=max(total.bytes, 0),
            in_flight_events=sum(each.in_flight_events for each in known) + since,
            in_flight_bytes=sum(each.in_flight_bytes for each in known),
            caught_up=complete and all(each.caught_up for each in known) and not since,
            needed_bytes=self.ledger.needed_bytes,
            needed_events=max((each.needed_events for each in known), default=0),
            waiting=self.ledger.is_starved,
        )
