"""Idempotent producers: a call sent again is stored once, by any sender, at any time, with any number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from redis import Redis

from benchmarks.servers import RedisServer
from headrace import EventBatch, StorageError, StreamId
from headrace.adapters import AdapterContext
from headrace.adapters.redis import PushedEvent, RedisAdapter, RedisOptions, ShardOptions, open_adapter
from headrace.adapters.redis.keys import ranked
from headrace.adapters.redis.limits import REDIS_LIMITS, RedisLimits
from headrace.adapters.redis.producers import RedisProducers
from headrace.adapters.redis.server import ServerAway
from headrace.streams.publishing import ProducerSequence, Receipt


def batch(payload: str) -> EventBatch:
    return EventBatch.of(StreamId("n", "k"), [payload.encode()])


@asynccontextmanager
async def adapter(
    options: RedisOptions, queues: int = 1, limits: RedisLimits = REDIS_LIMITS
) -> AsyncGenerator[RedisAdapter]:
    table = msgspec.to_builtins(options)
    opened = await open_adapter(AdapterContext(provider="p", queues=queues), table, limits)
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


@pytest.mark.parametrize("start", [(1 << 53) - 2, 999_999_999_999_999_998, (1 << 63) - 5])
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
            patch.setattr(RedisProducers, "_write", die)
            with pytest.raises(StorageError, match="killed"):
                await call(opened, 1, 0, queues=(0, 1))
        assert kept_for(direct, options, "sent") == [WEEK_S / 3600] * 2
    async with adapter(options, 2) as another:
        await call(another, 1, 0, queues=(0, 1))
        assert [await stored(another, queue) for queue in (0, 1)] == [1, 1]


async def test_a_repeated_call_renews_the_memory_of_it(options: RedisOptions, direct: Redis) -> None:
    async with adapter(options) as opened:
        shard, memory = opened.shards(0)[0], opened.shards(0)[0].keys.sent("p")
        first = await shard.push([PushedEvent(b"x")], pusher="p", number=1, remembered_s=WEEK_S)
        direct.expire(memory, 60)
        assert await shard.push([PushedEvent(b"x")], pusher="p", number=1, remembered_s=WEEK_S) == first
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
        await shard.push([PushedEvent(b"x")], pusher="p", number=2, remembered_s=WEEK_S)
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


@pytest.mark.long
async def test_the_calls_of_a_producer_stay_in_line_while_others_are_forgotten(
    options: RedisOptions,
) -> None:
    """Also while one call is done and the next has not begun."""
    async with adapter(options, limits=RedisLimits(cached_producers=0)) as opened:

        async def two_at_a_time() -> None:
            calls: list[asyncio.Task[Sequence[Receipt]]] = []
            for number in range(1, 101):
                calls.append(asyncio.create_task(call(opened, number, number - 1)))
                if number > 1:
                    await calls[number - 2]
            await calls[-1]

        async def come_and_go(name: str) -> None:
            while not publishing.done():
                await opened.last_sequence(name)

        publishing = asyncio.create_task(two_at_a_time())
        await asyncio.gather(publishing, *(come_and_go(f"other{number}") for number in range(20)))
        assert await stored(opened) == 100


# ---- several servers -------------------------------------------------------------------------------------------------

PRODUCERS = [f"c{number}" for number in range(12)]


@pytest.fixture
def three() -> Iterator[list[RedisServer]]:
    with RedisServer() as one, RedisServer() as two, RedisServer() as three:
        yield [one, two, three]


def over(servers: Sequence[RedisServer], names: str) -> RedisOptions:
    """Those of a, b and c, in that order."""
    urls = {name: f"redis://{server.address}" for name, server in zip("abc", servers, strict=True)}
    return RedisOptions(shards=tuple(ShardOptions(name=name, url=urls[name], zone=name) for name in names))


async def test_silos_that_list_the_servers_in_another_order_know_the_same_producers(three: list[RedisServer]) -> None:
    """Each has the server of its own zone first."""
    async with adapter(over(three, "abc")) as one, adapter(over(three, "cba")) as other:
        for producer in PRODUCERS:
            await call(one, 1, 0, producer=producer)
            assert await other.last_sequence(producer) == 1
            (receipt,) = await call(other, 1, 0, producer=producer)
            assert receipt.duplicate
            (receipt,) = await call(other, 2, 1, producer=producer)
            assert not receipt.duplicate
        assert await stored(one) == 2 * len(PRODUCERS)


async def test_producers_go_on_when_a_server_is_added(three: list[RedisServer]) -> None:
    async with adapter(over(three, "ab")) as before:
        for producer in PRODUCERS:
            await call(before, 1, 0, producer=producer)
    async with adapter(over(three, "abc")) as after:
        for producer in PRODUCERS:
            assert await after.last_sequence(producer) == 1
            (receipt,) = await call(after, 1, 0, producer=producer)
            assert receipt.duplicate
            await call(after, 2, 1, producer=producer)
        assert await stored(after) == 2 * len(PRODUCERS)


async def test_a_server_that_was_taken_out_for_a_while_does_not_stop_producers(three: list[RedisServer]) -> None:
    """Its ledgers are old then: if one says too little, the others are asked."""
    async with adapter(over(three, "abc")) as opened:
        for producer in PRODUCERS:
            await call(opened, 1, 0, producer=producer)
    async with adapter(over(three, "ab")) as without:
        for producer in PRODUCERS:
            last = await without.last_sequence(producer)
            await call(without, 2, last, producer=producer)
    async with adapter(over(three, "abc")) as again:
        for producer in PRODUCERS:
            await call(again, 3, 2, producer=producer)


async def test_while_a_server_is_away_a_producer_it_may_know_is_not_refused(three: list[RedisServer]) -> None:
    """The call fails, and can be sent again: a conflict would end the producer."""
    moved = [name for name in PRODUCERS if ranked("abc", name)[0] == "c" and ranked("ab", name)[0] == "a"]
    async with adapter(over(three, "ab")) as before:
        for producer in moved:
            await call(before, 1, 0, producer=producer)
    async with adapter(over(three, "abc")) as after:
        await asyncio.to_thread(three[0].kill)
        for producer in moved:
            with pytest.raises(ServerAway):
                await call(after, 2, 1, producer=producer)
            with pytest.raises(ServerAway):
                await after.last_sequence(producer)
    assert moved


@pytest.mark.parametrize("names", ["abc", "ab"])
async def test_a_new_producer_does_not_wait_for_all_servers(three: list[RedisServer], names: str) -> None:
    async with adapter(over(three, names)) as opened:
        producers = [name for name in PRODUCERS if ranked(names, name)[0] == "b"]
        await asyncio.to_thread(three[0].kill)
        for producer in producers:
            (receipt,) = await call(opened, 1, 0, producer=producer)
            assert not receipt.duplicate
        assert producers


def test_adding_or_removing_a_server_moves_only_its_producers() -> None:
    whats = [f"p{number}" for number in range(300)]
    for what in whats:
        assert ranked("cab", what) == ranked("abc", what)
        assert [name for name in ranked("abcd", what) if name != "d"] == ranked("abc", what)
    for name in "abcd":
        assert 40 < sum(ranked("abcd", what)[0] == name for what in whats) < 110
