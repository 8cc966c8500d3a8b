"""A `RedisQueue` over several servers: who is read, and how often."""

from __future__ import annotations

from collections import Counter

from headrace.adapters.redis import Pushed, RedisOptions, RedisQueue, ShardOptions
from headrace.benchmarks.servers import RedisServer


async def test_a_shard_that_is_never_empty_does_not_starve_another() -> None:
    with RedisServer() as one, RedisServer() as other:
        urls = {"a": f"redis://{one.address}", "b": f"redis://{other.address}"}
        shards = tuple(ShardOptions(name=name, url=url, zone=name) for name, url in urls.items())
        async with RedisQueue.open("q", RedisOptions(shards=shards, zone="a")) as queue:
            await queue.push_many([Pushed(b"x")] * 80)
            popped: Counter[str] = Counter()
            for _ in range(36):
                peeked = (await queue.peek(1))[0].id
                (taken,) = await queue.pop(1)
                assert taken.id == peeked
                popped[taken.shard.name] += 1
    assert popped == {"a": 32, "b": 4}
