"""Parcels are written as frames, as the credit of their member allows."""

from __future__ import annotations

from collections.abc import Sequence

from ...streams.events import EventBatch
from ...streams.frames import frame
from ..cache import CacheEntry
from ..cursor import CursorFailures
from .credit_line import CreditLine
from .edge import Edge
from .member import Member
from .parcel import Parcel, Piece, first_left

PARCEL_EVENTS = 4096
PARCEL_BYTES = 256 << 10
"""A parcel of several batches has at most this many events and bytes."""
FRAME_BYTES = 64
"""The most bytes of a frame, without its batch and its indexes."""
INDEX_BYTES = 3
"""The most bytes of an index."""
EVENT_OVERHEAD_BYTES = 16
"""Bytes of an event in an encoded batch, without payload, id and headers."""


class ParcelWriter:
    """Writes the parcels of one queue."""

    def __init__(self, queue: int, edge: Edge, line: CreditLine) -> None:
        self._queue = queue
        self._edge = edge
        self._line = line

    def write(self, parcel: Parcel, most: int, *, one: bool) -> list[bytes]:
        """Put the ready events of the parcel's stream into it, up to `most` or only `one`. Return the frames; none if
        the member cannot take them now. Raises InvalidArgument if the batch is damaged."""
        cursor, batch, entry, frames = parcel.cursor, parcel.cursor.batch, parcel.cursor.entry, list[bytes]()
        assert batch is not None
        # Later batches follow only a whole batch: a part ends because the credit does.
        if (
            self._add_first(parcel, frames, batch, most, one=one)
            and not one
            and entry is not None
            and entry.following is not None
            and cursor.done is None
            and parcel.pieces[0].stop == batch.count
        ):
            self._add_following(parcel, frames, entry, most)
        return frames

    def write_left(self, parcel: Parcel) -> bytes:
        """Return the frames of the events that are not done. Raises InvalidArgument if a batch is damaged."""
        return b"".join(self._frame_left(parcel, at) for at in range(parcel.head, len(parcel.pieces)))

    def _frame_left(self, parcel: Parcel, at: int) -> bytes:
        """Return a frame with the events of a piece that are not done; empty if all are done."""
        batch, indexes = parcel.pieces[at].batch, parcel.left(at)
        if not indexes:
            return b""
        attempt = _attempt(parcel.cursor.failures, (batch.offset, indexes[0]))
        if len(indexes) == batch.count:
            return frame(batch.encoded, self._queue, batch.offset, attempt=attempt)
        encoded = self._edge.part(batch, self._queue, indexes)
        return frame(encoded, self._queue, batch.offset, attempt=attempt, indexes=indexes)

    def _add_first(self, parcel: Parcel, frames: list[bytes], batch: EventBatch, most: int, *, one: bool) -> bool:
        """Add the rest of the cursor's batch, or a part of it. Return False if the member cannot take it now."""
        cursor, member = parcel.cursor, parcel.member
        if member.redriven and self._confusing(member, batch):
            return False
        size = min(batch.nbytes + FRAME_BYTES, member.credit_bytes)
        if not member.account.fits(size):
            self._line.wait_for_space(member, size)
            return False
        if (
            one
            or cursor.index
            or cursor.done is not None
            or batch.count > min(member.credit_events, most)
            or batch.nbytes + FRAME_BYTES > member.credit_bytes
        ):
            return self._add_part(parcel, frames, batch, most, one=one)
        self._add(parcel, frames, batch)
        return True

    def _confusing(self, member: Member, batch: EventBatch) -> bool:
        """Whether the member holds a dead letter of this batch: acknowledgements could be mistaken for its own."""
        return any(key[:2] == (self._queue, batch.offset) for key in member.redriven)

    def _add_following(self, parcel: Parcel, frames: list[bytes], first: CacheEntry, most: int) -> None:
        """Add the next cached batches of the stream, as many as a parcel may have and the credit allows."""
        member, entry = parcel.member, first
        events = min(member.credit_events, PARCEL_EVENTS, most)
        size = min(member.credit_bytes, PARCEL_BYTES, member.account.space)
        while (
            (entry := entry.following) is not None
            and (batch := entry.batch)
            and parcel.events + batch.count <= events
            and parcel.size + batch.nbytes + FRAME_BYTES <= size
            and not (member.redriven and self._confusing(member, batch))
        ):
            self._add(parcel, frames, batch)

    def _add(self, parcel: Parcel, frames: list[bytes], batch: EventBatch) -> None:
        """Add a whole batch."""
        trouble = parcel.cursor.trouble
        attempt = 1 if trouble is None else _attempt(trouble, (batch.offset, 0))
        if attempt == 1:
            encoded = self._edge.frame(batch, self._queue)
        else:
            encoded = frame(batch.encoded, self._queue, batch.offset, attempt=attempt)
        frames.append(encoded)
        parcel.pieces.append(Piece(batch, 0, batch.count))
        parcel.events += batch.count
        parcel.size += len(encoded)

    def _add_part(self, parcel: Parcel, frames: list[bytes], batch: EventBatch, most: int, *, one: bool) -> bool:
        """Add the first `most` events of the cursor's batch that are not done, or as many as the credit allows. Return
        False if it allows none, or if it does not allow all, and more credit may follow."""
        cursor, member = parcel.cursor, parcel.member
        most = 1 if one else most
        indexes, whole = first_left(cursor, batch, min(most, member.credit_events))
        few = not whole and len(indexes) < most
        if member.may_wait and (few or (batch.nbytes + FRAME_BYTES > member.credit_bytes and not one)):
            member.want(min(batch.count - cursor.index, most), batch.nbytes + FRAME_BYTES)
            return False
        wanted = len(indexes)
        indexes, encoded = self._fitting(batch, indexes, member)
        whole = whole and len(indexes) == wanted
        if not indexes:
            return False
        attempt = 1 if cursor.trouble is None else _attempt(cursor.trouble, cursor.token)
        frames.append(frame(encoded, self._queue, batch.offset, attempt=attempt, indexes=indexes))
        parcel.pieces.append(Piece(batch, cursor.index, batch.count if whole else indexes[-1] + 1))
        parcel.events += len(indexes)
        parcel.size += len(frames[-1])
        member.patient, member.was_answered = True, False
        return True

    def _fitting(self, batch: EventBatch, indexes: Sequence[int], member: Member) -> tuple[Sequence[int], bytes]:
        """Return as many of the first events as fit into the member's credit, and their encoding."""
        sizes, left = batch.sizes(), member.credit_bytes - len(batch.stream.prefix) - FRAME_BYTES
        for count, index in enumerate(indexes):
            left -= sizes[index] + EVENT_OVERHEAD_BYTES
            if left < 0:
                indexes = indexes[: max(count, 1)]
                break
        while indexes:
            encoded = self._edge.part(batch, self._queue, indexes)
            size = len(encoded) + FRAME_BYTES + INDEX_BYTES * len(indexes)
            if size <= member.credit_bytes:
                return indexes, encoded
            if len(indexes) == 1:
                member.needed_bytes = size
            indexes = indexes[: len(indexes) // 2]  # ids and headers take more than the estimate
        return indexes, b""


def max_bytes_left(parcel: Parcel) -> int:
    """Return an upper bound of the bytes of `write_left`."""
    return parcel.size + FRAME_BYTES + INDEX_BYTES * parcel.events


def _attempt(trouble: CursorFailures, token: tuple[int, int]) -> int:
    """Return the number of an event's next delivery, as far as it is known."""
    return 1 + trouble.deliveries if token < trouble.again else 1
