"""Clients and event loops: each has one, and leaves nothing for the next."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace import Client, Event, InvalidArgument, StreamId
from tests.client.silos import SiloProcess

ROUNDS = 6
PROGRAM = """
import asyncio, os, signal, sys
from headrace import Client, StreamId

ADDRESS, SILO = sys.argv[1], int(sys.argv[2])

async def publish(name):
    async with Client(ADDRESS) as client:
        await client.publish(StreamId("n", "k"), [b"x"] * 5)

async def consume(name):
    async with Client(ADDRESS) as client:
        await client.publish(StreamId("n", "k"), [b"x"] * 5)
        async with client.subscribe(name, "n/*", start="earliest") as consumer:
            async for batch in consumer:
                await batch.ack()
                break

async def cut_off(name):
    try:
        async with Client(ADDRESS) as client:
            await client.publish(StreamId("n", "k"), b"x")
            os.kill(SILO, signal.SIGSTOP)
    finally:
        os.kill(SILO, signal.SIGCONT)

for number in range(ROUNDS):
    asyncio.run(WHAT(f"s{number}"))
"""


@pytest.mark.long
@pytest.mark.parametrize("what", ["publish", "consume", "cut_off"])
def test_a_client_leaves_nothing_for_the_next_loop(silo: SiloProcess, what: str):
    """If grpc still had a callback for a closed loop, it would write an error to stderr."""
    program = PROGRAM.replace("ROUNDS", str(ROUNDS)).replace("WHAT", what)
    command = [sys.executable, "-c", program, silo.address, str(silo.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def entered(client: Client) -> None:
    async with client.subscribe("s", "n/*"):
        pass


async def handled(client: Client) -> None:
    async def handle(event: Event) -> None: ...

    await client.subscribe("s", "n/*", handle)


CALLS: list[Callable[[Client], Awaitable[Any]]] = [
    lambda client: client.stream("n", "k").publish(b"x"),
    lambda client: client.publish_many([(StreamId("n", "k"), b"x")]),
    lambda client: client.subscriptions(),
    lambda client: client.pull("s", "me"),
    entered,
    handled,
    Client.flush,
    Client.aclose,
    Client.__aenter__,
]


async def refused_in_another_loop(client: Client) -> None:
    for call in CALLS:
        with pytest.raises(InvalidArgument, match="a client belongs to the event loop that opened it: "):
            await call(client)


async def test_in_another_loop_a_client_says_to_which_it_belongs(silo: SiloProcess, caplog: pytest.LogCaptureFixture):
    async with Client(silo.address) as client, client.subscribe("here", "n/*") as consumer:

        async def elsewhere() -> None:
            await refused_in_another_loop(client)
            with pytest.raises(InvalidArgument, match="event loop"):
                await anext(consumer)

        failed: list[BaseException] = []

        def thread() -> None:
            try:
                asyncio.run(elsewhere())
            except BaseException as error:  # shown below
                failed.append(error)

        other = threading.Thread(target=thread, daemon=True)
        other.start()
        await asyncio.to_thread(other.join, 30)
        assert not failed, failed
        assert not other.is_alive()
        await client.publish(StreamId("n", "k"), b"x")
        assert (await anext(consumer)).payloads() == [b"x"]
    assert not caplog.records


LATER = """
import asyncio, sys
from headrace import Client
async def opened():
    return await Client(sys.argv[1]).__aenter__()
client = asyncio.run(opened())
try:
    asyncio.run(client.stream("n", "k").publish(b"x"))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_after_its_loop_a_client_says_so_in_one_line(silo: SiloProcess):
    command = [sys.executable, "-c", LATER, silo.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("InvalidArgument a client belongs to the event loop that opened it: ")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
