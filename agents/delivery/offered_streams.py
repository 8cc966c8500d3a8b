"""The batches that feeds offer to a delivery, and the streams that get a cursor for them. Pure.

Each stream with undelivered events has a cursor, except if they are all at `unseen` or later in the cache. Such streams
get their cursors in the order of the queue, when earlier cursors have been taken. So a subscription that takes nothing
has few cursors, however many streams there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...streams.errors import CorruptRecord
from ...streams.identity import SequenceToken, StreamId
from ...streams.subscriptions import Checkpoint
from ..cache import CacheEntry, QueueCache
from ..cursor import PARKED, READY, RUNNING, StreamCursor
from .oldest_offsets import SCANNED, OldestOffsets
from .stream_cursors import StreamCursors

LOOK_AHEAD = 4
"""Streams that get a cursor at a time. The others wait in the cache: a cursor with its parcel takes about 1 KiB."""


class BatchSource(Protocol):
    """Brings batches to a delivery: the queue's main feed, or a catch-up of the delivery's own."""

    cache: QueueCache
    damage: CorruptRecord | None
    """The damaged record that stops reading at present."""
    finished: bool
    """Whether it reads nothing more."""

    @property
    def caught_up(self) -> bool:
        """Whether it has reached the queue's end as of its start."""
        ...

    def all_seen(self) -> None:
        """The delivery has looked at all its batches."""
        ...


