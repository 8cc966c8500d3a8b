"""Something else has written into a queue's keys: what stops it is named, and how to go on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from redis import Redis

from headrace import EventBatch, StorageError, StreamId
from headrace.adapters import AdapterContext
from headrace.adapters.redis import RedisAdapter, RedisOptions, RedisQueue, open_adapter
from headrace.adapters.redis.keys import ShardKeys
from tests.adapters.redis.looking import check_agreement

ANY = 1 << 30
FIRST = 0.0
"""A score before all others."""
FOREIGN = [
    (None, "has no bytes"),
    (b"xx", "is no batch of events"),
    (b"\1\0\0\0" + b"\xff" * 30, "is no batch of events"),
]


@asynccontextmanager
async def adapter(options: RedisOptions) -> AsyncGenerator[RedisAdapter]:
    table = {"url": options.url, "prefix": options.prefix}
    opened = await open_adapter(AdapterContext(provider="p", queues=1), table)
    try:
        yield opened
    finally:
        await opened.aclose()


def batch(payload: str) -> EventBatch:
    return EventBatch.of(StreamId("n", "k"), [payload.encode()])


def spoil(direct: Redis, keys: ShardKeys, place: str, score: float, body: bytes | None) -> None:
    direct.zadd(place, {"bad id": score})
    if body is not None:
        direct.hset(keys.body, "bad id", body)  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.parametrize(("body", "what"), FOREIGN)
async def test_a_damaged_event_is_named_and_can_be_removed(
    options: RedisOptions, direct: Redis, body: bytes | None, what: str
) -> None:
    async with adapter(options) as opened:
        shard = opened.shards(0)[0]
        receiver = await opened.open_receiver(0)
        spoil(direct, shard.keys, shard.keys.waiting, FIRST, body)
        await opened.enqueue([(0, batch("behind"))])
        for _ in range(3):
            with pytest.raises(StorageError, match=rf"p\.0:0\}} the event 'bad id' {what}, .* docs/redis.md") as raised:
                await receiver.receive(ANY, ANY)
            assert "script" not in str(raised.value)
        assert await shard.remove("bad id")
        (received,) = (await receiver.receive(ANY, ANY)).batches
        assert received.payloads() == [b"behind"]
        check_agreement(direct, shard.keys)


@pytest.mark.parametrize(("body", "what"), FOREIGN)
async def test_so_it_is_where_a_reader_left_it(
    options: RedisOptions, direct: Redis, body: bytes | None, what: str
) -> None:
    async with adapter(options) as opened:
        shard = opened.shards(0)[0]
        await opened.enqueue([(0, batch("held"))])
        (held,) = (await (await opened.open_receiver(0)).receive(ANY, ANY)).batches
        spoil(direct, shard.keys, shard.keys.held, held.offset - 1, body)
        receiver = await opened.open_receiver(0)
        for _ in range(3):
            with pytest.raises(StorageError, match=f"the event 'bad id' {what}"):
                await receiver.receive(ANY, ANY)
        await shard.remove("bad id")
        assert (await receiver.receive(ANY, ANY)).batches == [held]


async def test_held_event_that_was_never_taken_is_named(options: RedisOptions, direct: Redis) -> None:
    async with adapter(options) as opened:
        shard = opened.shards(0)[0]
        receiver = await opened.open_receiver(0)
        await opened.enqueue([(0, batch("before"))])
        await receiver.receive(ANY, ANY)
        spoil(direct, shard.keys, shard.keys.held, float(1 << 52), b"xx")
        with pytest.raises(StorageError, match="the event 'bad id' has no lease"):
            await receiver.receive(ANY, ANY)


async def test_a_queue_for_competing_consumers_names_it_too(queue: RedisQueue, direct: Redis) -> None:
    keys = queue.shards[0].keys
    spoil(direct, keys, keys.waiting, FIRST, None)
    await queue.push(b"behind")
    for take in (queue.pop, queue.peek):
        with pytest.raises(StorageError, match="the event 'bad id' has no bytes"):
            await take(1)
    assert await queue.remove("bad id")
    (taken,) = await queue.pop(1)
    assert taken.body == b"behind"


async def test_a_key_of_another_type_is_said_to_be_one(queue: RedisQueue, direct: Redis) -> None:
    direct.set(queue.shards[0].keys.waiting, "x")
    with pytest.raises(StorageError, match=r"one of the keys .* is of another type than Headrace's: delete it"):
        await queue.push(b"x")
