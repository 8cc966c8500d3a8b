"""What is compared: ways to store an event until it is due, and to take and acknowledge it, in Redis."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, NamedTuple

from ..servers import NotAvailable

Push = Callable[[Sequence[bytes], Sequence[float]], Awaitable[object]]
"""Stores payloads, each for so many seconds; without seconds they are due at once. Returns when they are stored."""
Handle = Callable[[Sequence[bytes]], None]


class Place(NamedTuple):
    """The Redis server of a run, a folder for its other data, and a folder with packages of its own."""

    address: str
    data: str
    packages: str = ""

    @property
    def url(self) -> str:
        return f"redis://{self.address}"


class DelayKind(ABC):
    """One way. Its modules are imported only in the processes that use it."""

    connections: ClassVar[int] = 8
    """Of a producing process and of a consuming one: each is a producer or consumer of its own."""
    requires: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def producer(self, place: Place) -> AbstractAsyncContextManager[Push]: ...

    @abstractmethod
    def consumer(self, place: Place, batch: int, handle: Handle) -> AbstractAsyncContextManager[object]:
        """Takes up to `batch` events at a time, handles and acknowledges them, until the context ends."""

    def packages(self) -> str:
        """A folder with packages that do not fit into this environment, or nothing. Raises NotAvailable."""
        for module in self.requires:
            if importlib.util.find_spec(module) is None:
                raise NotAvailable(f"the package {module} is not installed: pip install 'headrace[bench]'")
        return ""


KINDS: Mapping[str, str] = {
    "RedisQueue": "ours:Queue",
    "provider": "ours:Published",
    "redis-py, recipe": "redis_py:Recipe",
    "redis-py, recipe, blocking client": "redis_py:BlockingRecipe",
    "redis-py, list": "redis_py:Lists",
    "taskiq": "taskiq_jobs:Taskiq",
    "arq": "arq_jobs:Arq",
}
"""Modules of this package, and their classes."""


def kind_of(name: str) -> DelayKind:
    module, _, cls = KINDS[name].partition(":")
    kind: type[DelayKind] = getattr(importlib.import_module(f"{__package__}.{module}"), cls)
    return kind()


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """They run for the length of the context, which ends with an error as soon as one of them does."""
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(work) for work in works}
        yield
        while tasks:  # more than once: in Python 3.11 redis-py's wait_for may swallow a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.05)
