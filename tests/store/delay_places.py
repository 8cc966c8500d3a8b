"""Stores of delayed batches for tests: a file, PostgreSQL or Redis, by a clock that stands still unless it is moved."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from redis import Redis
from sqlalchemy import Connection

from benchmarks.servers import RedisServer
from headrace.adapters.redis.delay_scripts import DelayScripts
from headrace.adapters.redis.delays import DelayKeys, RedisDelayStore
from headrace.adapters.redis.scripts import TESTS_CLOCK
from headrace.store.control_store import ControlStore
from headrace.store.delays import DelayStore

SCRIPTS = DelayScripts.with_clock(TESTS_CLOCK)

_numbers = itertools.count()


class Clock:
    def __init__(self) -> None:
        self._now_s = 1_000_000_000.0
        self.on_move: Callable[[], object] = lambda: None

    def __call__(self, _connection: Connection | None = None) -> int:
        return round(self._now_s * 1e6)

    @property
    def now_s(self) -> float:
        return self._now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self._now_s = now_s
        self.on_move()


class Place(NamedTuple):
    """Every `opened` is another process's."""

    opened: Callable[[], AbstractAsyncContextManager[DelayStore]]


def database_of(request: pytest.FixtureRequest, directory: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else str(directory / "control.db")


def place_of(request: pytest.FixtureRequest, directory: Path, clock: Clock) -> Place:
    """The one that the fixture's parameter names: file, postgres or redis."""
    if request.param == "redis":
        return _in_redis(request.getfixturevalue("redis_server"), clock)
    return _in_database(database_of(request, directory), clock)


def _in_database(where: str, clock: Clock) -> Place:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[DelayStore]:
        async with aclosing(await ControlStore.open(where)) as control:
            yield control.delay_store(clock)

    return Place(opened)


def _in_redis(server: RedisServer, clock: Clock) -> Place:
    prefix = f"delays{next(_numbers)}"
    url = f"redis://{server.address}"
    set_clock(server, prefix, clock)
    clock.on_move = lambda: set_clock(server, prefix, clock)
    return Place(lambda: aclosing(RedisDelayStore(url, prefix=prefix, scripts=SCRIPTS)))


def set_clock(server: RedisServer, prefix: str, clock: Clock) -> None:
    with Redis(port=server.port) as direct:
        for provider in ("p", "q"):
            direct.hset(DelayKeys.of(prefix, provider).meta, "now_us", str(clock()))
