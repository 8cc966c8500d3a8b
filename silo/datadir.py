"""The data directory of an embedded provider, and the locks in it.

    DIR/headrace.json            the marker: {"format": 1}; where the control store is a server also "control", which
                                 says where, and "id"
    DIR/control.db               the control store (SQLite), if not
    DIR/providers/<provider>/    what the provider's adapter keeps
    DIR/locks/<provider>/<subscription>.lock
                                 held (flock) by the process that serves the subscription, or shared by the silos of a
                                 cluster; its text is that process's id, or one of theirs
    DIR/locks/.silos/<name>.lock held by the silo of a cluster that has the name
    DIR/demo/                    ledgers of the demo
    DIR/staging/<provider>/      what Spark's sink has written and not published yet (headrace.pipeline.staging)

A directory is ours when it has the marker. A missing or empty one becomes ours; anything else is refused untouched, so
that a mistyped path never mixes event logs with somebody's files. The marker appears complete or not at all, and two
processes may make the same directory at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from ..streams.errors import Busy, DataDirectoryError, InvalidArgument, StorageError, StorageFull
from ..streams.subscriptions import check_stored_name

FORMAT = 1
"""Version of the layout above. Raised when an older headrace could not read what this one writes."""
MARKER = "headrace.json"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SQLITE_MAGIC = b"SQLite format 3\0"
_UNFINISHED = f".{MARKER}."
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class DataDirectory(NamedTuple):
    """A directory that was checked and is ours."""

    path: Path
    id: str = ""
    """What tells it from every other, where its control data is elsewhere."""

    @property
    def control_db(self) -> Path:
        return self.path / "control.db"

    def provider_dir(self, name: str) -> Path:
        """The provider's own directory; made where it is missing. Raises InvalidArgument for a bad name."""
        return _make(self.path / "providers" / check_provider_name(name))


def open_data_directory(path: str | os.PathLike[str], control: str | None = None) -> DataDirectory:
    """Check that `path` is a data directory, or make it one where it is missing or empty.

    `control` is the URL of the database that has its control data instead of `control.db`. The marker says where that
    is, for who looks elsewhere would find no progress, and repeat or delete what is not done.

    Raises DataDirectoryError with one clear line: a file, foreign (not empty, and not made by headrace), damaged, of
    another format, or not writable. StorageFull where there is no space for the marker.
    """
    directory, where = Path(path).absolute(), None if control is None else _shown(control)
    _make(directory)
    try:
        marker = _read_marker(directory)
        if marker is None:
            _claim(directory, where)
        else:
            _check_marker(directory, marker, where)
    except OSError as error:
        raise _refusal(directory, error) from None
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise DataDirectoryError(f"data directory {directory}: not writable by this user")
    return DataDirectory(directory, _id(directory) if control is not None else "")


def find_data_directory(path: str | os.PathLike[str]) -> DataDirectory:
    """The data directory at `path`, for who only reads its queues: nothing is made, and its control data may be
    anywhere.

    Raises DataDirectoryError where it is missing, foreign, damaged, or of another format.
    """
    directory = Path(path).absolute()
    try:
        marker = _read_marker(directory)
    except OSError as error:
        raise _refusal(directory, error) from None
    if marker is None:
        raise DataDirectoryError(f"{directory} is no data directory: it has no {MARKER}; check its name")
    _check_format(directory, marker)
    return DataDirectory(directory)


