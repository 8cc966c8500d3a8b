"""Runs the coroutines of one test in an event loop of its own, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from ..streams.clock import replaced_clock
from ..streams.errors import InvalidArgument
from .virtual_time import NothingLeftToHappenError, VirtualTimeLoop

_T = TypeVar("_T")


class WaitsForeverError(AssertionError):
    """The test waits for something that never happens."""


class VirtualTimeRunner:
    """An event loop in virtual time, for the length of a `with`. Timestamps of headrace follow its time."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop(self._may_be_answered)
        self._awaits_outside: Callable[[], bool] = lambda: True
        self._runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._runner)
        self._runner.get_loop()
        self._open.enter_context(replaced_clock(self.loop.wall_us))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        assert self.loop.is_closed()

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end. Raises WaitsForeverError if it waits for something that never happens."""
        __tracebackhide__ = True
        try:
            return self._runner.run(main)
        except NothingLeftToHappenError as error:
            problem = f"{_place(main)} waits for ever: {error}"
        raise WaitsForeverError(problem)

    def set_awaits_outside(self, awaits_outside: Callable[[], bool]) -> None:
        """Ask `awaits_outside` from now on whether a task may wait for a socket, or for a thread of its own. Until
        this call, a task may."""
        self._awaits_outside = awaits_outside

    def _may_be_answered(self) -> bool:
        return self._awaits_outside()


def check_no_running_loop() -> None:
    """Raise InvalidArgument if an event loop runs in this thread."""
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 (documented, for code like this)
        raise InvalidArgument("opened_provider has an event loop of its own: call it outside of a running one")


def _place(main: Coroutine[Any, Any, Any]) -> str:
    """Return where a coroutine waits."""
    frame = getattr(main, "cr_frame", None)
    return "the test" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} (in {frame.f_code.co_name})"
