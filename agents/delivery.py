"""Delivery of one queue's events to one subscription.

A `Delivery` is the actor (subscription, queue). Each stream that has something undelivered has one cursor here; what is
in flight of a stream is in one pair of hands, so order within a stream holds and streams do not wait for each other.
This is what all deliveries have in common: cursors and feeds, failures, progress. Who works on what is ready is for the
two kinds of it: handlers in this process (`handling.py`), and the members of a group (`group_delivery.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from typing import NamedTuple, Protocol

from ..streams.errors import Closed
from ..streams.events import Event, EventBatch
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import Behind, Checkpoint, OnFailure, SubscriptionDefinition
from .cache import EMPTY, QueueCache
from .cursor import PARKED, READY, RUNNING, State, StreamCursor

log = logging.getLogger("headrace.agents")

MAX_BEHIND = 4000
"""Streams behind that a periodic checkpoint lists; a clean stop lists all."""
MAX_RANGES = 10_000
"""The same for what is done out of order."""
FULL_S = 10.0
"""After so long in which periodic checkpoints left something out, one leaves out nothing, in seconds."""
STORE_RETRY_S = 1.0
CANCEL_S = 1.0
"""How long what was cancelled has to end, in seconds; what does not is left behind."""


class Feed(Protocol):
    """What brings batches to a delivery: the queue's main feed or a catch-up of its own."""

    cache: QueueCache

    @property
    def caught_up(self) -> bool:
        """Whether it has come to where the queue ended when it began."""
        ...

    def drained(self, delivery: Delivery, cursor: StreamCursor) -> None:
        """The cursor has finished what this feed's cache holds of its stream: forget it, keep it, or move it on."""
        ...


class DeliveryStatistics(NamedTuple):
    subscription: str
    delivered_events: int
    delivered_batches: int
    filtered: int
    retries: int
    dead_lettered: int
    skipped: int
    gaps: int
    in_flight: int
    ready: int
    waiting: int
    parked: int
    paused: int
    watermark: int


class FailureSink(Protocol):
    """Where events go that are given up on. Both are durable on return, or raise."""

    async def dead_letter(self, delivery: Delivery, events: Sequence[Event], reason: str, attempts: int) -> None: ...

    async def skipped(self, delivery: Delivery, events: Sequence[Event], reason: str) -> None: ...


class Failure(NamedTuple):
    """Why a delivery failed: from the cursor's position on, up to the event at index `end`, exclusive."""

    end: int
    reason: str
    error: BaseException | None = None
    """What a handler raised."""
    delay_s: float | None = None
    """When the consumer wants it again; None: as the retry policy says."""


class Term(Protocol):
    """How long a queue's lease lasts."""

    until: float
    """Loop time. Whoever holds the lease moves it on."""


