"""The LMDB environment of a log directory: open it, begin transactions, and translate LMDB's errors.

LMDB allows a process to open a directory only once, so the handles of a process share one `LogEnvironment`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec

from ...streams.durable import sync_path
from ...streams.errors import DataDirectoryError, InvalidArgument, NotSupported, StorageError, StorageFull
from ...streams.open_files import OpenFile
from ...streams.private_files import DIRECTORY_MODE, FILE_MODE
from ...streams.remedies import log_remedy
from .acknowledgements import PendingAcknowledgements
from .datafile import check_file, note_relaxed
from .options import LogOptions
from .rows import FORMAT, META_KEY, MetaRow, meta_of, meta_row
from .transactions import LogChanges, LogDatabases, LogSnapshot, Transaction

MAX_QUEUES = 4096
_MAX_READERS = 1022
_LOCK_FILE_BYTES = 64 * (_MAX_READERS + 2)
"""The size that LMDB gives the lock file for `_MAX_READERS`. It must not be larger: processes that see different sizes
would use slots beyond the map."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GROWTH_PROBE_BYTES = 1 << 20
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class LogEnvironment:
    """The open environment of one log directory, shared by the handles of this process; see `acquire`.

    All methods block, and may be called from any thread.
    """

    def __init__(self, path: Path, options: LogOptions, provider: str, queues: int | None, *, create: bool) -> None:
        """Open an existing directory. If it is empty, make a log in it if `create` is True. `queues`: None stands for
        the number of queues of the log.

        Raises DataDirectoryError if the directory holds something else, InvalidArgument if the log has another number
        of queues.
        """
        self.path = path
        self.options = options
        self._create = create
        self.queues = queues or 0
        self.provider = provider
        self.made_for = provider
        """The provider that the log was made for, as the log itself records it."""
        self.created_us = 0
        """When the log was made, in microseconds since 1970 UTC. Differs from that of an earlier log in this place."""
        self.read_only = queues is None
        """Whether only read-only handles are open so far: these have no options of their own."""
        self.inherited = False
        self.handles = 0
        self.acknowledgements = PendingAcknowledgements()
        self._gate = _Gate()
        self._lmdb, self._databases = self._open()

    @contextmanager
    def reading(self) -> Generator[LogSnapshot]:
        """Open a read transaction. Copy records that are used after it. Raises StorageError."""
        with self._transaction(write=False) as txn:
            yield LogSnapshot(txn, self._databases, self.path)

    @contextmanager
    def writing(self) -> Generator[LogChanges]:
        """Open a write transaction. It is committed at the end, or rolled back if the body raises.

        Only one is open at a time over all processes. Raises StorageFull or StorageError; then nothing has changed.
        Raises DataDirectoryError if the log was deleted or replaced: everything written to it would be lost.
        """
        self._data_file.check_current(self.path)
        with self._transaction(write=True) as txn:
            yield LogChanges(txn, self._databases, self.path)
        # Again after the commit: a log that was deleted before it does not have the changes.
        self._data_file.check_current(self.path)

    def is_current(self) -> bool:
        """Return False if the log was deleted or replaced by another one. Raises StorageError if that is not known."""
        return self._data_file.is_current()

    def release_freed_pages(self) -> None:
        """Commit almost nothing, so that LMDB can reuse the pages that a deletion has freed.

        LMDB reuses them only in the second transaction after the deletion. So this makes space if the log is full
        although batches were deleted.
        """
        with self.writing() as changes:
            changes.touch()

    def sync(self) -> None:
        """Wait until all commits are on disk. Needed with durability `relaxed` only."""
        with self._gate.shared(), _translated(self):
            self._lmdb.sync(force=True)

    def forget_dead_readers(self) -> None:
        """Free the slots of killed readers. Until then, LMDB does not reuse space that was deleted after they began to
        read."""
        with self._gate.shared(), _translated(self):
            self._lmdb.reader_check()

    def reopen(self) -> None:
        """Close and open again, as LMDB requires after it failed to write its meta page. Waits until no transaction is
        open. Raises DataDirectoryError if the log was deleted or replaced."""
        with self._gate.exclusive(), _translated(self):
            self._data_file.check_current(self.path)
            self._lmdb.close()
            self._lmdb, self._databases = self._open()

    def adopt_options(self, options: LogOptions) -> None:
        """Use these options from now on. Called when the first writing handle opens a log that is open read-only."""
        self.read_only = False
        as_opened = (self.options.durability, self.options.map_bytes)
        self.options = options
        if as_opened != (options.durability, options.map_bytes):
            self.reopen()

    def close(self) -> None:
        with self._gate.exclusive():
            self._lmdb.close()

    @contextmanager
    def _transaction(self, *, write: bool) -> Generator[Transaction]:
        for attempt in (1, 2):
            with self._gate.shared(), _translated(self):
                try:
                    txn = self._lmdb.begin(write=write, buffers=True)
                except lmdb.PanicError:
                    if attempt == 2:
                        raise
                else:
                    with txn:
                        yield txn
                    return
            self.reopen()

    def _open(self) -> tuple[lmdb.Environment, LogDatabases]:
        with _opening(self.path, self.options.map_bytes):
            if not self._create and not has_log(self.path):
                raise _missing(self.path, self.provider)
            _make_lock_file(self.path)
            if self.options.durability == "relaxed":
                note_relaxed(self.path)
            environment = self._open_lmdb()
            self._data_file = OpenFile(self.path / "data.mdb")
            try:
                check_file(environment, self.path)
                environment.reader_check()
                with environment.begin(write=True, buffers=True) as txn:
                    opened = self._open_databases(environment, txn)
                if self._create:
                    # Also with durability `relaxed`: the control store records the log next, and then the log is never
                    # made again.
                    environment.sync(force=True)
                self._create = False  # from now on a missing log is an error: it was deleted
            except BaseException:
                environment.close()
                raise
            return environment, opened

    def _open_lmdb(self) -> lmdb.Environment:
        return lmdb.open(
            os.fspath(self.path),
            map_size=self.options.map_bytes,
            max_dbs=MAX_QUEUES + 4,
            max_readers=_MAX_READERS,
            meminit=False,
            mode=FILE_MODE,
            readahead=True,
            sync=self.options.durability == "commit",
        )

    def _open_databases(self, environment: lmdb.Environment, txn: Transaction) -> LogDatabases:
        is_new = txn.stat()["entries"] == 0
        if is_new and not self._create:
            raise _missing(self.path, self.provider)
        meta = environment.open_db(b"meta", txn=txn, create=is_new)
        if is_new:
            # Done before the first commit, because other processes assume that the name of a log is durable.
            sync_path(self.path)
            sync_path(self.path.parent)
            made = MetaRow(format=FORMAT, queues=self.queues, provider=self.provider, created_us=time.time_ns() // 1000)
            txn.put(META_KEY, meta_row(made), db=meta)
        self._check(txn.get(META_KEY, db=meta))
        names = (b"state", b"producers", b"gaps", *(b"queue-%05d" % queue for queue in range(self.queues)))
        state, producers, gaps, *blocks = [environment.open_db(name, txn=txn, create=is_new) for name in names]
        return LogDatabases(meta, state, producers, gaps, blocks)

    def _check(self, row: memoryview | None) -> None:
        try:
            meta = meta_of(b"" if row is None else row)
        except msgspec.DecodeError:
            raise DataDirectoryError(f"'{self.path}' is not a log: it is an LMDB database of something else") from None
        if meta.format != FORMAT:
            raise DataDirectoryError(
                f"'{self.path}' has format {meta.format}, this version reads format {FORMAT}: open it with the version "
                "of headrace that made it"
            )
        self.queues = self.queues or meta.queues
        self.created_us = meta.created_us
        self.made_for = meta.provider
        if meta.queues != self.queues:
            raise InvalidArgument(
                f"'{self.path}' was made with {meta.queues} queues, not {self.queues}: the number of queues is fixed, "
                "because it decides which stream is in which queue"
            )


class _Gate:
    """A lock: many threads may use the environment at once, or one may replace it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0

    @contextmanager
    def shared(self) -> Generator[None]:
        with self._changed:
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._users)
            yield


_environments: dict[tuple[int, int], LogEnvironment] = {}
_registry = threading.Lock()


def acquire(
    path: Path, options: LogOptions, provider: str, queues: int | None, *, create: bool = True
) -> LogEnvironment:
    """Open the environment of a log directory, or share the one that is open. Give it back with `release`.

    If there is no log, make one if `create` is True. `queues`: None stands for the number of queues of the log, and
    never makes one.

    Raises DataDirectoryError (foreign, damaged, not accessible, missing), InvalidArgument (open with other options),
    and NotSupported in the child of a fork whose parent has it open.
    """
    create = create and queues is not None
    with _registry:
        key = _directory_identity(path, provider, create=create)
        environment = _environments.get(key)
        if environment is None:
            environment = LogEnvironment(path, options, provider, queues, create=create)
            _environments[key] = environment
        if environment.read_only and queues is not None:
            check_process(environment)
            environment.adopt_options(options)
        _check_shared(environment, options, queues)
        environment.handles += 1
        return environment


def release(environment: LogEnvironment) -> None:
    """Give the environment back. It is closed when its last handle gives it back."""
    with _registry:
        environment.handles -= 1
        if not environment.handles:
            for key in [key for key, one in _environments.items() if one is environment]:
                del _environments[key]
            environment.close()


def check_process(environment: LogEnvironment) -> None:
    """Raise NotSupported in a forked child: LMDB's locks belong to the process that opened the environment."""
    if environment.inherited:
        raise NotSupported(
            f"'{environment.path}' was opened before this process was forked from another, which LMDB does not allow: "
            "use multiprocessing's start method 'spawn', or open it only after the fork"
        )


def _mark_inherited() -> None:
    for environment in _environments.values():
        environment.inherited = True


os.register_at_fork(after_in_child=_mark_inherited)


def _check_shared(environment: LogEnvironment, options: LogOptions, queues: int | None) -> None:
    check_process(environment)
    if queues is None:
        return
    if environment.queues != queues:
        raise InvalidArgument(f"'{environment.path}' is open in this process with {environment.queues} queues")
    if (options.durability, options.map_bytes) != (environment.options.durability, environment.options.map_bytes):
        raise InvalidArgument(f"'{environment.path}' is open in this process with another durability or map_bytes")


def has_log(path: Path) -> bool:
    """Return whether a log directory holds a database. LMDB would make a new one if its file is missing or empty."""
    try:
        return (path / "data.mdb").stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def _missing(path: Path, provider: str) -> DataDirectoryError:
    return DataDirectoryError(
        f"'{path}': the log of provider {provider!r} was deleted or emptied: restore it from a backup, or begin a new "
        f"one with {log_remedy('repair log', path)}"
    )


def _directory_identity(path: Path, provider: str, *, create: bool) -> tuple[int, int]:
    try:
        if create:
            path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        found = path.stat()
    except FileNotFoundError:
        if not create:
            raise _missing(path, provider) from None
        raise DataDirectoryError(f"'{path}' cannot be a log directory: No such file or directory") from None
    except OSError as error:
        raise DataDirectoryError(f"'{path}' cannot be a log directory: {error.strerror}") from None
    return found.st_dev, found.st_ino


def _make_lock_file(path: Path) -> None:
    """Allocate the disk space of LMDB's lock file. LMDB maps it with holes: on a full disk, a write to one kills the
    process.

    Not to be called while this process has the log open: closing the file would drop all locks of the process on it.
    """
    lock = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        os.posix_fallocate(lock, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(lock)


@contextmanager
def _opening(path: Path, map_bytes: int) -> Generator[None]:
    """Translate errors that occur while a directory is opened."""
    try:
        yield
    except lmdb.MemoryError:
        raise StorageError(
            f"'{path}': the system refused {map_bytes:,} bytes of address space: lower the option map_bytes"
        ) from None
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        raise DataDirectoryError(f"'{path}' is not a log: it is an LMDB database of something else") from None
    except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise DataDirectoryError(f"'{path}' is not a log, or is damaged: {error}") from None
    except lmdb.Error as error:
        if getattr(error, "code", 0) in (*NO_SPACE, errno.EIO):
            raise _storage_error(error, path, map_bytes) from None
        raise DataDirectoryError(f"'{path}' cannot be opened: {error}") from None
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StorageFull(f"'{path}': no space left on the device: free some space, then open it again") from None
        raise DataDirectoryError(f"'{path}' cannot be opened: {error.strerror}") from None


@contextmanager
def _translated(environment: LogEnvironment) -> Generator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _storage_error(error, environment.path, environment.options.map_bytes) from error


def _storage_error(error: lmdb.Error, path: Path, map_bytes: int) -> StorageError:
    code = getattr(error, "code", 0)
    if isinstance(error, lmdb.MapFullError):
        return StorageFull(f"'{path}': the log has reached map_bytes={map_bytes:,}: raise the option, or retain less")
    if isinstance(error, lmdb.DiskError) or code in NO_SPACE or (code == errno.EIO and not _can_grow(path)):
        return StorageFull(f"'{path}': no space left on the device: free some space, then publish again")
    if isinstance(error, lmdb.MapResizedError):
        return StorageError(
            f"'{path}': the log is larger than map_bytes={map_bytes:,}: set the option to the value of other processes"
        )
    if isinstance(error, _DAMAGED):
        return DataDirectoryError(f"'{path}': the log is damaged: {error}: restore it from a backup")
    return StorageError(f"'{path}': {error}")


def _can_grow(path: Path) -> bool:
    """Return whether the disk has space left. LMDB reports a write that was cut short as an I/O error."""
    try:
        data = os.open(path / "data.mdb", os.O_RDWR)
        try:
            os.posix_fallocate(data, os.fstat(data).st_size, _GROWTH_PROBE_BYTES)
        finally:
            os.close(data)
    except OSError as error:
        return error.errno not in NO_SPACE
    return True
