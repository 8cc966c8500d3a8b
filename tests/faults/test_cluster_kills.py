"""Silos of a cluster are killed and restarted, as processes, while events flow.

`make chaos` does it for longer: CHAOS_SECONDS says how long. CHAOS_SEED repeats a run.
"""

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.faults.cluster_scene import loaded, playing
from tests.faults.cluster_stores import over, rng, store
from tests.servers import postgres_server, postgres_url

__all__ = ("postgres_server", "postgres_url", "rng", "store")

SECONDS = float(os.environ.get("CHAOS_SECONDS", "6"))

SHARES = {4: (2, 2, 1, 1), 3: (2, 2, 2), 2: (3, 3)}
"""Numbers of queues of each silo, by the number of silos."""

pytestmark = pytest.mark.timeout(200 + SECONDS)


@pytest.mark.long
@over("postgres")
@pytest.mark.parametrize("names", ["abc", pytest.param("abcd", marks=pytest.mark.slow)])
async def test_queues_are_shared_by_the_living_silos(
    tmp_path: Path, store: str | None, rng: random.Random, names: str
) -> None:
    async with playing(tmp_path, store, names) as cluster:
        await cluster.until_shared(*SHARES[len(names)])
        async with loaded(cluster, rng, "a") as load:
            await load.flowing()
            for left in range(len(names) - 1, 1, -1):
                await cluster.silos[names[len(names) - left]].kill()
                await cluster.until_shared(*SHARES[left])
            await load.flowing()
            await cluster.add("e")
            await cluster.until_shared(2, 2, 2)
            await load.flowing()
        load.check()


@pytest.mark.slow
@over("sqlite")
async def test_a_rolling_restart_loses_nothing_and_delivers_nothing_twice(
    tmp_path: Path, store: str | None, rng: random.Random
) -> None:
    async with playing(tmp_path, store, "abc") as cluster:
        await cluster.until_shared(2, 2, 2)
        async with loaded(cluster, rng, "ab") as load:
            await load.flowing()
            for silo in cluster.silos.values():
                await silo.stop()
                await silo.start()
                await load.flowing()
            await cluster.until_shared(2, 2, 2)
        load.check(once=True)


@pytest.mark.slow
@over("postgres")
async def test_silos_that_are_killed_at_random_moments_lose_nothing(
    tmp_path: Path, store: str | None, rng: random.Random
) -> None:
    async with playing(tmp_path, store, "abc") as cluster:
        async with loaded(cluster, rng, "ab") as load:
            await load.flowing()
            kills = 0
            until_s = asyncio.get_running_loop().time() + SECONDS
            while asyncio.get_running_loop().time() < until_s:
                silo = rng.choice(list(cluster.silos.values()))
                await silo.kill()
                kills += 1
                await asyncio.sleep(rng.uniform(0, 2))
                await silo.start()
                await asyncio.sleep(rng.uniform(0, 3))
        print(f"{kills} kills, {load.summary()}")
        load.check()