class OfferedStreams(StreamCursors):
    """Cursors for the streams that are next. The position is that of the first batch that was not looked at."""

    def __init__(self, checkpoint: Checkpoint, selects: Callable[[StreamId], bool], *, rewindable: bool) -> None:
        super().__init__(checkpoint.behind, rewindable=rewindable)
        self.base = checkpoint.next_offset
        """The position without a feed. A feed that reads beyond it moves the position, but not `base`."""
        self.feed: BatchSource | None = None
        """Brings new batches: a catch-up, or the main feed once the delivery has joined it."""
        self.unseen: CacheEntry | None = None
        """The first batch in the cache of `feed` that was not looked at yet. Its bucket is pinned. If there is one, a
        cursor is in `ready`."""
        self._takes = 0
        """Number of cursors to be taken before the next streams get theirs."""
        self._selects = selects
        self.oldest = OldestOffsets(self._cursors, self._needed_offset)

    def unpause(self, stream: StreamId) -> bool:
        if not super().unpause(stream):
            return False
        if (cursor := self._cursors.get(stream)) is not None:
            self.oldest.add(cursor)
        return True

    def _needed_offset(self, cursor: StreamCursor) -> int:
        return self.needed(cursor).offset

    @property
    def position(self) -> int:
        """Every event below is done, except in streams that have a cursor."""
        return max(self.base, self._seen_up_to(self.feed)) if self.feed else self.base

    def _seen_up_to(self, feed: BatchSource) -> int:
        """All batches of `feed` below this offset were looked at."""
        if self.unseen is not None and feed is self.feed:
            return self.unseen.batch.offset
        return feed.cache.next_offset

    @property
    def waiting_streams(self) -> int:
        """Upper bound of the streams that are ready, or will be when the batches in the cache are looked at."""
        unseen = 0
        if self.unseen is not None and self.feed is not None:
            unseen = self.feed.cache.count_from(self.unseen)
        return len(self._ready) + unseen

    def needed(self, cursor: StreamCursor) -> SequenceToken:
        """Token of the next undelivered event of the cursor's stream."""
        token = cursor.token
        if cursor.state is PARKED and cursor.feed is not None:
            return max(token, SequenceToken(self._seen_up_to(cursor.feed), 0))
        return token

    def take(self) -> StreamCursor | None:
        """Return the next ready cursor, which runs now; None if there is none."""
        ready = self._ready
        while ready:
            cursor = ready.popleft()
            if self.unseen is not None:
                self._takes -= 1
                if self._takes <= 0 or not ready:
                    self._look_on()
            if cursor.state is READY:
                cursor.state = RUNNING
                self.states.running += 1
                return cursor
            self.states.outdated -= 1
        return None

    def put_back(self, cursor: StreamCursor) -> None:
        super().put_back(cursor)
        self._takes += 1  # otherwise each attempt to hand out the same cursor would count as taking another one

    def offer(self, feed: BatchSource, entries: Sequence[CacheEntry]) -> None:
        """`feed` has read these batches."""
        if feed is not self.feed or feed.cache.next_offset <= self.base:
            self.touch()  # the position does not show this change
        if feed is self.feed:
            if self.unseen is None and entries:
                self._look(entries[0], LOOK_AHEAD)
            return
        cursors = self._cursors  # a catch-up for single streams brings nothing to others
        for entry in entries:
            cursor = cursors.get(entry.batch.stream)
            if cursor is not None and cursor.state is PARKED and cursor.feed is feed:
                self.unpark(cursor, feed, entry)

    def _look(self, entry: CacheEntry | None, most: int) -> None:
        """Look at the batches from `entry` on. Stop at a stream without a cursor when `most` cursors are ready."""
        cursors, ready, selects, feed, base = self._cursors, self._ready, self._selects, self.feed, self.base
        self._takes = LOOK_AHEAD
        assert feed is not None
        while entry is not None:
            batch = entry.batch
            stream = batch.stream
            cursor = cursors.get(stream)
            if cursor is None:
                if batch.offset >= base and selects(stream):  # nothing is new below the base
                    if len(ready) >= most:
                        break
                    cursors[stream] = cursor = StreamCursor(stream, feed, entry)
                    ready.append(cursor)
                    if len(cursors) > SCANNED:
                        self.oldest.add(cursor)
                    else:
                        self.oldest.complete = False
            elif cursor.state is PARKED and cursor.feed is feed:
                self.unpark(cursor, feed, entry)
            entry = entry.successor
        self._set_unseen(entry)

    def _set_unseen(self, entry: CacheEntry | None) -> None:
        before, self.unseen = self.unseen, entry
        if entry is not None:
            entry.bucket.pins += 1
        if before is not None:
            before.bucket.unpin()
        self.note_change()  # the position has moved

    def _look_on(self) -> None:
        feed = self.feed
        assert feed is not None
        self._look(self.unseen, len(self._ready) + LOOK_AHEAD)
        if self.unseen is None:
            self._forget_passed(feed)
            feed.all_seen()

    def _forget_passed(self, feed: BatchSource) -> None:
        for cursor in [c for c in self._cursors.values() if c.state is PARKED and c.feed is feed]:
            self._forget_if_passed(cursor, feed)

    def unpark(self, cursor: StreamCursor, feed: BatchSource, entry: CacheEntry) -> None:
        """Put a parked cursor onto the batch of `entry` in the cache of `feed`, unless the batch is done already."""
        batch, (offset, index) = entry.batch, cursor.token
        if batch.offset < offset or (batch.offset == offset and index >= batch.count):
            return
        cursor.attach(entry, index if batch.offset == offset else 0)
        cursor.feed = feed
        if cursor.done is not None:
            cursor.forget_done()
        self._enlist(cursor)

    def _forget_if_passed(self, cursor: StreamCursor, feed: BatchSource) -> bool:
        """Forget the cursor if the next batch of its stream will be new. Return whether it was forgotten.

        The next batch is not a new one if a catch-up moved the cursor past a main feed that had to start again, or if
        events of that batch are done already."""
        position = self._seen_up_to(feed)
        if position < self.base or cursor.offset > position or (cursor.offset == position and cursor.index):
            return False
        if cursor.done is not None and max(cursor.done) >= position:
            return False
        del self._cursors[cursor.stream]  # its next batch starts a new one
        self.touch()
        return True
