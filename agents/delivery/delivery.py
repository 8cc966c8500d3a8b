"""Delivery of one queue's events to one subscription.

A `Delivery` is the actor (subscription, queue). It has one cursor for each stream with undelivered events. Only one
handler or consumer at a time has events of a stream. So order within a stream holds, and streams do not wait for each
other.

This class has the common part of all deliveries: how cursors go on. `progress.py` has their positions, `retries.py`
the decisions after a failure. There are two kinds of deliveries: to handlers in this process (`handling.py`), and to
the members of a group (`group_delivery.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...balancer.held_leases import LeaseTerm
from ...streams.events import Event
from ...streams.failure_log import FailureLog, failure_text
from ...streams.subscriptions import Checkpoint, SubscriptionDefinition
from ..cache import CacheEntry
from ..counts import DeliveryCounts
from ..cursor import RUNNING, StreamCursor
from .breaker import Gate
from .checkpoint_pacer import CheckpointPacer, UnsavedProgress
from .confirmations import QueueReports, ReportMark
from .progress import BatchSource, DeliveryProgress
from .retries import Failure, Retries
from .waiters import ProgressWaiters

log = logging.getLogger("headrace.agents")


class DeliveryStatistics(NamedTuple):
    """The present state of a delivery. `DeliveryCounts` has the counts since its beginning."""

    subscription: str
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
        counts: DeliveryCounts | None = None,
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
        self.progress = DeliveryProgress(checkpoint, definition.selector.matcher(), rewindable=rewindable)
        self.pacer = CheckpointPacer(self.progress)
        self.reports = QueueReports(queue, queue_epoch)
        self.waiters = ProgressWaiters(self.progress, self.name, queue)
        self.gate = gate or Gate(definition.name, enabled=definition.circuit_breaker)
        """The circuit breaker of the subscription: one for all its queues in this process."""
        self.failures = failures or FailureLog()
        self.withheld = False
        """Whether the gate stops new attempts at present. Only the gate sets it, and wakes the delivery afterwards."""
        self.counts = counts or DeliveryCounts()
        """Continues those of the queue's former delivery."""
        self._term = term
        self._lost = False
        self._rewindable = rewindable
        self._loop = asyncio.get_running_loop()
        self.retries = Retries(self, sink, rng)
        self._stopping = False

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

    # ---- batches come and go ---------------------------------------------------------------------------------------

    def join(self, feed: BatchSource) -> None:
        """`feed` brings new batches from now on. Take those in its cache."""
        self.progress.join(feed)
        self.wake()
        self.waiters.notify()

    def offer(self, feed: BatchSource, entries: Sequence[CacheEntry]) -> None:
        """Take new batches of `feed`'s cache."""
        self.progress.offer(feed, entries)
        self.wake()

    def read_on(self, feed: BatchSource) -> None:
        """`feed` has read further, and offered all batches."""
        self.progress.read_on(feed)
        self.waiters.notify()

    def adopt(self, cursor: StreamCursor, feed: BatchSource) -> None:
        """Let a parked cursor go on in the cache of `feed`, which must reach back to the cursor."""
        self.progress.adopt(cursor, feed)
        self.wake()
        self.waiters.notify()

    def detach(self, cursor: StreamCursor) -> None:
        """Take a cursor out of its cache. A running cursor keeps its batch until that is done."""
        self.progress.detach(cursor)

    def leave(self, feed: BatchSource) -> None:
        """`feed` ends: take all cursors out of its cache."""
        for cursor in list(self.progress.cursors.values()):
            if cursor.batch is not None and (cursor.feed is feed or cursor.is_in(feed.cache)):
                self.detach(cursor)
        self.progress.leave_parked(feed)

    # ---- failures and progress -------------------------------------------------------------------------------------

    def is_wanted(self, event: Event) -> bool:
        """Whether the subscription's filter lets the event through."""
        return True

    def log_failure(self, cursor: StreamCursor, failure: Failure, outcome: str) -> None:
        """Write a failed attempt to the log, at a bounded rate."""
        message = failure_text(self.name, cursor.stream, cursor.token, outcome, failure.reason)
        first = cursor.failures.attempts + cursor.failures.excused == 1
        self.failures.write(log, self._loop.time(), message, failure.error, first=first)

    async def gave_up(self, failure: Failure) -> None:
        """Called after the delivery gave up on events."""

    @property
    def is_handling(self) -> bool:
        """Whether a handler runs: it finishes events of its batch without a call of `progress.on_change`."""
        return False

    def is_saved(self) -> bool:
        """Whether a save would find nothing to do, until `progress.on_change` is called, or a handler has run."""
        return self.pacer.is_saved and not self.marks()

    def unsaved(self) -> UnsavedProgress | None:
        """The checkpoint that is to be saved, None if the saved one is up to date."""
        return self.pacer.unsaved(self._loop.time())

    def marks(self) -> Sequence[ReportMark]:
        """Return the consumers' reports that are in the progress that was just read. They are confirmed when it is
        stored."""
        return self.reports.mark(self.progress)

    def statistics(self) -> DeliveryStatistics:
        """The present state. Its time does not depend on the number of cursors, unless they are paused."""
        progress, states = self.progress, self.progress.states
        return DeliveryStatistics(
            self.name,
            states.running,
            len(progress.ready),
            states.waiting,
            states.parked(len(progress.cursors), len(progress.ready)),
            len(states.paused),
            progress.shown_watermark,
        )
