"""An event loop whose time passes only when there is nothing else to do: hours cost milliseconds.

When every task waits, the loop does not sleep until the next timer is due, but sets its clock to that time. A wait that
would never end raises at once.

Work outside of the loop takes real time. The loop's clock stands still while `asyncio.to_thread` works, and while
`awaits_outside` says that a socket or another thread may answer: both only for a while, because they may never do so.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

_T = TypeVar("_T")

STARTS_AT_S = 1000.0
"""The virtual time at which a loop begins."""
THREAD_PATIENCE_S = 10.0
"""How long the clock stands still for work in threads, in real seconds."""
OUTSIDE_PATIENCE_S = 1.0
"""How long it stands still for sockets and other threads, in real seconds."""
_OUR_THREADS = ("asyncio_", "headrace-")
"""Names of threads that only work for `run_in_executor`."""


class NothingLeftToHappenError(RuntimeError):
    """Everything waits, and no timer is set: in real time the loop would hang for ever."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, for tests."""

    def __init__(
        self, awaits_outside: Callable[[], bool] = lambda: False, *, selector: selectors.BaseSelector | None = None
    ) -> None:
        """`awaits_outside`: whether a task may wait for a socket, or for a thread of its own."""
        self._now: float = STARTS_AT_S
        self._began_us = time.time_ns() // 1000
        self._awaits_outside = awaits_outside
        self._in_threads = 0
        self._threads = set(threading.enumerate())
        super().__init__(selector or _Clockwork(self))

    def time(self) -> float:
        return self._now

    def wall_us(self) -> int:
        """Return microseconds since 1970 UTC, by a clock that started right and goes on in virtual time."""
        return self._began_us + round((self._now - STARTS_AT_S) * 1e6)

    def pass_time(self, seconds: float | None) -> None:
        """Nothing is ready for this time; None: and no timer is set. Raises NothingLeftToHappenError."""
        if seconds is None:
            raise NothingLeftToHappenError("every task waits, and there is no timer that would wake one")
        self._now += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override]
        answer = super().run_in_executor(executor, func, *args)
        self._in_threads += 1
        answer.add_done_callback(self._answered)
        return answer

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        """As of every loop. It waits for a thread that joins the others, so the clock stands still."""
        self._in_threads += 1
        try:
            await super().shutdown_default_executor(*timeout)
        finally:
            self._in_threads -= 1

    def _answered(self, _: object) -> None:
        self._in_threads -= 1

    def patience_s(self, sockets: int) -> float:
        """How long to wait for an answer from outside before time passes, in real seconds. `sockets` is the number of
        those that the loop watches."""
        if self._in_threads:
            return THREAD_PATIENCE_S
        outside = sockets > 0 or any(
            not thread.name.startswith(_OUR_THREADS) for thread in set(threading.enumerate()) - self._threads
        )
        return OUTSIDE_PATIENCE_S if outside and self._awaits_outside() else 0.0


class _Clockwork(selectors.DefaultSelector):
    """Lets virtual time pass instead of waiting."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if patience_s := self._loop.patience_s(len(self.get_map()) - 1):  # without the loop's own one
            ready = super().select(patience_s)
        if not ready:
            self._loop.pass_time(timeout)
        return ready