class Delivery(ABC):
    """The actor (subscription, queue). All methods are called on the loop; nothing here blocks."""

    def __init__(
        self,
        definition: SubscriptionDefinition,
        queue: int,
        checkpoint: Checkpoint,
        sink: FailureSink,
        *,
        epoch: int = 0,
        term: Term | None = None,
        rewindable: bool = True,
        rng: random.Random | None = None,
    ) -> None:
        self.definition = definition
        self.name = definition.name
        self.queue = queue
        self.epoch = epoch
        """Under which this process serves the subscription: what is recorded for it carries it."""
        self.base = checkpoint.next_offset
        """Everything below is done, except for the streams that have a cursor."""
        self.feed: Feed | None = None
        """Who brings new batches: the main feed once joined, a catch-up before."""
        self.on_parked: Callable[[StreamCursor], None] = lambda _: None
        """Called when a parked cursor is due and no feed is going to bring its next batch."""
        self.cursors: dict[StreamId, StreamCursor] = {
            stream: StreamCursor.parked(stream, behind) for stream, behind in checkpoint.behind.items()
        }
        self._selects = definition.selector.matcher()
        self._sink = sink
        self._term = term
        self._lost = False
        self._rewindable = rewindable
        self._rng = rng or random.Random()  # noqa: S311 (jitter)
        self._loop = asyncio.get_running_loop()
        self._ready: deque[StreamCursor] = deque()
        self._in_flight = 0
        self._stopping = False
        self._watchers: list[asyncio.Future[None]] = []
        self.exact = True
        """Whether the last checkpoint listed everything that is done."""
        self._exact_at = self._loop.time()
        self._delivered_events = self._delivered_batches = self._filtered = self._retries = 0
        self._dead_lettered = self._skipped = 0
        self.gaps = 0

    @abstractmethod
    def _wake(self) -> None:
        """Something is ready, or became so."""

    @abstractmethod
    async def redrive(self, event: Event) -> BaseException | None:
        """Deliver one event out of line. Returns what went wrong."""

    @abstractmethod
    async def stop(self, drain_s: float) -> None:
        """Start nothing more; let what is in flight end within `drain_s` seconds, then take it back. Where this is
        cancelled, it is taken back, too."""

    @property
    def over(self) -> bool:
        """Whether nothing may be handed out any more: it stops, or the queue's lease is over, whoever knows of it."""
        return self._stopping or self.lost

    @property
    def lost(self) -> bool:
        """Whether the queue's lease is over: what is in somebody's hands is not to be had here any more, either."""
        return self._lost or (self._term is not None and self._loop.time() >= self._term.until)

    def cut(self) -> None:
        """The queue's lease is over."""
        self._lost = True
        self.halt()

    def halt(self) -> None:
        """From now on: nothing is handed out, and nothing tried again."""
        self._stopping = True
        self._notify()
        for cursor in self.cursors.values():
            if cursor.trouble is not None and cursor.trouble.timer is not None:
                cursor.trouble.timer.cancel()

    def runs_here(self) -> bool:
        """Whether the current task is one that this delivery waits for when it stops."""
        return False

    def held(self, cursor: StreamCursor) -> int:
        """Bytes that whoever works for a running cursor keeps alive."""
        return cursor.batch.nbytes if cursor.state is RUNNING and cursor.batch is not None else 0

    # ---- batches come in -------------------------------------------------------------------------------------------

    def offer(self, feed: Feed, batches: Iterable[EventBatch], base: float) -> None:
        """New batches in `feed`'s cache. Below `base` only streams with a cursor still need anything."""
        cursors, ready, selects = self.cursors, self._ready, self._selects
        for batch in batches:
            stream = batch.stream
            cursor = cursors.get(stream)
            if cursor is None:
                if batch.offset >= base and selects(stream):
                    cursors[stream] = cursor = StreamCursor(stream, feed, batch)
                    ready.append(cursor)
            elif cursor.state is PARKED and cursor.feed is feed:
                self._unpark(cursor, feed, batch)
        if ready:
            self._wake()

    def _unpark(self, cursor: StreamCursor, feed: Feed, batch: EventBatch) -> None:
        offset, index = cursor.token
        if batch.offset < offset or (batch.offset == offset and index >= batch.count):
            return
        cursor.attach(batch, index if batch.offset == offset else 0)
        cursor.feed = feed
        if cursor.done is not None:
            cursor.forget_done()
        self._enlist(cursor)

    # ---- cursors go on ---------------------------------------------------------------------------------------------

    def _finished(self, cursor: StreamCursor) -> None:
        """The cursor's batch is done: on to the next of which something is left, or out."""
        while True:
            apart = cursor.bucket is None
            if cursor.done is not None:
                cursor.forget_batch()
            empty = cursor.advance() is EMPTY
            if cursor.trouble is not None:
                cursor.went_on()
            if empty:
                break
            if cursor.done is None or cursor.skip_done():
                cursor.state = READY
                self._ready.append(cursor)
                return
        if apart:
            self._park(cursor)
        else:
            assert cursor.feed is not None
            cursor.state = PARKED
            cursor.feed.drained(self, cursor)

    def _enlist(self, cursor: StreamCursor) -> None:
        """It goes on in its batch, with what was not done out of order."""
        if cursor.done is None or cursor.skip_done():
            cursor.state = READY
            self._ready.append(cursor)
        else:
            self._finished(cursor)

    # ---- failures --------------------------------------------------------------------------------------------------

    async def _failed(self, cursor: StreamCursor, batch: EventBatch, failure: Failure) -> None:
        """Try again later, or give up."""
        if not self._again(cursor, failure):
            await self._exhausted(cursor, batch, failure)

    async def _exhausted(self, cursor: StreamCursor, batch: EventBatch, failure: Failure) -> None:
        log.warning(
            "%s gives up on %s %s after %d attempts: %s: %s",
            self.name, cursor.stream, cursor.token, cursor.troubled().attempts, self.definition.on_failure.value,
            failure.reason, exc_info=failure.error,
        )  # fmt: skip
        try:
            await self._give_up(cursor, batch, failure)
        except (Exception, asyncio.CancelledError) as problem:
            if self._stopping and isinstance(problem, asyncio.CancelledError):
                raise
            log.warning("cannot record that %s gave up on %s: %r; trying again", self.name, cursor.token, problem)
            self._wait(cursor, STORE_RETRY_S)
        else:
            await self._gave_up(failure)

    def _again(self, cursor: StreamCursor, failure: Failure) -> bool:
        """Count a failed delivery, and let the cursor wait for its next one. False where the retries are exhausted."""
        now, trouble = self._loop.time(), cursor.troubled()
        trouble.failed_at = trouble.failed_at if trouble.attempts else now
        trouble.attempts += 1
        delay = self.definition.retry.delay(trouble.attempts, now - trouble.failed_at, self._rng)
        if delay is None:
            return False
        delay = delay if failure.delay_s is None else failure.delay_s
        self._retries += 1
        log.info(
            "%s failed on %s %s, attempt %d, again in %.2f s: %s",
            self.name, cursor.stream, cursor.token, trouble.attempts, delay, failure.reason, exc_info=failure.error,
        )  # fmt: skip
        self._wait(cursor, delay)
        return True

    async def _give_up(self, cursor: StreamCursor, batch: EventBatch, failure: Failure) -> None:
        if self.definition.on_failure is OnFailure.PAUSE:
            self._pause(cursor, failure.reason)
            return
        left = [e for i, e in enumerate(batch.events()) if cursor.index <= i < failure.end and not cursor.is_done(i)]
        events = [event for event in left if self._wanted(event)]
        if self.definition.on_failure is OnFailure.DEAD_LETTER:
            await self._sink.dead_letter(self, events, failure.reason, cursor.troubled().attempts)
            self._dead_lettered += len(events)
        else:
            await self._sink.skipped(self, events, failure.reason)
            self._skipped += len(events)
        self._filtered += len(left) - len(events)
        cursor.index = failure.end
        cursor.went_on()
        if cursor.index < batch.count:
            self._enlist(cursor)
            self._wake()
        else:
            self._finished(cursor)

    async def _gave_up(self, failure: Failure) -> None:
        """Called after something was given up on."""

    def _wanted(self, event: Event) -> bool:
        """Whether the subscription's filter lets the event through."""
        return True

    def _wait(self, cursor: StreamCursor, delay: float) -> None:
        cursor.state = State.WAITING
        if self._stopping:
            return
        if cursor.bucket is None and self._rewindable:
            cursor.park()  # it left its cache while it ran: it is read again rather than held outside every budget
        cursor.troubled().timer = self._loop.call_later(delay, self._retry, cursor)

    def _retry(self, cursor: StreamCursor) -> None:
        cursor.troubled().timer = None
        self._go_on(cursor)

    def _go_on(self, cursor: StreamCursor) -> None:
        if cursor.batch is None:
            self._park(cursor)
        else:
            self._enlist(cursor)
            self._wake()

    def _pause(self, cursor: StreamCursor, reason: str) -> None:
        log.warning("stream %s of %s is paused at %s: %s", cursor.stream, self.name, cursor.token, reason)
        cursor.state = State.PAUSED
        cursor.troubled().paused = reason
        cursor.park()

    def resume(self, stream: StreamId) -> bool:
        """Go on with a paused stream. False where it is not paused here."""
        cursor = self.cursors.get(stream)
        if cursor is None or cursor.state is not State.PAUSED:
            return False
        trouble = cursor.troubled()
        trouble.paused, trouble.attempts = "", 0
        self._go_on(cursor)
        return True

    # ---- leaving a cache -------------------------------------------------------------------------------------------

    def _park(self, cursor: StreamCursor) -> None:
        cursor.state = PARKED
        cursor.feed = None
        self.on_parked(cursor)

    def detach(self, cursor: StreamCursor) -> None:
        """Take a cursor out of its cache. What is running keeps its batch until it is done."""
        if cursor.state is RUNNING:
            cursor.release()
            return
        cursor.park()
        if cursor.state is READY:
            self._park(cursor)

    def follow(self, cursor: StreamCursor, feed: Feed, batch: EventBatch) -> None:
        """A parked cursor goes on in `feed`, at `batch`."""
        self._unpark(cursor, feed, batch)
        if self._ready:
            self._wake()

    def forget(self, cursor: StreamCursor) -> None:
        """The stream has nothing undelivered: its next batch starts a new cursor."""
        del self.cursors[cursor.stream]
        self._notify()

    def leave(self, feed: Feed) -> None:
        """`feed` ends: whatever stands in its cache is parked."""
        for cursor in list(self.cursors.values()):
            if cursor.feed is feed and cursor.state in (READY, RUNNING, State.WAITING):
                self.detach(cursor)
            elif cursor.feed is feed:
                cursor.feed = None

    def end(self) -> None:
        """Nobody brings it anything any more. What is done stays what it is, however far its feeds read on."""
        self.base, self.feed = self.position, None
        for cursor in self.cursors.values():
            if cursor.state is PARKED:
                cursor.skip_to(self._needed(cursor))
            cursor.feed = None
            cursor.release()

    # ---- progress --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Everything below is done, except for the streams that have a cursor."""
        return max(self.base, self.feed.cache.next_offset) if self.feed else self.base

    def checkpoint(self, *, limit: int | None = MAX_BEHIND) -> Checkpoint:
        """What is done now. With more than `limit` streams behind, it goes back to where only so many are, and of what
        was done out of order it has at most `MAX_RANGES` ranges: some completed events then come again after a crash,
        none is lost. `exact` says afterwards whether it has everything; without a limit it does."""
        position = self.position
        here = SequenceToken(position)
        room = sys.maxsize if limit is None else MAX_RANGES
        self.exact = True
        behind: dict[StreamId, Behind] = {}
        for cursor in self.cursors.values():
            token, paused = self._needed(cursor), cursor.trouble.paused if cursor.trouble else ""
            done = () if cursor.done is None else self._listed(cursor, room)
            room -= len(done)
            # Ahead of it, too: a catch-up may have gone further than a main feed that had to start again.
            if token != here or paused or done:
                behind[cursor.stream] = Behind(token, paused, done)
        if limit is not None and len(behind) > limit:
            self.exact = False
            position = min(position, nsmallest(limit + 1, (b.token.offset for b in behind.values()))[-1])
            behind = {stream: b for stream, b in behind.items() if b.token.offset < position}
        return Checkpoint(position, behind)

    def periodic_checkpoint(self) -> Checkpoint:
        """With a limit, mostly. Consumers wait to be told what is saved, and do not go on for ever without; so now and
        then one has everything, however much that is."""
        now = self._loop.time()
        checkpoint = self.checkpoint(limit=None if now - self._exact_at >= FULL_S else MAX_BEHIND)
        if self.exact:
            self._exact_at = now
        return checkpoint

    def _listed(self, cursor: StreamCursor, room: int) -> tuple[tuple[int, int, int], ...]:
        """What a checkpoint says of what was done out of order, where it may name so many ranges."""
        done = cursor.done_ranges(room + 1)
        self.exact = self.exact and len(done) <= room
        return done[:room]

    def _needed(self, cursor: StreamCursor) -> SequenceToken:
        """The next event of its stream."""
        token = cursor.token
        if cursor.state is PARKED and cursor.feed is not None:
            return max(token, SequenceToken(cursor.feed.cache.next_offset, 0))
        return token

    @property
    def watermark(self) -> int:
        """The lowest offset still needed."""
        behind = min((self._needed(c).offset for c in self.cursors.values()), default=self.position)
        return min(behind, self.position)

    async def wait_until(self, offset: int) -> None:
        """Return when everything below `offset` is done (paused streams apart). Raises Closed once stopped."""
        while not self._reached(offset):
            if self._stopping:
                raise Closed(
                    f"subscription {self.name} stopped before it came to offset {offset} of queue {self.queue}"
                )
            await self._progress()

    def _reached(self, offset: int) -> bool:
        if self.position < offset:
            return False
        live = (c for c in self.cursors.values() if c.state is not State.PAUSED)
        return all(self._needed(c).offset >= offset for c in live)

    async def _progress(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._watchers.append(future)
        await future

    def _notify(self) -> None:
        if self._watchers:
            watchers, self._watchers = self._watchers, []
            for future in watchers:
                if not future.done():
                    future.set_result(None)

    def progressed(self) -> None:
        """The feed's position moved: whoever waits for it looks again."""
        self._notify()

    def statistics(self) -> DeliveryStatistics:
        states = [c.state for c in self.cursors.values()]
        return DeliveryStatistics(
            self.name,
            self._delivered_events,
            self._delivered_batches,
            self._filtered,
            self._retries,
            self._dead_lettered,
            self._skipped,
            self.gaps,
            self._in_flight,
            len(self._ready),
            states.count(State.WAITING),
            states.count(PARKED),
            states.count(State.PAUSED),
            self.watermark,
        )


def described(error: BaseException) -> str:
    """What to keep of a handler's error, whatever it is."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (its text is its own code)
        return type(error).__name__
