"""Directories and files that no other user can use, whatever the umask says.

Everything in a data directory is made here. Other users of the machine must not read events or control data, and a lock
or a pipe that they can open lets them stop a silo.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
WIDER = 0o077
"""The permissions of other users, which a private directory or file does not give."""


def make_directory(path: Path) -> None:
    """Make a directory and those above it, as far as they are missing. Raises OSError."""
    if not path.parent.exists():
        make_directory(path.parent)
    path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def make_file(path: Path) -> None:
    """Make an empty file, unless there is one, or it cannot be made: opening it says why."""
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def opener(path: str, flags: int) -> int:
    """The `opener` of `open`, for a file that may be made by it."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
