"""A folder in memory for the files of `make test`.

The tests write many small files and sync them: on a disk, that takes a sixth of the processors' time. The folder is
removed at the end. `make slow`, `make quick`, and the second run of tests that failed use the disk.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

VARIABLE = "HEADRACE_TESTS_IN_MEMORY"
"""`make test` sets it."""
MEMORY = Path("/dev/shm")
NEEDED = 12 << 30
"""Bytes of memory that have to be available: the files take 3 GB, and the processes of the tests 6."""


def use_memory_folder(config: pytest.Config) -> None:
    """Make the folder, let all processes of this run use it for temporary files, and remove it at the end.

    Do nothing if no programs run from there, as in Docker's containers, or if there is too little memory.
    """
    if not os.environ.pop(VARIABLE, "") or not _is_usable():
        return
    folder = tempfile.mkdtemp(prefix="hr", dir=MEMORY)  # short: a socket's path has at most 107 bytes
    Path(folder).chmod(0o1777)  # as /tmp: servers run as another user
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def _is_usable() -> bool:
    try:
        disk = os.statvfs(MEMORY)
        memory = Path("/proc/meminfo").read_text()
    except OSError:
        return False
    available = next(int(line.split()[1]) << 10 for line in memory.splitlines() if line.startswith("MemAvailable:"))
    return not disk.f_flag & os.ST_NOEXEC and min(disk.f_bavail * disk.f_frsize, available) >= NEEDED
