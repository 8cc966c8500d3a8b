"""Processes on one loop, in virtual time: what runs in a machine's context has the machine's clocks, stands still while
it is paused, and does not go on once it is killed, wherever it was. No `finally` runs then, as with SIGKILL, until
`bury`."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.simulation.virtual_time import SimulatedLoop

BEGINNING = 1000.0
"""When loops begin, by the simulation's own clock."""
ROUNDING_S = 2e-9
"""So much later than asked for a timer is due, so that it is never early by the clock of its machine."""
WALL = time.time()
LIBRARY = "headrace.streams", "headrace.adapters", "headrace.agents", "headrace.balancer", "headrace.silo"
Site = tuple[str, int]
"""File and line of an `await` of the library."""


@cache
def library_file(path: str) -> str | None:
    """Return the path of a library file within `headrace`, such as `agents/agent.py`. None: another program's file.

    The folder of the checkout may have any name, `headrace` too, and an editable install runs from that folder.
    """
    for package in LIBRARY:
        spec = find_spec(package)
        assert spec is not None, f"{package} is not installed"
        for folder in spec.submodule_search_locations or ():
            if Path(path).is_relative_to(folder):
                return str(Path(path).relative_to(Path(folder).parent))
    return None


class Step:
    """A callback that a machine is about to run."""

    __slots__ = ("args", "callback", "handle", "machine")

    def __init__(self, machine: "Machine", callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.machine = machine
        self.callback = callback
        self.args = args
        self.handle: asyncio.Handle

    def __call__(self) -> None:
        if self.machine.proceeds(self):
            self.callback(*self.args)

    def path(self) -> tuple[Site, ...]:
        """The `await`s of the library at which the task stands that this goes on with, the innermost one last."""
        task: Any = getattr(self.callback, "__self__", None)
        waits: Any = task.get_coro() if hasattr(task, "get_coro") else None
        found: list[Site] = []
        while (frame := getattr(waits, "cr_frame", None)) is not None:
            if (file := library_file(frame.f_code.co_filename)) is not None:
                found.append((file, frame.f_lineno))
            waits = waits.cr_await
        return tuple(found)


class Machine:
    def __init__(self, name: str, *, rate: float = 1.0, starts_at: float = BEGINNING) -> None:
        self.name = name
        self.rate = rate
        """Speed of its monotonic clock; 1: the simulation's."""
        self.starts_at = starts_at
        self.wall_s = 0.0
        """Error of its wall clock, in seconds."""
        self.paused = False
        self.dead = False
        self.gone = False
        """It was killed. Its steps while the world is cleared away do not count."""
        self.fuse = 0
        """Number of steps after which the machine is killed; 0: it is not."""
        self.on_fuse: Callable[[Step], None] = lambda _: None
        self.watch: Callable[[Step], None] | None = None
        """Called with each step before the step is taken."""
        self.context = copy_context()
        self.context.run(_machine.set, self)
        self._still = False
        self._late: list[Step] = []

    def run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name, context=self.context.copy())

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Call `callback` in this machine."""
        asyncio.get_running_loop().call_soon(callback, *args, context=self.context)

    def time(self, now: float) -> float:
        return self.starts_at + (now - BEGINNING) * self.rate

    def now(self, at: float) -> float:
        """Return the simulation's time at which its clock shows `at`."""
        return BEGINNING + (at - self.starts_at) / self.rate

    def kill(self) -> None:
        self.dead = self.gone = self._still = True

    def pause(self) -> None:
        self.paused = self._still = True

    def resume(self) -> None:
        self.paused = False
        if self.dead:
            return
        self._still = False
        late, self._late = self._late, []
        loop = asyncio.get_running_loop()
        for step in late:
            if not step.handle.cancelled():
                loop.call_soon(step.callback, *step.args, context=step.handle._context)  # type: ignore[attr-defined]

    def bury(self) -> None:
        """Let it come to its end, when nothing that it does has an effect any more."""
        self.gone, self.dead, self.fuse = True, False, 0
        self.resume()

    def proceeds(self, step: Step) -> bool:
        """Whether it takes this step now."""
        if self.watch is not None:
            self.watch(step)
        if self.fuse:
            self.fuse -= 1
            if not self.fuse:
                self.on_fuse(step)
        if self._still:
            self._late.append(step)
        return not self._still


_machine: ContextVar[Machine | None] = ContextVar("machine", default=None)


class MachineLoop(SimulatedLoop):
    """An event loop that runs each callback of a machine as one of its steps."""

    @property
    def now(self) -> float:
        """The time of the simulation's own clock, in every machine."""
        return self._now

    def time(self) -> float:
        machine = _machine.get()
        return self._now if machine is None else machine.time(self._now)

    def outside_at(self, when: float, callback: Callable[[], Any]) -> asyncio.TimerHandle:
        """Call `callback` outside of all machines, when the simulation's own clock shows `when`."""
        return super().call_at(when, callback, context=OUTSIDE)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        machine = _machine.get() if context is None else context.get(_machine)
        if machine is None:
            return super().call_soon(callback, *args, context=context)
        step = Step(machine, callback, args)
        step.handle = super().call_soon(step, context=context)
        return step.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        caller = _machine.get()
        if caller is not None:
            when = caller.now(when) + ROUNDING_S
        machine = caller if context is None else context.get(_machine)
        if machine is None:
            return super().call_at(when, callback, *args, context=context)
        step = Step(machine, callback, args)
        handle = step.handle = super().call_at(when, step, context=context)
        return handle


OUTSIDE = Context()
"""The context of callbacks that belong to no machine."""


def wall_ns() -> int:
    """`time.time_ns` in the simulation."""
    machine = _machine.get()
    return round((WALL + (0.0 if machine is None else machine.wall_s)) * 1e9)
