"""The LMDB environment behind a log directory: opening it, transactions, and what its errors mean.

LMDB allows one open environment for a directory in a process, so the handles of a process share one `LogEnvironment`.
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

from ...streams.errors import DataDirectoryError, InvalidArgument, NotSupported, StorageError, StorageFull
from .acknowledgements import Acknowledgements
from .options import LogOptions
from .rows import FORMAT, META_KEY, Meta, meta_of, meta_row
from .transactions import Changes, Databases, Snapshot, Transaction

MAX_QUEUES = 4096
_MAX_READERS = 1022
_LOCK_FILE_BYTES = 64 * (_MAX_READERS + 2)
"""What LMDB makes of `_MAX_READERS`. Never more: processes that see different sizes would take slots beyond the map."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_A_LITTLE_BYTES = 1 << 20
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

    def __init__(self, path: Path, options: LogOptions, provider: str, queues: int | None) -> None:
        """Open the directory, which exists; make a log of it where it is empty, unless `queues` is None: as many as it
        has.

        Raises DataDirectoryError where it holds something else, InvalidArgument where it has another number of queues.
        """
        self.path = path
        self.options = options
        self.queues = queues or 0
        self.provider = provider
        self.created_us = 0
        """When the log was made, microseconds since 1970 UTC: what tells it from one that was here before."""
        self.only_read = queues is None
        """Nobody has opened it with options of its own."""
        self.inherited = False
        self.handles = 0
        self.acknowledgements = Acknowledgements()
        self._gate = _Gate()
        self._lmdb, self._databases = self._open()

    @contextmanager
    def reading(self) -> Generator[Snapshot]:
        """A read transaction. Copy what is to outlive it."""
        with self._begun(write=False) as txn:
            yield Snapshot(txn, self._databases)

    @contextmanager
    def writing(self) -> Generator[Changes]:
        """A write transaction, committed at the end, rolled back where the body raises. One at a time over all
        processes. Raises StorageFull or StorageError, and nothing has changed then."""
        self._check_there()
        with self._begun(write=True) as txn:
            yield Changes(txn, self._databases)

    def is_current(self) -> bool:
        """False where somebody deleted the log, or put another one in its place."""
        try:
            return _file(self.path) == self._data_file
        except FileNotFoundError:
            return False

    def _check_there(self) -> None:
        """Raise DataDirectoryError where somebody deleted the log: what is written there is gone at once."""
        if not self.is_current():
            raise DataDirectoryError(
                f"{self.path} was deleted or replaced while it was open, and nothing more is stored there: close it, "
                "and open it again"
            )

    def advance(self) -> None:
        """Commit next to nothing. LMDB lets the transaction after the next have the pages that this one frees, so when
        deleting has made space but no transaction fits, an empty one is what is missing."""
        with self.writing() as changes:
            changes.touch()

    def sync(self) -> None:
        """Wait until everything committed is on disk. Nothing to do where each commit waits."""
        with self._gate.shared(), _translated(self):
            self._lmdb.sync(force=True)

    def forget_dead_readers(self) -> None:
        """Free the slots of killed readers, which keep deleted space from being used again."""
        with self._gate.shared(), _translated(self):
            self._lmdb.reader_check()

    def reopen(self) -> None:
        """Close and open again, which LMDB asks for after it failed to write its meta page. Waits until no transaction
        is open."""
        with self._gate.alone(), _translated(self):
            self._lmdb.close()
            self._lmdb, self._databases = self._open()

    def take(self, options: LogOptions) -> None:
        """These from now on. Who only reads, and was here first, needs none."""
        self.only_read = False
        as_opened = (self.options.durability, self.options.map_bytes)
        self.options = options
        if as_opened != (options.durability, options.map_bytes):
            self.reopen()

    def close(self) -> None:
        with self._gate.alone():
            self._lmdb.close()

    @contextmanager
    def _begun(self, *, write: bool) -> Generator[Transaction]:
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

    def _open(self) -> tuple[lmdb.Environment, Databases]:
        with _opening(self.path, self.options.map_bytes):
            _make_lock_file(self.path)
            environment = self._open_lmdb()
            self._data_file = _file(self.path)
            try:
                _check_length(environment, self.path)
                environment.reader_check()
                with environment.begin(write=True, buffers=True) as txn:
                    return environment, self._open_databases(environment, txn)
            except BaseException:
                environment.close()
                raise

    def _open_lmdb(self) -> lmdb.Environment:
        return lmdb.open(
            os.fspath(self.path),
            map_size=self.options.map_bytes,
            max_dbs=MAX_QUEUES + 4,
            max_readers=_MAX_READERS,
            meminit=False,
            mode=0o644,
            readahead=True,
            sync=self.options.durability == "commit",
        )

    def _open_databases(self, environment: lmdb.Environment, txn: Transaction) -> Databases:
        is_new = txn.stat()["entries"] == 0
        if is_new and not self.queues:
            raise DataDirectoryError(f"{self.path} is no log: it is empty")
        meta = environment.open_db(b"meta", txn=txn, create=is_new)
        if is_new:
            made = Meta(format=FORMAT, queues=self.queues, provider=self.provider, created_us=time.time_ns() // 1000)
            txn.put(META_KEY, meta_row(made), db=meta)
        self._check(txn.get(META_KEY, db=meta))
        names = (b"state", b"producers", b"gaps", *(b"queue-%05d" % queue for queue in range(self.queues)))
        state, producers, gaps, *blocks = [environment.open_db(name, txn=txn, create=is_new) for name in names]
        return Databases(meta, state, producers, gaps, blocks)

    def _check(self, row: memoryview | None) -> None:
        try:
            meta = meta_of(b"" if row is None else row)
        except msgspec.DecodeError:
            raise DataDirectoryError(f"{self.path} is not a log: it is an LMDB database of something else") from None
        if meta.format != FORMAT:
            raise DataDirectoryError(f"{self.path} has format {meta.format}, this version reads format {FORMAT}")
        self.queues = self.queues or meta.queues
        self.created_us = meta.created_us
        if meta.queues != self.queues:
            raise InvalidArgument(
                f"{self.path} was made with {meta.queues} queues, not {self.queues}: the number of queues is fixed, "
                "because streams are dealt out by it"
            )


class _Gate:
    """Lets many use the environment, or one replace it."""

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
    def alone(self) -> Generator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._users)
            yield


