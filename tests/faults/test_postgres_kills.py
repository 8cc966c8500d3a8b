"""PostgreSQL and silos of a cluster are killed and restarted, as processes, while events flow.

One PostgreSQL has the queues and the control store. `make chaos` does it for longer: CHAOS_SECONDS says how long.
CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.servers import PostgresServer
from tests.faults.cluster_scene import Times, loaded, playing
from tests.faults.cluster_stores import frozen, lasting_port, rng

__all__ = ("rng",)

SECONDS = float(os.environ.get("CHAOS_SECONDS", "10"))
AWAY_S = 30.0 if "CHAOS_SECONDS" in os.environ else 12.0
"""How long the server stands still."""
TIMES = Times(lease_s=10.0, dead_after_s=5.0)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 2 * SECONDS)]


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """One that the test may kill and start. It ends with the thread that started it, so each test has its own."""
    server = PostgresServer()
    server.port = lasting_port()
    with server:
        yield server


def on_postgres(server: PostgresServer) -> str:
    """The configuration of the provider."""
    options = f'url = "{server.url}", create = true, publish_timeout_s = 8'
    return f'adapter = "postgres"\noptions = {{ {options} }}'


async def test_server_and_silos_that_are_killed_at_random_moments_lose_nothing(
    tmp_path: Path, own_server: PostgresServer, rng: random.Random
) -> None:
    provider = on_postgres(own_server)
    async with playing(tmp_path, own_server.url, "ab", times=TIMES, provider=provider) as cluster:
        async with loaded(cluster, rng, "a") as load:
            await load.flowing()
            kills = 0
            until_s = asyncio.get_running_loop().time() + SECONDS
            while asyncio.get_running_loop().time() < until_s:
                await asyncio.to_thread(own_server.kill)
                kills += 1
                await asyncio.sleep(rng.uniform(0, 1))
                silo = rng.choice(list(cluster.silos.values()))
                await silo.kill()
                await asyncio.sleep(rng.uniform(0, 1))
                await asyncio.to_thread(own_server.start)
                await silo.start()
                await asyncio.sleep(rng.uniform(0, 3))
            await load.flowing()
        print(f"{kills} kills of the server and of a silo, {load.summary()}")
        load.check()


async def test_agents_resume_after_the_server_stood_still(
    tmp_path: Path, own_server: PostgresServer, rng: random.Random
) -> None:
    """Clients send failed calls again."""
    provider = on_postgres(own_server)
    async with playing(tmp_path, own_server.url, "ab", times=TIMES, provider=provider) as cluster:
        async with loaded(cluster, rng, "a") as load:
            await load.flowing()
            with frozen(own_server):
                await asyncio.sleep(AWAY_S)
            await load.flowing()
        print(load.summary())
        load.check()
