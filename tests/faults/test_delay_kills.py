"""Silos that store delayed events are killed while events are delayed, and when they are due: each comes once."""

import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import timedelta
from pathlib import Path

import pytest

from headrace import Client, Event, StreamId
from headrace.adapters import AdapterContext, open_adapter
from headrace.store.control_store import ControlStore
from headrace.store.datadir import DataDirectory
from headrace.store.delays import DelayStore
from tests.faults.cluster_stores import lasting_port, rng, store
from tests.faults.silo_process import SiloProcess, silo_process
from tests.servers import postgres_server, postgres_url

__all__ = ("postgres_server", "postgres_url", "rng", "store")

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
QUEUES = 2
CALLS = 60
SPREAD_S = 2.0
PATIENCE_S = 60
PROVIDER = f'[providers.default]\nqueues = {QUEUES}\ndelays = "store"\n'
TIMES = "period_s = 0.2\nlease_s = 2.0\ndead_after_s = 1.0\nmaturity_s = 0.5\n"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 30 * ROUNDS)]


async def publish(client: Client, rng: random.Random, first: int, count: int = CALLS) -> None:
    """Calls of two events each, one delayed and one not; every call is acknowledged."""
    for number in range(first, first + count):
        later = Event(b"%d later" % number, delay=timedelta(seconds=rng.uniform(0, SPREAD_S)))
        await client.publish(StreamId("n", str(number % 7)), [later, b"%d now" % number])
        await asyncio.sleep(rng.uniform(0, 2 * SPREAD_S / count))


def wanted(count: int) -> list[str]:
    return sorted(f"{number} {when}" for number in range(count) for when in ("later", "now"))


async def until_nothing_waits(delays: DelayStore) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await delays.due_in_s("default", "") is not None:  # noqa: ASYNC110 (a database tells nobody)
            await asyncio.sleep(0.05)


async def in_the_log(data: Path) -> list[str]:
    context = AdapterContext(provider="default", queues=QUEUES, directory=data / "providers" / "default")
    found: list[str] = []
    async with aclosing(await open_adapter("log", context, {})) as adapter:
        for queue in range(QUEUES):
            position, end = await adapter.bounds(queue)
            async with aclosing(await adapter.open_receiver(queue, 0)) as receiver:
                while position < end:
                    received = await receiver.receive(1000, 1 << 20)
                    position = received.next_offset
                    found += [payload.decode() for batch in received.batches for payload in batch.payloads()]
    return sorted(found)


async def test_a_silo_is_killed_again_and_again(tmp_path: Path, rng: random.Random) -> None:
    async with AsyncExitStack() as stack:
        silo = await stack.enter_async_context(silo_process(tmp_path, config=PROVIDER))
        control = await stack.enter_async_context(
            aclosing(await ControlStore.open(DataDirectory(tmp_path / "data").control_db))
        )
        client = await stack.enter_async_context(Client(silo.address))
        for turn in range(ROUNDS):
            publishing = asyncio.create_task(publish(client, rng, turn * CALLS))
            for _ in range(2):
                await asyncio.sleep(rng.uniform(0, SPREAD_S))
                await silo.kill()
                await silo.start()
            await publishing
        await until_nothing_waits(control.delay_store())
        await silo.stop()
    assert await in_the_log(tmp_path / "data") == wanted(ROUNDS * CALLS)


def cluster(directory: Path, store: str | None) -> Sequence[SiloProcess]:
    """Two silos on one data directory."""
    (directory / "data").mkdir()
    silos: list[SiloProcess] = []
    for name in ("a", "b"):
        (directory / name).mkdir()
        (directory / name / "data").symlink_to("../data")
        of_store = f'store = "{store}"\n' if store else ""
        silo = SiloProcess(directory / name, config=f'[cluster]\nname = "{name}"\n{TIMES}{of_store}{PROVIDER}')
        silo.address = f"127.0.0.1:{lasting_port()}"
        silos.append(silo)
    return silos


async def test_delayed_events_of_a_dead_silo_are_published_by_another(
    tmp_path: Path, store: str | None, rng: random.Random
) -> None:
    silos = cluster(tmp_path, store)
    async with AsyncExitStack() as stack:
        for silo in silos:
            stack.callback(silo.clean_up)
            await silo.start()
        control = await stack.enter_async_context(
            aclosing(await ControlStore.open(store or DataDirectory(tmp_path / "data").control_db))
        )
        async with Client(silos[0].address) as client:
            await publish(client, rng, 0)
        await silos[0].kill()
        await until_nothing_waits(control.delay_store())
        await silos[1].stop()
    assert await in_the_log(tmp_path / "data") == wanted(CALLS)


async def test_silos_of_a_cluster_are_killed_in_turn(tmp_path: Path, store: str | None, rng: random.Random) -> None:
    silos = cluster(tmp_path, store)
    async with AsyncExitStack() as stack:
        for silo in silos:
            stack.callback(silo.clean_up)
            await silo.start()
        control = await stack.enter_async_context(
            aclosing(await ControlStore.open(store or DataDirectory(tmp_path / "data").control_db))
        )
        client = await stack.enter_async_context(Client(",".join(silo.address for silo in silos)))
        for turn in range(ROUNDS):
            publishing = asyncio.create_task(publish(client, rng, turn * CALLS))
            for silo in rng.sample(silos, 2):
                await asyncio.sleep(rng.uniform(0, SPREAD_S))
                await silo.kill()
                await silo.start()
            await publishing
        await until_nothing_waits(control.delay_store())
        for silo in silos:
            await silo.stop()
    assert await in_the_log(tmp_path / "data") == wanted(ROUNDS * CALLS)
