"""Groups: the consumers attached to a subscription, and the distribution of its events to them.

Mode *shared*: the next parcel of any stream goes to the next member in line that has credit. Mode *bound*: the queues
are assigned to members by average allocation (EQueue). A queue moves to another member only after the events that its
former member holds are done or taken back. (Mode *broadcast* has a group of one member for each consumer.)

A member is given up if nothing is heard from it for its session timeout: its events go to others. A member whose
connection broke has the same time to return. Then it first gets the events again that it held.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ...balancer import average_allocation
from ...streams.errors import Busy, Closed, Fenced, HeadraceError, Unavailable
from ...streams.frames import QueueState, status_frame
from ...streams.identity import StreamId
from ...streams.subscriptions import Checkpoint, GapRecord, Mode, SubscriptionDefinition
from .confirmations import Question
from .delivery import Delivery, FailureSink
from .edge import Edge
from .group_delivery import GroupDelivery, Rejected
from .member import Events, Member, MemberStatistics
from .retries import Failure

log = logging.getLogger("headrace.agents")

MAX_MEMBERS = 10_000
RESEND_S = 2.0
"""How long a member that divides its credit may take to grant credit for the events that it held, in seconds."""
SPACE_S = 5.0
"""How long a member waits for the space for one batch, in seconds. Then another batch is tried."""
PARCEL_S = 1.0
"""How long a concurrent consumer works on a parcel at most, in seconds."""
FIRST_EVENT_S = 0.1
"""Assumed time per event until parcels are done, in seconds: the first parcels are small."""
MIN_EVENT_S = 1e-6
SIZES = 16
"""Number of different sizes of parcels."""
NEWEST_SHARE = 0.1
"""Weight of the newest parcel in the average time per event."""
DRAIN_S = 10.0
"""Mode bound: how long a member may keep the events of a queue that moves to another member, in seconds."""


class Group:
    """The members of one subscription in this process, over all its queues. A `DeliveryService`.

    `stored` says whether the control store keeps the position. All on one loop. Call `tick` at least about once a
    second.
    """

    def __init__(
        self, definition: SubscriptionDefinition, edge: Edge, *, stored: bool = True, queues: Sequence[int] = ()
    ) -> None:
        """With mode bound, `queues` are all queues to assign, also those of other silos. If empty, the queues that are
        delivered here are assigned."""
        self.definition = definition
        self._queues = queues
        self.edge = edge
        self._stored = stored
        self.members: dict[str, Member] = {}
        self.deliveries: dict[int, GroupDelivery] = {}
        self.empty_since = asyncio.get_running_loop().time()
        """Loop time when the last member left. Only valid while there is no member."""
        self._bound = definition.mode is Mode.BOUND
        self._line: deque[Member] = deque()
        self._owners: dict[int, str] = {}
        self._moving: dict[int, float] = {}
        """Mode bound: queues that wait to move to another member, and the loop time until which they wait."""
        self._unserved: set[int] = set()
        """Queues whose events no member could take: their deliveries wait to be woken."""
        self._waiters: list[asyncio.Future[None]] = []
        self._event_s = FIRST_EVENT_S
        """Moving average of the time that consumers take for a parcel, in seconds per event."""
        self._concurrent_parcels = 0
        """Number of parcels for concurrent consumers so far."""
        self._rebalancing = False
        self._loop = asyncio.get_running_loop()

    # ---- as the manager's service ----------------------------------------------------------------------------------

    @property
    def stored(self) -> bool:
        return self._stored

    def deliver(
        self, definition: SubscriptionDefinition, queue: int, checkpoint: Checkpoint, sink: FailureSink, **options: Any
    ) -> Delivery:
        delivery = GroupDelivery(definition, queue, checkpoint, self, sink, **options)
        before, self.deliveries[queue] = self.deliveries.get(queue), delivery
        if before is not None and self._fence(before) == self._fence(delivery):
            self._tell_all(before, QueueState.ENDED)  # its events in flight come again, under the same epoch
        self.tell_status(delivery)
        if self._bound and not self._rebalancing:
            self._rebalancing = True
            self._loop.call_soon(self._rebalance)
        return delivery

    def ended(self, queue: int) -> None:
        """The queue is not delivered here any more."""
        delivery = self.deliveries.pop(queue, None)
        self._owners.pop(queue, None)
        self._moving.pop(queue, None)
        self._unserved.discard(queue)
        if delivery is None:
            return
        self._tell_all(delivery, QueueState.ENDED)
        self._tell_queues()

    # ---- the status of queues --------------------------------------------------------------------------------------

    def status(self, member: Member, queue: int) -> tuple[int, int, bool] | None:
        """Return the epoch and generation of a queue, and whether it is assigned to the member; None if it is not
        delivered here."""
        delivery = self.deliveries.get(queue)
        return None if delivery is None else (*self._fence(delivery), self._is_assigned(member, queue))

    def _is_assigned(self, member: Member, queue: int) -> bool:
        return not self._bound or queue in member.queues

    def is_current(self, queue: int, epoch: int, generation: int) -> bool:
        """Whether a report about events of this epoch and generation may count."""
        delivery = self.deliveries.get(queue)
        return delivery is not None and not delivery.lost and self._fence(delivery) == (epoch, generation)

    @staticmethod
    def _fence(delivery: GroupDelivery) -> tuple[int, int]:
        return delivery.queue_epoch, delivery.generation

    def tell_status(self, delivery: GroupDelivery) -> None:
        """The status of a queue changed: tell all members."""
        if self.deliveries.get(delivery.queue) is delivery:
            self._tell_all(delivery)

    def _tell_all(self, delivery: GroupDelivery, state: QueueState | None = None) -> None:
        for member in self.members.values():
            self._tell(member, delivery, state)

    def _tell(self, member: Member, delivery: GroupDelivery, state: QueueState | None = None) -> None:
        if not member.attached:
            return
        queue, state = delivery.queue, state or delivery.state
        assigned = self._is_assigned(member, queue)
        member.put_status(queue, state, status_frame(queue, state, *self._fence(delivery), assigned=assigned))
        member.on_notice()

    def gap(self, record: GapRecord) -> None:
        for member in self.members.values():
            member.on_gap(record)

    async def fenced(self, error: HeadraceError) -> None:
        self.dissolve(error)

    async def completed(self, limit_s: float) -> None:
        self.dissolve(Fenced(f"subscription {self.definition.name!r} was deleted, or is not served here any more"))

    def dissolve(self, error: HeadraceError) -> None:
        """The subscription is not served here any more: remove all members, and tell them why."""
        for member in list(self.members.values()):
            self._remove(member)
            member.on_gone(error)

    # ---- members come and go ---------------------------------------------------------------------------------------

    def join(
        self,
        id: str,  # noqa: A002 (the word of the field)
        timeout_s: float,
        *,
        pulls: bool = False,
        concurrent: bool = False,
        divides_credit: bool = False,
        client: Hashable = None,
    ) -> Member:
        """A consumer connects. It supersedes the connection with its id, and gets the events of that one again, as
        the new credit allows. If both `pulls`, they come again only after the session timeout. If it is `concurrent`, a
        parcel has events for about a second of work, not more. If it `divides_credit`, it has sessions with several
        silos, and is told when events wait for its credit. Bytes that wait to be sent to it count for `client`, by
        default for itself alone. Raises Busy if there are too many members."""
        member = self.members.get(id)
        if member is None:
            if len(self.members) >= MAX_MEMBERS:
                raise Busy(f"subscription {self.definition.name!r} has {MAX_MEMBERS:,} consumers already: stop some")
            member = self.members[id] = Member(id, timeout_s, self.edge.budget.account(client))
        else:
            member.on_gone(taken_over(id))
            self.disconnect(member)
            member.account = self.edge.budget.account(client)
            member.to_resend.extend([] if pulls and member.pulls else member.parcels())
            member.resend_until = self._loop.time() + RESEND_S
        member.timeout_s, member.pulls, member.concurrent = timeout_s, pulls, concurrent
        member.divides_credit = divides_credit
        member.connected = member.attached = True
        member.connections += 1
        self.heard(member)
        self._rebalance()
        for delivery in self.deliveries.values():
            self._tell(member, delivery)
        self._tell_waiting_for(member)
        if divides_credit and member.to_resend:
            member.to_resend[0].delivery.may_resend(member.to_resend[0])  # not yet: sets the credit that it needs
        return member

    def heard(self, member: Member) -> None:
        member.heard_at = self._loop.time()

    def disconnect(self, member: Member) -> None:
        """The connection of a member is lost. The member has its session timeout to return."""
        self.heard(member)
        member.disconnect()
        self._unlist(member)
        self.edge.sent(member)
        self._give_up_redriven(member)
        for delivery in self.deliveries.values():
            delivery.reports.forget(member)
            delivery.waiters.notify()

    def leave(self, member: Member) -> None:
        """A member leaves in order. The events that it holds are delivered to others. Idempotent."""
        if self.members.get(member.id) is member:
            self._remove(member)
            self._rebalance()

    def _remove(self, member: Member) -> None:
        del self.members[member.id]
        on_gone = member.on_gone
        self.disconnect(member)
        member.on_gone = on_gone
        for parcel in member.parcels():
            parcel.delivery.take_back(parcel)
        if not self.members:
            self.empty_since = self._loop.time()

    def _give_up_redriven(self, member: Member) -> None:
        for outcome in member.redriven.values():
            if not outcome.done():
                outcome.set_result(Closed(f"consumer {member.id!r} is gone"))

    def extend_timeouts(self, late_s: float) -> None:
        """This process did not run for `late_s` seconds: requests of members may have come that are not read yet."""
        for member in self.members.values():
            member.heard_at += late_s

    def tick(self) -> None:
        """Give up members whose session timeout is over, and take back the events of queues that wait too long to move.
        Let members that wait for more credit use the credit that is left."""
        now = self._loop.time()
        for member in list(self.members.values()):
            if now - member.heard_at > member.timeout_s:
                self._time_out(member)
            elif member.resending and member.divides_credit and now > member.resend_until:
                self._resend(member, patient=False)
                self.available(member)
            elif member.account.wanted:
                if now >= member.retry_at:  # the batch for which it waits may be with another member by now
                    member.account.stop_waiting()
                    self._go_on(member)
            elif member.open and not (member.listed or member.resending or member.needed_bytes):
                member.patient = False
                self.available(member)
            if member.pulls:
                self._take_back_late(member, now)
        for queue in [queue for queue, until in self._moving.items() if now >= until]:
            for parcel in list(self.deliveries[queue].parcels):
                parcel.delivery.take_back(parcel)

    @staticmethod
    def _take_back_late(member: Member, now: float) -> None:
        """Take back the parcels that a pulling consumer has held for its session timeout."""
        for parcel in member.parcels():
            if now - parcel.handed_at > member.timeout_s:
                parcel.delivery.take_back(parcel)

    def _time_out(self, member: Member) -> None:
        log.warning(
            "subscription %r: consumer %r was not heard for %.1f s", self.definition.name, member.id, member.timeout_s
        )
        self._remove(member)
        member.on_gone(Unavailable(f"consumer {member.id!r} was not heard for {member.timeout_s:g} s"))
        self._rebalance()

    # ---- credit ----------------------------------------------------------------------------------------------------

    def grant(self, member: Member, events: int, size: int) -> None:
        """Add to the credit of a member. A member that came back first gets the events that it held."""
        member.grant(events, size)
        self._go_on(member)

    def reclaim(self, member: Member) -> tuple[int, int]:
        """Take back the credit that is left. Return its events and bytes."""
        left = member.take_credit()
        self._tell_waiting_for(member)
        return left

    def _go_on(self, member: Member) -> None:
        if member.resending and member.credited:
            self._resend(member)
        self.available(member)

    def wait_for_space(self, member: Member, size: int) -> None:
        """Give the member no events until `size` more bytes may wait for it, or `SPACE_S` seconds are over."""
        member.retry_at = self._loop.time() + SPACE_S
        member.account.wait(size, partial(self._go_on, member))

    def _resend(self, member: Member, *, patient: bool = True) -> None:
        """Send parcels again. Take those back that do not fit into the credit, except if more credit may follow."""
        while member.to_resend:
            parcel = member.to_resend[0]
            if parcel in parcel.delivery.parcels:
                if patient and member.divides_credit and not parcel.delivery.may_resend(parcel):
                    member.on_notice()
                    return
                if not (parcel.payload_dropped or member.account.fits(parcel.size)):
                    self.wait_for_space(member, parcel.size)
                    return
                if not parcel.delivery.resend(parcel):
                    parcel.delivery.take_back(parcel)
            member.to_resend.popleft()
        member.needed_events = member.needed_bytes = 0

    def sent(self, member: Member) -> bool:
        """A message to a member was sent. Return whether there is more to send."""
        more = self.edge.sent(member)
        self.available(member)
        return more or bool(member.statuses)

    def available(self, member: Member) -> None:
        """A member may be able to take events now: if so, put it into the line."""
        if not member.open or member.resending:
            return
        if self._waiters:
            self.notify_waiters()
        if member.listed:
            return
        member.listed = True
        if not self._bound:
            self._line.append(member)
        unserved, self._unserved = self._unserved, set()
        for queue in unserved:
            self.deliveries[queue].wake()

    def next_member(self, queue: int) -> Member | None:
        """Return the member that gets the next parcel of a queue. None: no member can take one, and the delivery of the
        queue is woken later."""
        owner = self._owner(queue) if self._bound else None
        if self._bound:
            if owner is not None and owner.listed and owner.open:
                return owner
            if owner is not None:
                owner.listed = False
        line = self._line
        while line:
            if line[0].open:
                return line[0]
            line.popleft().listed = False
        self.ask_for_credit(queue)
        return None

    def ask_for_credit(self, queue: int) -> None:
        """Events of a queue wait, and no member can take them: tell the members that divide their credit."""
        if queue not in self.deliveries:
            return
        self._unserved.add(queue)
        owner = self._owner(queue)
        self._tell_waiting(self.members.values() if not self._bound else [owner] if owner is not None else [])

    def _tell_waiting(self, members: Iterable[Member]) -> None:
        for member in members:
            if member.divides_credit and not member.waiting:
                member.waiting = True
                member.on_notice()

    def _tell_waiting_for(self, member: Member) -> None:
        """Tell a member without credit if events wait for it."""
        if any(not self._bound or self._owner(queue) is member for queue in self._unserved):
            self._tell_waiting([member])

    def _owner(self, queue: int) -> Member | None:
        return None if queue in self._moving else self.members.get(self._owners.get(queue, ""))

    def candidates(self, queue: int) -> Sequence[Member]:
        """Return the members that can take events of a queue. The first of them is next."""
        if not self._bound:
            return [member for member in self._line if member.open]
        owner = self._owner(queue)
        return [] if owner is None or not owner.open or owner.resending else [owner]

    def is_accepting(self, queue: int) -> bool:
        """Whether a member can take events of a queue. A member that pulls has credit only while a call waits, so
        the next events are kept ready for it."""
        return bool(self.candidates(queue)) or any(member.pulls for member in self.members.values())

    def pass_over(self, member: Member) -> None:
        """The credit of a member is too small for the next events: it waits for more."""
        if member.needed_bytes:
            member.on_notice()
        self._tell_waiting([member])
        self._unlist(member)

    def needs(self, member: Member, size: int) -> None:
        """Tell a member that a dead letter needs `size` bytes of credit."""
        if member.needed_bytes != size:
            member.needed_bytes = size
            member.on_notice()

    def _unlist(self, member: Member) -> None:
        if member.listed and not self._bound:
            self._line.remove(member)
        member.listed = False

    def rotate(self, member: Member) -> None:
        """The member had its share: the next one in line has its turn."""
        if not self._bound and self._line and self._line[0] is member:
            self._line.rotate(-1)

    def share(self, ready: int) -> int:
        """Return how many of `ready` streams one member gets in its turn."""
        return ready if self._bound else -(-ready // max(len(self._line), 1))

    def note_duration(self, seconds: float, events: int) -> None:
        """A parcel of so many events is done."""
        event_s = max(seconds / events, MIN_EVENT_S)
        self._event_s += (event_s - self._event_s) * NEWEST_SHARE

    def parcel_events(self) -> int:
        """Return the most events of the next parcel for a concurrent consumer.

        With larger parcels, slow streams would hold all of its credit, while handlers of other streams could run. The
        sizes differ by up to a third, so that parcels handed out together do not end together.
        """
        self._concurrent_parcels += 1
        seconds = PARCEL_S * (1 - self._concurrent_parcels % SIZES / (3 * SIZES))
        return max(int(seconds / self._event_s), 1)

    async def wait_for_member(self) -> None:
        """Wait until other members may be able to take events, or a delivery stops."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(future)
        await future

    def notify_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    # ---- what members say ------------------------------------------------------------------------------------------

    def acknowledge(self, member: Member, events: Events, *, up_to: bool = False) -> bool:
        """Events are done; with `up_to` also the earlier events of the stream that the member holds. Return False if
        the member does not hold the events."""
        if member.redriven and self._redriven(member, events, None):
            return True
        parcel = member.in_flight.get((events.queue, events.offset))
        if parcel is None:
            return False
        member.account.prove()
        at = parcel.find(events.offset)
        piece = parcel.pieces[at]
        if not up_to:
            return parcel.delivery.done(parcel, at, events.index, events.end(piece.stop))
        if not piece.start <= events.index < piece.stop:
            return False
        parcel.delivery.done_up_to(parcel, at, events.end(piece.stop))
        return True

    def reject(
        self, member: Member, events: Events, reason: str, delay_s: float | None = None, *, unavailable: bool = False
    ) -> bool:
        """Events failed, or, with `unavailable`, a dependency of the consumer. These events and the later ones of the
        parcel are delivered again. Return False if the member does not hold the events."""
        if member.redriven and self._redriven(member, events, Rejected(reason)):
            return True
        parcel = member.in_flight.get((events.queue, events.offset))
        if parcel is None:
            return False
        member.account.prove()
        at = parcel.find(events.offset)
        failure = Failure(events.end(parcel.pieces[at].stop), reason, delay_s=delay_s, unavailable=unavailable)
        return parcel.delivery.reject(parcel, at, events.index, failure)

    def release(self, member: Member, events: Events) -> bool:
        """The member gives these events back unprocessed, with the later ones of the parcel. It does not count as a
        failure. Return False if the member does not hold the events."""
        parcel = member.in_flight.get((events.queue, events.offset))
        if parcel is None:
            return False
        return parcel.delivery.release(parcel, parcel.find(events.offset), events.index)

    def note_unconfirmed(
        self, member: Member, queue: int, number: int, events: Sequence[tuple[StreamId, int, int, int]]
    ) -> None:
        """The member acknowledged these events in an earlier session: (stream, offset, index of the first, count).
        Those that it holds are done. It is told when all are done in the store, unless `number` is 0. Raises
        InvalidArgument if it asks for too many."""
        delivery = self.deliveries[queue]
        if number:
            questions = [Question(number, stream, offset, first, first + n) for stream, offset, first, n in events]
            delivery.reports.of(member).ask(questions)
        for stream, offset, first, count in events:
            parcel = member.in_flight.get((queue, offset))
            if parcel is not None and parcel.cursor.stream == stream:
                member.account.prove()
                parcel.delivery.done(parcel, parcel.find(offset), first, first + count)

    def note_applied(self, member: Member, queue: int, number: int) -> None:
        """All reports of the member about a queue are applied, up to this number."""
        if number and (delivery := self.deliveries.get(queue)) is not None:
            delivery.reports.of(member).note_applied(number)

    def _redriven(self, member: Member, events: Events, error: HeadraceError | None) -> bool:
        outcome = member.redriven.get(events[:3])
        if outcome is None or outcome.done():
            return False
        outcome.set_result(error)
        return True

    # ---- mode bound ------------------------------------------------------------------------------------------------

    def _rebalance(self) -> None:
        """Assign the queues again. A queue of which a member holds events moves when these are done or taken back."""
        self._rebalancing = False
        if not self._bound:
            return
        wanted = self._wanted_owners()
        for queue, delivery in self.deliveries.items():
            if self._owners.get(queue) == wanted.get(queue):
                if self._moving.pop(queue, None) is not None:
                    delivery.wake()
            elif delivery.parcels:
                self._moving.setdefault(queue, self._loop.time() + DRAIN_S)
            else:
                self._move(queue, wanted.get(queue))
        self._tell_queues()

    def _wanted_owners(self) -> Mapping[int, str]:
        queues = sorted(self._queues or self.deliveries)
        dealt = average_allocation(len(queues), sorted(self.members))
        return {queues[position]: member for member, positions in dealt.items() for position in positions}

    def _move(self, queue: int, owner: str | None) -> None:
        self._moving.pop(queue, None)
        if owner is None:
            self._owners.pop(queue, None)
        else:
            self._owners[queue] = owner
            self.deliveries[queue].wake()
            self.notify_waiters()

    def drained(self, queue: int) -> None:
        """No member holds events of a queue any more."""
        if queue in self._moving:
            self._move(queue, self._wanted_owners().get(queue))
            self._tell_queues()

    def _tell_queues(self) -> None:
        for member in self.members.values():
            owned = (q for q, owner in self._owners.items() if owner == member.id and q not in self._moving)
            queues = tuple(sorted(owned))
            changed, member.queues = {*queues} ^ {*member.queues}, queues
            for queue in sorted(changed & self.deliveries.keys()):
                self._tell(member, self.deliveries[queue])

    # ---- what others see -------------------------------------------------------------------------------------------

    @property
    def caught_up(self) -> bool:
        """Whether no event is left that could be delivered now."""
        return all(delivery.idle for delivery in self.deliveries.values())

    def positions(self) -> Mapping[int, Checkpoint]:
        return {queue: delivery.progress.checkpoint() for queue, delivery in self.deliveries.items()}

    def statistics(self) -> Sequence[MemberStatistics]:
        return [member.statistics() for member in self.members.values()]


def taken_over(consumer: str) -> Fenced:
    return Fenced(f"another connection took over consumer {consumer!r}: give each consumer an id of its own")
