"""How much memory of its own a silo takes while consumers grant credit and never read, or clients publish on many
streams."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.proto.v1.publisher_pb2 import PublishStreamRequest, PublishStreamResponse
from headrace.server.limits import ClientLimits
from headrace.streams.publishing import MAX_REQUEST_BATCHES
from tests.faults.scene import ROOT
from tests.faults.silo_process import SiloProcess, silo_process
from tests.silo.services.calling import PUBLISH_STREAM, Caller, batch, connecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MOST_BYTES = 150_000_000
LARGE, SMALL = (1 << 20) - 1000, 1000
REQUESTS = 100
"""200 MB, three times the cache."""
STREAMS, REQUESTS_OF_STREAM = 40, 12
SETTLED = 6
"""Looks in a row that find no more memory than before: it does not grow any more."""
POLL_S = 0.5


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
        await asyncio.sleep(POLL_S)
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


async def test_a_client_that_publishes_on_many_streams_takes_bounded_memory(tmp_path: Path) -> None:
    async with silo_process(tmp_path / "silo") as silo, connecting(silo.address) as caller:
        most = idle = silo.memory
        publishing = asyncio.gather(*(publish_on_stream(caller, f"n/{number}") for number in range(STREAMS)))
        while not publishing.done():
            most = max(most, silo.memory)
            await asyncio.sleep(0.02)
        await publishing
        print(f"{STREAMS} streams: {idle / 1e6:.0f} MB idle, {most / 1e6:.0f} MB")
        # gRPC, the request, its batches and the block that is stored have a copy each.
        assert most <= idle + 4 * (ClientLimits().publish_bytes + STREAMS * 3 * LARGE)


async def publish_on_stream(caller: Caller, stream: str) -> None:
    """Send large requests as fast as possible. Some are refused."""
    request = PublishStreamRequest(batches=[batch(stream, *[bytes(LARGE)] * 3)])
    call = caller.stream(PUBLISH_STREAM)

    async def send() -> None:
        for _ in range(REQUESTS_OF_STREAM):
            await call.write(request)
        await call.done_writing()

    sending = asyncio.create_task(send())
    while (answer := await call.read(PublishStreamResponse)) is not None:
        assert answer.error.code in ("", "limit_exceeded")
    await sending


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
