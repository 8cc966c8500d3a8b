"""The deliveries to a job of the demo, in order: one fixed-size record per event, appended to a file.

A record is written (to the operating system, not to the disk) before the handler returns, and therefore before the
event can be acknowledged. After kill -9 the ledger has every event that a checkpoint covers. If an event of the
checkpoint is missing in the ledger, it was lost. If it is delivered again, it is a duplicate.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path

from ...streams.errors import StorageFull
from ...streams.private_files import FILE_MODE

ROW = array("I").itemsize


class DemoLedger:
    """An append-only file of records of `record_bytes` each. Opening drops a record that a full disk cut off."""

    def __init__(self, path: Path, record_bytes: int = ROW) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        whole = os.fstat(self._descriptor).st_size // record_bytes
        os.ftruncate(self._descriptor, whole * record_bytes)

    def append(self, records: bytes) -> None:
        """Write records. Raises StorageFull if there is no space, and drops an incomplete record."""
        written = os.write(self._descriptor, records)
        if written != len(records):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise StorageFull(f"'{self.path}': no space left")

    def read(self) -> bytes:
        return self.path.read_bytes()

    def close(self) -> None:
        os.close(self._descriptor)
