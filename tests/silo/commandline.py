"""The command line as a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = str(Path(sysconfig.get_path("scripts"), "headrace"))
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}


class Ran(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, which is one JSON document on one line."""
        assert self.code == 0, self
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def events(self) -> list[dict[str, Any]]:
        """stdout, which has a JSON document on each line."""
        return [json.loads(line) for line in self.out.splitlines()]

    def refused(self, code: int) -> str:
        """The one line on stderr of a command that failed with `code` and printed nothing but what it created."""
        assert (self.code, self.out) == (code, ""), self
        (line,) = [line for line in self.err.splitlines() if not line.startswith("headrace: created ")]
        assert line.startswith("headrace: ")
        return line.removeprefix("headrace: ")


Headrace = Callable[..., Ran]
Start = Callable[..., "subprocess.Popen[bytes]"]


def ended(process: subprocess.Popen[bytes]) -> Ran:
    """Wait for a process's end; stdout and stderr have what had not been read before."""
    out, err = process.communicate(timeout=60)
    return Ran(process.returncode, (out or b"").decode(), (err or b"").decode())
