"""The cursors of one subscription in one queue, and the states that they go through. Pure.

    READY ──take──► RUNNING ──finish──► READY, at the stream's next batch, or PARKED
      ▲                │ └──put_back──► READY
      │                ├──wait──► WAITING ──resume──► READY
      └──── unpark     └──pause──► PAUSED ──unpause──► READY

A cursor that is to go on and has no batch is parked: a feed brings the batch again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from ...streams.events import EventBatch
from ...streams.identity import StreamId
from ...streams.subscriptions import StreamBehind
from ..cache import EMPTY
from ..cursor import PARKED, READY, RUNNING, CursorFailures, CursorState, StreamCursor
from .cursor_states import CursorStates
from .progress_changes import ProgressChanges

if TYPE_CHECKING:
    from .retries import Failure


def _ignore(_: StreamCursor) -> None: ...


class StreamCursors(ProgressChanges):
    """Cursors by stream, and the queue of those that are ready."""

    def __init__(self, behind: Mapping[StreamId, StreamBehind], *, rewindable: bool) -> None:
        super().__init__()
        self._cursors = {stream: StreamCursor.parked(stream, at) for stream, at in behind.items()}
        self.cursors: Mapping[StreamId, StreamCursor] = self._cursors
        self._ready: deque[StreamCursor] = deque()
        self.ready: Collection[StreamCursor] = self._ready
        """The cursors that wait to be taken."""
        self._deferred: list[tuple[StreamCursor, Failure]] = []
        self.deferred: Collection[tuple[StreamCursor, Failure]] = self._deferred
        """What `take_deferred` may return."""
        self.on_parked: Callable[[StreamCursor], None] = _ignore
        """Called when a parked cursor needs a feed: none will bring its next batch. Only the agent sets it."""
        self._rewindable = rewindable
        self.states = CursorStates(self._cursors.values())

    # ---- events are taken, and done --------------------------------------------------------------------------------

    def take_deferred(self) -> tuple[StreamCursor, Failure] | None:
        """Return a cursor whose event is to be given up on, because its batch has been read again, and the failure;
        None if there is none."""
        while self._deferred:
            cursor, failure = self._deferred.pop()
            if cursor.state is CursorState.WAITING and cursor.batch is not None:
                self.states.leave(cursor)
                cursor.state = RUNNING
                self.states.running += 1
                return cursor, failure
        return None

    def put_back(self, cursor: StreamCursor) -> None:
        """A cursor that was taken is the next one to be taken: its events were not delivered."""
        self.states.leave(cursor)
        cursor.state = READY
        self._ready.appendleft(cursor)

    def mark_done(self, cursor: StreamCursor, offset: int, first: int, end: int) -> int:
        """Events `first` to `end`, exclusive, of a batch are done out of order. Return how many of them were not done
        before."""
        self.touch()
        return cursor.mark_done(offset, first, end)

    def advance(self, cursor: StreamCursor, index: int) -> None:
        """The events of the cursor's batch below `index` are done. Move past them, and past those done out of order."""
        self.touch()
        cursor.index = index
        if cursor.done is not None:
            cursor.skip_done()
        if cursor.trouble is not None:
            cursor.recovered()

    def step(self, cursor: StreamCursor, batch: EventBatch) -> None:
        """Move a running cursor to `batch`, the next one of its stream."""
        if cursor.done is not None:
            cursor.forget_batch()
        if cursor.entry is None:
            cursor.stand_on(batch)
        else:
            cursor.advance()
            assert cursor.batch is batch

    def finish(self, cursor: StreamCursor) -> None:
        """The cursor's batch is done. Move to the next one with undelivered events, or leave the cache."""
        self.changes += 1
        if self.on_change is not None:
            self.note_change()
        if cursor.state is RUNNING:  # nearly always
            self.states.running -= 1
        else:
            self.states.leave(cursor)
        while True:
            apart = cursor.entry is None
            if cursor.done is not None:
                cursor.forget_batch()
            empty = cursor.advance() is EMPTY
            if cursor.trouble is not None:
                cursor.recovered()
            if empty:
                break
            if cursor.done is None or cursor.skip_done():
                cursor.state = READY
                self._ready.append(cursor)
                return
        cursor.state = PARKED
        if apart:
            self._park(cursor)
        else:
            self._drained(cursor)

    def _drained(self, cursor: StreamCursor) -> None:
        """The cursor has finished all batches of its stream in its feed's cache."""
        raise NotImplementedError

    # ---- failures --------------------------------------------------------------------------------------------------

    def fail(self, cursor: StreamCursor, phase: int, *, unavailable: bool) -> CursorFailures:
        """Note a failure in this phase of the circuit breaker, before it is known whether it counts. Return the
        failures."""
        cursor.trouble = failures = cursor.failures.in_phase(phase, unavailable=unavailable)
        return failures

    def count_failure(self, cursor: StreamCursor, now: float) -> int:
        """The failure counts. Return the number of failed attempts."""
        cursor.trouble = failures = cursor.failures.counted(now)
        return failures.attempts

    def excuse_failure(self, cursor: StreamCursor) -> CursorFailures:
        """The failure does not count. Return all failures."""
        cursor.trouble = failures = cursor.failures.without_count()
        return failures

    def note_return(self, cursor: StreamCursor, end: tuple[int, int]) -> None:
        """A consumer was sent the events before `end` and did not finish them: their next delivery is a later
        attempt."""
        cursor.trouble = cursor.failures.returned(end)

    def wait(self, cursor: StreamCursor) -> None:
        """The cursor's next attempt comes later. If its batch left the cache, drop the batch until then."""
        self.touch()
        self.states.leave(cursor)
        cursor.state = CursorState.WAITING
        self.states.waiting += 1
        self._drop_apart(cursor)

    def resume(self, cursor: StreamCursor) -> None:
        """Deliver the cursor's next event as soon as its batch is there. If the batch left the cache meanwhile, drop
        it: it is read again."""
        self._drop_apart(cursor)
        if cursor.batch is None:
            self._park(cursor)
        else:
            self._enlist(cursor)

    def pass_over(self, cursor: StreamCursor, end: int) -> None:
        """The events of the cursor's batch below `end` are given up on."""
        assert cursor.batch is not None
        self.touch()
        cursor.index = end
        cursor.recovered()
        if end < cursor.batch.count:
            self.resume(cursor)
        else:
            self.finish(cursor)

    def defer(self, cursor: StreamCursor, failure: Failure) -> None:
        """Give up on the cursor's event, once its batch has been read again."""
        cursor.trouble = cursor.failures._replace(deferred=(cursor.token, failure))
        self.resume(cursor)

    def pause(self, cursor: StreamCursor, reason: str) -> None:
        """Deliver nothing more of the stream until `unpause`."""
        self.touch()
        self.states.leave(cursor)
        cursor.state = CursorState.PAUSED
        self.states.paused[cursor.stream] = cursor
        cursor.trouble = cursor.failures._replace(paused=reason)
        cursor.park()

    def unpause(self, stream: StreamId) -> bool:
        """Go on with a paused stream. Return False if it is not paused here."""
        cursor = self._cursors.get(stream)
        if cursor is None or cursor.state is not CursorState.PAUSED:
            return False
        cursor.trouble = cursor.failures._replace(paused="", attempts=0, phase=None)
        self.touch()
        self.resume(cursor)
        return True

    # ---- batches leave the cache -----------------------------------------------------------------------------------

    def detach(self, cursor: StreamCursor) -> None:
        """Take a cursor out of its cache. A running cursor keeps its batch until that is done."""
        if cursor.state is RUNNING:
            cursor.release()
            cursor.feed = None  # else it would keep the cache of a feed that has ended
            return
        cursor.park()
        if cursor.state is READY:
            self.states.outdated += 1
            self._park(cursor)
            if self.states.outdated > len(self._cursors):
                self._drop_outdated()

    def _drop_outdated(self) -> None:
        """While no handler is free, nothing else takes these entries out of the queue of ready cursors. One stays if
        there is no other: it lets the delivery look for the next streams."""
        ready = list(dict.fromkeys(cursor for cursor in self._ready if cursor.state is READY))
        self.states.outdated = 0 if ready else 1
        kept = ready or [self._ready[0]]
        self._ready.clear()
        self._ready.extend(kept)

    def keep_apart(self, cursor: StreamCursor, batch: EventBatch) -> None:
        """A running cursor that left its cache keeps `batch` instead of its own: the same one without the payload."""
        assert cursor.entry is None
        cursor.batch = batch

    def _drop_apart(self, cursor: StreamCursor) -> None:
        if cursor.entry is None and self._rewindable:
            cursor.park()

    def _park(self, cursor: StreamCursor) -> None:
        self.states.leave(cursor)
        cursor.state = PARKED
        cursor.feed = None
        self.on_parked(cursor)

    def _enlist(self, cursor: StreamCursor) -> None:
        """Make the cursor ready at the next event of its batch that was not done out of order."""
        self.touch()
        trouble = cursor.trouble
        if trouble is not None and trouble.deferred is not None:
            (token, failure), cursor.trouble = trouble.deferred, trouble._replace(deferred=None)
            if token == cursor.token:
                self.states.leave(cursor)
                cursor.state = CursorState.WAITING
                self.states.waiting += 1
                self._deferred.append((cursor, failure))
                return
        if cursor.done is None or cursor.skip_done():
            self.states.leave(cursor)
            cursor.state = READY
            self._ready.append(cursor)
        else:
            self.finish(cursor)
