"""A `RedisQueue` over several servers: which is read and how often, and the effect of one that is away."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.servers import RedisServer
from headrace import StorageError
from headrace.adapters.redis import PushedEvent, RedisOptions, RedisQueue, ShardOptions


def over(one: RedisServer, other: RedisServer) -> RedisOptions:
    urls = {"a": f"redis://{one.address}", "b": f"redis://{other.address}"}
    shards = tuple(ShardOptions(name=name, url=url, zone=name) for name, url in urls.items())
    return RedisOptions(shards=shards, zone="a")


async def test_a_shard_that_is_never_empty_does_not_starve_another() -> None:
    with RedisServer() as one, RedisServer() as other:
        async with RedisQueue.open("q", over(one, other)) as queue:
            await queue.push_many([PushedEvent(b"x")] * 80)
            popped: Counter[str] = Counter()
            for _ in range(36):
                peeked = (await queue.peek(1))[0].id
                (taken,) = await queue.pop(1)
                assert taken.id == peeked
                popped[taken.shard.name] += 1
    assert popped == {"a": 32, "b": 4}


async def test_events_of_other_servers_are_acknowledged_though_one_is_away() -> None:
    with RedisServer() as one, RedisServer() as other:
        async with RedisQueue.open("q", over(one, other)) as queue:
            await queue.push_many([PushedEvent(b"x")] * 8)
            taken = [*await queue.pop(4), *await queue.pop(4)]
            assert Counter(each.shard.name for each in taken) == {"a": 4, "b": 4}
            one.kill()
            with pytest.raises(StorageError):
                await queue.acknowledge(*taken)
            (there,) = [shard for shard in queue.shards if shard.name == "b"]
            assert not any(await there.size())
