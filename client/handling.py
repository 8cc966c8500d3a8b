"""Handlers in a client. Workers (`streams/handler_workers.py`) take the batches that wait in the consumer's holdings.

Batches of one stream wait for one another; streams do not. Handled events are acknowledged. Failed events are rejected,
and the silo decides when to deliver them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic

from ..streams import tracing
from ..streams.errors import Closed, PayloadInvalid, Unavailable
from ..streams.failure_log import FailureLog, described, failure_text
from ..streams.handler_workers import TURN_S, HandlerWorkers, cancelled_itself, notify_completed, notify_error
from ..streams.handlers import Handler
from ..streams.identity import SequenceToken, StreamId
from ..streams.transactions import RedriveRefused
from .handler_effects import BatchInHandler, HandlerWithEffects
from .holdings import ConsumerHoldings
from .received import ReceivedBatch

log = logging.getLogger("headrace.client")

MAX_FAILING = 10_000
"""Number of failing streams that are remembered, so that the log can tell a first failure from a repeated one."""


class RemoteHandling:
    """Runs a handler on the batches that wait in `holdings`. `attempts` returns the `max_attempts` of the
    subscription."""

    def __init__(
        self,
        name: str,
        holdings: ConsumerHoldings,
        handler: Handler | HandlerWithEffects,
        concurrency: int,
        attempts: Callable[[], int],
    ) -> None:
        self._name = name
        self._holdings = holdings
        self._effects = handler if isinstance(handler, HandlerWithEffects) else None
        self._handler = Handler(None, None, None, None) if isinstance(handler, HandlerWithEffects) else handler
        self._per_event = self._handler.on_batch is None if self._effects is None else not self._effects.batch
        self._handle = self._handle_events if self._per_event else self._handle_batch
        self._workers = HandlerWorkers(name, concurrency, self._work, self._may_run, log)
        self._attempts = attempts
        self._failures = FailureLog()
        self._failing: dict[StreamId, SequenceToken] = {}
        """The event that failed last, by stream. An attempt above 1 does not always follow a failure."""
        self._exhausted: dict[StreamId, int] = {}
        """The silo's number of the attempt after which an event was given up, by stream."""
        self._loop = asyncio.get_running_loop()
        self._busy: dict[StreamId, deque[ReceivedBatch]] = {}
        """Streams whose handler is running, and their batches that arrived meanwhile."""
        self._stopping = False

    def wake(self) -> None:
        """Call this when a batch waits in the holdings."""
        self._workers.wake()

    def _may_run(self) -> bool:
        return self._holdings.waiting and not self._stopping

    # ---- batches ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Run handlers until no waiting batch may run."""
        if tracing.active is not None:
            tracing.active.record_nothing()  # instead of what this task inherited; a recorded batch has its own span
        if self._holdings.waiting:
            self.wake()
        while not self._stopping and (batch := self._next()) is not None:
            stream, waiting = batch.stream, deque[ReceivedBatch]()
            self._busy[stream] = waiting
            try:
                while True:
                    if self._holdings.begin_batch(batch):
                        await self._step(batch)
                    if monotonic() > self._workers.turn_ends:
                        await self._workers.yield_turn()
                    if self._stopping or not waiting:
                        break
                    batch = waiting.popleft()
            finally:
                del self._busy[stream]

    def _next(self) -> ReceivedBatch | None:
        """The next batch whose stream is not busy."""
        while (batch := self._holdings.next_waiting()) is not None:
            waiting = self._busy.get(batch.stream)
            if waiting is None:
                return batch
            waiting.append(batch)
        return None

    async def _step(self, batch: ReceivedBatch) -> None:
        begun, span = None, None if tracing.active is None else batch.begin_span()
        try:
            begun = None if self._effects is None else self._effects.begin(batch)
            await self._handle(batch, begun)
        except BaseException as error:
            if isinstance(error, Closed) and self._holdings.closed:
                return  # the consumer was closed meanwhile, and has given the batch back
            if span is not None:
                span.failed(error)
            if self._workers.ends_worker(error, stopping=self._stopping):
                raise
            await self._failed(batch, error, begun)
            if cancelled_itself(error):
                raise
        finally:
            if span is not None:
                span.end()

    async def _handle_batch(self, batch: ReceivedBatch, begun: BatchInHandler | None) -> None:
        on_batch = self._handler.on_batch if begun is None else begun.call
        assert on_batch is not None
        await on_batch(batch)
        batch.holder.acknowledge(batch)

    async def _handle_events(self, batch: ReceivedBatch, begun: BatchInHandler | None) -> None:
        """Acknowledge at the end of the batch, and from time to time, because a batch may take long."""
        on_event = self._handler.on_event if begun is None else begun.call
        assert on_event is not None
        done = acknowledged = 0
        acknowledges_at = monotonic() + TURN_S
        try:
            for event in batch.events():
                if self._stopping:
                    raise asyncio.CancelledError
                await on_event(event)
                done += 1
                now = monotonic()
                if now > acknowledges_at:
                    batch.holder.acknowledge_some(batch, acknowledged, done)
                    acknowledged, acknowledges_at = done, now + TURN_S
                if now > self._workers.turn_ends:
                    await self._workers.yield_turn()
        finally:
            if done > acknowledged:
                batch.holder.acknowledge_some(batch, acknowledged, done)

    # ---- failures --------------------------------------------------------------------------------------------------

    async def _failed(self, batch: ReceivedBatch, error: BaseException, begun: BatchInHandler | None) -> None:
        """Reject the batch, or its first event that is not acknowledged."""
        place = batch.first_open() if self._per_event else None
        if self._per_event and place is None:
            return  # it was taken back while the handler ran
        if begun is not None:
            events = batch.events()
            error = await begun.failed(events if place is None else [events[place]], error)
            if self._per_event and batch.first_open() != place:
                return  # it was taken back while the failure was noted
        attempt = self._attempt(batch) if not place else 1
        token = SequenceToken(batch.offset, batch.indexes[place or 0])
        message = failure_text(self._name, batch.stream, token, f"attempt {attempt}", described(error))
        first = self._failing.get(batch.stream) != token
        self._failures.write(log, self._loop.time(), message, error, first=first)
        if len(self._failing) == MAX_FAILING:
            self._failing.clear()
        self._failing[batch.stream] = token
        unavailable, invalid = isinstance(error, (Unavailable, RedriveRefused)), isinstance(error, PayloadInvalid)
        reason = str(error) if isinstance(error, RedriveRefused) else described(error)
        batch.holder.reject(batch, place, reason, None, unavailable=unavailable, invalid=invalid)
        if (attempt >= self._attempts() or invalid) and not unavailable:
            if len(self._exhausted) == MAX_FAILING:
                self._exhausted.clear()
            self._exhausted[batch.stream] = batch.attempt
            await self.notify_error(error)

    def _attempt(self, batch: ReceivedBatch) -> int:
        """Return the number of this attempt at the batch's first open event. The silo's number includes the attempts at
        events that were given up before."""
        before = self._exhausted.get(batch.stream, 0)
        if before >= batch.attempt:
            self._exhausted.pop(batch.stream, None)
            return batch.attempt
        return batch.attempt - before

    async def notify_error(self, error: BaseException) -> None:
        """Call the observer's `on_error`."""
        await notify_error(self._handler, error, log)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def in_handler(self) -> bool:
        """Whether the current task runs the handler."""
        return self._workers.runs_here()

    async def stop(self, drain_s: float) -> None:
        """Start no more handlers. Give the running ones `drain_s` seconds to end, then cancel them."""
        self._stopping = True
        await self._workers.stop(drain_s)

    async def notify_completed(self, limit_s: float) -> None:
        """Call the observer's `on_completed`, and cancel it after `limit_s` seconds."""
        await notify_completed(self._handler, limit_s, log)
