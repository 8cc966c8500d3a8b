"""Queues in a real Redis, each under keys of its own, with a clock that a test moves or with the server's."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import pytest_asyncio
from redis import Redis

from benchmarks.servers import RedisServer
from headrace.adapters.redis import RedisOptions, RedisQueue
from tests.adapters.redis.looking import Clock, scripts_of_tests
from tests.servers import redis_server

__all__ = ("redis_server",)

_numbers = itertools.count()


@pytest.fixture
def options(redis_server: RedisServer) -> RedisOptions:
    """The session's server, under a prefix of the test's own."""
    return RedisOptions(url=f"redis://{redis_server.address}", prefix=f"test{next(_numbers)}")


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    """The session's server, emptied."""
    with Redis(port=redis_server.port) as direct:
        cast("Any", direct).flushall()
    return f"redis://{redis_server.address}"


@pytest.fixture
def direct(redis_server: RedisServer) -> Iterator[Redis]:
    """The server as any client sees it."""
    with Redis(port=redis_server.port) as client:
        yield client


@pytest_asyncio.fixture
async def queue(options: RedisOptions) -> AsyncIterator[RedisQueue]:
    """A queue by the server's clock."""
    async with RedisQueue.open("q", options) as queue:
        yield queue


@pytest_asyncio.fixture
async def timed(options: RedisOptions) -> AsyncIterator[RedisQueue]:
    """A queue whose clock is `clock`."""
    async with RedisQueue.open("q", options, scripts=scripts_of_tests()) as queue:
        yield queue


@pytest.fixture
def clock(timed: RedisQueue, direct: Redis) -> Clock:
    return Clock(direct, [shard.keys for shard in timed.shards])
