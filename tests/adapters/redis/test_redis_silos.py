"""Several silos on queues in Redis: a queue goes from one to another."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from benchmarks.servers import RedisServer, process_tree
from headrace import Client, Selector, StreamId, SubscriptionDefinition
from tests.client.silos import SiloProcess

EVENTS = 1200


# slow: consumers that are killed have a quick test, and silos that are killed have one on the log
@pytest.mark.slow
async def test_silos_that_are_killed_or_stopped_lose_nothing(tmp_path: Path, redis_server: RedisServer) -> None:
    with Redis(port=redis_server.port) as direct:
        cast("Any", direct).flushall()
    config = ['data = "d"', "[providers.default]", 'adapter = "redis"', "queues = 4"]
    (tmp_path / "silo.toml").write_text("\n".join([*config, f'options = {{ url = "redis://{redis_server.address}" }}']))
    silos = SiloProcess(tmp_path, "silo.toml", "--workers", "2")
    address = await asyncio.to_thread(silos.start)
    got: Counter[bytes] = Counter()
    rng = random.Random(3)

    async def consume(client: Client) -> None:
        async with client.subscribe("s", "orders/*") as consumer:
            async for batch in consumer:
                got.update(batch.payloads())
                await batch.ack()

    host, _, port = address.rpartition(":")
    try:
        async with Client(f"{address},{host}:{int(port) + 1}") as client:
            await client.create_subscription(SubscriptionDefinition(name="s", selector=Selector("orders/*")))
            consuming = asyncio.create_task(consume(client))
            for start in range(0, EVENTS, 100):
                for number in range(start, start + 100):
                    await client.publish(StreamId("orders", str(number % 30)), b"%d" % number)
                if start in (300, 700):
                    workers = process_tree(silos.pid)[1:]
                    os.kill(rng.choice(workers), signal.SIGKILL if start == 300 else signal.SIGTERM)
            async with asyncio.timeout(90):
                while len(got) < EVENTS:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
    finally:
        await asyncio.to_thread(silos.kill)
    assert got.keys() == {b"%d" % number for number in range(EVENTS)}
