"""`headrace dev` on a project, as a process whose log can be waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.cli.commandline import ENVIRONMENT

TIMEOUT_S = 60.0


class DevelopmentProcess:
    """A running `headrace dev`. Its log is in a file."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] = ENVIRONMENT) -> None:
        self._log = folder / "dev.log"
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGINT)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def until(self, text: str, times: int = 1) -> str:
        """Wait until the log has a text so many times. Return the log."""
        deadline = time.monotonic() + TIMEOUT_S
        while (log := self.log).count(text) < times:
            assert self.process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.02)
        return log

    def end(self, number: int = signal.SIGINT) -> int:
        os.kill(self.process.pid, number)
        return self.process.wait(TIMEOUT_S)
