"""The parcels of one queue that members hold, and what becomes of their events. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from ..counts import DeliveryCounts
from ..cursor import StreamCursor
from .parcel import Parcel, Piece, left

if TYPE_CHECKING:
    from .breaker import Gate
    from .member import Member
    from .progress import DeliveryProgress
    from .retries import Failure


class ParcelOwner(Protocol):
    """The delivery, as its parcels see it."""

    def wake(self) -> None:
        """Cursors may be ready."""
        ...

    def parcel_ended(self, member: Member) -> None:
        """A member does not hold a parcel any more."""
        ...

    def parcel_done(self, parcel: Parcel) -> None:
        """A member has finished a parcel, or the part of it before a failure."""
        ...

    def failed(self, parcel: Parcel, failure: Failure) -> None:
        """The event at the parcel's cursor failed: retry, or give up."""
        ...


class HeldParcels:
    """Parcels in flight, in the order in which they were handed out."""

    def __init__(
        self, queue: int, progress: DeliveryProgress, gate: Gate, owner: ParcelOwner, counts: DeliveryCounts
    ) -> None:
        self._queue = queue
        self._progress = progress
        self._gate = gate
        self._owner = owner
        self._counts = counts
        self._parcels: dict[StreamCursor, Parcel] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    def __iter__(self) -> Iterator[Parcel]:
        return iter(self._parcels.values())

    def __contains__(self, parcel: Parcel) -> bool:
        return self._parcels.get(parcel.cursor) is parcel

    def of(self, cursor: StreamCursor) -> Parcel | None:
        """Return the parcel with the events of a cursor's stream."""
        return self._parcels.get(cursor)

    def add(self, parcel: Parcel) -> None:
        """A parcel is handed to its member."""
        member, last = parcel.member, parcel.pieces[-1]
        parcel.end = last.batch.offset, last.stop
        self._parcels[parcel.cursor] = parcel
        parcel.batches = len(parcel.pieces)
        member.account.hold_batches(parcel.batches)
        for piece in parcel.pieces:
            member.in_flight[self._queue, piece.batch.offset] = parcel
        member.in_flight_events += parcel.events
        member.in_flight_bytes += parcel.size

    # ---- events are done -------------------------------------------------------------------------------------------

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
            self._count(parcel, self._progress.mark_done(cursor, piece.batch.offset, first, last))
        if self._gate.breaker.watching:
            self._gate.succeeded(cursor.stream)
        return True

    def done_up_to(self, parcel: Parcel, at: int, last: int) -> None:
        """All events before event `last` of a piece are done."""
        while parcel.head < at:
            self.done(parcel, parcel.head, 0, parcel.pieces[parcel.head].stop)
        if parcel.head == at:
            self.done(parcel, at, 0, last)

    def _count(self, parcel: Parcel, events: int) -> None:
        self._forgo(parcel, events)
        self._counts.delivered_events += events

    def _advance(self, parcel: Parcel, index: int) -> None:
        """All events below `index` in the head piece are done."""
        cursor, piece = parcel.cursor, parcel.pieces[parcel.head]
        offset = piece.batch.offset
        if cursor.done is None:
            self._count(parcel, index - cursor.index)
        else:
            self._count(parcel, sum(1 for _ in left(cursor, offset, cursor.index, index)))
        while True:
            self._progress.advance(cursor, index)
            if cursor.index < piece.stop:
                return
            if piece.stop == piece.batch.count:
                self._counts.delivered_batches += 1
            del parcel.member.in_flight[self._queue, offset]
            parcel.head += 1
            if parcel.head == len(parcel.pieces):
                self._complete(parcel, piece)
                return
            piece = parcel.pieces[parcel.head]
            self._progress.step(cursor, piece.batch)
            offset, index = piece.batch.offset, piece.start

    def _complete(self, parcel: Parcel, piece: Piece) -> None:
        """All pieces are done: go on with the stream, or with the failure."""
        cursor, failure = parcel.cursor, parcel.failure
        self._owner.parcel_done(parcel)
        self._end(parcel)
        if failure is not None:
            assert parcel.failing is not None
            if parcel.failing.offset != piece.offset:
                self._progress.step(cursor, parcel.failing)
            self._fail(parcel, failure)
        elif piece.stop < piece.batch.count:
            self._progress.resume(cursor)
        else:
            self._progress.finish(cursor)
        self._owner.wake()

    # ---- events are not done ---------------------------------------------------------------------------------------

    def reject(self, parcel: Parcel, at: int, first: int, failure: Failure) -> bool:
        """The parcel fails from event `first` of a piece up to `failure.end`. Take later events back; earlier ones stay
        in flight. Return False if the parcel does not have the event."""
        piece, cursor = parcel.pieces[at], parcel.cursor
        if at < parcel.head or not parcel.begin(at) <= first < piece.stop or cursor.is_done(first, piece.offset):
            return False
        parcel.failure, parcel.failing = failure, piece.batch
        if self._cut(parcel, at, first) and at == parcel.head:
            self._end(parcel)
            self._fail(parcel, failure)
        return True

    def release(self, parcel: Parcel, at: int, first: int) -> bool:
        """Take the events from event `first` of a piece on back: they were not processed. Return False if the parcel
        does not have the event."""
        piece = parcel.pieces[at]
        if at < parcel.head or not parcel.begin(at) <= first < piece.stop:
            return False
        parcel.failure = parcel.failing = None
        if self._cut(parcel, at, first) and at == parcel.head:
            self._give_back(parcel)
        return True

    def take_back(self, parcel: Parcel) -> None:
        """The member is gone, or the queue moves: events that are not done are delivered again."""
        self._counts.returned += parcel.events
        self._progress.note_return(parcel.cursor, parcel.end)
        self._give_back(parcel)

    def _give_back(self, parcel: Parcel) -> None:
        """Deliver the events again that are not done."""
        for piece in parcel.pieces[parcel.head :]:
            del parcel.member.in_flight[self._queue, piece.batch.offset]
        self._end(parcel)
        self._progress.resume(parcel.cursor)
        self._owner.wake()

    def _fail(self, parcel: Parcel, failure: Failure) -> None:
        self._progress.note_return(parcel.cursor, parcel.end)
        self._owner.failed(parcel, failure)

    def _cut(self, parcel: Parcel, at: int, first: int) -> bool:
        """Take event `first` of a piece and all later ones back from the member. Return whether nothing is left of the
        piece."""
        whole = first == parcel.begin(at)
        for number in range(at if whole else at + 1, len(parcel.pieces)):
            self._forgo(parcel, len(parcel.left(number)))
            del parcel.member.in_flight[self._queue, parcel.pieces[number].offset]
        del parcel.pieces[at if whole else at + 1 :]
        if not whole:
            self._forgo(parcel, sum(index >= first for index in parcel.left(at)))
            parcel.pieces[at].stop = first
        return whole

    def _forgo(self, parcel: Parcel, events: int) -> None:
        parcel.events -= events
        parcel.member.in_flight_events -= events

    def _end(self, parcel: Parcel) -> None:
        member = parcel.member
        member.in_flight_events -= parcel.events
        member.in_flight_bytes -= parcel.size
        member.account.hold_batches(-parcel.batches)
        del self._parcels[parcel.cursor]
        self._owner.parcel_ended(member)
