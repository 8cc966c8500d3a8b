"""Delivery of one queue's events to one subscription.

A `Delivery` is the actor (subscription, queue). It has one cursor for each stream with undelivered events. Only one
handler or consumer at a time has events of a stream. So order within a stream holds, and streams do not wait for each
other.

This class has the common part of all deliveries: how cursors go on. `progress.py` has their positions, `retries.py`
what follows a failure. There are two kinds of deliveries: to handlers in this process (`handling.py`), and to the
members of a group (`group_delivery.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ...balancer.held_leases import LeaseTerm
from ...streams.events import Event
from ...streams.failure_log import FailureLog, failure_text
from ...streams.subscriptions import Checkpoint, SubscriptionDefinition
from ..cache import EMPTY, CacheEntry
from ..cursor import PARKED, READY, RUNNING, CursorState, StreamCursor
from .breaker import Gate
from .confirmations import ReportMark
from .progress import BatchSource, DeliveryProgress, UnsavedProgress
from .retries import Failure, Retries
from .waiters import ProgressWaiters

log = logging.getLogger("headrace.agents")


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
        queue_epoch: int = 0,
        generation: int = 0,
        term: LeaseTerm | None = None,
        rewindable: bool = True,
        gate: Gate | None = None,
        failures: FailureLog | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.definition = definition
        self.name = definition.name
        self.queue = queue
        self.epoch = epoch
        """The epoch under which this process serves the subscription. Its records carry it."""
        self.queue_epoch = queue_epoch
        """The epoch of the queue's lease. Without leases, the same as `epoch`."""
        self.generation = generation
        """The generation of the subscription."""
        self.progress = DeliveryProgress(checkpoint)
        self.waiters = ProgressWaiters(self.progress, self.name, queue)
        self.on_parked: Callable[[StreamCursor], None] = lambda _: None
        """Called when a parked cursor needs a feed: none will bring its next batch. Only the agent sets it."""
        self.gate = gate or Gate(definition.name, enabled=definition.circuit_breaker)
        """The circuit breaker of the subscription: one for all its queues in this process."""
        self.failures = failures or FailureLog()
        self.withheld = False
        """Whether the gate stops new attempts at present. Only the gate sets it, and wakes the delivery afterwards."""
        self._selects = definition.selector.matcher()
        self._term = term
        self._lost = False
        self._rewindable = rewindable
        self._loop = asyncio.get_running_loop()
        self.retries = Retries(self, sink, rewindable=rewindable, rng=rng)
        self._ready: deque[StreamCursor] = deque()
        self._in_flight = 0
        self._stopping = False
        self._delivered_events = self._delivered_batches = self._filtered = 0
        self.gaps = 0

    @abstractmethod
    def wake(self) -> None:
        """Start work on the cursors that are ready, if there are any."""

    @abstractmethod
    async def redrive(self, event: Event) -> BaseException | None:
        """Deliver one event outside of its stream's order. Return the error, None if it was handled."""

    @abstractmethod
    async def stop(self, drain_s: float) -> None:
        """Start nothing more. Events in flight have `drain_s` seconds to end; then take them back. If this call is
        cancelled, they are taken back, too."""

    @property
    def over(self) -> bool:
        """Whether no more events may be handed out: the delivery stops, or the queue's lease is over. The lease may be
        over before `halt` is called."""
        return self._stopping or self.lost

    @property
    def lost(self) -> bool:
        """Whether the queue's lease is over. Then the results of events in flight do not count here, either."""
        return self._lost or (self._term is not None and self._loop.time() >= self._term.until)

    def halt(self, *, lost: bool = False) -> None:
        """Hand out nothing more, and retry nothing. `lost`: the queue's lease is over."""
        self._stopping = True
        self._lost = self._lost or lost
        self.gate.leave(self)
        self.waiters.close()
        self.retries.stop()

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

    def offer(self, feed: BatchSource, entries: Iterable[CacheEntry], base: float) -> None:
        """Take new batches of `feed`'s cache. Below the offset `base`, only streams with a cursor need any."""
        cursors, ready, selects = self.progress.cursors, self._ready, self._selects
        for entry in entries:
            batch = entry.batch
            stream = batch.stream
            cursor = cursors.get(stream)
            if cursor is None:
                if batch.offset >= base and selects(stream):
                    cursors[stream] = cursor = StreamCursor(stream, feed, entry)
                    ready.append(cursor)
            elif cursor.state is PARKED and cursor.feed is feed and self.progress.unpark(cursor, feed, entry):
                self._enlist(cursor)
        if ready:
            self.wake()

    # ---- cursors go on ---------------------------------------------------------------------------------------------

    def finished(self, cursor: StreamCursor) -> None:
        """The cursor's batch is done: move to the next one with undelivered events, or leave the cache."""
        self.progress.touch()
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
            self.finished(cursor)

    def go_on(self, cursor: StreamCursor) -> None:
        """Deliver the cursor's next event as soon as its batch is there."""
        if cursor.batch is None:
            self._park(cursor)
        else:
            self._enlist(cursor)
            self.wake()

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

    def follow(self, cursor: StreamCursor, feed: BatchSource, entry: CacheEntry) -> None:
        """Let a parked cursor go on in the cache of `feed`, at `entry`."""
        if self.progress.unpark(cursor, feed, entry):
            self._enlist(cursor)
        self.wake()

    def forget(self, cursor: StreamCursor) -> None:
        """Drop the cursor of a stream without undelivered events: its next batch starts a new one."""
        self.progress.forget(cursor)
        self.waiters.notify()

    def leave(self, feed: BatchSource) -> None:
        """`feed` ends: park the cursors that are in its cache."""
        for cursor in list(self.progress.cursors.values()):
            if cursor.feed is feed and cursor.state in (READY, RUNNING, CursorState.WAITING):
                self.detach(cursor)
            elif cursor.feed is feed:
                cursor.feed = None
        self.progress.touch()

    # ---- failures and progress -------------------------------------------------------------------------------------

    def is_wanted(self, event: Event) -> bool:
        """Whether the subscription's filter lets the event through."""
        return True

    def log_failure(self, cursor: StreamCursor, failure: Failure, outcome: str) -> None:
        """Write a failed attempt to the log, at a bounded rate."""
        trouble = cursor.troubled()
        message = failure_text(self.name, cursor.stream, cursor.token, outcome, failure.reason)
        first = trouble.attempts + trouble.excused == 1
        self.failures.write(log, self._loop.time(), message, failure.error, first=first)

    async def gave_up(self, failure: Failure) -> None:
        """Called after the delivery gave up on events."""

    def unsaved(self) -> UnsavedProgress | None:
        """The checkpoint that is to be saved, None if the one that was saved last still holds."""
        return self.progress.unsaved(self._loop.time())

    def marks(self) -> Sequence[ReportMark]:
        """Return the consumers' reports that the progress has, as it was read just now: they are confirmed when it is
        stored."""
        return ()

    def statistics(self) -> DeliveryStatistics:
        states = [c.state for c in self.progress.cursors.values()]
        return DeliveryStatistics(
            self.name,
            self._delivered_events,
            self._delivered_batches,
            self._filtered + self.retries.filtered,
            self.retries.scheduled,
            self.retries.dead_lettered,
            self.retries.skipped,
            self.gaps,
            self._in_flight,
            len(self._ready),
            states.count(CursorState.WAITING),
            states.count(PARKED),
            states.count(CursorState.PAUSED),
            self.progress.watermark,
        )
