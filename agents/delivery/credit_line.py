"""The members of a group that have credit, in the order in which they get the next parcels.

Mode *shared*: the next parcel of any stream goes to the next member in line. Mode *bound*: to the owner of its queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .assignment import QueueAssignment
from .member import Member
from .waiters import Waiters

if TYPE_CHECKING:
    from .group_delivery import GroupDelivery

SPACE_S = 5.0
"""How long a member waits for the space for one batch, in seconds. Then another batch is tried."""


class CreditLine:
    """Chooses members for parcels. Deliveries that found none are woken when a member has credit again."""

    def __init__(
        self,
        members: Mapping[str, Member],
        deliveries: Mapping[int, GroupDelivery],
        assignment: QueueAssignment | None,
    ) -> None:
        """With mode bound there is an `assignment`."""
        self._members = members
        self._deliveries = deliveries
        self._assignment = assignment
        self._line: deque[Member] = deque()
        self._unserved: set[int] = set()
        """Queues whose events no member could take: their deliveries wait to be woken."""
        self.waiters = Waiters()
        """Tasks that wait until other members may be able to take events, or a delivery stops."""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._line)

    # ---- members come, and go ----------------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        """A member may be able to take events now: if so, put it into the line."""
        if not member.open or member.resending:
            return
        self.waiters.notify()
        if member.listed:
            return
        member.listed = True
        if self._assignment is None:
            self._line.append(member)
        unserved, self._unserved = self._unserved, set()
        for queue in unserved:
            self._deliveries[queue].wake()

    def remove(self, member: Member) -> None:
        """The member takes nothing for the time being."""
        if member.listed and self._assignment is None:
            self._line.remove(member)
        member.listed = False

    def rotate(self, member: Member) -> None:
        """The member had its share: the next one in line has its turn."""
        if self._line and self._line[0] is member:
            self._line.rotate(-1)

    def share(self, ready: int) -> int:
        """Return how many of `ready` streams one member gets in its turn."""
        return ready if self._assignment is not None else -(-ready // max(len(self._line), 1))

    def forget_queue(self, queue: int) -> None:
        """The queue is not delivered any more."""
        self._unserved.discard(queue)

    # ---- members for parcels ---------------------------------------------------------------------------------------

    def next_member(self, queue: int) -> Member | None:
        """Return the member that gets the next parcel of a queue. None: no member can take one, and the delivery of the
        queue is woken later."""
        if self._assignment is not None:
            owner = self._owner(queue)
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

    def candidates(self, queue: int) -> Sequence[Member]:
        """Return the members that can take events of a queue. The first of them is next."""
        if self._assignment is None:
            return [member for member in self._line if member.open]
        owner = self._owner(queue)
        return [] if owner is None or not owner.open or owner.resending else [owner]

    def is_member(self, member: Member, queue: int) -> bool:
        """Whether the member can take events of a queue, now or when it comes back within its session timeout."""
        if self._assignment is not None:
            return self._owner(queue) is member
        return self._members.get(member.id) is member

    def is_accepting(self, queue: int) -> bool:
        """Whether a member can take events of a queue. A member that pulls has credit only while a call waits, so
        the next events are kept ready for it."""
        return bool(self.candidates(queue)) or any(member.pulls for member in self._members.values())

    def _owner(self, queue: int) -> Member | None:
        assert self._assignment is not None
        return self._members.get(self._assignment.owner(queue))

    # ---- credit is missing -----------------------------------------------------------------------------------------

    def ask_for_credit(self, queue: int) -> None:
        """Events of a queue wait, and no member can take them: tell the members that divide their credit."""
        if queue in self._deliveries:
            self._unserved.add(queue)
            if self._assignment is None:
                self._tell_waiting(self._members.values())
            elif (owner := self._owner(queue)) is not None:
                self._tell_waiting([owner])

    def ask(self, member: Member) -> None:
        """Tell a member without credit if events wait for it."""
        if any(self._assignment is None or self._owner(queue) is member for queue in self._unserved):
            self._tell_waiting([member])

    @staticmethod
    def _tell_waiting(members: Iterable[Member]) -> None:
        for member in members:
            if member.divides_credit and not member.waiting:
                member.waiting = True
                member.on_notice()

    def pass_over(self, member: Member) -> None:
        """The credit of a member is too small for the next events: it waits for more."""
        if member.needed_bytes or (member.wanted_events and member.divides_credit):
            member.on_notice()
        self._tell_waiting([member])
        self.remove(member)

    @staticmethod
    def need(member: Member, size: int) -> None:
        """Tell a member that a dead letter needs `size` bytes of credit."""
        if member.needed_bytes != size:
            member.needed_bytes = size
            member.on_notice()

    # ---- credit comes ----------------------------------------------------------------------------------------------

    def go_on(self, member: Member) -> None:
        """The member has more credit: first send it again the events that it held."""
        if member.resending and member.credited:
            self._resend(member)
        self.add(member)

    def tick(self, member: Member, now: float) -> None:
        """Let a member that waits for more credit use the credit that is left."""
        if member.resending and member.divides_credit and now > member.resend_until:
            self._resend(member, patient=False)
            self.add(member)
        elif member.account.wanted:
            if now >= member.retry_at:  # the batch for which it waits may be with another member by now
                member.account.stop_waiting()
                self.go_on(member)
        elif member.open and not (member.listed or member.resending or member.needed_bytes):
            member.patient = False
            self.add(member)

    def wait_for_space(self, member: Member, size: int) -> None:
        """Give the member no events until `size` more bytes may wait for it, or `SPACE_S` seconds are over."""
        member.retry_at = self._loop.time() + SPACE_S
        member.account.wait(size, partial(self.go_on, member))

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
                    parcel.delivery.parcels.take_back(parcel)
            member.to_resend.popleft()
        member.needed_events = member.needed_bytes = 0
