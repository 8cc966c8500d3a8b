"""Directories and files that no other user can use, whatever the umask is.

All files of a data directory are created here. Other users of the machine must not read events or control data. If they
could open a lock or a pipe, they could stop a silo.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
WIDER = 0o077
"""The permissions of group and others, which private directories and files do not have."""


def make_directory(path: Path) -> None:
    """Create a directory and its parents if they are missing. Raises OSError."""
    if not path.parent.exists():
        make_directory(path.parent)
    path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def make_file(path: Path) -> None:
    """Create an empty file if it is missing. Errors are ignored, because opening the file reports them."""
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def opener(path: str, flags: int) -> int:
    """Open or create a private file: the argument `opener` of `open`."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
