"""Processes on one loop, in virtual time: what runs in a machine's context stands still while it is paused, and does
not go on once it is killed, wherever it was. No `finally` runs then, as with SIGKILL, until `bury`."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, NamedTuple

from tests.virtual_time import VirtualTimeLoop


class Step(NamedTuple):
    handle: asyncio.Handle
    callback: Callable[..., Any]
    args: tuple[Any, ...]
    context: Context


class Machine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.paused = False
        self.dead = False
        self.gone = False
        """It was killed: what it still does, as the world is cleared away, counts for nothing."""
        self.tasks: list[asyncio.Task[Any]] = []
        self._late: list[Step] = []

    def run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        context = copy_context()
        context.run(_machine.set, self)
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self.tasks.append(task)
        return task

    def kill(self) -> None:
        self.dead = self.gone = True

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        if self.dead:
            return
        late, self._late = self._late, []
        loop = asyncio.get_running_loop()
        for step in late:
            if not step.handle.cancelled():
                loop.call_soon(step.callback, *step.args, context=step.context)

    def bury(self) -> None:
        """Let it come to its end, when nothing that it does has an effect any more."""
        self.gone, self.dead = True, False
        self.resume()

    def take(self, step: Step) -> None:
        if self.paused or self.dead:
            self._late.append(step)
        else:
            step.callback(*step.args)


_machine: ContextVar[Machine | None] = ContextVar("machine", default=None)


class MachineLoop(VirtualTimeLoop):
    """Whatever a machine wants to be called goes through it."""

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        soon = super().call_soon
        return self._through(lambda step, context: soon(step, context=context), callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        at = super().call_at
        return self._through(lambda step, context: at(when, step, context=context), callback, args, context)  # type: ignore[return-value]

    def _through(
        self,
        schedule: Callable[[Callable[[], None], Context], asyncio.Handle],
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> asyncio.Handle:
        context = context or copy_context()
        machine = context.get(_machine)
        if machine is None:
            return schedule(lambda: callback(*args), context)
        steps: list[Step] = []
        handle = schedule(lambda: machine.take(steps[0]), context)
        steps.append(Step(handle, callback, args, context))
        return handle
