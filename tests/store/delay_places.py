"""Stores of delayed batches for tests: in a file or PostgreSQL, by a clock that stands still unless it is moved."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import Connection

from headrace.store.control_store import ControlStore
from headrace.store.delays import DelayedCall, DelayStore
from headrace.streams.events import ScheduledBatch
from headrace.streams.publishing import ProducerSequence


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000_000.0

    def __call__(self, _connection: Connection | None = None) -> int:
        return round(self.now_s * 1e6)


class Place(NamedTuple):
    """Every `opened` is another process's."""

    opened: Callable[[], AbstractAsyncContextManager[DelayStore]]


async def add(
    delays: DelayStore,
    provider: str,
    batches: Sequence[tuple[int, ScheduledBatch]],
    sequence: ProducerSequence | None = None,
) -> None:
    """Store the batches of one call."""
    await delays.add_all(provider, [DelayedCall(batches, sequence)])


def database_of(request: pytest.FixtureRequest, directory: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else str(directory / "control.db")


def place_of(request: pytest.FixtureRequest, directory: Path, clock: Clock) -> Place:
    """The one that the fixture's parameter names: file or postgres."""
    where = database_of(request, directory)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[DelayStore]:
        async with aclosing(await ControlStore.open(where)) as control:
            yield control.delay_store(clock)

    return Place(opened)
