"""How handlers are run, in a silo and in a client.

Up to `concurrency` workers call handlers. A worker is a task that goes from stream to stream. As long as handlers do
not suspend, thousands of streams cost one task. When a handler suspends, the next turn of the loop starts another
worker for the streams that are ready. So handlers always run in a real task (timeouts and context variables work), and
an additional task is only started when a handler waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from .handlers import Handler
from .wording import counted

TURN_S = 0.005
"""How long workers run before they let other tasks run, in seconds (QMQ's actor quota)."""
CANCEL_S = 1.0
"""How long a cancelled task has to end, in seconds. After that nothing waits for it."""
PROCESS_ENDS = (SystemExit, KeyboardInterrupt)


class HandlerWorkers:
    """The workers of one subscription, or of one of its queues. Belongs to the running loop."""

    def __init__(
        self,
        name: str,
        concurrency: int,
        work: Callable[[], Coroutine[Any, Any, None]],
        is_ready: Callable[[], bool],
        log: logging.Logger,
    ) -> None:
        """`work` is a worker: it calls handlers until no event is ready. `is_ready` returns whether events are ready
        for another worker. `name` is for the log."""
        self.concurrency = concurrency
        self._name = name
        self._work = work
        self._is_ready = is_ready
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spreading = False
        self._yielding = 0
        self.turn_ends = 0.0
        """When a worker should call `yield_turn` (`monotonic`). All workers share the turn: one whose handler waited
        has not had the loop meanwhile, and goes on at once."""

    def wake(self) -> None:
        """Call this when events become ready."""
        if not self._tasks:
            if self._is_ready():
                self._start()
        elif not self._spreading and len(self._tasks) < self.concurrency:
            self._spreading = True
            self._loop.call_soon(self._spread)

    def _spread(self) -> None:
        """Start a worker for events that are still ready after a turn of the loop: the other workers have suspended."""
        self._spreading = False
        if not self._yielding and len(self._tasks) < self.concurrency and self._is_ready():
            self._start()

    def _start(self) -> None:
        self.turn_ends = monotonic() + TURN_S
        task = self._loop.create_task(self._work(), name=f"headrace handle {self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._log.error("delivery of %s failed and goes on", self._name, exc_info=error)
        if self._is_ready():
            self.wake()

    async def yield_turn(self) -> None:
        """Let other tasks run. No other worker is started meanwhile, because the caller does not wait for anything."""
        self.turn_ends = monotonic() + TURN_S  # of the workers that go on meanwhile
        self._yielding += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._yielding -= 1
        self.turn_ends = monotonic() + TURN_S
        if self._is_ready():
            self.wake()

    def ends_worker(self, error: BaseException, *, stopping: bool) -> bool:
        """Whether the error is the end of the worker or of the process, and not a failure of the handler."""
        cancelled = isinstance(error, asyncio.CancelledError)
        return (cancelled and stopping) or isinstance(error, PROCESS_ENDS) or not self._loop.is_running()

    @property
    def busy(self) -> bool:
        """Whether a worker runs."""
        return bool(self._tasks)

    def runs_here(self) -> bool:
        """Whether the current task is a worker."""
        return asyncio.current_task() in self._tasks

    async def stop(self, drain_s: float, *, cancel_s: float = CANCEL_S) -> None:
        """Give running handlers `drain_s` seconds to end, then cancel them, and wait `cancel_s`. `is_ready` must be
        false by now.

        If this call is cancelled, it cancels the handlers too, and does not wait for them.
        """
        late = set(self._tasks)
        try:
            if late:
                _, late = await asyncio.wait(late, timeout=drain_s)
        finally:
            for task in late:
                task.cancel()
        if late:
            self._log.warning("%s of %s did not end within %.1f s", counted(len(late), "handler"), self._name, drain_s)
            _, left = await asyncio.wait(late, timeout=cancel_s)
            if left:
                self._log.error("%s of %s ignored its cancellation", counted(len(left), "handler"), self._name)


def cancelled_itself(error: BaseException) -> bool:
    """Whether a handler cancelled the task that it runs in. Then raise the error: this worker ends, another goes on."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def notify_error(handler: Handler, error: BaseException | None, log: logging.Logger) -> None:
    """Call the observer's `on_error`, if it has one."""
    if handler.on_error is None or not isinstance(error, Exception):
        return
    try:
        await handler.on_error(error)
    except Exception:
        log.exception("%s raised", _name_of(handler.on_error))


async def notify_completed(handler: Handler, limit_s: float, log: logging.Logger) -> None:
    """Call the observer's `on_completed`, if it has one. Cancel it after `limit_s` seconds."""
    if handler.on_completed is None:
        return
    completing, name = asyncio.ensure_future(handler.on_completed()), _name_of(handler.on_completed)
    try:
        await asyncio.wait([completing], timeout=limit_s)
    finally:
        completing.cancel()
    if not completing.done():
        log.warning("%s did not end within %.1f s", name, limit_s)
    elif not completing.cancelled() and (error := completing.exception()):
        log.error("%s raised", name, exc_info=error)


def _name_of(method: Callable[..., object]) -> str:
    return getattr(method, "__qualname__", repr(method))
