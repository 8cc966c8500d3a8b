"""The progress of one subscription in one queue. Pure.

Every event below the position is done, except in streams that have a cursor.
"""

from __future__ import annotations

from collections.abc import Callable

from ...streams.errors import CorruptRecord
from ...streams.identity import SequenceToken, StreamId
from ...streams.subscriptions import Checkpoint, StreamBehind
from ..cursor import PARKED, CursorState, StreamCursor
from .offered_streams import LOOK_AHEAD, BatchSource, OfferedStreams


class DeliveryProgress(OfferedStreams):
    """The position and the cursors. Nothing else writes their fields: feeds, handlers and groups call the methods."""

    def __init__(
        self, checkpoint: Checkpoint, selects: Callable[[StreamId], bool] = lambda _: True, *, rewindable: bool = True
    ) -> None:
        """`selects`: whether the subscription wants a stream. `rewindable`: batches can be read again."""
        super().__init__(checkpoint, selects, rewindable=rewindable)
        self.damage: CorruptRecord | None = None
        """The damaged record that stopped the last catch-up."""

    @property
    def watermark(self) -> int:
        """The lowest offset still needed."""
        behind = min((self.needed(c).offset for c in self._cursors.values()), default=self.position)
        return min(behind, self.position)

    @property
    def awaited(self) -> int:
        """The lowest offset still needed, without paused streams: these wait until a user resumes them. For statistics:
        it does not look at every cursor."""
        lowest = self.oldest.lowest()
        return self.position if lowest is None else min(lowest, self.position)

    @property
    def shown_watermark(self) -> int:
        """The same as `watermark`, for statistics: of all cursors it looks only at those that are paused."""
        return min([self.awaited, *(self.needed(cursor).offset for cursor in self.states.paused.values())])

    def reached(self, offset: int) -> bool:
        """Whether every event below `offset` is done. Paused streams do not count."""
        if self.position < offset:
            return False
        live = (c for c in self._cursors.values() if c.state is not CursorState.PAUSED)
        return all(self.needed(c).offset >= offset for c in live)

    def is_done(self, stream: StreamId, offset: int, first: int, end: int) -> bool:
        """Whether events `first` to `end`, exclusive, of the batch at `offset` are done."""
        cursor = self._cursors.get(stream)
        if cursor is None:
            return offset < self.position
        token = self.needed(cursor)
        if (offset, end) <= token or offset < token.offset:
            return True
        done = cursor.done.get(offset, ()) if cursor.done is not None else ()
        start = max(first, token.index) if offset == token.offset else first
        return all(index in done for index in range(start, end))

    @property
    def oldest_unread(self) -> int:
        """The lowest offset from which a feed has to read for this delivery."""
        return min([self.base, *(c.token.offset for c in self._cursors.values() if c.batch is None)])

    def resumes_at(self, within: int) -> int:
        """The lowest offset from which a stream goes on, at most the position. Streams that are more than `within`
        offsets behind it do not count."""
        needed = (self.needed(c).offset for c in self._cursors.values() if c.state is not CursorState.PAUSED)
        return min([self.base, *(offset for offset in needed if offset >= self.base - within)])

    def without_feed(self) -> list[StreamCursor]:
        """Return the parked cursors whose next batch no feed will bring."""
        return [c for c in self._cursors.values() if c.state is PARKED and c.feed is None]

    # ---- batches come in -------------------------------------------------------------------------------------------

    def join(self, feed: BatchSource) -> None:
        """`feed` brings new batches from now on. Take those in its cache."""
        self.feed = feed
        self.touch()
        # Offer first, then adopt: otherwise a stream that is ahead of this cache would look like a new one.
        parked = self.without_feed()
        self._look(feed.cache.entry_from(self.base), LOOK_AHEAD)
        for cursor in parked:
            if cursor.token.offset >= feed.cache.first_offset:
                self.adopt(cursor, feed)

    def read_on(self, feed: BatchSource) -> None:
        """`feed` has read further. Forget the parked streams that have nothing left to deliver."""
        self.note_change()  # the position has moved
        if feed is self.feed and feed.cache.next_offset >= self.base:
            self._forget_passed(feed)
        if feed is not self.feed or feed.cache.next_offset <= self.base:
            self.touch()

    def adopt(self, cursor: StreamCursor, feed: BatchSource) -> None:
        """Let a parked cursor go on in the cache of `feed`, or wait for the batches that `feed` brings. The cache must
        reach back to the cursor."""
        offset, index = cursor.token
        entry = feed.cache.first_entry(cursor.stream, offset)
        if entry is not None and entry.batch.offset == offset and index >= entry.batch.count:
            entry = entry.following
        if entry is not None:
            self.unpark(cursor, feed, entry)
        elif not self._forget_if_passed(cursor, feed):
            self.await_batch(cursor, feed)

    def await_batch(self, cursor: StreamCursor, feed: BatchSource) -> None:
        """`feed` will bring the parked cursor's next batch."""
        cursor.feed = feed
        self.touch()

    def _drained(self, cursor: StreamCursor) -> None:
        feed = cursor.feed
        if feed is not None and feed is self.feed:
            self._forget_if_passed(cursor, feed)
        elif feed is None or feed.finished:
            self._leave_cursor(cursor)
            self.on_parked(cursor)
        # Otherwise it stays, parked: only this catch-up brings the stream's next batch.

    # ---- feeds go --------------------------------------------------------------------------------------------------

    def leave_feed(self) -> None:
        """No feed brings new batches any more. The position stays, however far the feed reads on."""
        if self.feed is not None:
            self.leave_parked(self.feed)
        self.base, self.feed = self.position, None
        self._set_unseen(None)
        self.touch()

    def part(self) -> None:
        """Leave the main feed while it goes on. Cursors in its cache go on to the end of the cache."""
        feed = self.feed
        self.leave_feed()
        for cursor in self._cursors.values():
            if cursor.feed is feed:
                cursor.feed = None

    def leave_parked(self, feed: BatchSource) -> None:
        """`feed` will not bring the next batches of its parked cursors: keep how far it has read."""
        for cursor in self._cursors.values():
            if cursor.state is PARKED and cursor.feed is feed:
                self._leave_cursor(cursor)

    def _leave_cursor(self, cursor: StreamCursor) -> None:
        cursor.skip_to(self.needed(cursor))
        cursor.feed = None
        self.touch()

    def skip(self, offset: int) -> None:
        """The queue has nothing below `offset` any more."""
        for cursor in self._cursors.values():
            if cursor.batch is None and cursor.token.offset < offset:
                cursor.skip_to(SequenceToken(offset))
                if cursor.done is not None:
                    cursor.forget_done()
                self.touch()

    def end(self) -> None:
        """Leave all feeds. The progress stays as it is, however far the feeds read on."""
        self.leave_feed()
        for cursor in self._cursors.values():
            if cursor.state is PARKED:
                self._leave_cursor(cursor)
            cursor.feed = None
            cursor.release()

    # ---- damage ----------------------------------------------------------------------------------------------------

    def stop_at(self, damage: CorruptRecord) -> None:
        """A catch-up cannot pass the damaged record."""
        self.damage = damage

    def pass_damage(self, offset: float = float("inf")) -> None:
        """Every event below `offset` was read."""
        if self.damage is not None and offset > (-1 if self.damage.offset is None else self.damage.offset):
            self.damage = None

    def met_damage(self) -> CorruptRecord | None:
        """A copy of the error of the damaged record that stops reading, once every event before it is done."""
        for damage in (self.damage, self.feed.damage if self.feed else None):
            if damage is not None and self.reached(damage.offset or 0):
                return damage.copy()
        return None

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """The progress at this moment. It lists all streams behind, and all ranges of events done out of order: a
        stored checkpoint may never lack an event that an earlier one has, because consumers know that it is saved."""
        position = self.position
        here = SequenceToken(position)
        behind: dict[StreamId, StreamBehind] = {}
        for cursor in self._cursors.values():
            token, paused = self.needed(cursor), cursor.trouble.paused if cursor.trouble else ""
            done = cursor.done_ranges() if cursor.done is not None else ()
            # Streams ahead of the position count, too: a catch-up may be further than a main feed that started again.
            if token != here or paused or done:
                behind[cursor.stream] = StreamBehind(token, paused, done)
        return Checkpoint(position, behind)
