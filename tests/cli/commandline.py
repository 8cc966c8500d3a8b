"""The command line as a real process."""

from __future__ import annotations

import json
import os
import pty
import re
import sysconfig
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.cli.forking import Process, forking

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
        """The one line on stderr of a command that failed with `code` and printed nothing else, except creations."""
        assert (self.code, self.out) == (code, ""), self
        (line,) = [line for line in self.err.splitlines() if not line.startswith("headrace: created ")]
        assert line.startswith("headrace: ")
        return line.removeprefix("headrace: ")


Headrace = Callable[..., Ran]
Start = Callable[..., Process]


def on_terminal(directory: Path, *arguments: object, columns: int = 80) -> str:
    """What `headrace` prints in `directory` on a terminal of so many columns, without colours."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    environment = ENVIRONMENT | {"TERM": "xterm"}
    called = list(map(str, arguments))
    process = forking().start(called, cwd=directory, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # EIO: the process has closed its side
        while chunk := os.read(ours, 4096):
            shown += chunk
    os.close(ours)
    assert process.wait(60) == 0, shown
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r\n", "\n")


def ended(process: Process) -> Ran:
    """Wait for a process's end. The result has the rest of stdout and stderr."""
    out, err = process.communicate(timeout=60)
    return Ran(process.returncode, (out or b"").decode(), (err or b"").decode())
