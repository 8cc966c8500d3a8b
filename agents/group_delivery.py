"""Delivery to the members of a group: remote consumers with credit.

One parcel of a stream is in flight: consecutive events, handed to one member, until they are done, rejected or taken
back. So order within a stream holds although members outnumber queues, and a retry never overtakes. Acknowledgements
come in any order; the cursor moves over what is done from its position on, and remembers what is done behind that.
"""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..streams.errors import Closed, HeadraceError
from ..streams.events import Event, EventBatch
from ..streams.frames import frame, part
from ..streams.identity import StreamId
from ..streams.subscriptions import Checkpoint, SubscriptionDefinition
from .cursor import READY, RUNNING, State, StreamCursor
from .delivery import CANCEL_S, Delivery, Failure, FailureSink
from .edge import DeliveryActor
from .parcel import Parcel, Piece

if TYPE_CHECKING:
    from .group import Group
    from .member import Member

log = logging.getLogger("headrace.agents")

PARCEL_EVENTS = 4096
PARCEL_BYTES = 256 << 10
"""A parcel of several batches has no more than this."""
EVENT_OVERHEAD_BYTES = 16
"""Of an event in an encoded batch, besides payload, id and headers."""


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
        """In flight, in the order in which they were handed out."""
        self._actor = DeliveryActor(f"{definition.name}/{queue}", self)
        self._giving_up: set[asyncio.Task[None]] = set()

    def _wake(self) -> None:
        if self._ready and not self._stopping:
            self.group.edge.wake(self._actor)

    def wake(self) -> None:
        """A member can be given something."""
        self._wake()

    # ---- parcels are handed out ------------------------------------------------------------------------------------

    def turn(self, ends: float) -> bool:
        """Hand parcels to members in turn, until nothing is ready, nobody can take more, or the time is up. Whether
        it could go on."""
        ready, group = self._ready, self.group
        while ready and not self._stopping:
            member = group.next_member(self.queue)
            if member is None:
                return False
            if not member.busy and not group.edge.may_send():
                return True
            self._hand_some(member, group.share(len(ready)))
            if perf_counter() >= ends:
                break
        return bool(ready) and not self._stopping

    def _hand_some(self, member: Member, share: int) -> None:
        """So many parcels for one member, where it can take them; then it is another's turn."""
        ready = self._ready
        while ready and share and member.open:
            cursor = ready.popleft()
            if cursor.state is not READY:
                continue
            if not self._hand(cursor, member):
                ready.appendleft(cursor)
                self.group.pass_over(member)
                return
            share -= 1
        self.group.rotate(member)

    def _hand(self, cursor: StreamCursor, member: Member) -> bool:
        """Hand a member what is ready of a stream, as its credit allows. False where it does not allow one event, or
        where waiting for more credit is better: something is in flight, so more will come."""
        events, size = member.credit_events, member.credit_bytes
        parcel = Parcel(self, cursor, member, [])
        batch = cursor.batch
        assert batch is not None
        if cursor.index or cursor.done is not None or batch.count > events or batch.nbytes + 64 > size:
            if not self._add_part(parcel, batch):
                return False
        else:
            self._add(parcel, batch)
        # The rest of a stream only follows whole batches: a part ends where the credit does.
        if parcel.pieces[-1].stop == batch.count and cursor.bucket is not None and cursor.done is None:
            events, size = min(events, PARCEL_EVENTS), min(size, PARCEL_BYTES)
            while (
                (batch := batch.following) is not None
                and parcel.events + batch.count <= events
                and parcel.size + batch.nbytes + 64 <= size
            ):
                self._add(parcel, batch)
        self._handed(parcel)
        return True

    def _add(self, parcel: Parcel, batch: EventBatch) -> None:
        """A whole batch."""
        attempt = 1 if parcel.pieces else _attempt(parcel.cursor)
        if attempt == 1:
            encoded = self.group.edge.frame(batch, self.queue)
        else:
            encoded = frame(batch.encoded, self.queue, batch.offset, attempt=attempt)
        parcel.pieces.append(Piece(batch, 0, batch.count))
        self._put(parcel, encoded, batch.count)

    def _add_part(self, parcel: Parcel, batch: EventBatch) -> bool:
        """The first events of the cursor's batch that are not done, as many as the credit allows."""
        cursor, member = parcel.cursor, parcel.member
        indexes = [index for index in range(cursor.index, batch.count) if not cursor.is_done(index)]
        wanted = len(indexes)
        del indexes[member.credit_events :]
        encoded = self._fitting(batch, indexes, member)
        if not indexes or (len(indexes) < wanted and member.in_flight):
            return False
        parcel.pieces.append(Piece(batch, cursor.index, batch.count if len(indexes) == wanted else indexes[-1] + 1))
        self._put(
            parcel, frame(encoded, self.queue, batch.offset, attempt=_attempt(cursor), indexes=indexes), len(indexes)
        )
        return True

    def _fitting(self, batch: EventBatch, indexes: list[int], member: Member) -> bytes:
        """Encode the events of these indexes, and drop from the list what does not fit into the member's credit."""
        sizes, room = batch.sizes(), member.credit_bytes - len(batch.stream.prefix) - 64
        total = 0
        for count, index in enumerate(indexes):
            total += sizes[index] + EVENT_OVERHEAD_BYTES
            if total > room:
                del indexes[max(count, 1) :]
                break
        while indexes:
            encoded = part(batch, indexes)
            if len(encoded) + 64 + 3 * len(indexes) <= member.credit_bytes:
                return encoded
            member.needed_bytes = len(encoded) + 64 + 3 * len(indexes) if len(indexes) == 1 else 0
            del indexes[len(indexes) // 2 :]  # ids and headers take more than was thought
        return b""

    def _put(self, parcel: Parcel, encoded: bytes, events: int) -> None:
        parcel.events += events
        parcel.size += len(encoded)
        parcel.frames.append(encoded)

    def _handed(self, parcel: Parcel) -> None:
        member = parcel.member
        member.charge(parcel.events, parcel.size)
        # In one response: else the rest could still be on its way when its beginning is rejected.
        self.group.edge.put(member, b"".join(parcel.frames))
        parcel.frames.clear()
        parcel.cursor.state = RUNNING
        self._in_flight += 1
        self.parcels[parcel] = None
        for piece in parcel.pieces:
            member.in_flight[self.queue, piece.batch.offset] = parcel
        member.in_flight_events += parcel.events
        member.in_flight_bytes += parcel.size

    def resend(self, parcel: Parcel) -> bool:
        """Its member came back: send again what it had not acknowledged. False where its credit is too small."""
        cursor, member = parcel.cursor, parcel.member
        cursor.troubled().returns += 1
        frames: list[tuple[bytes, int]] = []
        for number, piece in enumerate(parcel.pieces[parcel.head :]):
            start = piece.start if number else cursor.index
            done = (cursor.done or {}).get(piece.batch.offset, ())
            indexes = [index for index in range(start, piece.stop) if index not in done]
            attempt = 1 if number else _attempt(cursor)
            whole = len(indexes) == piece.batch.count
            encoded = piece.batch.encoded if whole else part(piece.batch, indexes)
            more = () if whole else indexes
            frames.append((frame(encoded, self.queue, piece.offset, attempt=attempt, indexes=more), len(indexes)))
        events, size = sum(count for _, count in frames), sum(len(each) for each, _ in frames)
        if events > member.credit_events or size > member.credit_bytes:
            return False
        member.charge(events, size)
        self.group.edge.put(member, b"".join(each for each, _ in frames))
        return True

    # ---- parcels come to their end ---------------------------------------------------------------------------------

    def done(self, parcel: Parcel, at: int, first: int, last: int) -> bool:
        """Events `first` to `last`, exclusive, of a piece are done. False where it does not have them."""
        piece = parcel.pieces[at]
        first, last = max(first, piece.start), min(last, piece.stop)
        if first >= last or at < parcel.head:
            return False
        cursor = parcel.cursor
        if at == parcel.head and first <= cursor.index:
            if last > cursor.index:
                self._advance(parcel, last)
        else:
            if cursor.done is None:
                cursor.done = {}
            indexes = cursor.done.setdefault(piece.batch.offset, set())
            before = len(indexes)
            indexes.update(range(first, last))
            self._delivered_events += len(indexes) - before
        return True

    def _advance(self, parcel: Parcel, index: int) -> None:
        """Everything below `index` in the head piece is done."""
        cursor, piece = parcel.cursor, parcel.pieces[parcel.head]
        cursor.trouble = None
        self._count(cursor, index)
        while True:
            cursor.index = index
            if cursor.done is not None:
                cursor.skip_done()
            if cursor.index < piece.stop:
                return
            if piece.stop == piece.batch.count:
                self._delivered_batches += 1
            del parcel.member.in_flight[self.queue, piece.batch.offset]
            parcel.head += 1
            if parcel.head == len(parcel.pieces):
                self._complete(parcel, piece)
                return
            piece = parcel.pieces[parcel.head]
            self._step(cursor, piece.batch)
            index = piece.start

    def _count(self, cursor: StreamCursor, index: int) -> None:
        known = 0
        if cursor.done is not None:
            known = sum(cursor.index <= each < index for each in cursor.done.get(cursor.token.offset, ()))
        self._delivered_events += index - cursor.index - known

    def _step(self, cursor: StreamCursor, batch: EventBatch) -> None:
        """On to the next batch of the parcel."""
        if cursor.bucket is None:
            cursor.stand_on(batch)
        else:
            cursor.advance()
            assert cursor.batch is batch
        if cursor.done is not None:
            cursor.forget_done()

    def _complete(self, parcel: Parcel, piece: Piece) -> None:
        """All its pieces are done: on with the stream, or with what made it fail."""
        cursor, failure = parcel.cursor, parcel.failure
        self._end(parcel)
        if failure is not None:
            assert parcel.failing is not None
            if parcel.failing is not piece.batch:
                self._step(cursor, parcel.failing)
            self._fail(cursor, failure)
        elif piece.stop < piece.batch.count:
            self._resume(cursor)
        else:
            self._finished(cursor)
        self._wake()

    def _resume(self, cursor: StreamCursor) -> None:
        """Go on at the cursor's event. What left its cache meanwhile is read again rather than held outside of it."""
        if cursor.bucket is None and self._rewindable:
            cursor.park()
        self._go_on(cursor)

    def reject(self, parcel: Parcel, at: int, first: int, failure: Failure) -> bool:
        """From event `first` of a piece on, the parcel fails, up to `failure.end`: what follows is taken back, and what
        is before it stays in flight. False where it does not have that event."""
        piece, cursor = parcel.pieces[at], parcel.cursor
        if not piece.start <= first < piece.stop or at < parcel.head:
            return False
        if (at == parcel.head and first < cursor.index) or cursor.is_done(first, piece.offset):
            return False
        parcel.failure, parcel.failing = failure, piece.batch
        self._cut(parcel, at + 1)
        if first > (cursor.index if at == parcel.head else piece.start):
            piece.stop = first
        elif at > parcel.head:
            self._cut(parcel, at)
        else:
            self._cut(parcel, at)
            self._end(parcel)
            self._fail(cursor, failure)
        return True

    def _cut(self, parcel: Parcel, at: int) -> None:
        """Take the pieces from `at` on out of its member's hands."""
        for piece in parcel.pieces[at:]:
            del parcel.member.in_flight[self.queue, piece.offset]
        del parcel.pieces[at:]

    def _fail(self, cursor: StreamCursor, failure: Failure) -> None:
        """At the cursor's event. What is recorded of it takes a task."""
        batch = cursor.batch
        assert batch is not None
        if self._stopping:
            cursor.state = READY
        elif not self._again(cursor, failure):
            task = self._loop.create_task(
                self._exhausted(cursor, batch, failure), name=f"headrace give up {self.name}/{self.queue}"
            )
            self._giving_up.add(task)
            task.add_done_callback(self._gave_up_on)

    def _gave_up_on(self, task: asyncio.Task[None]) -> None:
        self._giving_up.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("delivery of %s, queue %d failed and goes on", self.name, self.queue, exc_info=error)
        self._wake()
        self._notify()

    def take_back(self, parcel: Parcel) -> None:
        """Its member is gone, or the queue changes hands: what is not done comes again."""
        for piece in parcel.pieces[parcel.head :]:
            del parcel.member.in_flight[self.queue, piece.batch.offset]
        self._end(parcel)
        cursor = parcel.cursor
        cursor.troubled().returns += 1
        if self._stopping:
            cursor.state = READY
        else:
            self._resume(cursor)

    def _end(self, parcel: Parcel) -> None:
        member = parcel.member
        member.in_flight_events -= parcel.events
        member.in_flight_bytes -= parcel.size
        del self.parcels[parcel]
        self._in_flight -= 1
        self.group.ended(member)
        if not self.parcels:
            self.group.drained(self.queue)
            self._notify()

    def held(self, cursor: StreamCursor) -> int:
        # Found by looking: that is done only where a cache is full, and only for what stands in its oldest bucket.
        if cursor.state is not RUNNING:
            return 0
        return next((p.nbytes() for p in self.parcels if p.cursor is cursor), super().held(cursor))

    # ---- out of line -----------------------------------------------------------------------------------------------

    async def redrive(self, event: Event) -> BaseException | None:
        """Deliver one event out of line, to whoever can take it first. Raises Closed where the delivery ends before."""
        assert event.token is not None
        batch = EventBatch.of(event.stream or StreamId("", ""), [event])
        encoded = frame(batch.encoded, self.queue, event.token.offset, indexes=[event.token.index], redriven=True)
        key = (self.queue, event.token.offset, event.token.index)
        while True:
            member = await self._somebody(key)
            outcome = member.redriven[key] = self._loop.create_future()
            member.charge(1, len(encoded))
            self.group.edge.put(member, encoded)
            try:
                error = await outcome
            finally:
                if member.redriven.get(key) is outcome:
                    del member.redriven[key]
            if isinstance(error, Closed):
                continue  # it is gone: another one
            self._delivered_events += error is None
            return error

    async def _somebody(self, key: tuple[int, int, int]) -> Member:
        while True:
            if self._stopping:
                raise Closed(f"subscription {self.name} stopped before dead letters were delivered once more")
            member = self.group.next_member(self.queue)
            if member is not None and key not in member.redriven:
                return member
            await self.group.somebody()

    # ---- the end ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is left that could be delivered now."""
        return self.feed is not None and all(c.state is State.PAUSED for c in self.cursors.values())

    async def stop(self, drain_s: float) -> None:
        self._stopping = True
        self.group.edge.forget(self._actor)
        self._notify()
        self.group.tell_somebody()
        for cursor in self.cursors.values():
            if cursor.trouble is not None and cursor.trouble.timer is not None:
                cursor.trouble.timer.cancel()
        try:
            async with asyncio.timeout(drain_s):
                while self._giving_up or any(parcel.member.attached for parcel in self.parcels):
                    await self._progress()
        except TimeoutError:
            log.warning(
                "%d parcels of %s, queue %d were not acknowledged within %.1f s and come again",
                len(self.parcels), self.name, self.queue, drain_s,
            )  # fmt: skip
        finally:
            for parcel in list(self.parcels):
                self.take_back(parcel)
            for task in self._giving_up:
                task.cancel()
        if self._giving_up:
            await asyncio.wait(self._giving_up, timeout=CANCEL_S)
        self._notify()


class Rejected(HeadraceError):
    """A consumer rejected an event that was delivered to it out of line."""

    code = "rejected"


def _attempt(cursor: StreamCursor) -> int:
    trouble = cursor.trouble
    return 1 if trouble is None else 1 + trouble.attempts + trouble.returns
