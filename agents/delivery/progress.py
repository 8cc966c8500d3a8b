"""The progress of one subscription in one queue, and the checkpoints that store it. Pure.

Every event below the position is done, except in streams that have a cursor. To make a checkpoint takes time and space
in proportion to the cursors. So changes are counted: no checkpoint is made while the saved one still holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...streams.errors import CorruptRecord
from ...streams.identity import SequenceToken, StreamId
from ...streams.subscriptions import Checkpoint, StreamBehind
from ..cache import CacheEntry, QueueCache
from ..cursor import PARKED, CursorState, StreamCursor

if TYPE_CHECKING:
    from .delivery import Delivery

MAX_ENTRIES = 4000
"""After a checkpoint with more streams behind and ranges of done events together, the next ones are held back."""
ENTRIES_PER_S = 40_000
"""While checkpoints are held back, so many streams and ranges are written in a second."""
HELD_BACK_S = 10.0
"""The longest time for which checkpoints are held back, in seconds."""


class BatchSource(Protocol):
    """Brings batches to a delivery: the queue's main feed, or a catch-up of the delivery's own."""

    cache: QueueCache
    damage: CorruptRecord | None
    """The damaged record that stops reading at present."""

    @property
    def caught_up(self) -> bool:
        """Whether it has reached the queue's end as of its start."""
        ...

    def drained(self, delivery: Delivery, cursor: StreamCursor) -> None:
        """The cursor has finished all batches of its stream in this feed's cache: forget, keep or move the cursor."""
        ...


class UnsavedProgress(NamedTuple):
    """A checkpoint that is to be saved, and the state from which it was made."""

    progress: DeliveryProgress
    checkpoint: Checkpoint
    changes: int
    position: int

    def note_saved(self) -> None:
        """The checkpoint is stored."""
        self.progress.note_saved(self)


