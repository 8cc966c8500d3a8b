"""Delivery of one queue's events to one subscription's handler.

A `Delivery` is the actor (subscription, queue). Each stream that has something undelivered has one cursor here; at most
one batch per cursor is in flight, so order within a stream holds and streams do not wait for each other. Up to
`concurrency` workers step handlers. A worker is a task that goes from cursor to cursor: as long as handlers do not
suspend, thousands of streams cost one task; when one suspends, the loop's next turn starts another worker for what is
still ready. So handlers always run in a real task (timeouts and context variables work) and a task is only paid for
where something waits.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from time import monotonic
from typing import NamedTuple, Protocol

from ..streams.errors import Closed
from ..streams.events import Event, EventBatch, SomeEvents
from ..streams.handlers import EventFilter, Handler
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import Behind, Checkpoint, OnFailure, SubscriptionDefinition
from .cache import EMPTY, Cursor, QueueCache

log = logging.getLogger("headrace.agents")

YIELD_EVENTS = 1024
"""A handler per event that never suspends lets the loop turn after so many events of one batch."""
TURN_S = 0.005
"""How long a worker runs before it lets the loop do something else, in seconds (QMQ's actor quota)."""
MAX_BEHIND = 4000
"""Streams behind that a periodic checkpoint lists; a clean stop lists all."""
STORE_RETRY_S = 1.0
CANCEL_S = 1.0
"""How long a handler that was cancelled has to end, in seconds; one that does not is left behind."""
PROCESS_ENDS = (SystemExit, KeyboardInterrupt)


class State(enum.Enum):
    READY = "ready"
    """In line for a worker."""
    RUNNING = "running"
    """Its handler runs."""
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

    __slots__ = ("attempts", "failed_at", "paused", "seen", "seen_at", "timer")

    def __init__(self) -> None:
        self.attempts = 0
        """Failed deliveries of the present event or batch."""
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

    __slots__ = ("feed", "state", "stream", "trouble")

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

    @classmethod
    def parked(cls, stream: StreamId, behind: Behind) -> StreamCursor:
        cursor = cls.__new__(cls)
        cursor.batch = cursor.bucket = cursor.feed = cursor.trouble = None
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


class Feed(Protocol):
    """What brings batches to a delivery: the queue's main feed or a catch-up of its own."""

    cache: QueueCache

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


class Delivery:
    """The actor (subscription, queue). All methods are called on the loop; nothing here blocks."""

    def __init__(
        self,
        definition: SubscriptionDefinition,
        queue: int,
        checkpoint: Checkpoint,
        handler: Handler,
        sink: FailureSink,
        *,
        epoch: int = 0,
        predicate: EventFilter | None = None,
        concurrency: int = 100,
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
        self._handler = handler
        self._sink = sink
        self.predicate = predicate
        self._handle = self._handle_batch if handler.on_batch else self._handle_events
        self.concurrency = concurrency
        self._rewindable = rewindable
        self._rng = rng or random.Random()  # noqa: S311 (jitter)
        self._loop = asyncio.get_running_loop()
        self._ready: deque[StreamCursor] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._spreading = False
        self._yielding = 0
        self._stopping = False
        self._watchers: list[asyncio.Future[None]] = []
        self._delivered_events = self._delivered_batches = self._filtered = self._retries = 0
        self._dead_lettered = self._skipped = 0
        self.gaps = 0

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
        self._enlist(cursor)

    def _wake(self) -> None:
        if not self._workers:
            self._start_worker()
        elif not self._spreading and len(self._workers) < self.concurrency:
            self._spreading = True
            self._loop.call_soon(self._spread)

    def _spread(self) -> None:
        """Runs a turn after work appeared: what is ready now waits behind handlers that suspended."""
        self._spreading = False
        if self._ready and not self._yielding and len(self._workers) < self.concurrency:
            self._start_worker()

    def _start_worker(self) -> None:
        if self._stopping:
            return
        task = self._loop.create_task(self._work(), name=f"headrace deliver {self.name}/{self.queue}")
        self._workers.add(task)
        task.add_done_callback(self._worker_ended)

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        self._workers.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("delivery of %s, queue %d failed and goes on", self.name, self.queue, exc_info=error)
        if self._ready:
            self._wake()

    # ---- handlers run ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Step handlers until nothing is ready. Written out flat: what it calls per batch, it pays for per batch."""
        ready, handle = self._ready, self._handle
        turn_ends = monotonic() + TURN_S
        if len(ready) > 1:
            self._wake()
        while ready and not self._stopping:
            cursor = ready.popleft()
            if cursor.state is not READY:
                continue
            batch = cursor.batch
            assert batch is not None
            cursor.state = RUNNING
            self._in_flight += 1
            try:
                await handle(cursor, batch)
            except BaseException as error:  # noqa: BLE001 (a handler's failure is not ours)
                await self._raised(cursor, batch, error)
            else:
                self._delivered_batches += 1
                self._finished(cursor)
            finally:
                self._in_flight -= 1
            if monotonic() > turn_ends:
                await self._yield_turn()
                turn_ends = monotonic() + TURN_S
        self._notify()

    async def _yield_turn(self) -> None:
        """Let the loop turn. Meanwhile no other worker is started: this one only makes way, it does not wait."""
        self._yielding += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._yielding -= 1
        if len(self._ready) > 1:
            self._wake()

    async def _raised(self, cursor: StreamCursor, batch: EventBatch, error: BaseException) -> None:
        cancelled = isinstance(error, asyncio.CancelledError)
        if (cancelled and self._stopping) or isinstance(error, PROCESS_ENDS) or not self._loop.is_running():
            cursor.state = READY  # at its token it goes on some other time
            raise error
        await self._failed(cursor, batch, error)
        task = asyncio.current_task()
        if cancelled and task is not None and task.cancelling():
            raise error  # a handler cancelled the task that it runs in: another worker goes on

    async def _handle_events(self, cursor: StreamCursor, batch: EventBatch) -> None:
        on_event = self._handler.on_event
        assert on_event is not None
        start = cursor.index
        for index, event in enumerate(batch.events(start), start):
            if self._stopping:
                raise asyncio.CancelledError
            if self.predicate is None or self._wanted(event):
                await on_event(event)
                self._delivered_events += 1
            else:
                self._filtered += 1
            cursor.index = index + 1
            cursor.trouble = None
            if not index % YIELD_EVENTS and index:
                await self._yield_turn()

    async def _handle_batch(self, cursor: StreamCursor, batch: EventBatch) -> None:
        on_batch = self._handler.on_batch
        assert on_batch is not None
        left = batch.count - cursor.index
        if cursor.index or self.predicate is not None:
            events = [e for e in batch.events(cursor.index) if self._wanted(e)]
            batch = SomeEvents(batch, events)
        if batch.count:
            await on_batch(batch)
        self._delivered_events += batch.count
        self._filtered += left - batch.count

    def _wanted(self, event: Event) -> bool:
        try:
            if self.predicate is None or self.predicate(event):
                return True
        except PROCESS_ENDS:
            raise
        except BaseException:
            log.warning("filter of %s raised on %s %s: delivered", self.name, event.stream, event.token, exc_info=True)
            return True
        return False

    def _finished(self, cursor: StreamCursor) -> None:
        """The cursor's batch is done: on to the next, or out."""
        cursor.trouble = None
        apart = cursor.bucket is None
        if cursor.advance() is not EMPTY:
            cursor.state = READY
            self._ready.append(cursor)
        elif apart:
            self._park(cursor)
        else:
            assert cursor.feed is not None
            cursor.state = PARKED
            cursor.feed.drained(self, cursor)

    def _enlist(self, cursor: StreamCursor) -> None:
        cursor.state = READY
        self._ready.append(cursor)

    # ---- failures --------------------------------------------------------------------------------------------------

    async def _failed(self, cursor: StreamCursor, batch: EventBatch, error: BaseException) -> None:
        now, trouble = self._loop.time(), cursor.troubled()
        trouble.failed_at = trouble.failed_at if trouble.attempts else now
        trouble.attempts += 1
        delay = self.definition.retry.delay(trouble.attempts, now - trouble.failed_at, self._rng)
        if delay is not None:
            self._retries += 1
            log.info(
                "%s failed on %s %s, attempt %d, again in %.2f s",
                self.name, cursor.stream, cursor.token, trouble.attempts, delay, exc_info=error,
            )  # fmt: skip
            self._wait(cursor, delay)
            return
        log.warning(
            "%s gives up on %s %s after %d attempts: %s",
            self.name, cursor.stream, cursor.token, trouble.attempts, self.definition.on_failure.value, exc_info=error,
        )  # fmt: skip
        reason = described(error)
        try:
            await self._give_up(cursor, batch, reason)
        except (Exception, asyncio.CancelledError) as failure:
            if self._stopping and isinstance(failure, asyncio.CancelledError):
                raise
            log.warning("cannot record that %s gave up on %s: %r; trying again", self.name, cursor.token, failure)
            self._wait(cursor, STORE_RETRY_S)
        else:
            await self._tell(error)

    async def _give_up(self, cursor: StreamCursor, batch: EventBatch, reason: str) -> None:
        if self.definition.on_failure is OnFailure.PAUSE:
            self._pause(cursor, reason)
            return
        index = cursor.index + 1 if self._handler.on_event else batch.count
        events = [e for e in batch.events(cursor.index)[: index - cursor.index] if self._wanted(e)]
        if self.definition.on_failure is OnFailure.DEAD_LETTER:
            await self._sink.dead_letter(self, events, reason, cursor.troubled().attempts)
            self._dead_lettered += len(events)
        else:
            await self._sink.skipped(self, events, reason)
            self._skipped += len(events)
        self._filtered += index - cursor.index - len(events)
        cursor.trouble = None
        cursor.index = index
        if index < batch.count:
            self._enlist(cursor)
        else:
            self._finished(cursor)

    async def _tell(self, error: BaseException) -> None:
        if self._handler.on_error is None or not isinstance(error, Exception):
            return
        try:
            await self._handler.on_error(error)
        except Exception:
            log.exception("on_error of %s raised", self.name)

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
        cursor.trouble = None
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

    # ---- progress --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Everything below is done, except for the streams that have a cursor."""
        return max(self.base, self.feed.cache.next_offset) if self.feed else self.base

    def checkpoint(self, *, limit: int | None = MAX_BEHIND) -> Checkpoint:
        """What is done now. With more than `limit` streams behind, it goes back to where only so many are: some
        completed events then come again after a crash, none is lost."""
        position = self.position
        here = SequenceToken(position)
        # Ahead of it, too: a catch-up may have gone further than a main feed that had to start again.
        behind = {c.stream: b for c in self.cursors.values() if (b := self._behind(c)).token != here or b.paused}
        if limit is not None and len(behind) > limit:
            position = min(position, nsmallest(limit + 1, (b.token.offset for b in behind.values()))[-1])
            behind = {stream: b for stream, b in behind.items() if b.token.offset < position}
        return Checkpoint(position, behind)

    def _behind(self, cursor: StreamCursor) -> Behind:
        token = cursor.token
        if cursor.state is PARKED and cursor.feed is not None:
            token = max(token, SequenceToken(cursor.feed.cache.next_offset, 0))
        return Behind(token, cursor.trouble.paused if cursor.trouble else "")

    @property
    def watermark(self) -> int:
        """The lowest offset still needed."""
        behind = min((self._behind(c).token.offset for c in self.cursors.values()), default=self.position)
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
        return all(self._behind(c).token.offset >= offset for c in live)

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

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def redrive(self, event: Event) -> BaseException | None:
        """Deliver one event out of line. Returns what the handler raised."""
        assert event.token is not None
        batch = EventBatch.of(event.stream or StreamId("", ""), [event])
        batch.offset = event.token.offset
        try:
            if self._handler.on_event:
                await self._handler.on_event(event)
            elif self._handler.on_batch:
                await self._handler.on_batch(SomeEvents(batch, [event]))
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return error
        self._delivered_events += 1
        return None

    def runs_here(self) -> bool:
        """Whether the current task is one that steps the handler."""
        return asyncio.current_task() in self._workers

    async def stop(self, drain_s: float) -> None:
        """Start nothing more; let the events that are handled now end within `drain_s` seconds, then cancel their
        handlers. Where this is cancelled, they are too, and it does not wait for them."""
        self._stopping = True
        self._notify()
        for cursor in self.cursors.values():
            if cursor.trouble is not None and cursor.trouble.timer is not None:
                cursor.trouble.timer.cancel()
        late = set(self._workers)
        try:
            if late:
                _, late = await asyncio.wait(late, timeout=drain_s)
        finally:
            for task in late:
                task.cancel()
        if late:
            log.warning(
                "%d handlers of %s, queue %d did not end within %.1f s", len(late), self.name, self.queue, drain_s
            )
            _, left = await asyncio.wait(late, timeout=CANCEL_S)
            if left:
                log.error(
                    "%d handlers of %s, queue %d ignore that they are cancelled", len(left), self.name, self.queue
                )
        self._notify()


def described(error: BaseException) -> str:
    """What to keep of a handler's error, whatever it is."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (its text is its own code)
        return type(error).__name__
