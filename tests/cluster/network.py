"""The way to the store: calls take time, get lost before or after they were carried out, come twice, or long after
their caller gave them up."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from headrace import StorageError
from tests.cluster.machines import Machine


@dataclass
class NetworkConditions:
    """How things are at present."""

    rng: random.Random
    latency_s: float = 0.0
    loss: float = 0.0
    """Share of calls of which something is lost, and the same share comes twice."""
    slow: float = 0.0
    """Share of calls whose answer takes long."""
    slow_s: float = 0.0
    """Longest delay of such an answer."""
    timeout_s: float = 1.0
    outage: bool = False
    refuses: str = ""
    """Name of a call that fails each time; "": none."""


class StoreCaller(Protocol):
    """The end at which a line begins."""

    machine: Machine
    cut_off: bool
    congested: bool
    """Calls and their answers take long."""
    without_store: bool
    """The store cannot be reached."""
    answers_after_s: float
    """Delay of the answer to the next renewal, after which nothing gets through; 0: no delay."""
    answered_late: int
    """Number of renewals that were answered so."""


class StoreConnection:
    """A machine's connection to the store, used in place of the store."""

    def __init__(self, weather: NetworkConditions, place: StoreCaller, target: object) -> None:
        self._weather = weather
        self._place = place
        self._target = target
        self.private = False

    def watch_redrives(self, notify: Callable[[], None]) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._target, name)

        async def call(*args: Any, **options: Any) -> Any:
            sent = [_as_it_is(each) for each in args]
            return await self._call(name, lambda: method(*sent, **options))

        return call

    async def _call(self, name: str, carry_out: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        weather, rng = self._weather, self._weather.rng
        congested = self._place.congested
        await asyncio.sleep(rng.random() * (weather.slow_s / 3 if congested else weather.latency_s))
        await self._reach()
        if name == weather.refuses:
            if rng.random() < 0.5:
                await carry_out()
            raise StorageError(f"{name}: the store has an error")
        lost = weather.loss and rng.random() < weather.loss
        if lost and rng.random() < 0.5:
            if name != "join" and rng.random() < 0.5:  # a silo that starts again under its name waits for longer
                self._later(carry_out)
            raise StorageError(f"{name}: the request is lost")
        if weather.loss and rng.random() < weather.loss:
            with suppress(Exception):
                await carry_out()
        result = await carry_out()
        slow = congested or rng.random() < weather.slow
        await asyncio.sleep(rng.random() * (weather.slow_s if slow else weather.latency_s))
        if name == "beat" and self._place.answers_after_s:
            await asyncio.sleep(self._place.answers_after_s)
            self._place.answers_after_s, self._place.cut_off = 0.0, True
            self._place.answered_late += 1
            return result
        await self._reach()
        if lost:
            raise StorageError(f"{name}: the answer is lost")
        return result

    def _later(self, carry_out: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Let a request reach the store later. No task waits for its answer any more."""

        async def arrives() -> None:
            await asyncio.sleep(self._weather.rng.random() * self._weather.slow_s)
            with suppress(Exception):
                await carry_out()

        Machine("the network").run(arrives(), "late request")

    async def _reach(self) -> None:
        if self._place.machine.gone:
            raise StorageError("the process is gone")
        if self._weather.outage or self._place.cut_off or self._place.without_store:
            await asyncio.sleep(self._weather.timeout_s * self._weather.rng.random())
            raise StorageError("the store cannot be reached")


def _as_it_is(value: Any) -> Any:
    """Copy a mutable value: an argument that is sent does not change any more."""
    return copy(value) if type(value) in (dict, list) else value
