"""Parcels: what a member of a group holds of one stream."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from ..streams.events import EventBatch
from .cursor import StreamCursor
from .delivery import Failure

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

    __slots__ = ("cursor", "delivery", "events", "failing", "failure", "frames", "head", "member", "pieces", "size")

    def __init__(self, delivery: GroupDelivery, cursor: StreamCursor, member: Member, pieces: list[Piece]) -> None:
        self.delivery = delivery
        self.cursor = cursor
        self.member = member
        self.pieces = pieces
        self.head = 0
        self.events = 0
        self.size = 0
        """Bytes on the wire; with `events` what the member's credit was charged."""
        self.frames: list[bytes] = []
        """What is to be sent of it."""
        self.failure: Failure | None = None
        """Why it fails once all its pieces are done: at the event behind them,"""
        self.failing: EventBatch | None = None
        """which is in this batch."""

    def find(self, offset: int) -> int:
        """Which of the pieces has the batch at `offset`."""
        if self.pieces[self.head].offset == offset:
            return self.head
        return bisect_left(self.pieces, offset, key=_offset_of)

    def nbytes(self) -> int:
        """Bytes of the batches that are not done yet."""
        return sum(piece.batch.nbytes for piece in self.pieces[self.head :])


def _offset_of(piece: Piece) -> int:
    return piece.batch.offset
