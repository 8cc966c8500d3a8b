"""The examples of docs/consuming.md, run unchanged, except for the address."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.silos import SiloProcess

PAGE = (Path(__file__).parents[2] / "docs" / "consuming.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PUBLISH = """
import asyncio
from headrace import Client

async def main():
    async with Client("127.0.0.1:9465") as client:
        await client.stream("orders", "42").publish(b"placed")

asyncio.run(main())
"""


def run(program: str, silo: SiloProcess) -> str:
    program = program.replace("127.0.0.1:9465", silo.address)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "prints"),
    [
        (0, r"orders/42 0 b'placed'\norders/42 0\.1 b'paid'\n"),
        (1, r"b'placed'\n"),
        (2, r"\[[\d, ]+\]\n"),
        (3, r"orders/42 \[b'placed'\]\n"),
    ],
)
def test_the_examples_run(silo: SiloProcess, number: int, prints: str):
    if number:
        run(PUBLISH, silo)
    assert re.fullmatch(prints, run(EXAMPLES[number], silo))


def test_all_examples_are_run():
    assert len(EXAMPLES) == 4
