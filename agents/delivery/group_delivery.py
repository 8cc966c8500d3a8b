"""Delivery to the members of a group: remote consumers with credit.

At most one parcel of a stream is in flight: consecutive events that one member holds until they are done, rejected or
taken back. So order within a stream holds even if there are more members than queues, and a retry never overtakes.
Acknowledgements come in any order: the cursor moves to the first event that is not done, and remembers later events
that are done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ...streams.errors import InvalidArgument
from ...streams.events import Event, EventBatch
from ...streams.failure_log import described
from ...streams.frames import QueueState
from ...streams.handler_workers import CANCEL_S
from ...streams.subscriptions import Checkpoint, SubscriptionDefinition
from ..cursor import READY, RUNNING, CursorState, StreamCursor
from .breaker import Admission
from .confirmations import QueueReports, ReportMark
from .delivery import Delivery, FailureSink
from .edge import DeliveryActor
from .group_redrives import GroupRedrives
from .member import MAX_CREDIT
from .parcel import Parcel, Piece, left
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
        self.parcels: dict[Parcel, None] = {}
        """Parcels in flight, in the order in which they were handed out."""
        self.reports = QueueReports(queue, self.queue_epoch)
        self._actor = DeliveryActor(f"{definition.name}/{queue}", self)
        self._giving_up: set[asyncio.Task[None]] = set()
        self._redrives = GroupRedrives(self.name, queue, group.edge, group.line)
        self._writer = ParcelWriter(queue, group.edge, group.line)

    def wake(self) -> None:
        if self._ready and not self._stopping and not self.withheld:
            self.group.edge.wake(self._actor)

    @property
    def is_accepting(self) -> bool:
        return self.group.line.is_accepting(self.queue)

    async def wait_until_accepting(self) -> None:
        while not self.is_accepting:
            self.group.line.ask_for_credit(self.queue)
            await self.group.line.wait_for_member()

    # ---- parcels are handed out ------------------------------------------------------------------------------------

    def turn(self, ends: float) -> bool:
        """Hand parcels to members in turn, until no stream is ready, no member can take more, or the time is up. Return
        whether it could go on."""
        ready, group = self._ready, self.group
        if self.over:
            return False
        share = group.line.share(len(ready))
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
        ready, gate, breaker = self._ready, self.gate, self.gate.breaker
        while ready and share and member.open:
            admission = gate.ask(self) if breaker.limiting else Admission.ANY
            if admission is Admission.NONE:
                break
            cursor = ready.popleft()
            if cursor.state is not READY:
                continue
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
            self._ready.appendleft(cursor)
            self.group.line.pass_over(member)
            return False
        self._handed(parcel, frames)
        return True

    def _handed(self, parcel: Parcel, frames: list[bytes]) -> None:
        cursor, member = parcel.cursor, parcel.member
        cursor.state = RUNNING
        cursor.parcel = parcel
        last = parcel.pieces[-1]
        parcel.end = last.batch.offset, last.stop
        self._in_flight += 1
        self.parcels[parcel] = None
        for piece in parcel.pieces:
            member.in_flight[self.queue, piece.batch.offset] = parcel
        member.in_flight_events += parcel.events
        member.in_flight_bytes += parcel.size
        member.charge(parcel.events, parcel.size)
        parcel.handed_at, parcel.count = self._loop.time(), parcel.events
        # In one response: otherwise its beginning could be rejected while the rest is still on its way.
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
        self._note_return(parcel)
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

    def done(self, parcel: Parcel, at: int, first: int, last: int) -> bool:
        """Events `first` to `last`, exclusive, of a piece are done. Return False if the piece does not have them."""
        piece = parcel.pieces[at]
        first, last = max(first, piece.start), min(last, piece.stop)
        if first >= last or at < parcel.head:
            return False
        cursor = parcel.cursor
        if at == parcel.head and first <= cursor.index:
            if last > cursor.index:
                self._advance(parcel, last)
        else:
            self._count(parcel, cursor.mark_done(piece.batch.offset, first, last))
        self.progress.touch()
        if self.gate.breaker.watching:
            self.gate.succeeded(cursor.stream)
        return True

    def done_up_to(self, parcel: Parcel, at: int, last: int) -> None:
        """All events before event `last` of a piece are done."""
        while parcel.head < at:
            self.done(parcel, parcel.head, 0, parcel.pieces[parcel.head].stop)
        if parcel.head == at:
            self.done(parcel, at, 0, last)

    def _count(self, parcel: Parcel, events: int) -> None:
        parcel.events -= events
        parcel.member.in_flight_events -= events
        self._delivered_events += events

    def _advance(self, parcel: Parcel, index: int) -> None:
        """All events below `index` in the head piece are done."""
        cursor, piece = parcel.cursor, parcel.pieces[parcel.head]
        offset = piece.batch.offset
        if cursor.done is None:
            self._count(parcel, index - cursor.index)
        else:
            self._count(parcel, sum(1 for _ in left(cursor, offset, cursor.index, index)))
        while True:
            cursor.index = index
            if cursor.done is not None:
                cursor.skip_done()
            if cursor.trouble is not None:
                cursor.recovered()
            if cursor.index < piece.stop:
                return
            if piece.stop == piece.batch.count:
                self._delivered_batches += 1
            del parcel.member.in_flight[self.queue, offset]
            parcel.head += 1
            if parcel.head == len(parcel.pieces):
                self._complete(parcel, piece)
                return
            piece = parcel.pieces[parcel.head]
            self._step(cursor, piece.batch)
            offset, index = piece.batch.offset, piece.start

    def _step(self, cursor: StreamCursor, batch: EventBatch) -> None:
        """Move the cursor to the next batch of the parcel."""
        if cursor.done is not None:
            cursor.forget_batch()
        if cursor.entry is None:
            cursor.stand_on(batch)
        else:
            cursor.advance()
            assert cursor.batch is batch

    def _complete(self, parcel: Parcel, piece: Piece) -> None:
        """All pieces are done: go on with the stream, or with the failure."""
        cursor, failure = parcel.cursor, parcel.failure
        self.group.sizes.note_duration(self._loop.time() - parcel.handed_at, parcel.count)
        self._end(parcel)
        if failure is not None:
            assert parcel.failing is not None
            if parcel.failing.offset != piece.offset:
                self._step(cursor, parcel.failing)
            self._note_return(parcel)
            self._fail(parcel, failure)
        elif piece.stop < piece.batch.count:
            self._resume(cursor)
        else:
            self.finished(cursor)
        self.wake()

    def _resume(self, cursor: StreamCursor) -> None:
        """Go on at the cursor's event. If its batch left the cache meanwhile, read it again rather than keep it."""
        if cursor.entry is None and self._rewindable:
            cursor.park()
        self.go_on(cursor)

    def reject(self, parcel: Parcel, at: int, first: int, failure: Failure) -> bool:
        """The parcel fails from event `first` of a piece up to `failure.end`. Take later events back; earlier ones stay
        in flight. Return False if the parcel does not have the event."""
        piece, cursor = parcel.pieces[at], parcel.cursor
        if at < parcel.head or not parcel.begin(at) <= first < piece.stop or cursor.is_done(first, piece.offset):
            return False
        parcel.failure, parcel.failing = failure, piece.batch
        self._cut(parcel, at + 1)
        if first > parcel.begin(at):
            self._forgo(parcel, sum(index >= first for index in parcel.left(at)))
            piece.stop = first
            return True
        self._cut(parcel, at)
        if at == parcel.head:
            self._end(parcel)
            self._note_return(parcel)
            self._fail(parcel, failure)
        return True

    def release(self, parcel: Parcel, at: int, first: int) -> bool:
        """Take the events from event `first` of a piece on back: they were not processed. Return False if the parcel
        does not have the event."""
        piece = parcel.pieces[at]
        if at < parcel.head or not parcel.begin(at) <= first < piece.stop:
            return False
        parcel.failure = parcel.failing = None
        if at == parcel.head and first == parcel.begin(at):
            self._give_back(parcel)
            return True
        self._cut(parcel, at + 1)
        if first == parcel.begin(at):
            self._cut(parcel, at)
            return True
        self._forgo(parcel, sum(index >= first for index in parcel.left(at)))
        piece.stop = first
        return True

    def _cut(self, parcel: Parcel, at: int) -> None:
        """Take the pieces from `at` on back from the member."""
        for number in range(at, len(parcel.pieces)):
            self._forgo(parcel, len(parcel.left(number)))
            del parcel.member.in_flight[self.queue, parcel.pieces[number].offset]
        del parcel.pieces[at:]

    def _forgo(self, parcel: Parcel, events: int) -> None:
        parcel.events -= events
        parcel.member.in_flight_events -= events

    def _fail(self, parcel: Parcel, failure: Failure) -> None:
        """The cursor's event failed: retry, or give up."""
        cursor = parcel.cursor
        if self._stopping:
            cursor.state = READY
        elif not self.retries.again(cursor, failure):
            if parcel.payload_dropped:
                cursor.troubled().deferred = cursor.token, failure
                self._resume(cursor)
            else:
                self._start_giving_up(cursor, failure)

    def _start_giving_up(self, cursor: StreamCursor, failure: Failure) -> None:
        """Give up in a task, because the store has to record it."""
        batch = cursor.batch
        assert batch is not None
        cursor.state = RUNNING
        task = self._loop.create_task(
            self.retries.exhausted(cursor, batch, failure), name=f"headrace give up {self.name}/{self.queue}"
        )
        self._giving_up.add(task)
        task.add_done_callback(self._gave_up_on)

    def _gave_up_on(self, task: asyncio.Task[None]) -> None:
        self._giving_up.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("delivery of subscription %r, queue %d failed and goes on", self.name, self.queue, exc_info=error)
        self.wake()
        self.waiters.notify()

    def _enlist(self, cursor: StreamCursor) -> None:
        trouble = cursor.trouble
        if trouble is not None and trouble.deferred is not None and not self._stopping:
            (token, failure), trouble.deferred = trouble.deferred, None
            if token == cursor.token:
                self._start_giving_up(cursor, failure)
                return
        super()._enlist(cursor)

    def take_back(self, parcel: Parcel) -> None:
        """The member is gone, or the queue moves: events that are not done are delivered again."""
        self._note_return(parcel)
        self._give_back(parcel)

    def _give_back(self, parcel: Parcel) -> None:
        """Deliver the events again that are not done."""
        for piece in parcel.pieces[parcel.head :]:
            del parcel.member.in_flight[self.queue, piece.batch.offset]
        self._end(parcel)
        if self._stopping:
            parcel.cursor.state = READY
        else:
            self._resume(parcel.cursor)

    def _note_return(self, parcel: Parcel) -> None:
        """Note that events of the parcel were sent and not finished: their next delivery is a later attempt."""
        trouble = parcel.cursor.troubled()
        trouble.deliveries += 1
        trouble.again = max(trouble.again, parcel.end)

    def _end(self, parcel: Parcel) -> None:
        member = parcel.member
        member.in_flight_events -= parcel.events
        member.in_flight_bytes -= parcel.size
        parcel.cursor.parcel = None
        del self.parcels[parcel]
        self._in_flight -= 1
        self.group.line.add(member)
        if not self.parcels:
            self.group.drained(self.queue)
            self.waiters.notify()

    # ---- leaving a cache -------------------------------------------------------------------------------------------

    def detach(self, cursor: StreamCursor) -> None:
        super().detach(cursor)
        if cursor.parcel is not None and self._rewindable:
            cursor.parcel.drop_payload()

    def held(self, cursor: StreamCursor) -> int:
        # If the queue can rewind, events that a consumer holds need not be kept in this process.
        return 0 if cursor.parcel is not None and self._rewindable else super().held(cursor)

    async def redrive(self, event: Event) -> BaseException | None:
        error = await self._redrives.deliver(event)
        self._delivered_events += error is None
        return error

    # ---- the end ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no event is left that could be delivered now."""
        feed = self.progress.feed
        if self._stopping or feed is None or not feed.caught_up:
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

    def marks(self) -> Sequence[ReportMark]:
        return self.reports.mark(self.progress)

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
                while self._giving_up or any(parcel.member.attached for parcel in self.parcels):
                    await self.waiters.wait()
        except TimeoutError:
            if drain_s > 0:  # otherwise the caller does not wait
                log.warning(
                    "%d parcels of %s, queue %d were not acknowledged within %.1f s and come again",
                    len(self.parcels), self.name, self.queue, drain_s,
                )  # fmt: skip
        finally:
            for parcel in list(self.parcels):
                self.take_back(parcel)
            self._redrives.close()
            for task in self._giving_up:
                task.cancel()
        if self._giving_up:
            await asyncio.wait(self._giving_up, timeout=CANCEL_S)
        self.waiters.notify()
