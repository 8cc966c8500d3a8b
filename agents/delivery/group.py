"""Groups: the consumers attached to a subscription, and the distribution of its events to them.

`credit_line.py` chooses the member for each parcel, `assignment.py` the owner of each queue with mode bound,
`group_queues.py` takes the members' reports. (Mode *broadcast* has a group of one member for each consumer.)

A member is given up if nothing is heard from it for its session timeout: its events go to others. A member whose
connection broke has the same time to return. Then it first gets the events again that it held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ...streams.errors import Busy, Closed, Fenced, HeadraceError, Unavailable
from ...streams.frames import QueueState, status_frame
from ...streams.subscriptions import Checkpoint, GapRecord, Mode, SubscriptionDefinition, parent_name
from .assignment import QueueAssignment
from .credit_line import CreditLine
from .delivery import Delivery, FailureSink
from .edge import Edge
from .group_delivery import GroupDelivery
from .group_queues import GroupQueues
from .member import Member, MemberStatistics
from .parcel import Parcel
from .parcel_sizes import ParcelSizes

log = logging.getLogger("headrace.agents")

MAX_MEMBERS = 10_000
RESEND_S = 2.0
"""How long a member that divides its credit may take to grant some for the events that it held, in seconds."""


class Group(GroupQueues):
    """The members of one subscription in this process, over all its queues. A `DeliveryService`.

    `stored` says whether the control store keeps the position. All on one loop. Call `tick` at least about once a
    second.
    """

    def __init__(
        self, definition: SubscriptionDefinition, edge: Edge, *, stored: bool = True, queues: Sequence[int] = ()
    ) -> None:
        """With mode bound, `queues` are all queues to assign, also those of other silos. If empty, the queues that are
        delivered here are assigned."""
        super().__init__()
        self.definition = definition
        self.edge = edge
        self.stored = stored
        self.members: dict[str, Member] = {}
        self.empty_since = asyncio.get_running_loop().time()
        """Loop time when the last member left. Only valid while there is no member."""
        self._assignment = QueueAssignment(queues) if definition.mode is Mode.BOUND else None
        self.line = CreditLine(self.members, self.deliveries, self._assignment)
        self.sizes = ParcelSizes()
        self._assigning = False
        self._loop = asyncio.get_running_loop()

    # ---- as the manager's service ----------------------------------------------------------------------------------

    def deliver(
        self, definition: SubscriptionDefinition, queue: int, checkpoint: Checkpoint, sink: FailureSink, **options: Any
    ) -> Delivery:
        delivery = GroupDelivery(definition, queue, checkpoint, self, sink, **options)
        before, self.deliveries[queue] = self.deliveries.get(queue), delivery
        if before is not None and before.fence == delivery.fence:
            self.tell_status(before, QueueState.ENDED)  # its events in flight come again, under the same epoch
        self.tell_status(delivery, delivery.state)
        if not self._assigning:
            self._assigning = True
            self._loop.call_soon(self._assign)
        return delivery

    def ended(self, queue: int) -> None:
        delivery = self.deliveries.pop(queue, None)
        self.line.forget_queue(queue)
        if self._assignment is not None:
            self._assignment.forget(queue)
        if delivery is not None:
            self.tell_status(delivery, QueueState.ENDED)
            self._assigned([])

    def gap(self, record: GapRecord) -> None:
        for member in self.members.values():
            member.on_gap(record)

    async def fenced(self, error: HeadraceError) -> None:
        self.dissolve(error)

    async def completed(self, limit_s: float) -> None:
        name = parent_name(self.definition.name)
        self.dissolve(Fenced(f"subscription {name!r} was deleted, or is not served here any more"))

    def dissolve(self, error: HeadraceError) -> None:
        """The subscription is not served here any more: remove all members, and tell them why."""
        for member in list(self.members.values()):
            self._remove(member)
            member.on_gone(error)

    # ---- the status of queues --------------------------------------------------------------------------------------

    def status(self, member: Member, queue: int) -> tuple[int, int, bool] | None:
        """Return the epoch and generation of a queue, and whether it is assigned to the member; None if it is not
        delivered here."""
        delivery = self.deliveries.get(queue)
        return None if delivery is None else (*delivery.fence, self._is_assigned(member, queue))

    def tell_status(self, delivery: GroupDelivery, state: QueueState) -> None:
        """Tell all members the status of a queue."""
        for member in self.members.values():
            self._tell(member, delivery, state)

    def _tell(self, member: Member, delivery: GroupDelivery, state: QueueState) -> None:
        if member.attached:
            queue = delivery.queue
            assigned = self._is_assigned(member, queue)
            member.put_status(queue, state, status_frame(queue, state, *delivery.fence, assigned=assigned))
            member.on_notice()

    # ---- mode bound ------------------------------------------------------------------------------------------------

    def _is_assigned(self, member: Member, queue: int) -> bool:
        return self._assignment is None or queue in member.queues

    def _assign(self) -> None:
        """Members or queues came or went: assign the queues again."""
        self._assigning = False
        if self._assignment is not None:
            held = {queue for queue, delivery in self.deliveries.items() if delivery.parcels}
            self._assigned(self._assignment.assign(self.members, self.deliveries, held, self._loop.time()))

    def drained(self, queue: int) -> None:
        """No member holds events of a queue any more."""
        if self._assignment is not None and self._assignment.drained(queue, self.members, self.deliveries):
            self._assigned([queue])

    def _assigned(self, queues: Sequence[int]) -> None:
        """These queues have another owner: tell the members."""
        if self._assignment is None:
            return
        for queue in queues:
            self.deliveries[queue].wake()
        self.line.waiters.notify()
        assigned = self._assignment.queues()
        for member in self.members.values():
            before, member.queues = member.queues, tuple(assigned.get(member.id, ()))
            for queue in sorted({*before} ^ {*member.queues}):
                if (delivery := self.deliveries.get(queue)) is not None:
                    self._tell(member, delivery, delivery.state)

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
        started_us: int = 0,
    ) -> Member:
        """A consumer connects. It replaces the connection with the same id, and gets the events again that the replaced
        connection held, as its credit allows. If both connections pull, these events come again only after the session
        timeout. `concurrent`: a parcel has events for at most about a second of work. `divides_credit`: the consumer
        has sessions with several silos, and is told when events wait for its credit. Bytes that wait to be sent to it
        count for `client`, by default for itself alone. `started_us` is when the consumer was made. Raises Busy if
        there are too many members."""
        member = self.members.get(id)
        if member is None:
            if len(self.members) >= MAX_MEMBERS:
                raise Busy(f"subscription {self.definition.name!r} has {MAX_MEMBERS:,} consumers already: stop some")
            member = self.members[id] = Member(id, timeout_s, self.edge.budget.account(client))
        else:
            member.on_gone(taken_over(id))
            self.disconnect(member)
            member.account = self.edge.budget.account(client)
            if pulls and member.pulls:
                for parcel in member.parcels():  # taken back at the same time as before, whatever the new timeout
                    parcel.handed_at += member.timeout_s - timeout_s
            else:
                member.to_resend.extend(member.parcels())
            member.resend_until = self._loop.time() + RESEND_S
        member.timeout_s, member.pulls, member.concurrent = timeout_s, pulls, concurrent
        member.divides_credit, member.started_us = divides_credit, started_us
        member.connected = member.attached = True
        member.connections += 1
        self.heard(member)
        self._assign()
        for delivery in self.deliveries.values():
            self._tell(member, delivery, delivery.state)
        self.line.ask(member)
        if divides_credit and member.to_resend:
            # The member has no credit yet: this call notes how much it needs.
            member.to_resend[0].delivery.may_resend(member.to_resend[0])
        return member

    def heard(self, member: Member) -> None:
        member.heard_at = self._loop.time()

    def disconnect(self, member: Member) -> None:
        """The connection of a member is lost. The member has its session timeout to return."""
        self.heard(member)
        member.disconnect()
        self.line.remove(member)
        self.edge.sent(member)
        for outcome in member.redriven.values():
            if not outcome.done():
                outcome.set_result(Closed(f"consumer {member.id!r} is gone"))
        for delivery in self.deliveries.values():
            delivery.reports.forget(member)
            delivery.waiters.notify()

    def leave(self, member: Member) -> None:
        """A member leaves in order. The events that it holds are delivered to others. Idempotent."""
        if self.members.get(member.id) is member:
            self._remove(member)
            self._assign()

    def _remove(self, member: Member) -> None:
        del self.members[member.id]
        on_gone = member.on_gone
        self.disconnect(member)
        member.on_gone = on_gone
        _take_back(member.parcels())
        self.line.waiters.notify()  # dead letters that it held may go to others
        if not self.members:
            self.empty_since = self._loop.time()

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
                log.warning(
                    "subscription %r: nothing was heard from consumer %r for %.1f s",
                    self.definition.name, member.id, member.timeout_s,
                )  # fmt: skip
                self._remove(member)
                member.on_gone(Unavailable(f"nothing was heard from consumer {member.id!r} for {member.timeout_s:g} s"))
                self._assign()
            else:
                self.line.tick(member, now)
            if member.pulls:  # its events come again when it has held them for its session timeout
                _take_back(parcel for parcel in member.parcels() if now - parcel.handed_at > member.timeout_s)
        if self._assignment is not None:
            for queue in self._assignment.overdue(now):
                _take_back(list(self.deliveries[queue].parcels))

    # ---- credit ----------------------------------------------------------------------------------------------------

    def grant(self, member: Member, events: int, size: int) -> None:
        """Add to the credit of a member. A member that came back first gets the events that it held."""
        member.grant(events, size)
        self.line.go_on(member)

    def reclaim(self, member: Member) -> tuple[int, int]:
        """Take back the credit that is left. Return its events and bytes."""
        left = member.take_credit()
        self.line.ask(member)
        return left

    def sent(self, member: Member) -> bool:
        """A message to a member was sent. Return whether there is more to send."""
        more = self.edge.sent(member)
        self.line.add(member)
        return more or bool(member.statuses)

    def statistics(self) -> Sequence[MemberStatistics]:
        return [member.statistics() for member in self.members.values()]


def taken_over(consumer: str) -> Fenced:
    return Fenced(f"another connection took over consumer {consumer!r}: give each consumer an id of its own")


def _take_back(parcels: Iterable[Parcel]) -> None:
    for parcel in parcels:
        parcel.delivery.parcels.take_back(parcel)