class DeliveryProgress:
    """The position and the cursors. `touch` it after each change of a cursor's position."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.base = checkpoint.next_offset
        """The position without a feed. A feed that reads beyond it moves the position, but not `base`."""
        self.feed: BatchSource | None = None
        """Brings new batches: a catch-up, or the main feed once the delivery has joined it."""
        self.cursors: dict[StreamId, StreamCursor] = {
            stream: StreamCursor.parked(stream, behind) for stream, behind in checkpoint.behind.items()
        }
        self.damage: CorruptRecord | None = None
        """The damaged record that stopped the last catch-up."""
        self.held_back = False
        """Whether the last call of `unsaved` returned None although the saved checkpoint does not hold any more."""
        self._held_back_until = 0.0
        self._changes = 0
        self._saved: UnsavedProgress | None = None

    @property
    def position(self) -> int:
        """Every event below is done, except in streams that have a cursor."""
        return max(self.base, self.feed.cache.next_offset) if self.feed else self.base

    def needed(self, cursor: StreamCursor) -> SequenceToken:
        """Token of the next undelivered event of the cursor's stream."""
        token = cursor.token
        if cursor.state is PARKED and cursor.feed is not None:
            return max(token, SequenceToken(cursor.feed.cache.next_offset, 0))
        return token

    @property
    def watermark(self) -> int:
        """The lowest offset still needed."""
        behind = min((self.needed(c).offset for c in self.cursors.values()), default=self.position)
        return min(behind, self.position)

    def reached(self, offset: int) -> bool:
        """Whether every event below `offset` is done. Paused streams do not count."""
        if self.position < offset:
            return False
        live = (c for c in self.cursors.values() if c.state is not CursorState.PAUSED)
        return all(self.needed(c).offset >= offset for c in live)

    def is_done(self, stream: StreamId, offset: int, first: int, end: int) -> bool:
        """Whether events `first` to `end`, exclusive, of the batch at `offset` are done."""
        cursor = self.cursors.get(stream)
        if cursor is None:
            return offset < self.position
        token = self.needed(cursor)
        if (offset, end) <= token or offset < token.offset:
            return True
        done = cursor.done.get(offset, ()) if cursor.done is not None else ()
        start = max(first, token.index) if offset == token.offset else first
        return all(index in done for index in range(start, end))

    # ---- changes ---------------------------------------------------------------------------------------------------

    def touch(self) -> None:
        """A cursor moved, or was paused: the saved checkpoint does not hold any more."""
        self._changes += 1

    def join(self, feed: BatchSource) -> None:
        """`feed` brings new batches from now on."""
        self.feed = feed
        self.touch()

    def read_on(self, feed: BatchSource) -> None:
        """`feed` has read further. Count a change only if `position` does not show it."""
        if feed is not self.feed or feed.cache.next_offset <= self.base:
            self.touch()

    def leave_feed(self) -> None:
        """No feed brings new batches any more. The position stays, however far the feed reads on."""
        self.base, self.feed = self.position, None
        self.touch()

    def await_batch(self, cursor: StreamCursor, feed: BatchSource) -> None:
        """`feed` will bring the parked cursor's next batch."""
        cursor.feed = feed
        self.touch()

    def skip(self, cursor: StreamCursor, token: SequenceToken) -> None:
        """The queue has nothing before `token` any more: a parked cursor goes on there."""
        cursor.skip_to(token)
        self.touch()

    def leave_cursor(self, cursor: StreamCursor) -> None:
        """The parked cursor's feed will not bring its next batch: keep how far the feed has read."""
        cursor.skip_to(self.needed(cursor))
        cursor.feed = None
        self.touch()

    def forget(self, cursor: StreamCursor) -> None:
        """Drop the cursor of a stream without undelivered events: its next batch starts a new one."""
        del self.cursors[cursor.stream]
        self.touch()

    def unpark(self, cursor: StreamCursor, feed: BatchSource, entry: CacheEntry) -> bool:
        """Put a parked cursor onto the batch of `entry` in `feed`. Return False if the batch is done already."""
        batch, (offset, index) = entry.batch, cursor.token
        if batch.offset < offset or (batch.offset == offset and index >= batch.count):
            return False
        cursor.attach(entry, index if batch.offset == offset else 0)
        cursor.feed = feed
        if cursor.done is not None:
            cursor.forget_done()
        self.touch()
        return True

    def end(self) -> None:
        """Leave all feeds. The progress stays as it is, however far the feeds read on."""
        self.leave_feed()
        for cursor in self.cursors.values():
            if cursor.state is PARKED:
                self.leave_cursor(cursor)
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
        for cursor in self.cursors.values():
            token, paused = self.needed(cursor), cursor.trouble.paused if cursor.trouble else ""
            done = cursor.done_ranges() if cursor.done is not None else ()
            # Streams ahead of the position count, too: a catch-up may be further than a main feed that started again.
            if token != here or paused or done:
                behind[cursor.stream] = StreamBehind(token, paused, done)
        return Checkpoint(position, behind)

    def unsaved(self, now: float) -> UnsavedProgress | None:
        """Return a checkpoint that is to be saved, None if the one that was saved last still holds. Call its
        `note_saved` once it is stored.

        After a large checkpoint the next one is held back for a while, so that the store keeps up."""
        self.held_back = False
        saved, position = self._saved, self.position
        if saved is not None and saved.changes == self._changes and saved.position == position:
            return None
        self.held_back = now < self._held_back_until
        if self.held_back:
            return None
        checkpoint = self.checkpoint()
        entries = sum(1 + len(behind.done) for behind in checkpoint.behind.values())
        if entries > MAX_ENTRIES:
            self._held_back_until = now + min(entries / ENTRIES_PER_S, HELD_BACK_S)
        return UnsavedProgress(self, checkpoint, self._changes, position)

    def note_saved(self, saved: UnsavedProgress) -> None:
        """This result of `unsaved` is stored."""
        self._saved = saved
