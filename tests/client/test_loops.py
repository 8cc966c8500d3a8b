"""Clients that follow each other in one process, each in an event loop of its own."""

import subprocess
import sys

import pytest

from tests.client.silos import SiloProcess

ROUNDS = 6
PROGRAM = """
import asyncio, os, signal, sys
from headrace.streams import Client, StreamId

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


@pytest.mark.parametrize("what", ["publish", "consume", "cut_off"])
def test_a_client_leaves_nothing_for_the_next_loop(silo: SiloProcess, what: str):
    """What grpc still had to tell a loop that is closed, it would write to stderr."""
    program = PROGRAM.replace("ROUNDS", str(ROUNDS)).replace("WHAT", what)
    command = [sys.executable, "-c", program, silo.address, str(silo.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
