"""How much memory of its own a silo takes while consumers grant credit and never read."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.streams.publishing import MAX_REQUEST_BATCHES
from tests.faults.scene import ROOT
from tests.faults.silo_process import SiloProcess, silo_process
from tests.silo.services.calling import batch, connecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MOST_BYTES = 150_000_000
LARGE, SMALL = (1 << 20) - 1000, 1000
REQUESTS = 100
"""200 MB, three times the cache."""
SETTLED = 6
"""Looks in a row that find no more memory than before: it does not grow any more."""
LOOK_S = 0.5


@asynccontextmanager
async def deaf_consumers(silo: SiloProcess, count: int, *flags: str) -> AsyncGenerator[None]:
    command = [sys.executable, "-m", "tests.faults.deaf_consumers", silo.address, str(count), *flags]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=DEVNULL, stdout=PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        await process.wait()


async def most_memory(silo: SiloProcess) -> int:
    """Bytes, once they do not grow any more."""
    most, settled = 0, 0
    while settled < SETTLED:
        await asyncio.sleep(LOOK_S)
        now = silo.memory
        settled = 0 if now > most + (1 << 20) else settled + 1
        most = max(most, now)
    return most


async def publish(silo: SiloProcess, events: int, size: int, requests: int) -> None:
    """Requests of 2 MB, or as many batches as one may have, of so many events, each of a stream of its own."""
    payload, batches = bytes(size), min(max((2 << 20) // (events * size), 1), MAX_REQUEST_BATCHES)
    async with connecting(silo.address) as caller:
        for number in range(requests):
            await caller.publish(*(batch(f"n/{number}-{each}", *[payload] * events) for each in range(batches)))


@pytest.mark.parametrize(
    ("consumers", "flags"),
    [
        pytest.param(1, (), id="one"),
        pytest.param(50, (), id="fifty"),
        pytest.param(200, ("--broadcast", "--one-connection"), id="broadcast"),
    ],
)
@pytest.mark.parametrize(
    ("events", "size"),
    [pytest.param(2, LARGE, id="2 MB"), pytest.param(64, SMALL, id="64 kB"), pytest.param(10, 10, id="100 B")],
)
async def test_consumers_that_do_not_read_take_bounded_memory(
    tmp_path: Path, consumers: int, flags: tuple[str, ...], events: int, size: int
) -> None:
    async with silo_process(tmp_path / "silo") as silo:
        await publish(silo, events, size, REQUESTS if size > 10 else 2)
        await silo.stop()
        await silo.start()  # without what publishing took
        idle = silo.memory
        async with deaf_consumers(silo, consumers, *flags):
            most = await most_memory(silo)
        print(f"{consumers} consumers: {idle / 1e6:.0f} MB idle, {most / 1e6:.0f} MB with {events} × {size} B a batch")
        assert most <= MOST_BYTES
