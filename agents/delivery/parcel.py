"""Parcels: the events of one stream that a member of a group holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ...streams.events import EventBatch
from ..cursor import StreamCursor
from .retries import Failure

if TYPE_CHECKING:
    from .group_delivery import GroupDelivery
    from .member import Member


class Piece:
    """Events `start` to `stop`, exclusive, of one batch, without those that were done before it was handed out."""

    __slots__ = ("batch", "start", "stop")

    def __init__(self, batch: EventBatch, start: int, stop: int) -> None:
        self.batch = batch
        self.start = start
        self.stop = stop

    @property
    def offset(self) -> int:
        return self.batch.offset


class Parcel:
    """Consecutive events of one stream that one member holds, until all are done, or the parcel is rejected or taken
    back. The cursor is at the first event that is not done, in the piece `head`."""

    __slots__ = (
        "batches",
        "count",
        "cursor",
        "delivery",
        "end",
        "events",
        "failing",
        "failure",
        "handed_at",
        "head",
        "measured",
        "member",
        "payload_dropped",
        "pieces",
        "size",
    )

    def __init__(self, delivery: GroupDelivery, cursor: StreamCursor, member: Member) -> None:
        self.delivery = delivery
        self.cursor = cursor
        self.member = member
        self.pieces: list[Piece] = []
        self.head = 0
        self.events = 0
        """Number of events that were sent and are not done."""
        self.size = 0
        """Bytes on the wire, which were charged to the member's credit."""
        self.end: tuple[int, int] = (0, 0)
        """Offset and index after the last event that was sent."""
        self.failure: Failure | None = None
        """The failure of the event after the pieces. It takes effect once all pieces are done."""
        self.failing: EventBatch | None = None
        """The batch of the event that failed."""
        self.handed_at = 0.0
        """Loop time."""
        self.measured = False
        """Whether its duration is measured."""
        self.batches = 0
        """Number of batches that were handed out."""
        self.count = 0
        """Number of events that were handed out."""
        self.payload_dropped = False
        """The payloads were dropped: events that are to be sent again have to be read again."""

    def find(self, offset: int) -> int:
        """Return the index of the piece with the batch at `offset`."""
        if self.pieces[self.head].offset == offset:
            return self.head
        return bisect_left(self.pieces, offset, key=lambda piece: piece.offset)

    def left(self, at: int) -> list[int]:
        """Return the indexes of the events of a piece that are not done."""
        piece = self.pieces[at]
        return list(left(self.cursor, piece.offset, self.begin(at), piece.stop))

    def begin(self, at: int) -> int:
        """Return an index in a piece below which every event is done."""
        return self.cursor.index if at == self.head else self.pieces[at].start

    def drop_payload(self) -> EventBatch:
        """The cursor left the cache: drop the payloads of the events that the consumer holds. Return the cursor's batch
        without them."""
        self.payload_dropped = True
        for piece in self.pieces:
            piece.batch = _without_payload(piece.batch)
        if self.failing is not None:
            self.failing = _without_payload(self.failing)
        return self.pieces[self.head].batch


def left(cursor: StreamCursor, offset: int, start: int, stop: int) -> Iterator[int]:
    """Yield the indexes from `start` to `stop` of the events of a batch that were not done out of order."""
    done = cursor.done.get(offset) if cursor.done is not None else None
    return iter(range(start, stop)) if done is None else (index for index in range(start, stop) if index not in done)


def first_left(cursor: StreamCursor, batch: EventBatch, most: int) -> tuple[Sequence[int], bool]:
    """Return the indexes of the first `most` events of a cursor's batch that are not done, and whether they are all."""
    some = list(islice(left(cursor, batch.offset, cursor.index, batch.count), most + 1))
    return some[:most], len(some) <= most


def _without_payload(batch: EventBatch) -> EventBatch:
    return EventBatch(batch.stream, b"", batch.count, batch.offset)
