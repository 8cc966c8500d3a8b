"""A real uvicorn on a free port, with an application in a directory."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.cli.commandline import ENVIRONMENT

PATIENCE_S = 100


class Uvicorn:
    """`uvicorn APPLICATION`, whose output is in a file. `start` before use, `stop` or `clean_up` after.

    Connections wait while no worker runs."""

    def __init__(self, directory: Path, application: str, workers: int = 1) -> None:
        self.directory = directory
        self._log = directory / "uvicorn.log"
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._command = [
            sys.executable, "-m", "uvicorn", application, "--fd", str(self._socket.fileno()), "--workers", str(workers),
            "--app-dir", str(directory),
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("wb") as log:
            # Buffered: else a line is several writes, and those of the application and of uvicorn mix.
            environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": ""}
            self.process = subprocess.Popen(
                self._command, cwd=self.directory, env=environment, stdout=log, stderr=subprocess.STDOUT,
                pass_fds=[self._socket.fileno()], start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def until_logged(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until the output has matched `pattern` so often, and return the last match."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = list(re.finditer(pattern, self.log))
            if len(found) >= count:
                return found[-1]
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        raise AssertionError(f"{pattern} is not in the output:\n{self.log}")

    def stop(self) -> int:
        """Stop it in order, and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def clean_up(self) -> None:
        """Kill it and its workers, if they run."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
        self._socket.close()
