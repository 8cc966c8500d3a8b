"""Handlers in a client. They run as in a silo (`agents/delivery/handling.py`).

Up to `concurrency` workers step handlers. A worker is a task that goes from batch to batch; as long as handlers do not
suspend, thousands of streams cost one task. When a handler suspends, the loop's next turn starts another worker for the
batches that still wait. Batches of one stream wait for one another; streams do not.

Handled events are acknowledged. Failed events are rejected, and the silo decides when to deliver them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic

from ..streams.errors import Closed, Unavailable
from ..streams.failure_log import FailureLog, failure_text
from ..streams.handlers import Handler
from ..streams.identity import SequenceToken, StreamId
from .received import ReceivedBatch
from .session import Session

log = logging.getLogger("headrace.client")

TURN_S = 0.005
"""How long a worker runs before it lets the loop do something else, in seconds."""
CANCEL_S = 1.0
"""How long a cancelled handler may take to end, in seconds. After that it is left running."""
PROCESS_ENDS = (SystemExit, KeyboardInterrupt)
MAX_FAILING = 10_000
"""Number of failing streams that are remembered, so that the log can tell a first failure from a repeated one."""


class RemoteHandling:
    """Runs a handler on the batches that wait in `session`. `attempts` returns the `max_attempts` of the
    subscription."""

    def __init__(
        self, name: str, session: Session, handler: Handler, concurrency: int, attempts: Callable[[], int]
    ) -> None:
        self._name = name
        self._session = session
        self._handler = handler
        self._handle = self._handle_batch if handler.on_batch else self._handle_events
        self._concurrency = concurrency
        self._attempts = attempts
        self._failures = FailureLog()
        self._failing: dict[StreamId, SequenceToken] = {}
        """The event that failed last, by stream. An attempt above 1 does not always follow a failure."""
        self._loop = asyncio.get_running_loop()
        self._busy: dict[StreamId, deque[ReceivedBatch]] = {}
        """Streams whose handler is running, and their batches that arrived meanwhile."""
        self._workers: set[asyncio.Task[None]] = set()
        self._spreading = False
        self._yielding = 0
        self._stopping = False

    def wake(self) -> None:
        """Call this when a batch waits in the session."""
        if not self._workers:
            self._start_worker()
        elif not self._spreading and len(self._workers) < self._concurrency:
            self._spreading = True
            self._loop.call_soon(self._spread)

    def _spread(self) -> None:
        """Start a worker for batches that still wait after a turn of the loop: the other workers have suspended."""
        self._spreading = False
        if self._session.waiting and not self._yielding and len(self._workers) < self._concurrency:
            self._start_worker()

    def _start_worker(self) -> None:
        if self._stopping:
            return
        task = self._loop.create_task(self._work(), name=f"headrace handle {self._name}")
        self._workers.add(task)
        task.add_done_callback(self._worker_ended)

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        self._workers.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("handling of %s failed and goes on", self._name, exc_info=error)
        if self._session.waiting:
            self.wake()

    # ---- batches ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Run handlers until no waiting batch may run."""
        if self._session.waiting:
            self.wake()
        turn_ends = monotonic() + TURN_S
        while not self._stopping and (batch := self._next()) is not None:
            stream, waiting = batch.stream, deque[ReceivedBatch]()
            self._busy[stream] = waiting
            try:
                while True:
                    if self._session.begin(batch):
                        await self._step(batch)
                    if monotonic() > turn_ends:
                        await self._yield_turn()
                        turn_ends = monotonic() + TURN_S
                    if self._stopping or not waiting:
                        break
                    batch = waiting.popleft()
            finally:
                del self._busy[stream]

    def _next(self) -> ReceivedBatch | None:
        """The next batch whose stream is not busy."""
        while (batch := self._session.next_waiting()) is not None:
            waiting = self._busy.get(batch.stream)
            if waiting is None:
                return batch
            waiting.append(batch)
        return None

    async def _yield_turn(self) -> None:
        """Let the loop turn. No other worker is started meanwhile, because this worker is not blocked."""
        self._yielding += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._yielding -= 1
        if self._session.waiting:
            self.wake()

    async def _step(self, batch: ReceivedBatch) -> None:
        try:
            await self._handle(batch)
        except BaseException as error:
            if isinstance(error, Closed) and self._session.closed:
                return  # the session was closed meanwhile, and has given the batch back
            cancelled = isinstance(error, asyncio.CancelledError)
            if (cancelled and self._stopping) or isinstance(error, PROCESS_ENDS) or not self._loop.is_running():
                raise
            await self._failed(batch, error)
            task = asyncio.current_task()
            if cancelled and task is not None and task.cancelling():
                raise  # a handler cancelled its own task: another worker continues

    async def _handle_batch(self, batch: ReceivedBatch) -> None:
        on_batch = self._handler.on_batch
        assert on_batch is not None
        await on_batch(batch)
        self._session.acknowledge(batch)

    async def _handle_events(self, batch: ReceivedBatch) -> None:
        """Acknowledge at the end of the batch, and from time to time, because a batch may take long."""
        on_event = self._handler.on_event
        assert on_event is not None
        done = acknowledged = 0
        turn_ends = monotonic() + TURN_S
        try:
            for event in batch.events():
                if self._stopping:
                    raise asyncio.CancelledError
                await on_event(event)
                done += 1
                if monotonic() > turn_ends:
                    self._session.acknowledge_some(batch, acknowledged, done)
                    acknowledged = done
                    await self._yield_turn()
                    turn_ends = monotonic() + TURN_S
        finally:
            if done > acknowledged:
                self._session.acknowledge_some(batch, acknowledged, done)

    # ---- failures --------------------------------------------------------------------------------------------------

    async def _failed(self, batch: ReceivedBatch, error: BaseException) -> None:
        """Reject the batch, or its first event that is not acknowledged."""
        per_event = self._handler.on_event is not None
        place = batch.first_open() if per_event else None
        if per_event and place is None:
            return  # it was taken back while the handler ran
        attempt = batch.attempt if not place else 1
        token = SequenceToken(batch.offset, batch.indexes[place or 0])
        message = failure_text(self._name, batch.stream, token, f"attempt {attempt}", described(error))
        first = self._failing.get(batch.stream) != token
        self._failures.write(log, self._loop.time(), message, error, first=first)
        if len(self._failing) == MAX_FAILING:
            self._failing.clear()
        self._failing[batch.stream] = token
        unavailable = isinstance(error, Unavailable)
        self._session.reject(batch, place, described(error), None, unavailable)
        if attempt >= self._attempts() and isinstance(error, Exception) and not unavailable:
            await self.notify_error(error)

    async def notify_error(self, error: Exception) -> None:
        """Call the observer's `on_error`."""
        if self._handler.on_error is None:
            return
        try:
            await self._handler.on_error(error)
        except Exception:
            log.exception("on_error of %s raised", self._name)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def in_handler(self) -> bool:
        """Whether the current task runs the handler."""
        return asyncio.current_task() in self._workers

    async def stop(self, drain_s: float) -> None:
        """Start no more handlers. Give the running ones `drain_s` seconds to end, then cancel them.

        If this call is cancelled, it cancels the handlers too, and does not wait for them.
        """
        self._stopping = True
        late = set(self._workers)
        try:
            if late:
                _, late = await asyncio.wait(late, timeout=drain_s)
        finally:
            for task in late:
                task.cancel()
        if late:
            log.warning("%d handlers of %s did not end within %.1f s", len(late), self._name, drain_s)
            _, left = await asyncio.wait(late, timeout=CANCEL_S)
            if left:
                log.error("%d handlers of %s ignore their cancellation", len(left), self._name)

    async def notify_completed(self, limit_s: float) -> None:
        """Call the observer's `on_completed`, and cancel it after `limit_s` seconds."""
        if self._handler.on_completed is None:
            return
        completing = asyncio.ensure_future(self._handler.on_completed())
        try:
            await asyncio.wait([completing], timeout=limit_s)
        finally:
            completing.cancel()
        if not completing.done():
            log.warning("on_completed of %s did not end within %.1f s", self._name, limit_s)
        elif not completing.cancelled() and (error := completing.exception()):
            log.error("on_completed of %s raised", self._name, exc_info=error)


def described(error: BaseException) -> str:
    """Return the text of a handler's error that a rejection keeps. Works for any exception."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (the error's __str__ may raise)
        return type(error).__name__
