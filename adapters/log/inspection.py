"""A log opened read-only for a check: nothing is written, and writers do not wait."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import lmdb
import msgspec

from ...streams.errors import DataDirectoryError, PermissionDenied, StorageError, StorageFull
from ...streams.private_files import FILE_MODE, make_file
from .damage import DamagedRange, OnProgress, count_blocks, find_damage, still_damaged
from .datafile import RELAXED, check_file
from .environment import MAX_QUEUES, NO_SPACE, has_log
from .options import LogOptions
from .rows import META_KEY, meta_of
from .transactions import Database, LogDatabases, LogSnapshot

_ATTEMPTS = 3
"""Number of reads before damage counts. Reads take no lock: a writer may reuse pages during a read, which looks like
damage."""


class QueueReport(NamedTuple):
    """The result of checking one queue."""

    end: int
    """The offset of the next batch."""
    damages: list[DamagedRange]
    faults: list[str]
    """Faults in the queue's counts, although all blocks are sound."""


class LogInspection:
    """The log in a directory, opened read-only. Use as a context manager. All methods block.

    A process cannot open a log both in this way and as a provider.
    """

    def __init__(self, path: Path) -> None:
        """Raises DataDirectoryError if the log is missing, or so damaged that nothing of it can be read."""
        self.path = path
        if not has_log(path):
            raise DataDirectoryError(f"'{path}': the log was deleted or emptied")
        lock = path / "lock.mdb"
        self._locked = os.access(lock, os.R_OK | os.W_OK, effective_ids=True)
        with self._translated():
            self._lmdb = lmdb.open(
                os.fspath(path), map_size=LogOptions().map_bytes, max_dbs=MAX_QUEUES + 4, readonly=True,
                lock=self._locked, readahead=True,
            )  # fmt: skip
        try:
            check_file(self._lmdb, path)
            with self._translated():
                self._databases = self._open()
        except BaseException:
            self._lmdb.close()
            raise

    def _open(self) -> LogDatabases:
        def database(name: bytes) -> Database:  # outside of `begin`: a handle ends with the transaction that opened it
            return self._lmdb.open_db(name, create=False)

        meta = database(b"meta")
        with self._lmdb.begin(buffers=True) as txn:
            try:
                made = meta_of(txn.get(META_KEY, b"", db=meta))
            except msgspec.DecodeError:
                raise DataDirectoryError(f"'{self.path}': its record of format and queues is damaged") from None
        self.queues, self.provider, self.identity = made.queues, made.provider, str(made.created_us)
        state, producers, gaps = database(b"state"), database(b"producers"), database(b"gaps")
        return LogDatabases(
            meta, state, producers, gaps, [database(b"queue-%05d" % queue) for queue in range(made.queues)]
        )

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise DataDirectoryError(f"'{self.path}': {error}") from None

    @contextmanager
    def reading(self) -> Generator[LogSnapshot]:
        """Open a read transaction. Copy records that are used after it."""
        with self._translated(), self._lmdb.begin(buffers=True) as txn:
            yield LogSnapshot(txn, self._databases, self.path)

    def ends(self) -> list[int]:
        """Return the offset of the next batch of each queue."""
        with self.reading() as snapshot:
            return [snapshot.tail(queue).next for queue in range(self.queues)]

    def was_used(self) -> bool:
        """Return whether any queue has or had events."""
        return any(self.ends())

    def check(self, queue: int, on_progress: OnProgress) -> QueueReport:
        """Read a whole queue. Raises DataDirectoryError if its pages cannot be read."""
        for _ in range(1 if self._locked else _ATTEMPTS - 1):
            try:
                report = self._check(queue, on_progress)
            except DataDirectoryError:
                if self._locked:
                    raise
                continue
            if self._locked or not (report.damages or report.faults):
                return report
        return self._check(queue, on_progress)

    def _check(self, queue: int, on_progress: OnProgress) -> QueueReport:
        damages = find_damage(self, queue, on_progress)
        with self.reading() as snapshot:
            damages = [damage for damage in damages if damage in still_damaged(snapshot, queue, damage)]
            tail = snapshot.tail(queue)
            faults: list[str] = []
            if next(snapshot.blocks(queue, tail.next), None) is not None:
                faults.append(f"it ends at offset {tail.next}, but there are records behind that")
            elif not damages and count_blocks(snapshot.blocks(queue, 0)) != (tail.events, tail.nbytes):
                faults.append(f"its number of events or bytes is wrong: it says {tail.events:,} and {tail.nbytes:,}")
            return QueueReport(tail.next, damages, faults)

    def copy(self, target: Path) -> None:
        """Copy the log into the empty directory `target`, as one transaction left it. Writers do not wait.

        Raises PermissionDenied if this user may not lock the log, StorageFull, StorageError.
        """
        if not self._locked and (self.path / "lock.mdb").exists():
            raise PermissionDenied(f"'{self.path}': this user may not lock the log: run as the user that owns it")
        if (self.path / RELAXED).exists():
            make_file(target / RELAXED)
        try:
            self._lmdb.copy(os.fspath(target))
        except lmdb.Error as error:
            if getattr(error, "code", 0) in NO_SPACE:
                raise StorageFull(f"'{target}': no space left on the device: free some, and try again") from None
            raise StorageError(f"'{self.path}' cannot be copied to '{target}': {error}") from None
        (target / "data.mdb").chmod(FILE_MODE)

    def close(self) -> None:
        """Idempotent."""
        self._lmdb.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
