"""A silo under load is backed up, destroyed and restored. The loss is exactly the events published after the backup."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from headrace import Client, Event, StreamId
from tests.cli.commandline import Headrace
from tests.cli.conftest import headrace
from tests.faults.silo_process import SiloProcess, silo_process

__all__ = ("headrace",)

PUBLISHERS, STREAMS_EACH = 4, 5
SOME = 100
PATIENCE_S = 90

Got = dict[StreamId, list[int]]


class Load:
    """Publishers of numbered events, each to streams of its own."""

    def __init__(self) -> None:
        self.numbers = count()
        self.called: set[int] = set()
        """Events whose publish was called."""
        self.returned: dict[int, int] = {}
        """Events whose publish returned, with their offset."""

    async def publish(self, address: str, publisher: int) -> None:
        streams = [StreamId("orders", f"{publisher}-{number}") for number in range(STREAMS_EACH)]
        async with Client(address, timeout_s=2) as client:
            for number in self.numbers:
                self.called.add(number)
                token = await client.stream(*streams[number % STREAMS_EACH]).publish(b"%d" % number)
                self.returned[number] = token.offset

    @asynccontextmanager
    async def running(self, address: str) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(self.publish(address, publisher)) for publisher in range(PUBLISHERS)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (publishers and a silo change it)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def consuming(address: str, name: str) -> AsyncGenerator[tuple[Client, Got]]:
    """A consumer's client, and the numbers that it has got, by stream."""
    got: Got = {}

    async def handle(event: Event) -> None:
        assert event.stream is not None
        got.setdefault(event.stream, []).append(int(event.payload))

    async with Client(address, timeout_s=2) as client:
        subscription = await client.subscribe(name, "orders/*", handle, start="earliest")
        try:
            yield client, got
        finally:
            with suppress(Exception):  # its silo is dead
                async with asyncio.timeout(1):
                    await subscription.close()


def numbers(got: Got) -> set[int]:
    return {number for each in got.values() for number in each}


async def everything(silo: SiloProcess, name: str) -> Got:
    async with consuming(silo.address, name) as (client, got):
        await client.caught_up(name)
        return got


@pytest.mark.slow  # tests/cli/test_backup.py covers each rule without load
@pytest.mark.timeout(240)
async def test_what_was_published_before_the_backup_survives_the_loss_of_the_directory(
    tmp_path: Path, headrace: Headrace
):
    load = Load()
    async with silo_process(tmp_path) as silo:
        async with load.running(silo.address), consuming(silo.address, "bills") as (_, before):
            await until(lambda: len(numbers(before)) > SOME)
            published_before = set(load.returned)
            backup = await asyncio.to_thread(headrace, "backup", "--data", "data", "backup")
            assert backup.code == 0, backup
            called_during = set(load.called)
            await until(lambda: len(numbers(before) - called_during) > SOME)
            await silo.kill()
        shutil.rmtree(tmp_path / "data")
        assert (await asyncio.to_thread(headrace, "restore", "backup", "--data", "data")).code == 0

        await silo.start()
        stored = await everything(silo, "audit")
        bills = await everything(silo, "bills")
        assert published_before <= numbers(stored) <= called_during
        assert numbers(stored) <= numbers(before) | numbers(bills)
        assert all(each == sorted(set(each)) for each in stored.values())
        async with Client(silo.address) as client:
            assert await client.dead_letters("bills") == []
            token = await client.stream("orders", "new").publish(b"0")
            assert token.offset > max(load.returned.values())
            reasons = {gap.reason for gap in await client.gaps("bills")}
        await silo.stop()
    assert reasons <= {"a backup was restored: events that were published after it, if any, are lost"}
