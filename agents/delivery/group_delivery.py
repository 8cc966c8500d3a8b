"""Delivery to the members of a group: remote consumers with credit.

At most one parcel of a stream is in flight: consecutive events that one member holds until they are done, rejected or
taken back. So order within a stream holds even if there are more members than queues, and a retry never overtakes.
Acknowledgements come in any order: the cursor moves to the first event that is not done, and remembers later events
that are done.
"""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ...streams.errors import InvalidArgument
from ...streams.events import Event
from ...streams.failure_log import described
from ...streams.frames import QueueState
from ...streams.handler_workers import CANCEL_S
from ...streams.subscriptions import Checkpoint, SubscriptionDefinition
from ..cursor import CursorState, StreamCursor
from .breaker import Admission
from .delivery import Delivery, FailureSink
from .edge import DeliveryActor
from .group_redrives import GroupRedrives
from .held_parcels import HeldParcels
from .member import MAX_CREDIT
from .parcel import Parcel
from .parcel_writer import ParcelWriter, max_bytes_left
from .retries import Failure

if TYPE_CHECKING:
    from .group import Group
    from .member import Member

log = logging.getLogger("headrace.agents")


class GroupDelivery(Delivery):
    """Hands parcels to the members of `group`. `options` are those of `Delivery`."""

    def __init__(
        self,
        definition: SubscriptionDefinition,
        queue: int,
        checkpoint: Checkpoint,
        group: Group,
        sink: FailureSink,
        **options: Any,
    ) -> None:
        super().__init__(definition, queue, checkpoint, sink, **options)
        self.group = group
        self.parcels = HeldParcels(queue, self.progress, self.gate, self, self.counts)
        self._actor = DeliveryActor(f"{definition.name}/{queue}", self)
        self._giving_up: set[asyncio.Task[None]] = set()
        self._redrives = GroupRedrives(self.name, queue, group.edge, group.line)
        self._writer = ParcelWriter(queue, group.edge, group.line)

    def wake(self) -> None:
        while not self._stopping and (deferred := self.progress.take_deferred()) is not None:
            self._give_up(*deferred)
        if self.progress.ready and not self._stopping and not self.withheld:
            self.group.edge.wake(self._actor)

    @property
    def is_accepting(self) -> bool:
        return self.group.line.is_accepting(self.queue)

    async def wait_until_accepting(self) -> None:
        while not self.is_accepting:
            self.group.line.ask_for_credit(self.queue)
            await self.group.line.waiters.wait()

    # ---- parcels are handed out ------------------------------------------------------------------------------------

    def turn(self, ends: float) -> bool:
        """Hand parcels to members in turn, until no stream is ready, no member can take more, or the time is up. Return
        whether it could go on."""
        ready, group = self.progress.ready, self.group
        if self.over:
            return False
        share = group.line.share(self.progress.waiting_streams)
        while ready and not self._stopping:
            member = group.line.next_member(self.queue)
            if member is None:
                return False
            if not member.busy and not group.edge.may_send():
                return True
            self._hand_some(member, share, ends)
            if self.withheld or perf_counter() >= ends:
                break
        return bool(ready) and not self._stopping and not self.withheld

    def _hand_some(self, member: Member, share: int, ends: float) -> None:
        """Hand up to `share` parcels to one member while it can take them and the time is not up. Then rotate."""
        progress, gate, breaker = self.progress, self.gate, self.gate.breaker
        while progress.ready and share and member.open:
            admission = gate.ask(self) if breaker.limiting else Admission.ANY
            if admission is Admission.NONE:
                break
            cursor = progress.take()
            if progress.deferred:
                self.wake()
            if cursor is None:
                self.waiters.notify()
                break
            if not self._hand(cursor, member, one=admission is Admission.PROBE):
                return
            if breaker.limiting:
                gate.begin()
            share -= 1
            if perf_counter() >= ends:
                break
        self.group.line.rotate(member)

    def _hand(self, cursor: StreamCursor, member: Member, *, one: bool) -> bool:
        """Hand a member the ready events of a stream, or `one` of them, as its credit allows. Return False if it allows
        none."""
        parcel = Parcel(self, cursor, member)
        most = self.group.sizes.next_events() if member.concurrent else MAX_CREDIT
        try:
            frames = self._writer.write(parcel, most, one=one)
        except InvalidArgument as error:
            self.retries.pause(cursor, described(error))
            return True
        if not frames:
            self.progress.put_back(cursor)
            self.group.line.pass_over(member)
            return False
        self._handed(parcel, frames)
        return True

    def _handed(self, parcel: Parcel, frames: list[bytes]) -> None:
        member = parcel.member
        self.parcels.add(parcel)
        member.charge(parcel.events, parcel.size)
        now = parcel.handed_at = self._loop.time()
        parcel.count = parcel.events
        parcel.measured = now >= self.counts.measure_at
        if parcel.measured:
            self.counts.measure_delay(parcel.pieces[0].batch, now, first=parcel.cursor.trouble is None)
        # The parcel is sent in one response: otherwise its beginning could be rejected while the rest is still on its
        # way.
        self.group.edge.put(member, frames[0] if len(frames) == 1 else b"".join(frames))

    def may_resend(self, parcel: Parcel) -> bool:
        """Return whether its member's credit is enough. If not, set the credit that the member needs."""
        member, size = parcel.member, max_bytes_left(parcel)
        if parcel.events <= member.credit_events and size <= member.credit_bytes:
            return True
        member.needed_events, member.needed_bytes = parcel.events, size
        return False

    def resend(self, parcel: Parcel) -> bool:
        """The member came back: send it the unacknowledged events again. Return False if its credit is too small, the
        events have to be read again, or the queue's lease is over."""
        member = parcel.member
        if self.lost or parcel.payload_dropped or parcel.events > member.credit_events:
            return False
        self.progress.note_return(parcel.cursor, parcel.end)
        try:
            message = self._writer.write_left(parcel)
        except InvalidArgument:
            return False
        if len(message) > member.credit_bytes:
            return False
        member.in_flight_bytes += len(message) - parcel.size
        parcel.size = len(message)
        member.charge(parcel.events, len(message))
        self.group.edge.put(member, message)
        return True

    # ---- parcels come to their end ---------------------------------------------------------------------------------

    def parcel_ended(self, member: Member) -> None:
        """A member does not hold a parcel any more."""
        self.group.line.add(member)
        if not self.parcels:
            self.group.drained(self.queue)
            self.waiters.notify()

    def parcel_done(self, parcel: Parcel) -> None:
        """A member has finished a parcel, or the part of it before a failure."""
        now = self._loop.time()
        self.group.sizes.note_duration(now - parcel.handed_at, parcel.count)
        if parcel.measured:
            self.counts.handling.observe(now - parcel.handed_at)

    def failed(self, parcel: Parcel, failure: Failure) -> None:
        """The event at the parcel's cursor failed: retry, or give up."""
        cursor = parcel.cursor
        if self._stopping:
            self.progress.put_back(cursor)
        elif not self.retries.try_again(cursor, failure):
            if parcel.payload_dropped:
                self.progress.defer(cursor, failure)
            else:
                self._give_up(cursor, failure)

    def _give_up(self, cursor: StreamCursor, failure: Failure) -> None:
        """Give up in a task, because the store has to record it."""
        batch = cursor.batch
        assert batch is not None
        task = self._loop.create_task(
            self.retries.give_up(cursor, batch, failure), name=f"headrace give up {self.name}/{self.queue}"
        )
        self._giving_up.add(task)
        task.add_done_callback(self._gave_up_on)

    def _gave_up_on(self, task: asyncio.Task[None]) -> None:
        self._giving_up.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("delivery of subscription %r, queue %d failed and goes on", self.name, self.queue, exc_info=error)
        self.wake()
        self.waiters.notify()

    # ---- leaving a cache -------------------------------------------------------------------------------------------

    def detach(self, cursor: StreamCursor) -> None:
        super().detach(cursor)
        if self._rewindable and (parcel := self.parcels.of(cursor)) is not None:
            self.progress.keep_apart(cursor, parcel.drop_payload())

    def held(self, cursor: StreamCursor) -> int:
        # If the queue can rewind, events that a consumer holds need not be kept in this process.
        return 0 if self._rewindable and self.parcels.of(cursor) is not None else super().held(cursor)

    async def redrive(self, event: Event) -> BaseException | None:
        error = await self._redrives.deliver(event)
        self.counts.delivered_events += error is None
        return error

    # ---- the end ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no event is left that could be delivered now."""
        feed = self.progress.feed
        if self._stopping or feed is None or not feed.caught_up or self.progress.unseen is not None:
            return False
        return all(cursor.state is CursorState.PAUSED for cursor in self.progress.cursors.values())

    @property
    def fence(self) -> tuple[int, int]:
        """The epoch and generation that reports about its events must have."""
        return self.queue_epoch, self.generation

    @property
    def state(self) -> QueueState:
        """DRAINING: it hands out nothing more, and waits for the events that members hold."""
        return QueueState.DRAINING if self._stopping else QueueState.SERVED

    def halt(self, *, lost: bool = False) -> None:
        super().halt(lost=lost)
        self._redrives.halt()

    async def stop(self, drain_s: float) -> None:
        self.halt()
        if drain_s > 0 and self.group.deliveries.get(self.queue) is self:
            self.group.tell_status(self, self.state)
        self.group.edge.forget(self._actor)
        try:
            async with asyncio.timeout(drain_s):
                while self._giving_up or any(parcel.member.may_acknowledge for parcel in self.parcels):
                    await self.waiters.wait()
        except TimeoutError:
            if drain_s > 0:  # with 0, the caller does not want to wait
                log.warning(
                    "%d parcels of %s, queue %d were not acknowledged within %.1f s and come again",
                    len(self.parcels), self.name, self.queue, drain_s,
                )  # fmt: skip
        finally:
            for parcel in list(self.parcels):
                self.parcels.take_back(parcel)
            self._redrives.close()
            for task in self._giving_up:
                task.cancel()
        if self._giving_up:
            await asyncio.wait(self._giving_up, timeout=CANCEL_S)
        self.waiters.notify()
