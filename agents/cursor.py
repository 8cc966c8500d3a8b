"""A subscription's position in one stream, with the state that its delivery keeps for the stream."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import StreamBehind
from .cache import CacheEntry, Cursor

if TYPE_CHECKING:
    from .delivery.parcel import Parcel
    from .delivery.progress import BatchSource
    from .delivery.retries import Failure


class CursorState(enum.Enum):
    READY = "ready"
    """Waits for a worker, or for a consumer with credit."""
    RUNNING = "running"
    """Its handler runs, or a consumer holds it."""
    WAITING = "waiting"
    """Waits for its next attempt."""
    PARKED = "parked"
    """In no cache: it is read again from its token."""
    PAUSED = "paused"
    """Stopped by a failure until a user resumes it."""


# `CursorState.READY` is looked up through the metaclass of the enumeration. The hot path reads these names instead.
READY, RUNNING, PARKED = CursorState.READY, CursorState.RUNNING, CursorState.PARKED


class CursorFailures:
    """The failures of a cursor. Most cursors never have any."""

    __slots__ = (
        "again",
        "attempts",
        "deferred",
        "deliveries",
        "excused",
        "failed_at",
        "paused",
        "phase",
        "seen",
        "seen_at",
        "timer",
    )  # fmt: skip

    def __init__(self) -> None:
        self.attempts = 0
        """Failed deliveries of the present event or batch."""
        self.excused = 0
        """Failed deliveries that do not count."""
        self.phase: int | None = None
        """Phase of the circuit breaker at the last failure, None before the first. `attempts` of an earlier phase do
        not count."""
        self.deliveries = 0
        """How often consumers were sent events before `again` and did not finish them, whatever the reason."""
        self.again: tuple[int, int] = (0, 0)
        """Offset and index after the last event that consumers were sent and did not finish."""
        self.deferred: tuple[SequenceToken, Failure] | None = None
        """The event to give up on once its batch has been read again, and its failure."""
        self.failed_at = 0.0
        """Loop time of the first failed attempt."""
        self.timer: asyncio.TimerHandle | None = None
        """Starts the next attempt."""
        self.paused = ""
        """Why the stream is paused; empty if it is not."""
        self.seen: SequenceToken | None = None
        self.seen_at = 0.0
        """Position of the cursor when its full cache was checked last, and the loop time since which it is there."""


class StreamCursor(Cursor):
    """A cursor with the state that its delivery keeps. Each stream with undelivered events has one: keep it light."""

    __slots__ = ("done", "feed", "parcel", "state", "stream", "trouble")

    def __init__(self, stream: StreamId, feed: BatchSource | None, entry: CacheEntry) -> None:
        entry.bucket.pins += 1
        self.batch = batch = entry.batch
        self.entry = entry
        self.index = 0
        self._offset = batch.offset
        self.stream = stream
        self.feed = feed
        """The feed through whose cache it moves. Parked: the feed that will bring its next batch, None if there is
        none."""
        self.state = READY
        self.trouble: CursorFailures | None = None
        self.parcel: Parcel | None = None
        """The events of the stream that a consumer holds."""
        self.done: dict[int, set[int]] | None = None
        """Indexes, by offset, of events after its position that are done already: a consumer may acknowledge in any
        order. Mostly None."""

    @classmethod
    def parked(cls, stream: StreamId, behind: StreamBehind) -> StreamCursor:
        cursor = cls.__new__(cls)
        cursor.batch = cursor.entry = cursor.feed = cursor.trouble = cursor.parcel = None
        cursor.done = {}
        for offset, first, last in behind.done:
            cursor.done.setdefault(offset, set()).update(range(first, last))
        cursor.done = cursor.done or None
        cursor.stream = stream
        cursor.state = PARKED
        if behind.paused:
            cursor.state = CursorState.PAUSED
            cursor.troubled().paused = behind.paused
        cursor.skip_to(behind.token)
        return cursor

    def troubled(self) -> CursorFailures:
        if self.trouble is None:
            self.trouble = CursorFailures()
        return self.trouble

    def recovered(self) -> None:
        """The event that failed is done: forget its failures."""
        trouble = self.trouble
        if trouble is not None and trouble.again > self.token:
            trouble.attempts, trouble.phase = 0, None
        else:
            self.trouble = None

    def is_done(self, index: int, offset: int | None = None) -> bool:
        """Whether an event was done out of order. Without an `offset`, the event is in the current batch."""
        return self.done is not None and index in self.done.get(self._offset if offset is None else offset, ())

    def mark_done(self, offset: int, first: int, end: int) -> int:
        """Events `first` to `end`, exclusive, of a batch are done out of order. Return how many of them were not."""
        if self.done is None:
            self.done = {}
        indexes = self.done.setdefault(offset, set())
        before = len(indexes)
        indexes.update(range(first, end))
        return len(indexes) - before

    def skip_done(self) -> bool:
        """Move past events that are done already, and forget their marks. Return False if nothing of the batch is
        left."""
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
        """The current batch is done: drop its marks in `done`."""
        assert self.done is not None
        self.done.pop(self._offset, None)
        self.done = self.done or None

    def forget_done(self) -> None:
        """Drop the marks in `done` that the position has passed."""
        assert self.done is not None
        self.done = {offset: done for offset, done in self.done.items() if offset >= self._offset} or None

    def done_ranges(self) -> tuple[tuple[int, int, int], ...]:
        """Ranges of events after the position that are done, as (offset, first index, end index exclusive)."""
        ranges: list[tuple[int, int, int]] = []
        if self.done is not None:
            for offset in sorted(self.done):
                ranges += _ranges(offset, self.done[offset], self.token)
        return tuple(ranges)


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
