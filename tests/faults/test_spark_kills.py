"""Streaming queries of Spark are killed, and silos that they read from, as processes, while events flow.

`make chaos` does it for longer: CHAOS_ROUNDS says how often, a third of it here. CHAOS_SEED repeats a run.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.servers import java_home
from headrace import Client, Provider, StreamId
from tests.faults.cluster_scene import playing
from tests.faults.cluster_stores import rng
from tests.faults.spark_query import SOURCE
from tests.faults.spark_scene import PATIENCE_S, SparkQueries, check_once

__all__ = ("rng",)

KILLS = int(os.environ.get("CHAOS_ROUNDS", "3")) // 3
KEYS = [f"k{number}" for number in range(12)]

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout((KILLS + 3) * PATIENCE_S)]
Publish = Callable[[list[tuple[StreamId, bytes]]], Awaitable[object]]
Start = Callable[[Mapping[str, str], Mapping[str, str]], SparkQueries]


class Publishing:
    """Events of each key, numbered."""

    def __init__(self, publish: Publish, rng: random.Random) -> None:
        self.published: Counter[str] = Counter()
        self._publish = publish
        self._rng = rng

    async def some(self) -> None:
        counts = {key: self._rng.randint(0, 3) for key in KEYS}
        await self._publish(
            [
                (StreamId(SOURCE, key), b"%d" % (self.published[key] + number))
                for key, count in counts.items()
                for number in range(count)
            ]
        )
        self.published.update(counts)

    @asynccontextmanager
    async def meanwhile(self) -> AsyncGenerator[None]:
        """Until the end of the block, and never half a call."""
        ended = False

        async def go_on() -> None:
            while not ended:
                await self.some()
                await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(go_on())
            yield
            ended = True


@pytest.fixture
def queries(tmp_path: Path) -> Iterator[Start]:
    java, made = java_home(), list[SparkQueries]()

    def make(source: Mapping[str, str], sink: Mapping[str, str]) -> SparkQueries:
        made.append(SparkQueries(tmp_path / "queries", java, source, sink))
        return made[0]

    yield make
    for each in made:
        each.clean_up()


async def test_a_query_that_is_killed_at_random_moments_ends_with_each_event_once(
    tmp_path: Path, rng: random.Random, queries: Start
) -> None:
    async with Provider.open(tmp_path / "copies", queues=2):
        pass
    async with Provider.open(tmp_path / "orders", queues=3) as provider:
        publishing = Publishing(provider.publish_many, rng)
        running = queries({"data": str(tmp_path / "orders")}, {"data": str(tmp_path / "copies")})
        async with publishing.meanwhile():
            for number in range(KILLS):
                await running.started()
                if number % 3 != 1:  # else it may be before it has done anything
                    await running.advanced(by=1)
                await asyncio.sleep(rng.uniform(0, 2))
                running.kill()
            await running.started()
            await running.advanced(by=2)
        arrived = await running.finish()
    print(f"{KILLS} kills, {publishing.published.total():,} events, {running.batches()} batches")
    check_once(arrived, publishing.published)


async def test_a_rebalance_and_the_death_of_a_silo_do_not_disturb_a_query(
    tmp_path: Path, rng: random.Random, queries: Start
) -> None:
    async with Provider.open(tmp_path / "copies", queues=2):
        pass
    async with playing(tmp_path, None, "ab") as cluster:
        await cluster.until_shared(3, 3)
        running = queries({"server": cluster.address()}, {"data": str(tmp_path / "copies")})
        async with Client(cluster.address(), connect_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S) as client:
            publishing = Publishing(client.publish_many, rng)
            async with publishing.meanwhile():
                await running.started()
                await running.advanced(by=1)
                await cluster.add("c")
                await cluster.until_shared(2, 2, 2)
                await running.advanced(by=1)
                await cluster.silos["a"].kill()
                await running.advanced(by=2)
                await cluster.until_shared(3, 3)
                await running.advanced(by=1)
            arrived = await running.finish()
    print(f"{publishing.published.total():,} events, {running.batches()} batches")
    check_once(arrived, publishing.published)
