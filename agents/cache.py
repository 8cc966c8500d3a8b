"""The queue cache: buckets of batches, indexed by stream, and the cursors that move through it.

Pure: no I/O, no clock. After Orleans' SimpleQueueCache (buckets of a tenth each, only the oldest buckets go), with two
changes: batches of a stream are linked, so that a cursor's step costs the same however many other streams share the
queue, and pressure counts the events and bytes of all buckets, not the buckets.

A cursor pins the bucket of its current batch. Buckets are dropped oldest first, so the pin keeps all batches that the
cursor still needs.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ..adapters.receiving import Gap
from ..streams.errors import InvalidArgument
from ..streams.events import EventBatch
from ..streams.identity import SequenceToken, StreamId

BUCKETS = 10
BATCH_OVERHEAD_BYTES = 400
"""Charged for every batch in addition to its encoded size: its objects, and a cursor. Without this charge, a cache of
batches with one small event each would take ten times its limit."""


class Empty(enum.Enum):
    """A cursor has no further batch now. A later batch starts a new cursor."""

    EMPTY = "empty"


EMPTY = Empty.EMPTY


class Bucket:
    """A tenth of the cache: entries in offset order, and `pins`, the number of cursors in it."""

    __slots__ = ("bytes", "cache", "entries", "events", "pins")

    def __init__(self, cache: QueueCache) -> None:
        self.cache = cache
        self.entries: list[CacheEntry] = []
        self.events = 0
        self.bytes = 0
        self.pins = 0

    def unpin(self) -> None:
        self.pins -= 1
        if not self.pins:
            self.cache.on_unpinned()


class CacheEntry(msgspec.Struct, eq=False):
    """A batch in the cache. Only the cache and its cursors see entries: a batch does not know where it is cached."""

    batch: EventBatch
    bucket: Bucket
    following: CacheEntry | None = None
    """The next cached batch of the same stream."""
    successor: CacheEntry | None = None
    """The next cached batch of any stream."""


class BucketStatistics(NamedTuple):
    events: int
    bytes: int
    pins: int
    low: int
    """Offset of the first batch."""
    high: int
    """Offset of the last batch."""


class CacheStatistics(NamedTuple):
    buckets: Sequence[BucketStatistics]
    events: int
    bytes: int
    max_events: int
    max_bytes: int
    pressure: bool


def _ignore() -> None: ...


def _offset_of(entry: CacheEntry) -> int:
    return entry.batch.offset


class QueueCache:
    """Holds the batches of one queue between receiving and the last delivery.

    Capacity is `max_events` and `max_bytes`, whichever is reached first, in buckets of a tenth each. A reader that
    stops at pressure exceeds the capacity by at most one batch: the first one, or one larger than the batch before it.
    """

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self.max_events = max_events
        self.max_bytes = max_bytes
        self.bucket_events = max(1, max_events // BUCKETS)
        self.bucket_bytes = max(1, max_bytes // BUCKETS)
        self._capacity = BUCKETS * self.bucket_events, BUCKETS * self.bucket_bytes
        self.buckets: deque[Bucket] = deque()
        self.events = 0
        self.bytes = 0
        self.next_offset = 0
        """The queue has been read up to this offset, exclusive."""
        self.on_unpinned: Callable[[], None] = _ignore
        """Called when a bucket loses its last pin."""
        self._newest_bytes = 0
        self._first: dict[StreamId, CacheEntry] = {}
        self._last: dict[StreamId, CacheEntry] = {}

    @property
    def first_offset(self) -> int:
        """The cache still has all received batches from this offset on."""
        return self.buckets[0].entries[0].batch.offset if self.buckets else self.next_offset

    @property
    def space(self) -> tuple[int, int]:
        """Events and bytes that fit before there is pressure; at least 1 of each."""
        events, size = self._capacity
        return max(1, events - self.events), max(1, size - self.bytes)

    @property
    def pressure(self) -> bool:
        """Whether the events have reached the capacity, or one more batch as large as the newest does not fit."""
        events, size = self._capacity
        return self.events >= events or (self.bytes > 0 and self.bytes + self._newest_bytes > size)

    def add(self, batches: Sequence[EventBatch], next_offset: int | None = None) -> list[CacheEntry]:
        """Append batches in offset order, and return their entries. `next_offset`: the offset up to which the queue has
        been read, if that is further."""
        last = self._last
        entries: list[CacheEntry] = []
        bucket = self.buckets[-1] if self.buckets else None
        newest = bucket.entries[-1] if bucket is not None else None
        events, size = 0, 0
        for batch in batches:
            if bucket is None or self._full(bucket):
                bucket = Bucket(self)
                self.buckets.append(bucket)
            entry = CacheEntry(batch, bucket)
            if newest is not None:
                newest.successor = entry
            newest = entry
            entries.append(entry)
            bucket.entries.append(entry)
            bucket.events += batch.count
            charge = len(batch.encoded) + BATCH_OVERHEAD_BYTES
            bucket.bytes += charge
            stream = batch.stream
            before = last.get(stream)
            if before is None:
                self._first[stream] = entry
            else:
                before.following = entry
            last[stream] = entry
            events += batch.count
            size += charge
            self._newest_bytes = charge
        self.events += events
        self.bytes += size
        if batches:
            self.next_offset = batches[-1].offset + 1
        if next_offset is not None:
            self.next_offset = max(self.next_offset, next_offset)
        return entries

    def purge(self) -> int:
        """Drop the oldest buckets without pins, but not the newest one while it fills. Return their number."""
        purged = 0
        buckets = self.buckets
        while buckets and not buckets[0].pins and (len(buckets) > 1 or self._full(buckets[0])):
            self._forget(buckets.popleft())
            purged += 1
        return purged

    def close(self) -> None:
        """Drop all buckets, and forget `on_unpinned`: otherwise the cache and its owner refer to each other, and stay
        in memory until the next garbage collection. No cursor may be in the cache."""
        self.on_unpinned = _ignore
        while self.buckets:
            self._forget(self.buckets.popleft())

    def first_entry(self, stream: StreamId, offset: int) -> CacheEntry | None:
        """The entry of the stream's first cached batch at or after `offset`."""
        entry = self._first.get(stream)
        while entry is not None and entry.batch.offset < offset:
            entry = entry.following
        return entry

    def cursor(self, stream: StreamId, start: SequenceToken) -> Cursor | Empty | Gap:
        """Return a cursor at the stream's first event at or after `start`.

        Return EMPTY if there is no such event yet, a Gap if the cache no longer reaches back to `start`.
        """
        if start.offset < self.first_offset:
            return Gap(start.offset, self.first_offset, "no longer in the cache")
        entry = self.first_entry(stream, start.offset)
        if entry is None:
            return EMPTY
        return Cursor(entry, start.index if entry.batch.offset == start.offset else 0)

    def entry_from(self, offset: int) -> CacheEntry | None:
        """The entry of the first cached batch of any stream at or after `offset`."""
        for bucket in self.buckets:
            if bucket.entries[-1].batch.offset >= offset:
                return bucket.entries[bisect_left(bucket.entries, offset, key=_offset_of)]
        return None

    def count_from(self, entry: CacheEntry) -> int:
        """The number of cached batches from this one on."""
        offset = entry.batch.offset
        later = sum(len(bucket.entries) for bucket in self.buckets if bucket.entries[0].batch.offset > offset)
        entries = entry.bucket.entries
        return later + len(entries) - bisect_left(entries, offset, key=_offset_of)

    def entries_from(self, offset: int) -> Sequence[CacheEntry]:
        """The entries of all cached batches at or after `offset`, in order."""
        return [entry for bucket in self.buckets for entry in bucket.entries if entry.batch.offset >= offset]

    def statistics(self) -> CacheStatistics:
        buckets = [
            BucketStatistics(b.events, b.bytes, b.pins, b.entries[0].batch.offset, b.entries[-1].batch.offset)
            for b in self.buckets
        ]
        return CacheStatistics(buckets, self.events, self.bytes, self.max_events, self.max_bytes, self.pressure)

    def _full(self, bucket: Bucket) -> bool:
        return bucket.events >= self.bucket_events or bucket.bytes >= self.bucket_bytes

    def _forget(self, bucket: Bucket) -> None:
        first, last = self._first, self._last
        self.events -= bucket.events
        self.bytes -= bucket.bytes
        for entry in bucket.entries:
            entry.successor = None  # otherwise freeing the first entry frees the others recursively
            stream, following = entry.batch.stream, entry.following
            if following is None:
                del first[stream], last[stream]
            else:
                first[stream] = following
        bucket.entries = []  # break the cycle of references between entries and bucket, so that they are freed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLimits:
    """Bounds of one queue's cached batches.

    Each of the at most four catch-ups has an eighth, and the main feed has half. A queue that cannot rewind has no
    catch-ups: its main feed has everything."""

    max_events: int = 100_000
    max_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if self.max_events < 20 or self.max_bytes < 20 * 1024:
            raise InvalidArgument(
                f"a queue's cache of {self.max_events:,} events and {self.max_bytes:,} bytes is too small: at least 20 "
                "events and 20 KiB for each queue"
            )

    def main(self, *, rewindable: bool) -> QueueCache:
        share = 2 if rewindable else 1
        return QueueCache(self.max_events // share, self.max_bytes // share)

    @property
    def catch_up_bytes(self) -> int:
        """For all catch-ups of one queue."""
        return self.max_bytes // 2

    def catch_up(self) -> QueueCache:
        return QueueCache(self.max_events // 8, self.max_bytes // 8)


class Cursor:
    """A subscription's position in one stream: its current batch, and the index of its next event in the batch.

    A cursor without a batch is parked: it left the cache and only remembers its `token`.
    """

    __slots__ = ("batch", "entry", "index", "offset")

    def __init__(self, entry: CacheEntry, index: int = 0) -> None:
        self.attach(entry, index)

    @property
    def token(self) -> SequenceToken:
        """Token of the next event. All events of this stream before it are done."""
        return SequenceToken(self.offset, self.index)

    @property
    def bucket(self) -> Bucket | None:
        """The bucket that the cursor pins, None outside of the cache."""
        return None if self.entry is None else self.entry.bucket

    def is_in(self, cache: QueueCache) -> bool:
        """Whether its batch is in this cache."""
        return self.entry is not None and self.entry.bucket.cache is cache

    def attach(self, entry: CacheEntry, index: int = 0) -> None:
        """Make the batch of `entry` the current one, and pin its bucket."""
        self.batch: EventBatch | None = entry.batch
        self.entry: CacheEntry | None = entry
        self.offset = entry.batch.offset
        self.index = index
        entry.bucket.pins += 1

    def advance(self) -> EventBatch | Empty:
        """The batch is done: move to the stream's next one. If the cache has none, unpin and return EMPTY."""
        entry = self.entry
        self.index = 0
        following = entry.following if entry is not None else None
        if following is None:
            self.batch = self.entry = None
            self.offset += 1
        else:
            self.batch, self.entry = following.batch, following
            self.offset = following.batch.offset
            if entry is not None and following.bucket is entry.bucket:
                return following.batch
            following.bucket.pins += 1
        if entry is not None:
            bucket = entry.bucket
            bucket.pins -= 1
            if not bucket.pins:
                bucket.cache.on_unpinned()
        return EMPTY if following is None else following.batch

    def stand_on(self, batch: EventBatch) -> None:
        """Make a later batch of the stream the current one, outside of all caches."""
        assert self.entry is None
        self.batch = batch
        self.offset = batch.offset
        self.index = 0

    def release(self) -> None:
        """Unpin, but keep the batch: a running handler goes on with it while the cache moves on."""
        if self.entry is not None:
            bucket, self.entry = self.entry.bucket, None
            bucket.unpin()

    def park(self) -> None:
        """Leave the cache, and remember the token."""
        self.release()
        self.batch = None

    def skip_to(self, token: SequenceToken) -> None:
        """Set the position of a parked cursor: its next event is at `token` or later."""
        assert self.batch is None
        self.offset, self.index = token
