"""docs/client.md: its examples run, and its numbers are those of the code."""

import re
import subprocess
import sys
from pathlib import Path

from headrace.client import connection, publishing, transport
from headrace.client.client import UNKNOWN_PLACE
from headrace.client.window import WindowLimits
from headrace.streams.events import MAX_EVENT_BYTES
from headrace.streams.publishing import MAX_BATCH_BYTES
from tests.client.silos import SiloProcess

TEXT = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(example: str, silo: SiloProcess) -> str:
    script = example.replace("127.0.0.1:9465", silo.address)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_example_publishes(silo: SiloProcess):
    assert re.fullmatch(r"stored at \d+\n", run(EXAMPLES[0], silo))


def test_a_producer_of_its_own_goes_on(silo: SiloProcess):
    imports, body = EXAMPLES[1].split("\n\n", 1)
    indented = "".join(f"        {line}\n" for line in body.splitlines())
    program = (
        f"import asyncio\n{imports}\nfrom headrace import Client, StreamId\n"
        "items = [(StreamId('n', 'k'), b'x')]\n"
        f"async def main():\n    async with Client('127.0.0.1:9465') as client:\n{indented}"
        "        print(done)\nasyncio.run(main())\n"
    )
    assert [run(program, silo) for _ in range(2)] == ["0\n", "1\n"]


def test_the_example_with_threads_prints_the_consumed_events(silo: SiloProcess):
    assert run(EXAMPLES[2], silo) == "orders/42 [b'paid']\n"


def test_numbers_are_those_of_the_code():
    limits = WindowLimits()
    assert (limits.request_bytes, limits.request_batches) == (1 << 20, 1024)
    assert (limits.requests, limits.bytes) == (32, 8 << 20)
    assert (publishing.MAX_BYTES, MAX_BATCH_BYTES, MAX_EVENT_BYTES) == (32 << 20, 3 << 20, 1 << 20)
    assert connection.KEEPALIVE_MS + connection.KEEPALIVE_TIMEOUT_MS == 15_000
    assert (transport.FIRST_PAUSE_S, transport.MAX_PAUSE_S) == (0.05, 1.0)
    assert UNKNOWN_PLACE.offset == -1
