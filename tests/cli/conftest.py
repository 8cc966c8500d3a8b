"""The command line as a real process."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cli.commandline import ENVIRONMENT, Headrace, Ran, Start
from tests.cli.forking import Process, forking
from tests.client.silos import silo, silos
from tests.servers import postgres_server, postgres_url, redis_server

__all__ = ("postgres_server", "postgres_url", "redis_server", "silo", "silos")


@pytest.fixture
def headrace(tmp_path: Path) -> Headrace:
    """Run `headrace` in `tmp_path` to its end."""

    def run(*arguments: object, stdin: bytes = b"", **environment: str) -> Ran:
        code, out, err = forking().run(list(map(str, arguments)), stdin, tmp_path, ENVIRONMENT | environment, 100)
        return Ran(code, out.decode(), err.decode())

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `headrace`, or the `program` with its arguments, in `tmp_path`; kill it at the end of the test."""
    processes: list[Process] = []

    def begin(*arguments: object, stderr: int = subprocess.PIPE, program: Sequence[str] | None = None) -> Process:
        pipe = subprocess.PIPE
        called = list(map(str, arguments))
        process: Process
        if program is None:
            process = forking().start(called, cwd=tmp_path, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=stderr)
        else:
            process = subprocess.Popen(
                [*program, *called], cwd=tmp_path, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=stderr
            )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
