"""The event loop of simulations: virtual time, and one seed always gives one order of events.

Nothing may wait for the outside world: work for threads runs at once, on the loop, and answers after `latency()`
virtual seconds.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from headrace.testing.virtual_time import STARTS_AT_S, VirtualTimeLoop

__all__ = ("STARTS_AT_S", "NoTimePassesError", "SimulatedLoop", "run", "virtual_time")

T = TypeVar("T")
P = ParamSpec("P")

BUSY_TURNS = 100_000
"""Turns of the loop after which time should have passed."""


class NoTimePassesError(RuntimeError):
    """Tasks keep one another busy without ever waiting."""


class SimulatedLoop(VirtualTimeLoop):
    """`latency` gives the virtual seconds that each piece of work in a thread takes."""

    def __init__(self, latency: Callable[[], float] = lambda: 0.0) -> None:
        self._busy_turns = 0
        self._latency = latency
        self._created = WeakKeyDictionary[asyncio.Task[Any], int]()
        self._numbers = count()
        super().__init__(selector=_Clockwork(self))

    def stand_still(self, seconds: float) -> None:
        """As a process that is stopped: time passes in the middle of a turn of the loop."""
        self._now += seconds

    def pass_time(self, seconds: float | None) -> None:
        super().pass_time(seconds)
        self._busy_turns = 0 if seconds else self._busy_turns + 1
        if self._busy_turns > BUSY_TURNS:
            raise NoTimePassesError(f"{BUSY_TURNS:,} turns of the loop, and no time has passed")

    def create_task(self, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:  # type: ignore[override]
        task = super().create_task(coro, **options)
        self._created[task] = next(self._numbers)
        return task

    def tasks(self) -> list[asyncio.Task[Any]]:
        """All that are not done, in the order of their creation."""
        return sorted(asyncio.all_tasks(self), key=lambda task: self._created.get(task, -1))

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        answer: asyncio.Future[T] = self.create_future()
        try:
            settle, outcome = answer.set_result, func(*args)
        except Exception as error:
            settle, outcome = answer.set_exception, error
        self.call_later(self._latency(), lambda: None if answer.done() else settle(outcome))  # type: ignore[arg-type]
        return answer


class _Clockwork(selectors.SelectSelector):
    """Lets time pass instead of waiting."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Nothing comes from outside: it is looked at only before giving up.
        ready = super().select(0) if timeout is None else []
        if not ready:
            self._loop.pass_time(timeout)
        return ready


def run(
    main: Coroutine[Any, Any, T], *, limit_s: float = 10_000_000.0, latency: Callable[[], float] = lambda: 0.0
) -> T:
    """Run `main` in virtual time. Raises TimeoutError where it takes longer than `limit_s` virtual seconds.

    A task that outlives it is an AssertionError.
    """
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(latency)) as runner:
        return runner.run(_bounded(main, limit_s))


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorates an async test: it runs in virtual time."""

    @wraps(test)
    def in_virtual_time(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return in_virtual_time


async def _bounded(main: Coroutine[Any, Any, T], limit_s: float) -> T:
    async with asyncio.timeout(limit_s):
        result = await main
    for _ in range(10):  # the task cancelled last needs a turn of the loop or two
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {', '.join(sorted(task.get_name() for task in left))}"  # type: ignore[union-attr]
    return result
