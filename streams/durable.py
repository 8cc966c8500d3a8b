"""Directories and files whose names outlive a power failure.

A sync of a file makes its content durable, not its name: that is in its directory, which has a sync of its own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .private_files import make_directory


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_directory(directory: Path) -> None:
    """Make a private directory, and those above it, if they are missing.

    Their names are durable when this returns, also the name of a directory that another process made just now. Raises
    OSError.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    make_directory(directory)
    for each in reversed(missing or [directory]):
        with suppress(PermissionError):  # a directory that may be entered and not read cannot be synced
            sync_directory(each.parent)
