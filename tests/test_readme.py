"""The README, followed from top to bottom in one directory, as a reader would."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from benchmarks.servers import java_home
from tests.servers import ValkeyServer

ROOT = Path(__file__).parent.parent
SILO_PORT, REDIS_PORT = 9465, 6379


class Block(NamedTuple):
    """A block of code, with the prose between it and the block before."""

    prose: str
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


class Reader:
    """Runs each block. A silo runs on, as in another terminal, until the next silo is started or all is done."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        self._silo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._silo.close()

    def follow(self, block: Block) -> str:
        """What the block prints."""
        named = re.findall(r"`([\w/]+\.(?:py|toml))`", block.prose.rpartition("```")[2])
        if block.language == "toml" or (named and block.language == "python"):
            file = self.directory / named[-1]
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
            return ""
        if block.language == "python":
            return self._run([sys.executable, "-c", block.text])
        return "".join(self._command(line.removeprefix("$ ")) for line in block.text.splitlines())

    def _command(self, command: str) -> str:
        if command == "make demo":  # tests/cli/test_demo.py runs it
            return ""
        if command.startswith("headrace silo"):
            self._silo.close()
            self._silo.enter_context(self._serving(command))
            return ""
        return self._run(["bash", "-c", command])

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.directory, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    @contextmanager
    def _serving(self, command: str) -> Generator[None]:
        workers = int(re.findall(r"--workers (\d+)|$", command)[0] or 1)
        with subprocess.Popen(
            command.split(), cwd=self.directory, env=self._environment, stderr=subprocess.PIPE, text=True
        ) as silo:
            assert silo.stderr is not None
            ready = 0
            while ready < workers:
                line = silo.stderr.readline()
                assert line, (command, silo.wait())
                ready += "silo is ready" in line
            yield
            silo.send_signal(signal.SIGINT)
            silo.communicate()
            assert silo.returncode == 0


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row. Each process begins at another place, because others may take the ports
    before they are used. The ports are below those that the system gives to connections."""
    begin = os.getpid() * 64 % 9_000
    for first in (20_000 + (begin + step) % 9_000 for step in range(0, 9_000, count)):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
    raise AssertionError("no ports are free")


@pytest.fixture
def new_valkey_server() -> Iterator[ValkeyServer]:
    """One without any keys: the README uses the name `default`."""
    with ValkeyServer() as server:
        yield server


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "end", ["## On Spark", pytest.param("## Guarantees", marks=(pytest.mark.spark, pytest.mark.slow))]
)
def test_all_blocks_run_in_their_order(
    end: str, tmp_path: Path, new_valkey_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "README.md").read_text()
    text = text[: text.index(end)].replace(f":{REDIS_PORT}", f":{new_valkey_server.port}")
    text = text.replace(str(SILO_PORT), str(free_ports(4)))
    if end != "## On Spark":
        monkeypatch.setenv("JAVA_HOME", str(java_home()))
    with Reader(tmp_path) as reader:
        printed = [reader.follow(block) for block in blocks(text)]
    everything = "\n".join(printed)
    assert printed[1] == "orders/42 b'paid'\n"
    assert "billing" in printed[2]
    assert "orders/43 [b'paid']" in everything
    if end != "## On Spark":
        assert re.search(r"\|\s*orders\|\s*3\|", everything), everything
        assert "archived 3 events" in everything
