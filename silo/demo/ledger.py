"""What a job of the demo was given, in order: one fixed-size record per delivered event, appended to a file.

A record is written (to the operating system, not to the disk) before the handler returns, and so before the event can
be acknowledged. So after kill -9 the ledger has every event that a checkpoint covers: if one that a checkpoint covered
never got here, it was lost, and if it comes again, it was doubled.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path

from ...streams import StorageFull

ROW = array("I").itemsize


class Ledger:
    """An append-only file of records of `record_bytes` each. What a full disk cut short is dropped on opening."""

    def __init__(self, path: Path, record_bytes: int = ROW) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        whole = os.fstat(self._descriptor).st_size // record_bytes
        os.ftruncate(self._descriptor, whole * record_bytes)

    def append(self, records: bytes) -> None:
        """Write records. Raises StorageFull where there is no space; what is there of them then is dropped."""
        written = os.write(self._descriptor, records)
        if written != len(records):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise StorageFull(f"{self.path}: no space left")

    def read(self) -> bytes:
        return self.path.read_bytes()

    def close(self) -> None:
        os.close(self._descriptor)
