"""Parcels: what a member of a group holds of one stream."""

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
    """Events `start` to `stop`, exclusive, of one batch, less those that were done before it was handed out."""

    __slots__ = ("batch", "start", "stop")

    def __init__(self, batch: EventBatch, start: int, stop: int) -> None:
        self.batch = batch
        self.start = start
        self.stop = stop

    @property
    def offset(self) -> int:
        return self.batch.offset


class Parcel:
    """Consecutive events of one stream, in one member's hands as a unit: until all are done, it is rejected, or taken
    back. The cursor stands on the first event that is not done, in the piece `head`."""

    __slots__ = (
        "cursor",
        "delivery",
        "end",
        "events",
        "failing",
        "failure",
        "handed_at",
        "head",
        "member",
        "pieces",
        "shed",
        "size",
    )

    def __init__(self, delivery: GroupDelivery, cursor: StreamCursor, member: Member) -> None:
        self.delivery = delivery
        self.cursor = cursor
        self.member = member
        self.pieces: list[Piece] = []
        self.head = 0
        self.events = 0
        """Sent, and not done."""
        self.size = 0
        """Bytes on the wire: what the member's credit was charged."""
        self.end: tuple[int, int] = (0, 0)
        """Offset and index behind the last event that was sent."""
        self.failure: Failure | None = None
        """Why it fails once all its pieces are done: at the event behind them,"""
        self.failing: EventBatch | None = None
        """which is in this batch."""
        self.handed_at = 0.0
        """By the loop's clock, where its member pulls."""
        self.shed = False
        """It knows only where its events are: what is sent again has to be read again."""

    def find(self, offset: int) -> int:
        """Which of the pieces has the batch at `offset`."""
        if self.pieces[self.head].offset == offset:
            return self.head
        return bisect_left(self.pieces, offset, key=_offset_of)

    def left(self, at: int) -> list[int]:
        """Indexes of the events of a piece that are not done."""
        piece = self.pieces[at]
        return list(left(self.cursor, piece.offset, self.begin(at), piece.stop))

    def begin(self, at: int) -> int:
        """Index of the first event of a piece that may not be done."""
        return self.cursor.index if at == self.head else self.pieces[at].start

    def shed_bytes(self) -> None:
        """Its cursor left the cache: hold nothing of what is in a consumer's hands."""
        self.shed = True
        for piece in self.pieces:
            piece.batch = _husk(piece.batch)
        self.cursor.batch = self.pieces[self.head].batch
        if self.failing is not None:
            self.failing = _husk(self.failing)


def left(cursor: StreamCursor, offset: int, start: int, stop: int) -> Iterator[int]:
    """Indexes of the events of a batch that were not done out of order."""
    done = cursor.done.get(offset) if cursor.done is not None else None
    return iter(range(start, stop)) if done is None else (index for index in range(start, stop) if index not in done)


def first_left(cursor: StreamCursor, batch: EventBatch, most: int) -> tuple[Sequence[int], bool]:
    """The first so many that are left of a cursor's batch, and whether those are all."""
    some = list(islice(left(cursor, batch.offset, cursor.index, batch.count), most + 1))
    return some[:most], len(some) <= most


def _husk(batch: EventBatch) -> EventBatch:
    return EventBatch(batch.stream, b"", batch.count, batch.offset)


def _offset_of(piece: Piece) -> int:
    return piece.batch.offset
