"""A subscription's position in one stream, with what its delivery has to remember."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

from ..streams.events import EventBatch
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import Behind
from .cache import Cursor

if TYPE_CHECKING:
    from .delivery import Failure, Feed
    from .parcel import Parcel


class State(enum.Enum):
    READY = "ready"
    """In line for a worker, or for a consumer with credit."""
    RUNNING = "running"
    """Its handler runs, or a consumer holds it."""
    WAITING = "waiting"
    """For its next attempt."""
    PARKED = "parked"
    """Out of every cache: to be read again from its token."""
    PAUSED = "paused"
    """Until somebody resumes it."""


# Members of an enumeration are looked up through its metaclass; the hot path reads these instead.
READY, RUNNING, PARKED = State.READY, State.RUNNING, State.PARKED


class Trouble:
    """What a cursor remembers while things do not go well; most never have any."""

    __slots__ = ("again", "attempts", "deliveries", "doomed", "failed_at", "paused", "seen", "seen_at", "timer")

    def __init__(self) -> None:
        self.attempts = 0
        """Failed deliveries of the present event or batch."""
        self.deliveries = 0
        """How often consumers were sent, and did not finish, what comes before"""
        self.again: tuple[int, int] = (0, 0)
        """this offset and index: for whatever reason, which need not be a failure of the event."""
        self.doomed: tuple[SequenceToken, Failure] | None = None
        """What is to be given up on, once its batch has been read again."""
        self.failed_at = 0.0
        """Loop time of the first of them."""
        self.timer: asyncio.TimerHandle | None = None
        """The next attempt."""
        self.paused = ""
        """Why the stream is paused, if it is."""
        self.seen: SequenceToken | None = None
        self.seen_at = 0.0
        """Where the cursor stood when a full cache was last looked at, and since when."""


class StreamCursor(Cursor):
    """A cursor with what its delivery has to remember. One is made for every stream that wakes up: keep it light."""

    __slots__ = ("done", "feed", "parcel", "state", "stream", "trouble")

    def __init__(self, stream: StreamId, feed: Feed | None, batch: EventBatch) -> None:
        bucket = batch.bucket
        bucket.pins += 1
        self.batch = batch
        self.bucket = bucket
        self.index = 0
        self._offset = batch.offset
        self.stream = stream
        self.feed = feed
        """Whose cache it moves through; for a parked cursor who will bring its next batch, if anybody."""
        self.state = READY
        self.trouble: Trouble | None = None
        self.parcel: Parcel | None = None
        """What a consumer holds of the stream."""
        self.done: dict[int, set[int]] | None = None
        """Events after its position that are done already, by offset: indexes. A consumer may acknowledge in any
        order; mostly it has none."""

    @classmethod
    def parked(cls, stream: StreamId, behind: Behind) -> StreamCursor:
        cursor = cls.__new__(cls)
        cursor.batch = cursor.bucket = cursor.feed = cursor.trouble = cursor.parcel = None
        cursor.done = {}
        for offset, first, last in behind.done:
            cursor.done.setdefault(offset, set()).update(range(first, last))
        cursor.done = cursor.done or None
        cursor.stream = stream
        cursor.state = PARKED
        if behind.paused:
            cursor.state = State.PAUSED
            cursor.troubled().paused = behind.paused
        cursor.skip_to(behind.token)
        return cursor

    def troubled(self) -> Trouble:
        if self.trouble is None:
            self.trouble = Trouble()
        return self.trouble

    def went_on(self) -> None:
        """The event that gave trouble is done."""
        trouble = self.trouble
        if trouble is not None and trouble.again > self.token:
            trouble.attempts = 0
        else:
            self.trouble = None

    def is_done(self, index: int, offset: int | None = None) -> bool:
        """Whether an event, of the present batch where none is named, was done out of order."""
        return self.done is not None and index in self.done.get(self._offset if offset is None else offset, ())

    def skip_done(self) -> bool:
        """Move over events that are done already, and forget that. False where nothing of the batch is left."""
        batch = self.batch
        assert batch is not None
        if self.done is not None and (done := self.done.get(batch.offset)):
            while self.index in done:
                done.remove(self.index)
                self.index += 1
            if not done:
                self.forget_batch()
        return self.index < batch.count

    def forget_batch(self) -> None:
        """The present batch is done: what was done of it out of order need not be remembered."""
        assert self.done is not None
        self.done.pop(self._offset, None)
        self.done = self.done or None

    def forget_done(self) -> None:
        """Drop what the position has passed, however it came to be there."""
        assert self.done is not None
        self.done = {offset: done for offset, done in self.done.items() if offset >= self._offset} or None

    def done_ranges(self, most: int) -> tuple[tuple[int, int, int], ...]:
        """What is done after the position, as (offset, first index, last index exclusive): the first so many."""
        ranges: list[tuple[int, int, int]] = []
        if self.done is not None:
            for offset in sorted(self.done):
                ranges += _ranges(offset, self.done[offset], self.token)
                if len(ranges) > most:
                    break
        return tuple(ranges[:most])


def _ranges(offset: int, done: set[int], after: SequenceToken) -> list[tuple[int, int, int]]:
    ranges: list[tuple[int, int, int]] = []
    for index in sorted(done):
        if (offset, index) < after:
            continue
        if ranges and ranges[-1][2] == index:
            ranges[-1] = (offset, ranges[-1][1], index + 1)
        else:
            ranges.append((offset, index, index + 1))
    return ranges
