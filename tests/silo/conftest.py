"""The command line as a real process."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.servers import postgres_server, postgres_url, redis_server
from tests.silo.commandline import ENVIRONMENT, SCRIPT, Headrace, Ran, Start
from tests.silo.forking import Forking

__all__ = ("postgres_server", "postgres_url", "redis_server")


@pytest.fixture(scope="session")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    made = Forking(tmp_path_factory.mktemp("f"))
    yield made
    made.close()


@pytest.fixture
def headrace(tmp_path: Path, forking: Forking) -> Headrace:
    """Run `headrace` in `tmp_path` to its end."""

    def run(*arguments: object, stdin: bytes = b"", **environment: str) -> Ran:
        code, out, err = forking.run(list(map(str, arguments)), stdin, tmp_path, ENVIRONMENT | environment, 100)
        return Ran(code, out.decode(), err.decode())

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `headrace` in `tmp_path`; whatever still runs at the end of the test is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(
        *arguments: object, stderr: int = subprocess.PIPE, program: Sequence[str] = (SCRIPT,)
    ) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*program, *map(str, arguments)], cwd=tmp_path, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=stderr
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
