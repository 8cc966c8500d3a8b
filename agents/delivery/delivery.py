"""Delivery of one queue's events to one subscription.

A `Delivery` is the actor (subscription, queue). It has one cursor for each stream with undelivered events. One handler
or one consumer at a time has events of a stream, so order within a stream holds, and streams do not wait for each
other.

This class has the common part of all deliveries: cursors and feeds, failures, progress. There are two kinds: handlers
in this process (`handling.py`), and the members of a group (`group_delivery.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ...streams.errors import Closed, CorruptRecord
from ...streams.events import Event, EventBatch
from ...streams.failure_log import failure_text
from ...streams.identity import StreamId
from ...streams.subscriptions import Checkpoint, OnFailure, SubscriptionDefinition
from ..cache import EMPTY
from ..cursor import PARKED, READY, RUNNING, State, StreamCursor
from .breaker import HELD, Gate
from .progress import BatchSource, DeliveryProgress, UnsavedProgress

log = logging.getLogger("headrace.agents")

STORE_RETRY_S = 1.0
EXCUSED_S = 1.0
"""The shortest wait after a failure that does not count, in seconds: their number is not limited."""

RNG = random.Random()  # noqa: S311 (jitter)
"""One for all deliveries: a generator takes 2.5 kB, and a subscription has a delivery for each queue."""


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
    """Records events that a delivery gives up on. A record is durable when the call returns; otherwise it raises."""

    async def dead_letter(self, delivery: Delivery, events: Sequence[Event], reason: str, attempts: int) -> None: ...

    async def skipped(self, delivery: Delivery, events: Sequence[Event], reason: str) -> None: ...


class Failure(NamedTuple):
    """Why a delivery of the events from the cursor's position up to index `end`, exclusive, failed."""

    end: int
    reason: str
    error: BaseException | None = None
    """The exception of a handler."""
    delay_s: float | None = None
    """When the consumer wants the events again, in seconds. None: the retry policy decides."""
    unavailable: bool = False
    """The consumer blames a dependency, not the event: it never counts against the event."""


