"""The programs of the examples in other languages, as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.silo_server import SiloServer

TIMEOUT_S = 60.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}


class Program:
    """One of the example's programs, with its output in a file that grows."""

    def __init__(self, folder: Path, output: Path, *command: str, stdin: int | None = None) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def lines(self) -> list[str]:
        text = self.output.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait until its output fulfils the condition."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(lines := self.lines):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {lines[-10:]}"
            assert time.monotonic() < deadline, f"{len(lines)} lines: {lines[-10:]}"
            time.sleep(0.02)
        return lines

    def send(self, lines: Sequence[str]) -> None:
        assert self.process.stdin
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.process.stdin.flush()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)


def numbered(count: int, first: int = 0) -> list[str]:
    return [f"{number}" for number in range(first, first + count)]


def of_stream(lines: Sequence[str], stream: str) -> list[str]:
    return [line.removeprefix(f"{stream} ") for line in lines if line.startswith(f"{stream} ")]


def first_times(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def stop_worker(silos: SiloServer, number: int) -> None:
    """End the first worker. Return when it is ready again."""
    ready = silos.log().count("-1 headrace.silo: silo is ready")
    (lock,) = (silos.directory / "data" / "locks" / ".silos").glob("*-1.lock")
    os.kill(int(lock.read_text()), number)
    deadline = time.monotonic() + TIMEOUT_S
    while silos.log().count("-1 headrace.silo: silo is ready") == ready:
        assert time.monotonic() < deadline, silos.log()
        time.sleep(0.02)
