"""Delivery to a handler in this process.

Up to `concurrency` workers step handlers. A worker is a task that goes from cursor to cursor: as long as handlers do
not suspend, thousands of streams cost one task; when one suspends, the loop's next turn starts another worker for what
is still ready. So handlers always run in a real task (timeouts and context variables work) and a task is only paid for
where something waits.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

from ..streams.events import Event, EventBatch, SomeEvents
from ..streams.handlers import EventFilter, Handler
from ..streams.identity import StreamId
from ..streams.subscriptions import Checkpoint, SubscriptionDefinition
from .cursor import READY, RUNNING, StreamCursor
from .delivery import CANCEL_S, Delivery, Failure, FailureSink, described

log = logging.getLogger("headrace.agents")

YIELD_EVENTS = 1024
"""A handler per event that never suspends lets the loop turn after so many events of one batch."""
TURN_S = 0.005
"""How long a worker runs before it lets the loop do something else, in seconds (QMQ's actor quota)."""
PROCESS_ENDS = (SystemExit, KeyboardInterrupt)


class HandlerDelivery(Delivery):
    """Steps a handler. `options` are those of `Delivery`."""

    def __init__(
        self,
        definition: SubscriptionDefinition,
        queue: int,
        checkpoint: Checkpoint,
        handler: Handler,
        sink: FailureSink,
        *,
        predicate: EventFilter | None = None,
        concurrency: int = 100,
        **options: Any,
    ) -> None:
        super().__init__(definition, queue, checkpoint, sink, **options)
        self._handler = handler
        self.predicate = predicate
        self._handle = self._handle_batch if handler.on_batch else self._handle_events
        self.concurrency = concurrency
        self._workers: set[asyncio.Task[None]] = set()
        self._spreading = False
        self._yielding = 0

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
        while ready and not self.over:
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
        if (cancelled and self.over) or isinstance(error, PROCESS_ENDS) or not self._loop.is_running():
            cursor.state = READY  # at its token it goes on some other time
            raise error
        end = batch.count if self._handler.on_batch else cursor.index + 1
        await self._failed(cursor, batch, Failure(end, described(error), error))
        task = asyncio.current_task()
        if cancelled and task is not None and task.cancelling():
            raise error  # a handler cancelled the task that it runs in: another worker goes on

    async def _handle_events(self, cursor: StreamCursor, batch: EventBatch) -> None:
        on_event = self._handler.on_event
        assert on_event is not None
        start, leased = cursor.index, self._term is not None
        for index, event in enumerate(batch.events(start), start):
            if self._stopping or (leased and self.over):
                raise asyncio.CancelledError
            if cursor.done is not None and cursor.is_done(index):
                continue
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
        if cursor.index or self.predicate is not None or cursor.done is not None:
            events = batch.events(cursor.index)
            if cursor.done is not None:
                events = [e for i, e in enumerate(events, cursor.index) if not cursor.is_done(i)]
            left = len(events)
            batch = SomeEvents(batch, [e for e in events if self._wanted(e)])
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

    async def _gave_up(self, failure: Failure) -> None:
        if self._handler.on_error is None or not isinstance(failure.error, Exception):
            return
        try:
            await self._handler.on_error(failure.error)
        except Exception:
            log.exception("on_error of %s raised", self.name)

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
        self.halt()
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
