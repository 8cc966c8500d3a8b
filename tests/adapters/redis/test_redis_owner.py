"""The queues on a server belong to one control store, also after the server has lost its data."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest
from redis import Redis

from benchmarks.servers import RedisServer
from headrace import EventBatch, InvalidArgument, StorageError, StreamId
from headrace.adapters import AdapterContext, ProducerSequence, QueueReceiver
from headrace.adapters.redis import RedisAdapter, RedisOptions, open_adapter
from headrace.adapters.redis.keys import provider_key
from headrace.adapters.redis.limits import REDIS_LIMITS, RedisLimits
from headrace.adapters.redis.owned import OwnedConnection, QueuesOwner
from headrace.adapters.redis.scripts import OWN
from headrace.adapters.redis.server import ServerAway

ANY = 1 << 30
OTHER = "the queues of another provider 'p', with other control data"
SOON = REDIS_LIMITS._replace(owner_s=0.02)
LATE = REDIS_LIMITS._replace(owner_s=3600.0)


@asynccontextmanager
async def adapter(owner: str, limits: RedisLimits = LATE, **options: Any) -> AsyncGenerator[RedisAdapter]:
    opened = await open_adapter(AdapterContext(provider="p", queues=1, owner=owner), options, limits)
    try:
        yield opened
    finally:
        await opened.aclose()


def of_test(owner: str, options: RedisOptions, limits: RedisLimits = LATE) -> AbstractAsyncContextManager[RedisAdapter]:
    return adapter(owner, limits, url=options.url, prefix=options.prefix)


def batch(payload: str) -> EventBatch:
    return EventBatch.of(StreamId("n", "k"), [payload.encode()])


def key_of(options: RedisOptions) -> str:
    return provider_key(options.prefix, "p")


def lose_data(server: RedisServer) -> None:
    server.kill()
    for each in server.directory.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.suffix in {".aof", ".rdb"}:
            each.unlink()


async def received(receiver: QueueReceiver) -> list[bytes]:
    """Receive as an agent does: once more after each StorageError."""
    while True:
        with suppress(StorageError):
            return [each for batch in (await receiver.receive(ANY, ANY)).batches for each in batch.payloads()]
        await asyncio.sleep(0.02)


async def until_refused(opened: RedisAdapter) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await opened.enqueue([(0, batch("between"))])
            except StorageError:
                return
            await asyncio.sleep(0.01)


async def test_the_owner_is_stored_again_when_a_server_comes_back_empty() -> None:
    with RedisServer() as server:
        options = RedisOptions(url=f"redis://{server.address}")
        async with of_test("one", options) as one:
            receiving = asyncio.create_task(received(await one.open_receiver(0)))
            await asyncio.to_thread(lose_data, server)
            await asyncio.to_thread(server.start)
            await one.enqueue([(0, batch("after"))])
            assert await asyncio.wait_for(receiving, 10) == [b"after"]
            with pytest.raises(InvalidArgument, match=OTHER):
                await of_test("two", options).__aenter__()


async def test_the_owner_is_stored_again_without_an_outage(options: RedisOptions, direct: Redis) -> None:
    """After FLUSHALL nothing fails that would show it."""
    async with of_test("one", options, SOON):
        direct.delete(key_of(options))
        async with asyncio.timeout(10):
            while not direct.exists(key_of(options)):  # noqa: ASYNC110 (the server does not tell)
                await asyncio.sleep(0.01)
        with pytest.raises(InvalidArgument, match=OTHER):
            await of_test("two", options).__aenter__()


async def test_an_open_provider_stops_when_the_queues_belong_to_another(options: RedisOptions, direct: Redis) -> None:
    async with of_test("one", options, SOON) as one:
        receiver = await one.open_receiver(0)
        direct.delete(key_of(options))
        direct.hset(key_of(options), mapping={"owner": "two", "queues": "1"})
        await until_refused(one)
        for refused in (
            one.enqueue([(0, batch("x"))]),
            one.enqueue([(0, batch("x"))], sequence=ProducerSequence("producer", 1, 0)),
            receiver.receive(ANY, ANY),
            receiver.acknowledge(ANY),
            one.open_receiver(0),
        ):
            with pytest.raises(StorageError, match=OTHER):
                await refused
        direct.delete(key_of(options))
        receiver = await asyncio.wait_for(opened_again(one), 10)
        await one.enqueue([(0, batch("after"))])
        assert b"after" in await received(receiver)


async def opened_again(opened: RedisAdapter) -> QueueReceiver:
    while True:
        with suppress(StorageError):
            return await opened.open_receiver(0)
        await asyncio.sleep(0.01)


async def test_a_reader_asks_for_the_owner_before_it_takes_a_queue_over(options: RedisOptions, direct: Redis) -> None:
    async with of_test("one", options) as one:
        direct.delete(key_of(options))
        async with of_test("two", options) as two:
            receiver = await two.open_receiver(0)
            with pytest.raises(StorageError, match=OTHER):
                await one.open_receiver(0)
            await two.enqueue([(0, batch("x"))])
            assert await received(receiver) == [b"x"]


async def test_a_server_that_was_away_at_the_open_is_asked_when_it_answers() -> None:
    with RedisServer() as a, RedisServer() as b:
        shards = [{"name": "a", "url": f"redis://{a.address}"}, {"name": "b", "url": f"redis://{b.address}"}]
        with Redis(port=b.port) as direct:
            direct.hset(provider_key("headrace", "p"), mapping={"owner": "two", "queues": "1"})
        await asyncio.to_thread(b.kill)
        async with adapter("one", shards=shards) as opened:
            await asyncio.to_thread(b.start)
            with pytest.raises(StorageError, match=OTHER):
                await opened.shards(0)[1].bounds()


async def test_scripts_that_wait_for_a_silent_server_share_one_attempt() -> None:
    """Each attempt takes seconds: one after another, the last script would wait for all of them."""
    asked = 0
    released = asyncio.Event()

    class Silent(OwnedConnection):
        async def _store_owner(self) -> None:
            nonlocal asked
            asked += 1
            await released.wait()
            raise ServerAway("no answer")

    owner = QueuesOwner("key", "default", "control", 1)
    connection = Silent("redis://127.0.0.1:1", owner, cluster=False, limits=REDIS_LIMITS)
    scripts = [asyncio.create_task(connection.run(OWN, ["key"], "", 1)) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    released.set()
    outcomes = await asyncio.gather(*scripts, return_exceptions=True)
    assert [type(each) for each in outcomes] == [ServerAway] * 10
    assert asked == 1
    await connection.aclose()
