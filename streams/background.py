"""Work in the background: tasks that outlive the call that starts them, and work that is repeated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Self, TypeVar

from .backoff import Backoff
from .errors import HeadraceError

log = logging.getLogger("headrace.background")

AGAIN_S = 1.0
"""A task that has not ended so many seconds after it was cancelled is cancelled again. Shorter would interrupt tasks
that clean up."""
MAX_PAUSE_S, MAX_SHARE = 1.0, 0.05
"""After repeated work that took long, there is a pause. It is so long that the work takes at most `MAX_SHARE` of the
time, but at most `MAX_PAUSE_S` seconds."""

_T = TypeVar("_T")


class BackgroundTasks:
    """The background tasks of one object. It holds them until they end, and `aclose` ends them all."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In the order in which they began."""

    def start(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Run `work` in a task that nothing awaits. If it fails, its error is logged."""
        task = self.hold(work, name)
        task.add_done_callback(_log_failure)
        return task

    def hold(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Run `work` in a task that the caller awaits in `asyncio.shield`: the task goes on if the caller is cancelled.
        The caller gets its error."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    async def finish(self, work: Coroutine[Any, Any, _T], name: str) -> _T:
        """Await `work` in a task that goes on if the caller is cancelled. The caller gets its error; if the caller is
        cancelled, its error is logged."""
        task = self.hold(work, name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    def _forget(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        _retrieve(task)

    def __contains__(self, name: str) -> bool:
        """Whether a task of this name runs."""
        return any(task.get_name() == name and not task.done() for task in self._tasks)

    def __bool__(self) -> bool:
        """Whether any task runs."""
        return any(not task.done() for task in self._tasks)

    async def join(self, timeout_s: float | None = None) -> None:
        """Wait until no task is left, for at most `timeout_s` seconds. Cancels no task."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        while self._tasks:
            await end(*self._tasks)
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and wait until they have ended. Ignore None, and the errors of the tasks.

    One cancellation may not be enough: before Python 3.12, `asyncio.wait_for` swallows it if the awaited operation is
    done at the same moment.
    """
    left = running = [task for task in tasks if task is not None]
    while left := [task for task in left if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=AGAIN_S)
    for task in running:
        _retrieve(task)


async def first_of(*works: Coroutine[Any, Any, _T], name: str) -> _T:
    """Run several works. Return the result of the first that ends, or raise its error, and end the others."""
    tasks = [asyncio.create_task(work, name=name) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await end(*tasks)


def _retrieve(task: asyncio.Task[Any]) -> BaseException | None:
    """Return the error of a task that has ended. asyncio warns of errors that are never asked for."""
    return None if task.cancelled() else task.exception()


def _log_failure(task: asyncio.Task[Any]) -> None:
    if (error := _retrieve(task)) is not None:
        unforeseen = None if isinstance(error, HeadraceError) else error
        log.error("task %r failed: %s", task.get_name(), error, exc_info=unforeseen)


async def run_periodically(
    work: Callable[[], Awaitable[None]], period_s: float, sleep: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Run `work` every `period_s` seconds, or less often if it takes long or fails. Log its errors with the name of the
    task, and go on. `sleep` is called before each pause: it returns when there may be work. It must not raise."""
    loop, pause_s = asyncio.get_running_loop(), period_s
    task = asyncio.current_task()
    name = "" if task is None else task.get_name()
    backoff = Backoff(2 * period_s, MAX_PAUSE_S)
    while True:
        if sleep is not None:
            await sleep()
        await asyncio.sleep(pause_s)
        began, least_s = loop.time(), period_s
        try:
            await work()
            backoff.reset()
        except Exception as error:
            unforeseen = None if isinstance(error, HeadraceError) else error
            level = logging.WARNING if unforeseen is None else logging.ERROR
            log.log(level, "background work %r failed and is tried again: %s", name, error, exc_info=unforeseen)
            least_s = max(period_s, backoff.next_s())
        pause_s = max(least_s, min((loop.time() - began) / MAX_SHARE, MAX_PAUSE_S))


async def ticks(period_s: float) -> AsyncGenerator[float]:
    """Every `period_s` seconds, yield for how many seconds this process did not run: 0 if it was less than a period.
    Does not end."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        await asyncio.sleep(period_s)
        late_s = loop.time() - began - period_s
        yield late_s if late_s > period_s else 0.0
