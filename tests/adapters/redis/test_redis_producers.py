"""Idempotent producers: a call sent again is stored once, whoever sends it, whenever, and whatever the number."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from redis import Redis

from headrace.adapters import AdapterContext
from headrace.adapters.redis import Pushed, RedisAdapter, RedisOptions, open_adapter
from headrace.adapters.redis.producers import Producers
from headrace.streams import EventBatch, StorageError, StreamId
from headrace.streams.publishing import ProducerSequence, Receipt


def batch(payload: str) -> EventBatch:
    return EventBatch.of(StreamId("n", "k"), [payload.encode()])


@asynccontextmanager
async def adapter(options: RedisOptions, queues: int = 1) -> AsyncGenerator[RedisAdapter]:
    table = msgspec.to_builtins(options)
    opened = await open_adapter(AdapterContext(provider="p", queues=queues), table)
    try:
        yield opened
    finally:
        await opened.aclose()


async def call(
    opened: RedisAdapter, number: int, previous: int, *, producer: str = "c", queues: Sequence[int] = (0,)
) -> Sequence[Receipt]:
    """One batch for each of the queues."""
    batches = [(queue, batch(str(number))) for queue in queues]
    return await opened.enqueue(batches, sequence=ProducerSequence(producer, number, previous))


async def stored(opened: RedisAdapter, queue: int = 0) -> int:
    return (await opened.backlog(queue, 0)).batches


@pytest.mark.parametrize("start", [(1 << 53) - 2, 999_999_999_999_999_998, (1 << 64) - 5])
async def test_neighbouring_numbers_are_told_apart_however_large(options: RedisOptions, start: int) -> None:
    """The server's scripts count in doubles, which have no odd numbers from 2^53 on."""
    async with adapter(options) as opened:
        for number in range(start, start + 4):
            await call(opened, number, number - 1 if number > start else 0)
    async with adapter(options) as another:
        assert await another.last_sequence("c") == start + 3
        for number in range(start + 1, start + 4):
            (receipt,) = await call(another, number, number - 1)
            assert receipt.duplicate
        assert await stored(another) == 4
        (receipt,) = await call(another, start + 4, start + 3)
        assert not receipt.duplicate
        assert await stored(another) == 5


# ---- repeats ---------------------------------------------------------------------------------------------------------

WEEK_S = 7 * 24 * 3600


def kept_for(direct: Redis, options: RedisOptions, word: str) -> list[int]:
    """For how many hours the keys with this word live, rounded up."""
    return sorted(-(-direct.ttl(key) // 3600) for key in keys(direct, f"{{{options.prefix}:*{word}:*"))


def keys(direct: Redis, pattern: str) -> list[bytes]:
    return cast("Any", direct).keys(pattern)


async def test_a_call_of_which_no_ledger_knows_is_remembered_as_long_as_the_producer(
    options: RedisOptions, direct: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silo that dies after storing, before it has written that down; its client sends the call again days later."""

    async def die(*_: object) -> None:
        raise StorageError("killed")

    async with adapter(options, 2) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(Producers, "_write", die)
            with pytest.raises(StorageError, match="killed"):
                await call(opened, 1, 0, queues=(0, 1))
        assert kept_for(direct, options, "sent") == [WEEK_S / 3600] * 2
    async with adapter(options, 2) as another:
        await call(another, 1, 0, queues=(0, 1))
        assert [await stored(another, queue) for queue in (0, 1)] == [1, 1]


async def test_a_repeat_renews_what_is_remembered(options: RedisOptions, direct: Redis) -> None:
    async with adapter(options) as opened:
        shard, memory = opened.shards(0)[0], opened.shards(0)[0].keys.sent("p")
        first = await shard.push([Pushed(b"x")], pusher="p", number=1, remembered_s=WEEK_S)
        direct.expire(memory, 60)
        assert await shard.push([Pushed(b"x")], pusher="p", number=1, remembered_s=WEEK_S) == first
        assert direct.ttl(memory) > WEEK_S - 60


async def test_a_call_that_the_ledger_has_is_remembered_for_an_hour(options: RedisOptions, direct: Redis) -> None:
    """Producers that come and go would fill the server. But a frozen one may carry out a repeat late."""
    async with adapter(options, 3) as opened:
        await call(opened, 1, 0, queues=(0, 1, 2))
    assert kept_for(direct, options, "sent") == [1] * 3
    assert kept_for(direct, options, "producer") == [WEEK_S / 3600]


async def test_settling_a_call_leaves_the_memory_of_a_later_one(options: RedisOptions, direct: Redis) -> None:
    async with adapter(options) as opened:
        shard = opened.shards(0)[0]
        await shard.push([Pushed(b"x")], pusher="p", number=2, remembered_s=WEEK_S)
        await shard.settle("p", 1)
        assert kept_for(direct, options, "sent") == [WEEK_S / 3600]


async def test_a_repeat_renews_the_ledger(options: RedisOptions, direct: Redis) -> None:
    async with adapter(options) as opened:
        await call(opened, 1, 0)
        for key in keys(direct, f"{{{options.prefix}:p:producer:*"):
            direct.expire(key, 60)
    async with adapter(options) as another:
        (receipt,) = await call(another, 1, 0)
        assert receipt.duplicate
    assert kept_for(direct, options, "producer") == [WEEK_S / 3600]
