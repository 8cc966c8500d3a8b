"""A subscription's position in one stream, and the failures there. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..streams.events import Event, EventBatch
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import StreamBehind
from .cache import CacheEntry, Cursor

if TYPE_CHECKING:
    from .delivery.offered_streams import BatchSource
    from .delivery.retries import Failure


class CursorState(enum.Enum):
    READY = "ready"
    """Waits for a worker, or for a consumer with credit."""
    RUNNING = "running"
    """Its handler runs, or a consumer holds it."""
    WAITING = "waiting"
    """Waits for its next attempt."""
    PARKED = "parked"
    """In no cache: a feed has to read its batch again, from its token on."""
    PAUSED = "paused"
    """Stopped by a failure until a user resumes it."""


# `CursorState.READY` is looked up through the metaclass of the enumeration. The hot path reads these names instead.
READY, RUNNING, PARKED = CursorState.READY, CursorState.RUNNING, CursorState.PARKED


class CursorFailures(NamedTuple):
    """The failures of a cursor. Most cursors never have any."""

    attempts: int = 0
    """Failed deliveries of the present event or batch."""
    excused: int = 0
    """Failed deliveries that do not count."""
    phase: int | None = None
    """Phase of the circuit breaker at the last failure, None before the first. `attempts` of an earlier phase do not
    count."""
    failed_at: float = 0.0
    """Loop time of the first failed attempt."""
    deliveries: int = 0
    """How often events before `again` were sent to a consumer that did not finish them, for any reason."""
    again: tuple[int, int] = (0, 0)
    """Offset and index after the last event that consumers were sent and did not finish."""
    deferred: tuple[SequenceToken, Failure] | None = None
    """The event to give up on once its batch has been read again, and its failure."""
    paused: str = ""
    """Why the stream is paused; empty if it is not."""

    def in_phase(self, phase: int, *, unavailable: bool) -> CursorFailures:
        """Note a failure in this phase of the circuit breaker. Forget the attempts of an earlier phase. Forget failures
        that do not count, too, unless a dependency was `unavailable` again."""
        if self.phase == phase:
            return self
        return self._replace(phase=phase, attempts=0, excused=self.excused if unavailable else 0)

    def since(self, now: float) -> float:
        """Return the loop time of the first failed attempt, `now` if there is none yet."""
        return self.failed_at if self.attempts else now

    def counted(self, now: float) -> CursorFailures:
        """The failure counts."""
        return self._replace(attempts=self.attempts + 1, failed_at=self.since(now))

    def without_count(self) -> CursorFailures:
        """The failure does not count."""
        return self._replace(excused=self.excused + 1, deliveries=0)

    def returned(self, end: tuple[int, int]) -> CursorFailures:
        """A consumer was sent the events before `end` and did not finish them."""
        return self._replace(deliveries=self.deliveries + 1, again=max(self.again, end))


NO_FAILURES = CursorFailures()


class StreamCursor(Cursor):
    """A cursor with the state of its stream. Each stream with undelivered events has one: keep it light.

    Only `DeliveryProgress` moves it, and writes its fields."""

    __slots__ = ("done", "feed", "state", "stream", "trouble")

    def __init__(self, stream: StreamId, feed: BatchSource | None, entry: CacheEntry) -> None:
        entry.bucket.pins += 1
        self.batch = batch = entry.batch
        self.entry = entry
        self.index = 0
        self.offset = batch.offset
        self.stream = stream
        self.feed = feed
        """The feed through whose cache it moves. Parked: the feed that will bring its next batch, None if there is
        none."""
        self.state = READY
        self.trouble: CursorFailures | None = None
        self.done: dict[int, set[int]] | None = None
        """Indexes, by offset, of events after its position that are done already: a consumer may acknowledge in any
        order. Mostly None."""

    @classmethod
    def parked(cls, stream: StreamId, behind: StreamBehind) -> StreamCursor:
        cursor = cls.__new__(cls)
        cursor.batch = cursor.entry = cursor.feed = None
        cursor.done = {}
        for offset, first, last in behind.done:
            cursor.done.setdefault(offset, set()).update(range(first, last))
        cursor.done = cursor.done or None
        cursor.stream = stream
        cursor.state = CursorState.PAUSED if behind.paused else PARKED
        cursor.trouble = CursorFailures(paused=behind.paused) if behind.paused else None
        cursor.skip_to(behind.token)
        return cursor

    @property
    def failures(self) -> CursorFailures:
        return self.trouble or NO_FAILURES

    def is_done(self, index: int, offset: int | None = None) -> bool:
        """Whether an event was done out of order. Without an `offset`, the event is in the current batch."""
        return self.done is not None and index in self.done.get(self.offset if offset is None else offset, ())

    def handle(self) -> Iterator[Event]:
        """Yield the events of the batch that are not done. An event counts as done when the next one is asked for, or
        when the whole batch is finished."""
        batch = self.batch
        assert batch is not None
        return batch.iter_events() if batch.count == 1 else self._handle(batch)  # a generator costs more than one event

    def _handle(self, batch: EventBatch) -> Iterator[Event]:
        for index, event in enumerate(batch.iter_events(self.index), self.index):
            if self.done is None or not self.is_done(index):
                self.index = index
                yield event
                self.trouble = None
        self.index = batch.count

    def recovered(self) -> None:
        """The event that failed is done: forget its failures."""
        trouble = self.trouble
        if trouble is not None and trouble.again > self.token:
            self.trouble = trouble._replace(attempts=0, phase=None)
        else:
            self.trouble = None

    def mark_done(self, offset: int, first: int, end: int) -> int:
        """Events `first` to `end`, exclusive, of a batch are done out of order. Return how many of them were not done
        before."""
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
        self.done.pop(self.offset, None)
        self.done = self.done or None

    def forget_done(self) -> None:
        """Drop the marks in `done` that the position has passed."""
        assert self.done is not None
        self.done = {offset: done for offset, done in self.done.items() if offset >= self.offset} or None

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
