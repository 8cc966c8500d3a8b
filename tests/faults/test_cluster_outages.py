"""Silos of a cluster are stopped, lose their control store, or one another, while events flow."""

import random
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.servers import PostgresServer
from tests.faults.cluster_scene import Cluster, Load, Times, loaded, playing
from tests.faults.cluster_stores import frozen, over, own_server, rng, store
from tests.faults.cluster_wire import wired
from tests.faults.silo_process import SiloProcess
from tests.servers import new_schema, postgres_server, postgres_url

__all__ = ("own_server", "postgres_server", "postgres_url", "rng", "store")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
LONG = Times(lease_s=10.0, dead_after_s=5.0)


@over("sqlite")
async def test_a_silo_that_stood_still_beyond_its_lease_joins_again(
    tmp_path: Path, store: str | None, rng: random.Random
) -> None:
    async with playing(tmp_path, store, "abc") as cluster:
        await cluster.until_shared(2, 2, 2)
        async with loaded(cluster, rng, "ab") as load:
            await load.flowing()
            await freeze(cluster, load, "c")
            await cluster.until_shared(3, 3)
            await load.until_handled_everywhere()
            cluster.silos["c"].signal(signal.SIGCONT)
            await cluster.until_shared(2, 2, 2)
            await load.until_handled_by("c")
            await load.flowing()
        load.check(stood_still=True)


async def freeze(cluster: Cluster, load: Load, name: str) -> None:
    """Stop a silo, but not during a transaction: on one machine no other process could write meanwhile."""
    while True:
        cluster.silos[name].signal(signal.SIGSTOP)
        if await cluster.is_writable() and await load.is_publishing():
            return
        cluster.silos[name].signal(signal.SIGCONT)
        await load.flowing()


async def test_a_store_that_is_away_for_less_than_the_lease_changes_nothing(
    tmp_path: Path, own_server: PostgresServer, rng: random.Random
) -> None:
    async with playing(tmp_path, new_schema(own_server), "ab", times=LONG) as cluster:
        await cluster.until_shared(3, 3)
        async with loaded(cluster, rng, "a") as load:
            await load.flowing()
            before = await cluster.epochs()
            with frozen(own_server):
                await load.flowing()
            await load.flowing()
            assert await cluster.epochs() == before
        load.check(once=True)


async def test_a_store_that_is_away_for_longer_stops_agents_until_it_is_back(
    tmp_path: Path, own_server: PostgresServer, rng: random.Random
) -> None:
    async with playing(tmp_path, new_schema(own_server), "ab") as cluster:
        await cluster.until_shared(3, 3)
        async with loaded(cluster, rng, "a") as load:
            await load.flowing()
            before = await cluster.epochs()
            own_server.stop()
            await cluster.until_said("could not be renewed in time", 6)
            handled = len(cluster.handled())
            await load.until_published(200)
            assert len(cluster.handled()) == handled
            own_server.start()
            await cluster.until_shared(3, 3)
            await load.flowing()
            after = await cluster.epochs()
            assert all(after[queue] > before[queue] for queue in before)
        load.check()


@over("postgres")
async def test_silos_that_cannot_reach_each_other_keep_their_queues(
    tmp_path: Path, store: str | None, rng: random.Random
) -> None:
    async with AsyncExitStack() as stack:
        silos: dict[str, SiloProcess] = {}
        wires = {name: await stack.enter_async_context(wired(lambda at=name: silos[at].address)) for name in "ab"}
        addresses = {name: wire.address for name, wire in wires.items()}
        async with playing(tmp_path, store, "ab", addresses=addresses, silos=silos) as cluster:
            await cluster.until_shared(3, 3)
            async with loaded(cluster, rng, "ab") as load:
                await load.flowing()
                for wire in wires.values():
                    wire.cut()
                await cluster.until_said("nothing was heard from", 2)
                await load.until_handled_by("a", "b")
                await load.until_clients_get_more()
                for wire in wires.values():
                    wire.mend()
                await load.flowing()
            load.check()
