"""Commands in messages to users. They are complete and quoted, so that they can be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path


def remedy(command: str, *arguments: object, data: Path | None = None, provider: str | None = None) -> str:
    """Return a command in backticks: `headrace repair queue --data DIR --provider NAME 0`. Options that are None are
    left out."""
    words = ["headrace", *command.split()]
    if data is not None:
        words += ["--data", str(data.absolute())]
    if provider is not None:
        words += ["--provider", str(provider)]
    return f"`{shlex.join([*words, *map(str, arguments)])}`"


def log_remedy(command: str, log: Path, *arguments: object) -> str:
    """Like `remedy`, for the log in the directory `log`, which is `DATA/providers/PROVIDER/log` in a data directory."""
    own = log.absolute().parent
    if own.parent.name != "providers":
        return remedy(command, *arguments)
    return remedy(command, *arguments, data=own.parent.parent, provider=own.name)
