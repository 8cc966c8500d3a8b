"""Delivery to a handler in this process. Its workers (`streams/handler_workers.py`) go from cursor to cursor."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

from ...streams import tracing
from ...streams.errors import PayloadInvalid, Unavailable
from ...streams.events import Event, EventBatch, PartialBatch
from ...streams.failure_log import described
from ...streams.handler_workers import (
    PROCESS_ENDS,
    HandlerWorkers,
    cancelled_itself,
    notify_error,
)
from ...streams.handlers import CONCURRENCY, Handler
from ...streams.identity import StreamId
from ...streams.options import EventFilter
from ...streams.subscriptions import Checkpoint, SubscriptionDefinition
from ..cursor import StreamCursor
from .breaker import Admission
from .checkpoint_pacer import UnsavedProgress
from .delivery import Delivery, FailureSink
from .retries import Failure

log = logging.getLogger("headrace.agents")

YIELD_EVENTS = 1024
"""After so many events of one batch, a worker whose handler never suspends lets other tasks run."""


class HandlerDelivery(Delivery):
    """Calls a handler. `options` are those of `Delivery`."""

    def __init__(
        self,
        definition: SubscriptionDefinition,
        queue: int,
        checkpoint: Checkpoint,
        handler: Handler,
        sink: FailureSink,
        *,
        predicate: EventFilter | None = None,
        concurrency: int = CONCURRENCY,
        provider: str = "default",
        **options: Any,
    ) -> None:
        """`provider` is its name, for traces."""
        super().__init__(definition, queue, checkpoint, sink, **options)
        self._handler = handler
        self._provider = provider
        self.predicate = predicate
        self._handle = self._handle_batch if handler.on_batch else self._handle_events
        self._workers = HandlerWorkers(f"{self.name}, queue {queue}", concurrency, self._work, self._may_run, log)

    def wake(self) -> None:
        if self.progress.ready and not self.withheld:
            self._workers.wake()

    def _may_run(self) -> bool:
        return bool(self.progress.ready) and not (self.withheld or self._stopping)

    # ---- handlers run ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:  # noqa: C901, PLR0912, PLR0915 (see its docstring)
        """Call handlers until no cursor is ready. The body is not divided into functions: each costs a call per
        batch."""
        progress, handle, gate, breaker = self.progress, self._handle, self.gate, self.gate.breaker
        ready, workers, counts = progress.ready, self._workers, self.counts
        if tracing.active is not None:
            tracing.active.record_nothing()  # instead of what this task inherited; a recorded batch has its own span
        now = monotonic()
        if len(ready) > 1 or progress.unseen is not None:
            self.wake()
        while ready and not self.over:
            probe = False
            if breaker.limiting:
                admission = gate.ask(self)
                if admission is Admission.NONE:
                    break
                probe = admission is Admission.PROBE
            cursor = progress.take()
            if cursor is None:
                break
            batch = cursor.batch
            assert batch is not None
            if breaker.limiting:
                gate.begin()
            span, start, measured, handled = None, cursor.index, now >= counts.measure_at, True
            try:
                if measured:
                    counts.measure_delay(batch, now, first=cursor.trouble is None)
                if tracing.active is not None:
                    span = tracing.active.handling(self._provider, self.name, self.queue, batch)
                handled = await (self._handle_one if probe else handle)(cursor, batch)
            except BaseException as error:  # noqa: BLE001 (a handler's failure is not ours)
                if span is not None:
                    span.failed(error)
                await self._raised(cursor, batch, error, start, one=probe)
            else:
                if breaker.watching and handled:
                    gate.succeeded(cursor.stream)
                if not probe or cursor.index >= batch.count:
                    counts.delivered_batches += 1
                    progress.finish(cursor)
                else:
                    progress.resume(cursor)
            finally:
                if span is not None:
                    span.end()
                if measured and handled:
                    counts.handling.observe(monotonic() - now)
            now = monotonic()
            if now > workers.turn_ends:
                self.waiters.notify()
                await workers.yield_turn()
                now = monotonic()
        self.waiters.notify()

    async def _raised(
        self, cursor: StreamCursor, batch: EventBatch, error: BaseException, start: int, *, one: bool
    ) -> None:
        """A handler that began at event `start` raised. `one`: it was given a single event, even if it takes
        batches."""
        self.progress.touch()
        if self._workers.ends_worker(error, stopping=self.over):
            self.progress.put_back(cursor)  # it goes on at its token later
            raise error
        if cursor.index > start and self.predicate is None and self.gate.breaker.watching:
            self.gate.succeeded(cursor.stream)
        end = batch.count if self._handler.on_batch and not one else cursor.index + 1
        failure = Failure(
            end, described(error), error,
            unavailable=isinstance(error, Unavailable), invalid=isinstance(error, PayloadInvalid),
        )  # fmt: skip
        await self.retries.failed(cursor, batch, failure)
        if cancelled_itself(error):
            raise error

    async def _handle_events(self, cursor: StreamCursor, batch: EventBatch) -> bool:
        """Return whether the handler was given anything."""
        on_event = self._handler.on_event
        assert on_event is not None
        leased, handled = self._term is not None, False
        for event in cursor.handle():
            if not cursor.index % YIELD_EVENTS and cursor.index:
                await self._workers.yield_turn()
            if self._stopping or (leased and self.over):
                raise asyncio.CancelledError
            if self.predicate is None or self.is_wanted(event):
                await on_event(event)
                self.counts.delivered_events += 1
                handled = True
            else:
                self.counts.filtered += 1
        return handled

    async def _handle_one(self, cursor: StreamCursor, batch: EventBatch) -> bool:
        """Give the handler the cursor's event alone, or the next one that passes the filter."""
        for event in cursor.handle():
            if wanted := self.is_wanted(event):
                await self._call(batch, event)
                self.counts.delivered_events += 1
            else:
                self.counts.filtered += 1
            self.progress.advance(cursor, cursor.index + 1)
            if wanted:
                return True
        return False

    async def _call(self, batch: EventBatch, event: Event) -> None:
        if self._handler.on_event:
            await self._handler.on_event(event)
        elif self._handler.on_batch:
            await self._handler.on_batch(PartialBatch(batch, [event]))

    async def _handle_batch(self, cursor: StreamCursor, batch: EventBatch) -> bool:
        on_batch = self._handler.on_batch
        assert on_batch is not None
        left = batch.count - cursor.index
        if cursor.index or self.predicate is not None or cursor.done is not None:
            events = batch.events(cursor.index)
            if cursor.done is not None:
                events = [e for i, e in enumerate(events, cursor.index) if not cursor.is_done(i)]
            left = len(events)
            batch = PartialBatch(batch, [e for e in events if self.is_wanted(e)])
        if batch.count:
            await on_batch(batch)
        self.counts.delivered_events += batch.count
        self.counts.filtered += left - batch.count
        return batch.count > 0

    def is_wanted(self, event: Event) -> bool:
        try:
            if self.predicate is None or self.predicate(event):
                return True
        except PROCESS_ENDS:
            raise
        except BaseException:
            log.warning(
                "the filter of subscription %r raised on event %s of stream %s: it is delivered",
                self.name, event.token, event.stream, exc_info=True,
            )  # fmt: skip
            return True
        return False

    async def gave_up(self, failure: Failure) -> None:
        await notify_error(self._handler, failure.error, log)

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def redrive(self, event: Event) -> BaseException | None:
        """Deliver one event outside of its stream's order. Return the handler's exception, None if it was handled."""
        assert event.token is not None
        batch = EventBatch.of(event.stream or StreamId("", ""), [event])
        batch.offset = event.token.offset
        span = None
        try:
            if tracing.active is not None:
                active = tracing.active
                span = active.handling(self._provider, self.name, self.queue, batch, redriven=True)
                span = span or active.record_nothing()
            if self._handler.on_redrive is not None:
                await self._handler.on_redrive(event)
            else:
                await self._call(batch, event)
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            if span is not None:
                span.failed(error)
            if cancelled_itself(error):
                raise
            return error
        finally:
            if span is not None:
                span.end()
        self.counts.delivered_events += 1
        return None

    @property
    def is_handling(self) -> bool:
        return self._workers.busy

    def unsaved(self) -> UnsavedProgress | None:
        if self._workers.busy:
            self.progress.touch()  # a handler moves its cursor with each event, without a `touch` until the batch ends
        return super().unsaved()

    def runs_here(self) -> bool:
        return self._workers.runs_here()

    async def stop(self, drain_s: float) -> None:
        self.halt()
        await self._workers.stop(drain_s)
        self.waiters.notify()