_environments: dict[tuple[int, int], LogEnvironment] = {}
_registry = threading.Lock()


def acquire(path: Path, options: LogOptions, provider: str, queues: int | None) -> LogEnvironment:
    """The environment of a log directory, opened or shared; made where there is none, unless `queues` is None: as many
    as it has. Each is given back by `release`.

    Raises DataDirectoryError (foreign, damaged, not accessible), InvalidArgument (opened with other options), and
    NotSupported in the child of a fork whose parent has it open.
    """
    with _registry:
        key = _identity(path)
        environment = _environments.get(key)
        if environment is None:
            environment = _environments[key] = LogEnvironment(path, options, provider, queues)
        if environment.only_read and queues is not None:
            check_process(environment)
            environment.take(options)
        _check_shared(environment, options, queues)
        environment.handles += 1
        return environment


def release(environment: LogEnvironment) -> None:
    """Give back; the last one closes it."""
    with _registry:
        environment.handles -= 1
        if not environment.handles:
            for key in [key for key, one in _environments.items() if one is environment]:
                del _environments[key]
            environment.close()


def check_process(environment: LogEnvironment) -> None:
    """Raise NotSupported in a forked child: LMDB's locks belong to the process that opened it."""
    if environment.inherited:
        raise NotSupported(
            f"{environment.path} was opened before this process was forked from another, which LMDB does not allow: "
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
        raise InvalidArgument(f"{environment.path} is open in this process with {environment.queues} queues")
    if (options.durability, options.map_bytes) != (environment.options.durability, environment.options.map_bytes):
        raise InvalidArgument(f"{environment.path} is open in this process with another durability or map_bytes")


def _identity(path: Path) -> tuple[int, int]:
    try:
        path.mkdir(exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise DataDirectoryError(f"{path} cannot be a log directory: {error.strerror}") from None
    return found.st_dev, found.st_ino


def _file(path: Path) -> tuple[int, int]:
    found = (path / "data.mdb").stat()
    return found.st_dev, found.st_ino


def _make_lock_file(path: Path) -> None:
    """Give LMDB's lock file its space. LMDB maps it with holes: on a full disk, touching one kills the process.

    Not while this process has it open: closing a file gives up all locks of the process on it.
    """
    lock = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(lock, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(lock)


def _check_length(environment: lmdb.Environment, path: Path) -> None:
    """LMDB maps the file: to touch a page that is not there would kill the process."""
    expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    found = (path / "data.mdb").stat().st_size
    if found < expected:
        raise DataDirectoryError(f"{path / 'data.mdb'} is cut short: {found:,} bytes of {expected:,}")


@contextmanager
def _opening(path: Path, map_bytes: int) -> Generator[None]:
    """Say what errors of LMDB mean while a directory is opened."""
    try:
        yield
    except lmdb.MemoryError:
        raise StorageError(
            f"{path}: this system does not give {map_bytes:,} bytes of address space: lower the option map_bytes"
        ) from None
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        raise DataDirectoryError(f"{path} is not a log: it is an LMDB database of something else") from None
    except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise DataDirectoryError(f"{path} is not a log, or is damaged: {error}") from None
    except lmdb.Error as error:
        if getattr(error, "code", 0) in (*_NO_SPACE, errno.EIO):
            raise _storage_error(error, path, map_bytes) from None
        raise DataDirectoryError(f"{path} cannot be opened: {error}") from None
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageFull(f"{path}: no space left on the device: free some, then open it again") from None
        raise DataDirectoryError(f"{path} cannot be opened: {error.strerror}") from None


@contextmanager
def _translated(environment: LogEnvironment) -> Generator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _storage_error(error, environment.path, environment.options.map_bytes) from error


def _storage_error(error: lmdb.Error, path: Path, map_bytes: int) -> StorageError:
    code = getattr(error, "code", 0)
    if isinstance(error, lmdb.MapFullError):
        return StorageFull(f"{path}: the log holds all of its map_bytes={map_bytes:,}: raise it, or retain less")
    if isinstance(error, lmdb.DiskError) or code in _NO_SPACE or (code == errno.EIO and not _can_grow(path)):
        return StorageFull(f"{path}: no space left on the device; publish again once there is some")
    if isinstance(error, lmdb.MapResizedError):
        return StorageError(f"{path}: the log has outgrown map_bytes={map_bytes:,}: open it with as much as the others")
    if isinstance(error, _DAMAGED):
        return DataDirectoryError(f"{path}: the log is damaged: {error}")
    return StorageError(f"{path}: {error}")


def _can_grow(path: Path) -> bool:
    """Whether there is space for a little more. LMDB reports a write that was cut short as an I/O error."""
    try:
        data = os.open(path / "data.mdb", os.O_RDWR)
        try:
            os.posix_fallocate(data, os.fstat(data).st_size, _A_LITTLE_BYTES)
        finally:
            os.close(data)
    except OSError as error:
        return error.errno not in _NO_SPACE
    return True