class Term(Protocol):
    """How long a queue's lease lasts."""

    until: float
    """End of the lease, in loop time. The membership moves it on when it renews the lease."""


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
        gate: Gate | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.definition = definition
        self.name = definition.name
        self.queue = queue
        self.epoch = epoch
        """The epoch under which this process serves the subscription. Its records carry it."""
        self.progress = DeliveryProgress(checkpoint, asyncio.get_running_loop().time())
        self.on_parked: Callable[[StreamCursor], None] = lambda _: None
        """Called when a parked cursor is due and no feed will bring its next batch."""
        self.gate = gate or Gate(definition.name, enabled=definition.circuit_breaker)
        """The circuit breaker of the subscription: one for all its queues in this process."""
        self.withheld = False
        """Whether the gate stops new attempts at present. Only the gate sets it, and wakes the delivery afterwards."""
        self._selects = definition.selector.matcher()
        self._sink = sink
        self._term = term
        self._lost = False
        self._rewindable = rewindable
        self._rng = rng or RNG
        self._loop = asyncio.get_running_loop()
        self._ready: deque[StreamCursor] = deque()
        self._in_flight = 0
        self._stopping = False
        self._watchers: list[asyncio.Future[None]] = []
        self._delivered_events = self._delivered_batches = self._filtered = self._retries = 0
        self._dead_lettered = self._skipped = 0
        self.gaps = 0
        self.damage: CorruptRecord | None = None
        """The damaged record that stopped the last catch-up."""

    @abstractmethod
    def _wake(self) -> None:
        """Start work on the cursors that are ready."""

    def wake_ready(self) -> None:
        """The gate may allow new attempts: start work if a cursor is ready."""
        if self._ready:
            self._wake()

    @abstractmethod
    async def redrive(self, event: Event) -> BaseException | None:
        """Deliver one event outside of its stream's order. Return the error, None if it was handled."""

    @abstractmethod
    async def stop(self, drain_s: float) -> None:
        """Start nothing more. Events in flight have `drain_s` seconds to end; then take them back. If this call is
        cancelled, they are taken back, too."""

    @property
    def over(self) -> bool:
        """Whether nothing may be handed out any more: the delivery stops, or the queue's lease is over. The lease may
        be over before `cut` is called."""
        return self._stopping or self.lost

    @property
    def lost(self) -> bool:
        """Whether the queue's lease is over: results of events in flight do not count here any more, either."""
        return self._lost or (self._term is not None and self._loop.time() >= self._term.until)

    def cut(self) -> None:
        """End at once: the queue's lease is over."""
        self._lost = True
        self.halt()

    def halt(self) -> None:
        """Hand out nothing more, and retry nothing."""
        self._stopping = True
        self.gate.leave(self)
        self._notify()
        for cursor in self.progress.cursors.values():
            if cursor.trouble is not None and cursor.trouble.timer is not None:
                cursor.trouble.timer.cancel()

    @property
    def is_accepting(self) -> bool:
        """Whether more events can be handed out now. No catch-up reads for a delivery that accepts nothing."""
        return True

    async def wait_until_accepting(self) -> None:
        """Return when `is_accepting` is true. Cancelled when the delivery stops."""

    def runs_here(self) -> bool:
        """Whether the current task is one that this delivery waits for when it stops."""
        return False

    def held(self, cursor: StreamCursor) -> int:
        """Bytes that the handler or consumer of a running cursor keeps in memory."""
        return cursor.batch.nbytes if cursor.state is RUNNING and cursor.batch is not None else 0

    # ---- batches come in -------------------------------------------------------------------------------------------

    def offer(self, feed: BatchSource, batches: Iterable[EventBatch], base: float) -> None:
        """Take new batches of `feed`'s cache. Below the offset `base`, only streams with a cursor need any."""
        cursors, ready, selects = self.progress.cursors, self._ready, self._selects
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

    def _unpark(self, cursor: StreamCursor, feed: BatchSource, batch: EventBatch) -> None:
        offset, index = cursor.token
        if batch.offset < offset or (batch.offset == offset and index >= batch.count):
            return
        cursor.attach(batch, index if batch.offset == offset else 0)
        cursor.feed = feed
        if cursor.done is not None:
            cursor.forget_done()
        self.progress.touch()
        self._enlist(cursor)

    # ---- cursors go on ---------------------------------------------------------------------------------------------

    def _finished(self, cursor: StreamCursor) -> None:
        """The cursor's batch is done: move to the next one with undelivered events, or leave the cache."""
        self.progress.touch()
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
        """Make the cursor ready at the next event of its batch that was not done out of order."""
        self.progress.touch()
        if cursor.done is None or cursor.skip_done():
            cursor.state = READY
            self._ready.append(cursor)
        else:
            self._finished(cursor)

    # ---- failures --------------------------------------------------------------------------------------------------

    async def _failed(self, cursor: StreamCursor, batch: EventBatch, failure: Failure) -> None:
        """Schedule another attempt, or give up."""
        if not self._again(cursor, failure):
            await self._exhausted(cursor, batch, failure)

    async def _exhausted(self, cursor: StreamCursor, batch: EventBatch, failure: Failure) -> None:
        log.warning(
            "subscription %r gives up on event %s of stream %s after %d attempts: %s: %s",
            self.name, cursor.token, cursor.stream, cursor.troubled().attempts, self.definition.on_failure.value,
            failure.reason, exc_info=failure.error,
        )  # fmt: skip
        try:
            await self._give_up(cursor, batch, failure)
        except (Exception, asyncio.CancelledError) as problem:
            if self._stopping and isinstance(problem, asyncio.CancelledError):
                raise
            log.warning(
                "cannot record that subscription %r gave up on event %s: %r; trying again",
                self.name, cursor.token, problem,
            )  # fmt: skip
            self._wait(cursor, STORE_RETRY_S)
        else:
            await self._gave_up(failure)

    def _again(self, cursor: StreamCursor, failure: Failure) -> bool:
        """Schedule the cursor's next attempt. Count the failed one if the circuit breaker says so. Return False if the
        retries are exhausted."""
        now, trouble = self._loop.time(), cursor.troubled()
        earlier, trouble.phase = trouble.phase, self.gate.breaker.phase
        if earlier != trouble.phase:
            trouble.attempts = 0
            trouble.excused = trouble.excused if failure.unavailable else 0
        failed_at = trouble.failed_at if trouble.attempts else now
        delay = self.definition.retry.delay(trouble.attempts + 1, now - failed_at, self._rng)
        if not self.gate.failed(cursor.stream, failure, earlier=earlier, exhausted=delay is None):
            self._excuse(cursor, failure)
            return True
        trouble.failed_at = failed_at
        trouble.attempts += 1
        if delay is None:
            return False
        delay = delay if failure.delay_s is None else failure.delay_s
        self._retries += 1
        self._log_failure(cursor, failure, f"attempt {trouble.attempts}, again in {delay:.2f} s")
        self._wait(cursor, delay)
        return True

    def _excuse(self, cursor: StreamCursor, failure: Failure) -> None:
        """Try again, without counting the failure. While the subscription is held, the stream goes to the end of the
        line, and the gate decides when it is tried. Otherwise it waits as after a failure that counts."""
        trouble = cursor.troubled()
        trouble.excused += 1
        trouble.deliveries = 0
        self._retries += 1
        self._log_failure(cursor, failure, "not counted")
        if self.gate.breaker.state is not HELD or self._stopping:
            delay_s = failure.delay_s
            if delay_s is None:
                delay_s = self.definition.retry.backoff(trouble.attempts + trouble.excused, self._rng)
            self._wait(cursor, max(delay_s, EXCUSED_S))
            return
        if cursor.bucket is None and self._rewindable:
            cursor.park()
        self._go_on(cursor)

    def _log_failure(self, cursor: StreamCursor, failure: Failure, outcome: str) -> None:
        log.info("%s", failure_text(self.name, cursor.stream, cursor.token, outcome, failure.reason))

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
        """Called after the delivery gave up on events."""

    def _wanted(self, event: Event) -> bool:
        """Whether the subscription's filter lets the event through."""
        return True

    def _wait(self, cursor: StreamCursor, delay: float) -> None:
        cursor.state = State.WAITING
        if self._stopping:
            return
        if cursor.bucket is None and self._rewindable:
            cursor.park()  # it left its cache while it ran: read it again, rather than hold it outside of all limits
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
        log.warning("subscription %r pauses stream %s at event %s: %s", self.name, cursor.stream, cursor.token, reason)
        cursor.state = State.PAUSED
        cursor.troubled().paused = reason
        cursor.park()
        self.progress.touch()

    def resume(self, stream: StreamId) -> bool:
        """Go on with a paused stream. Return False if it is not paused here."""
        cursor = self.progress.cursors.get(stream)
        if cursor is None or cursor.state is not State.PAUSED:
            return False
        trouble = cursor.troubled()
        trouble.paused, trouble.attempts, trouble.phase = "", 0, None
        self.progress.touch()
        self._go_on(cursor)
        return True

    # ---- leaving a cache -------------------------------------------------------------------------------------------

    def _park(self, cursor: StreamCursor) -> None:
        cursor.state = PARKED
        cursor.feed = None
        self.on_parked(cursor)

    def detach(self, cursor: StreamCursor) -> None:
        """Take a cursor out of its cache. A running cursor keeps its batch until that is done."""
        if cursor.state is RUNNING:
            cursor.release()
            return
        cursor.park()
        if cursor.state is READY:
            self._park(cursor)

    def follow(self, cursor: StreamCursor, feed: BatchSource, batch: EventBatch) -> None:
        """Let a parked cursor go on in `feed`, at `batch`."""
        self._unpark(cursor, feed, batch)
        if self._ready:
            self._wake()

    def forget(self, cursor: StreamCursor) -> None:
        """Drop the cursor of a stream without undelivered events: its next batch starts a new one."""
        self.progress.forget(cursor)
        self._notify()

    def leave(self, feed: BatchSource) -> None:
        """`feed` ends: park the cursors that are in its cache."""
        for cursor in list(self.progress.cursors.values()):
            if cursor.feed is feed and cursor.state in (READY, RUNNING, State.WAITING):
                self.detach(cursor)
            elif cursor.feed is feed:
                cursor.feed = None
        self.progress.touch()

    def end(self) -> None:
        """Leave all feeds. The delivery's progress stays as it is, however far the feeds read on."""
        self.progress.leave_feed()
        for cursor in self.progress.cursors.values():
            if cursor.state is PARKED:
                self.progress.leave_cursor(cursor)
            cursor.feed = None
            cursor.release()

    # ---- progress --------------------------------------------------------------------------------------------------

    def unsaved(self) -> UnsavedProgress | None:
        """The checkpoint that is to be saved, None if the one that was saved last still holds."""
        return self.progress.unsaved(self._loop.time())

    async def wait_until(self, offset: int) -> None:
        """Return when every event below `offset` is done. Paused streams do not count.

        Raises Closed once the delivery stopped, CorruptRecord when every event before a damaged record below `offset`
        is done.
        """
        while not self.progress.reached(offset):
            if (damage := self._met_damage()) is not None:
                raise damage
            if self._stopping:
                raise Closed(
                    f"subscription {self.name} stopped before it came to offset {offset} of queue {self.queue}"
                )
            await self._progress()

    def _met_damage(self) -> CorruptRecord | None:
        """A copy of the error of the damaged record that stops this delivery, once every event before it is done."""
        for damage in (self.damage, self.progress.feed.damage if self.progress.feed else None):
            if damage is not None and self.progress.reached(damage.offset or 0):
                return damage.copy()
        return None

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
        """The feed's position moved: wake the tasks in `wait_until`."""
        self._notify()

    def statistics(self) -> DeliveryStatistics:
        states = [c.state for c in self.progress.cursors.values()]
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
            self.progress.watermark,
        )