def check_provider_name(name: str) -> str:
    """Return `name`, or raise InvalidArgument: it is part of a path."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is no provider name: letters, digits, dot, dash and underscore, at most 128, "
            "starting with a letter or digit"
        )
    return name


class DirectoryLock:
    """An exclusive right of one process. Freed by `release`, or when the process ends, however it ends."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self.path = path

    def release(self) -> None:
        """Free the lock. Idempotent. The file stays: removing it would free a successor's lock as well."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        """One that was taken for somebody who was cancelled meanwhile is free again."""
        self.release()


def lock_subscription(
    directory: DataDirectory, provider: str, subscription: str, *, shared: bool = False
) -> DirectoryLock:
    """Take the right to serve a subscription, at once: exclusive, or shared with the other silos of a cluster. Raises
    Busy, naming a process that has it."""
    check_stored_name(subscription)
    what = f"subscription {subscription} of provider {provider} is served"
    return lock(directory, check_provider_name(provider), subscription, what, shared=shared)


def lock(directory: DataDirectory, group: str, name: str, what: str, *, shared: bool = False) -> DirectoryLock:
    """Take the lock `name` of `group`, both plain file names, at once: `shared`, or exclusive.

    Raises Busy, saying `what` is going on "by process" so and so. A group that is no provider begins with a dot.
    """
    path = _make(directory.path / "locks" / group) / f"{name}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _refusal(directory.path, error) from None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace") or "unknown"
        os.close(descriptor)
        raise Busy(f"{what} by process {holder}: stop that one first") from None
    except OSError as error:
        os.close(descriptor)
        raise _refusal(directory.path, error) from None
    return DirectoryLock(descriptor, path)


SILOS = ".silos"
"""Group of the locks that the silos of a cluster hold, by name."""


def is_free(directory: DataDirectory, group: str, name: str) -> bool:
    """Whether the process is gone that held the lock. False where that cannot be told."""
    try:
        descriptor = os.open(directory.path / "locks" / group / f"{name}.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _make(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(directory, error) from None
    return directory


def _read_marker(directory: Path) -> bytes | None:
    try:
        return (directory / MARKER).read_bytes()
    except FileNotFoundError:
        return None


def _shown(control: str) -> str:
    """Where a database is, without who may use it."""
    url = urlsplit(control)
    port = f":{url.port}" if url.port else ""
    return f"{url.scheme.partition('+')[0]}://{url.hostname or ''}{port}{url.path}"


def _check_marker(directory: Path, marker: bytes, control: str | None) -> None:
    content = _check_format(directory, marker)
    _check_control(directory, content.get("control"), control)
    if control is None:
        _check_control_db(DataDirectory(directory))


def _check_format(directory: Path, marker: bytes) -> Mapping[str, object]:
    """What the marker says."""
    try:
        content = msgspec.json.decode(marker, type=dict[str, object])
    except msgspec.DecodeError:
        raise DataDirectoryError(f"data directory {directory}: damaged, {MARKER} is no JSON object") from None
    version = content.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise DataDirectoryError(f"data directory {directory}: damaged, {MARKER} has no number 'format'")
    if version != FORMAT:
        raise DataDirectoryError(
            f"data directory {directory}: has format {version}, this headrace reads format {FORMAT}: "
            "use the version that wrote it"
        )
    return content


def _check_control(directory: Path, stored: object, control: str | None) -> None:
    if stored == control:
        return
    if stored is None:
        raise DataDirectoryError(
            f"data directory {directory}: its control data is in its own control.db, not in {control}: leave out "
            "cluster.store, or name another directory"
        )
    if control is None:
        raise DataDirectoryError(
            f"data directory {directory}: its control data is in {stored}, so it is not to be opened by itself: ask a "
            "silo (--server), or name that database as cluster.store"
        )
    raise DataDirectoryError(
        f"data directory {directory}: its control data is in {stored}, not in {control}: name that database as "
        f'cluster.store, or, where it moved, change "control" in {directory / MARKER} to the new one'
    )


def _id(directory: Path) -> str:
    content = msgspec.json.decode(_read_marker(directory) or b"{}", type=dict[str, object])
    return str(content.get("id", ""))


def _check_control_db(directory: DataDirectory) -> None:
    try:
        with directory.control_db.open("rb") as file:
            magic = file.read(len(_SQLITE_MAGIC))
    except FileNotFoundError:
        if _entries(directory.path / "providers"):
            raise DataDirectoryError(
                f"data directory {directory.path}: damaged, it has queues but control.db is missing"
            ) from None
        return
    if magic not in (b"", _SQLITE_MAGIC):
        raise DataDirectoryError(f"data directory {directory.path}: damaged, control.db is no SQLite database")


def _claim(directory: Path, control: str | None) -> None:
    """Write the marker into a directory that has nothing in it."""
    foreign = [entry for entry in _entries(directory) if not entry.startswith(_UNFINISHED) and entry != "lost+found"]
    if (directory / MARKER).exists():  # another process made it between our two looks
        return
    if foreign:
        raise DataDirectoryError(
            f"data directory {directory}: not empty and not made by headrace (it has {foreign[0]!r} and no "
            f"{MARKER}): name another directory"
        )
    unfinished = directory / f"{_UNFINISHED}{os.getpid()}"
    try:
        content = {"format": FORMAT}
        if control is not None:
            content |= {"control": control, "id": uuid.uuid4().hex}
        write_through(unfinished, msgspec.json.encode(content))
        with suppress(FileExistsError):  # another process's, made meanwhile, stays as it is
            (directory / MARKER).hardlink_to(unfinished)
        sync_directory(directory)
    finally:
        unfinished.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make durable which files it has."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_through(path: Path, content: bytes) -> None:
    """Write a file whose content is durable when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _entries(directory: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(entry.name for entry in directory.iterdir())
    return []


def _refusal(directory: Path, error: OSError) -> StorageError:
    if error.errno in _SPACE_ERRORS:
        return StorageFull(f"data directory {directory}: no space left: free some, then run this again")
    if isinstance(error, FileExistsError | NotADirectoryError):
        return DataDirectoryError(f"data directory {directory}: it, or a part of its path, is a file, not a directory")
    return DataDirectoryError(f"data directory {directory}: cannot be used: {error.strerror}")
