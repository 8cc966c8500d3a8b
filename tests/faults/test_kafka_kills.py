"""Brokers of Kafka and silos of a cluster are killed and restarted, as processes, while events flow.

Three brokers with three replicas each, and PostgreSQL as the control store. `make chaos` does it for longer:
CHAOS_SECONDS says how long. CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kafka_servers import KafkaCluster, brokers_at
from benchmarks.servers import PostgresServer
from headrace import Provider, StreamId
from tests.faults.cluster_scene import Times, loaded, playing
from tests.faults.cluster_stores import rng
from tests.servers import new_schema, postgres_server

__all__ = ("postgres_server", "rng")

SECONDS = float(os.environ.get("CHAOS_SECONDS", "10"))
AWAY_S = 60.0 if "CHAOS_SECONDS" in os.environ else 12.0
"""How long all brokers stand still."""
TIMES = Times(lease_s=10.0, dead_after_s=5.0)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 2 * SECONDS)]


@pytest.fixture(scope="module")
def brokers() -> Iterator[KafkaCluster]:
    with KafkaCluster() as cluster:
        yield cluster


def on_kafka(brokers: KafkaCluster, topic: str) -> str:
    """The configuration of the provider."""
    options = f'bootstrap = "{brokers.address}", topic = "{topic}", replication = 3, publish_timeout_s = 8'
    return f'adapter = "kafka"\noptions = {{ {options} }}'


async def until_all_brokers_are_back(brokers: KafkaCluster) -> None:
    """Ask each of them: the others may still list one that was killed."""
    for broker in brokers.brokers:
        while await asyncio.to_thread(brokers_at, broker.address) < len(brokers.brokers):  # noqa: ASYNC110 (a process)
            await asyncio.sleep(0.2)


async def test_brokers_and_silos_that_are_killed_at_random_moments_lose_nothing(
    tmp_path: Path, brokers: KafkaCluster, postgres_server: PostgresServer, rng: random.Random
) -> None:
    provider = on_kafka(brokers, "killed")
    async with playing(tmp_path, new_schema(postgres_server), "ab", times=TIMES, provider=provider) as cluster:
        async with loaded(cluster, rng, "a") as load:
            await load.flowing()
            kills = 0
            until_s = asyncio.get_running_loop().time() + SECONDS
            while asyncio.get_running_loop().time() < until_s:
                broker = rng.choice(brokers.brokers)
                await asyncio.to_thread(broker.kill)
                kills += 1
                await asyncio.sleep(rng.uniform(0, 3))
                silo = rng.choice(list(cluster.silos.values()))
                await silo.kill()
                await asyncio.sleep(rng.uniform(0, 2))
                await asyncio.to_thread(broker.start)
                await until_all_brokers_are_back(brokers)
                await silo.start()
                await asyncio.sleep(rng.uniform(0, 3))
            await load.flowing()
        print(f"{kills} kills of a broker and of a silo, {load.summary()}")
        load.check()


async def test_agents_resume_after_all_brokers_stood_still(
    tmp_path: Path, brokers: KafkaCluster, postgres_server: PostgresServer, rng: random.Random
) -> None:
    """Clients send failed calls again."""
    await until_all_brokers_are_back(brokers)
    provider = on_kafka(brokers, "frozen")
    async with playing(tmp_path, new_schema(postgres_server), "ab", times=TIMES, provider=provider) as cluster:
        async with loaded(cluster, rng, "a") as load:
            await load.flowing()
            for broker in brokers.brokers:
                os.kill(broker.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(AWAY_S)
            finally:
                for broker in brokers.brokers:
                    os.kill(broker.pid, signal.SIGCONT)
            await load.flowing()
        print(load.summary())
        load.check()


async def test_queues_can_be_opened_right_after_a_broker_was_killed(tmp_path: Path, brokers: KafkaCluster) -> None:
    """The others still name it as a leader for up to 9 s."""
    await until_all_brokers_are_back(brokers)
    options = {"bootstrap": brokers.address, "topic": "opened", "replication": 3}

    async def publish(payload: bytes) -> None:
        async with Provider.open(tmp_path, adapter="kafka", queues=8, options=options) as provider:
            await provider.publish(StreamId("s", payload.decode()), payload)

    await publish(b"before")
    for killed in brokers.brokers:  # one of them controls the others
        await asyncio.to_thread(killed.kill)
        try:
            await publish(b"after")
        finally:
            await asyncio.to_thread(killed.start)
            await until_all_brokers_are_back(brokers)
