"""The command line as a real process."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.silo.commandline import ENVIRONMENT, SCRIPT, Headrace, Ran, Start


@pytest.fixture
def headrace(tmp_path: Path) -> Headrace:
    """Run `headrace` in `tmp_path` to its end."""

    def run(*arguments: object, stdin: bytes = b"", **environment: str) -> Ran:
        done = subprocess.run(
            [SCRIPT, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            cwd=tmp_path,
            env=ENVIRONMENT | environment,
            timeout=100,
            check=False,
        )
        return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())

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
