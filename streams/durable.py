"""Directories and files whose names survive a power failure.

A sync of a file makes its content durable, but not its name. The name is in the directory, which must be synced, too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .private_files import make_directory


def sync_path(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_directory(directory: Path) -> None:
    """Create a private directory, and its parents, if they are missing.

    Their names are durable when this returns, also if another process created a directory just now. Raises OSError.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    make_directory(directory)
    for each in reversed(missing or [directory]):
        with suppress(PermissionError):  # a directory without read permission cannot be synced
            sync_path(each.parent)
