"""The data directory of an embedded provider, and the locks in it.

    DIR/headrace.json            the marker: {"format": 1}; if the control store is on a server, also its address
                                 "control", and "id"
    DIR/control.db               the control store (SQLite), if it is not on a server
    DIR/providers/<provider>/    the data of the provider's adapter; the log is in log/data.mdb
    DIR/locks/<provider>/<subscription>.lock
                                 held (flock) by the process that serves the subscription, or shared by the silos of a
                                 cluster; its text is the id of a process that holds it
    DIR/locks/.silos/<name>.lock held by the silo of a cluster that has the name
    DIR/locks/.readers/<provider>.lock
                                 held in the same way by the process that serves subscriptions, if each queue of the
                                 provider has one reader
    DIR/demo/                    ledgers of the demo
    DIR/staging/<provider>/      data of Spark's sink that is not published yet (headrace.pipeline.staging)

A directory with the marker is a data directory. A missing or empty directory becomes one. Any other directory is
refused and not changed, so that a mistyped path never mixes event logs with other files. The marker is written
completely or not at all, and two processes may create the same directory at once.

Only the user that created it can use it: all directories in it have the mode 0700, all files 0600.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shlex
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import urlsplit
from weakref import WeakSet

import msgspec

from ..streams.arguments import check_path
from ..streams.durable import make_durable_directory, sync_path
from ..streams.errors import Busy, DataDirectoryError, InvalidArgument, StorageError, StorageFull
from ..streams.private_files import FILE_MODE, WIDER, make_directory, opener
from ..streams.remedies import remedy
from ..streams.subscriptions import check_provider_name, check_stored_name, parent_name
from .write_ahead_log import find_damage

FORMAT = 1
"""Version of the layout above. It is raised if an older headrace could not read the directory."""
MARKER = "headrace.json"

PERMISSIONS = "HEADRACE_DATA_PERMISSIONS"
"""Variable: `refuse` (the default) or `warn` about a data directory that other users can use."""

log = logging.getLogger("headrace.silo")

_UNFINISHED = f".{MARKER}."
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class DataDirectory(NamedTuple):
    """A data directory that was checked."""

    path: Path
    id: str = ""
    """The id of the directory, if its control data is in a database elsewhere; else ""."""

    @property
    def control_db(self) -> Path:
        return self.path / "control.db"

    def has_control_db(self) -> bool:
        """Whether control.db is there, and not empty."""
        return _size(self.control_db) > 0

    def provider_dir(self, name: str) -> Path:
        """Return the provider's directory. Create it if it is missing. Raises InvalidArgument for a bad name."""
        return _make(_make(self.path / "providers") / check_provider_name(name))


def open_data_directory(
    path: str | os.PathLike[str], control: str | None = None, *, control_lost: bool = False
) -> DataDirectory:
    """Check that `path` is a data directory, or make it one if it is missing or empty.

    `control` is the URL of the database that has its control data instead of `control.db`. The marker names that
    database, because a process with another database would find no progress, and repeat or delete events that are not
    done.

    With `control_lost` a missing or empty `control.db` is accepted: the caller makes a new one.

    Raises DataDirectoryError if it is a file, foreign (not empty, and not made by headrace), damaged, of another
    format, or not writable. Raises StorageFull if there is no space for the marker.
    """
    directory, shown = Path(check_path("data", path)).absolute(), None if control is None else _shown(control)
    try:
        check_marker_kept(directory)
        marker = _read_marker(directory) or _claim(directory, shown)
        _check_marker(directory, marker, shown, control_lost=control_lost)
    except OSError as error:
        raise _refusal(directory, error) from None
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise DataDirectoryError(f"data directory '{directory}': not writable by this user")
    _check_private(directory)
    return DataDirectory(directory, _id(directory) if control is not None else "")


def _check_private(directory: Path) -> None:
    """Refuse a directory that other users can look into, or warn of it if `PERMISSIONS` says so."""
    mode = _mode(directory)
    if not mode & WIDER:
        return
    wrong = f"data directory '{directory}': other users of this machine can use it, its mode is {mode:04o}"
    if _refuses_wider():
        raise DataDirectoryError(
            f"{wrong}: run `chmod 700 {shlex.quote(str(directory))}`; if you cannot, name a directory "
            f"that is not there yet, or trust those users and set {PERMISSIONS}=warn"
        )
    _warn_once(f"{wrong}; {PERMISSIONS}=warn lets it be")


def _mode(directory: Path) -> int:
    return stat.S_IMODE(directory.stat().st_mode)


def _refuses_wider() -> bool:
    chosen = os.environ.get(PERMISSIONS, "refuse")
    if chosen not in ("refuse", "warn"):
        raise InvalidArgument(f"{PERMISSIONS}={chosen}: expected refuse or warn; leave it out for refuse")
    return chosen == "refuse"


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def find_data_directory(path: str | os.PathLike[str]) -> DataDirectory:
    """Return the data directory at `path`, to read its queues only: nothing is created, and its control data may be
    anywhere.

    Raises DataDirectoryError if it is missing, foreign, damaged, or of another format, InvalidArgument for no path.
    """
    directory = Path(check_path("data", path)).absolute()
    try:
        check_marker_kept(directory)
        marker = _read_marker(directory)
    except OSError as error:
        raise _refusal(directory, error) from None
    if marker is None:
        raise DataDirectoryError(f"{str(directory)!r} is no data directory: it has no {MARKER}; check its name")
    _check_format(directory, marker)
    return DataDirectory(directory)


def logs(directory: Path) -> list[Path]:
    """Return the directories of the providers that have a log, by name."""
    return sorted(each for each in (directory / "providers").glob("*") if _size(each / "log" / "data.mdb"))


def check_control_kept(directory: DataDirectory) -> None:
    """Raise DataDirectoryError if the directory's own control store is missing or empty."""
    if directory.has_control_db():
        return
    if logs(directory.path):
        raise DataDirectoryError(
            f"data directory '{directory.path}': damaged, it has queues but control.db is missing or empty: restore it "
            f"from a backup, or make a new one from the logs with {remedy('repair control', data=directory.path)}"
        )
    raise DataDirectoryError(
        f"data directory '{directory.path}': damaged, control.db is missing or empty, and there is no log: check the "
        "directory's name, or restore it from a backup; see docs/damage.md"
    )


def check_marker_kept(directory: Path) -> None:
    """Raise DataDirectoryError if the marker is missing or empty, but other parts of a data directory are there."""
    own = DataDirectory(directory)
    is_used = own.control_db.exists() or (own.path / "providers").exists()
    if not is_used or (_read_marker(directory) or b"").strip():  # in this order: another process may make it now
        return
    write = f"""`echo '{{"format": {FORMAT}}}' > {shlex.quote(str(directory.absolute() / MARKER))}`"""
    way = f"write it anew with {write}" if own.control_db.exists() else "write it anew as docs/damage.md says"
    raise DataDirectoryError(
        f"data directory '{directory}': damaged, {MARKER} is missing or empty: restore it from a backup, or {way}"
    )


def check_control(directory: DataDirectory, control: str) -> None:
    """Raise DataDirectoryError if the control data of a directory is not in the database of this URL."""
    marker = _read_marker(directory.path) or b"{}"
    _check_control(directory.path, _check_format(directory.path, marker).get("control"), _shown(control))


class DirectoryLock:
    """An exclusive right of one process. Freed by `release`, or when the process ends, however it ends."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self.path = path
        _locks.add(self)

    def is_valid(self) -> bool:
        """Whether the lock is held, and its file is still the one that other processes lock."""
        if self._descriptor < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except OSError:
            return False

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
        """Free the lock also if the caller was cancelled while it was taken."""
        self.release()


_locks = WeakSet[DirectoryLock]()


def _close_inherited() -> None:
    """A forked process does not keep the locks of its parent, which may be killed before it."""
    for one in list(_locks):
        one.release()


os.register_at_fork(after_in_child=_close_inherited)


def lock_subscription(
    directory: DataDirectory, provider: str, subscription: str, *, shared: bool = False
) -> DirectoryLock:
    """Take the right to serve a subscription, without waiting: exclusive, or shared with the other silos of a cluster.
    Raises Busy, which names a process that has it."""
    check_stored_name(subscription)
    what = f"subscription {parent_name(subscription)!r} of provider {provider!r} is served"
    return lock(directory, check_provider_name(provider), subscription, what, shared=shared)


def lock_reader(directory: DataDirectory, provider: str, *, shared: bool = False) -> DirectoryLock:
    """Take the right to read the queues of a provider that have one reader each, as `lock_subscription` does."""
    what = f"provider {provider!r} has queues with one reader each: its subscriptions are served"
    return lock(directory, READERS, check_provider_name(provider), what, shared=shared)


def lock(directory: DataDirectory, group: str, name: str, what: str, *, shared: bool = False) -> DirectoryLock:
    """Take the lock `name` of `group`, both plain file names, without waiting: `shared`, or exclusive.

    Raises Busy with the text `WHAT by process ID`. The name of a group that is not a provider begins with a dot.
    """
    path = directory.path / "locks" / group / f"{name}.lock"
    try:
        make_directory(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise _refusal(directory.path, error) from None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace") or "unknown"
        os.close(descriptor)
        raise Busy(f"{what} by process {holder}", hint="stop that one first") from None
    except OSError as error:
        os.close(descriptor)
        raise _refusal(directory.path, error) from None
    return DirectoryLock(descriptor, path)


READERS = ".readers"
"""The group of the locks of `lock_reader`; the name of a lock is the provider's name."""

SILOS = ".silos"
"""The group of the locks that the silos of a cluster hold; the name of a lock is the silo's name."""


def place_of(held: DirectoryLock) -> str:
    """Return the place of a lock for `is_held`: a text that no other lock has, on any machine."""
    status = held.path.stat()
    return f"{_boot_id()}:{status.st_dev}:{status.st_ino}:{held.path}"


def running_silos(data: Path) -> list[str]:
    """Return the names of the silos of a cluster whose processes on this machine use a data directory."""
    found: list[str] = []
    for path in sorted((data / "locks" / SILOS).glob("*.lock")):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.stem)
    return found


def is_held(place: str) -> bool | None:
    """Return whether a process holds the lock at a place. None if this is not known: the lock is on another machine, or
    its file is missing or was replaced."""
    boot, _, rest = place.partition(":")
    device, _, rest = rest.partition(":")
    number, _, path = rest.partition(":")
    if boot != _boot_id():
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if (str(status.st_dev), str(status.st_ino)) != (device, number):
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(descriptor)


@cache
def _boot_id() -> str:
    """Return the id of this start of the machine; a text of its own for each process if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return uuid.uuid4().hex


def _make(directory: Path) -> Path:
    try:
        make_durable_directory(directory)
    except OSError as error:
        raise _refusal(directory, error) from None
    return directory


def _read_marker(directory: Path) -> bytes | None:
    try:
        return (directory / MARKER).read_bytes()
    except FileNotFoundError:
        return None


def _shown(control: str) -> str:
    """Return the address of a database, without user and password."""
    url = urlsplit(control)
    port = f":{url.port}" if url.port else ""
    return f"{url.scheme.partition('+')[0]}://{url.hostname or ''}{port}{url.path}"


def _check_marker(directory: Path, marker: bytes, control: str | None, *, control_lost: bool) -> None:
    content = _check_format(directory, marker)
    _check_control(directory, content.get("control"), control)
    if control is None:
        _check_control_db(DataDirectory(directory), control_lost=control_lost)


def _check_format(directory: Path, marker: bytes) -> Mapping[str, object]:
    """Return the content of the marker. Raise DataDirectoryError if it is damaged or of another format."""
    try:
        content = msgspec.json.decode(marker, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise DataDirectoryError(f"data directory '{directory}': damaged, {MARKER} is no JSON object") from None
    version = content.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise DataDirectoryError(f"data directory '{directory}': damaged, {MARKER} has no number 'format'")
    if version != FORMAT:
        raise DataDirectoryError(
            f"data directory '{directory}': has format {version}, this headrace reads format {FORMAT}: "
            "use the version that wrote it"
        )
    return content


def _check_control(directory: Path, stored: object, control: str | None) -> None:
    if stored == control:
        return
    if stored is None:
        raise DataDirectoryError(
            f"data directory '{directory}': its control data is in its own control.db, not in {control}: leave out "
            "cluster.store, or name another directory"
        )
    if control is None:
        raise DataDirectoryError(
            f"data directory '{directory}': its control data is in {stored}, so it is not to be opened by itself: ask "
            "a silo (--server), or name that database as cluster.store, or with --store in commands that have it"
        )
    raise DataDirectoryError(
        f"data directory '{directory}': its control data is in {stored}, not in {control}: name that database as "
        "cluster.store; if it was moved, run `headrace cluster move-store "
        f"--data {shlex.quote(str(directory))} --store URL`"
    )


def idle_directory(path: str | os.PathLike[str]) -> DataDirectory:
    """Return the data directory at `path`. Its control data must be in a database, and no silo may run on it.

    Raises DataDirectoryError, and Busy, which names a running process.
    """
    directory = find_data_directory(path)
    if not (own_id := _id(directory.path)):
        raise DataDirectoryError(
            f"data directory '{directory.path}': its control data is in its own control.db, so no database of it "
            "can move"
        )
    for file in sorted((directory.path / "locks" / SILOS).glob("*.lock")):
        lock(directory, SILOS, file.stem, f"the data directory is used by silo {file.stem!r},").release()
    return directory._replace(id=own_id)


def change_control(directory: DataDirectory, control: str) -> None:
    """Store the new address of the database with the directory's control data. Raises StorageError."""
    try:
        content = _check_format(directory.path, _read_marker(directory.path) or b"")
        changed = directory.path / f"{_UNFINISHED}{uuid.uuid4().hex}"
        write_through(changed, msgspec.json.encode({**content, "control": _shown(control)}))
        changed.replace(directory.path / MARKER)
        sync_path(directory.path)
    except OSError as error:
        raise _refusal(directory.path, error) from None


def _id(directory: Path) -> str:
    content = msgspec.json.decode(_read_marker(directory) or b"{}", type=dict[str, object])
    return str(content.get("id", ""))


def _check_control_db(directory: DataDirectory, *, control_lost: bool) -> None:
    """Raise DataDirectoryError if there are queues and the control store is missing or empty, or if its write-ahead log
    is damaged.

    control.db is not opened: closing it would drop the locks that SQLite holds for this process's open control stores.
    """
    if control_lost:
        return
    if _entries(directory.path / "providers"):
        check_control_kept(directory)
    if (damage := find_damage(directory.control_db)) is not None:
        raise DataDirectoryError(
            f"data directory '{directory.path}': damaged, {damage}: restore it from a backup, or continue with the "
            f"data saved before it with {remedy('repair control', data=directory.path)}"
        )


def _claim(directory: Path, control: str | None) -> bytes:
    """Write the marker into an empty directory. Return the marker, also if another process was first."""
    # Done before the marker is written: a process that finds the marker assumes that the directory's name is durable.
    _make(directory)
    foreign = [entry for entry in _entries(directory) if not entry.startswith(_UNFINISHED) and entry != "lost+found"]
    if (marker := _read_marker(directory)) is not None:  # another process made it meanwhile
        return marker
    if foreign:
        raise DataDirectoryError(
            f"data directory '{directory}': not empty and not made by headrace (it has {foreign[0]!r} and no "
            f"{MARKER}): name another directory"
        )
    if _refuses_wider():
        with suppress(PermissionError):  # created by the volume, and belongs to another user
            directory.chmod(_mode(directory) & ~WIDER)
        _check_private(directory)
    # A random name and not the process's id: threads share it, and containers with their own PID namespaces repeat it.
    unfinished = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
    try:
        content = {"format": FORMAT}
        if control is not None:
            content |= {"control": control, "id": uuid.uuid4().hex}
        write_through(unfinished, msgspec.json.encode(content))
        with suppress(FileExistsError):  # if another process wrote the marker meanwhile, that marker stays
            (directory / MARKER).hardlink_to(unfinished)
        sync_path(directory)
    finally:
        unfinished.unlink(missing_ok=True)
    return (directory / MARKER).read_bytes()


def write_through(path: Path, content: bytes) -> None:
    """Write a file whose content is durable when this returns."""
    with open(path, "wb", opener=opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _size(file: Path) -> int:
    with suppress(FileNotFoundError, NotADirectoryError):
        return file.stat().st_size
    return 0


def _entries(directory: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(entry.name for entry in directory.iterdir())
    return []


def _refusal(directory: Path, error: OSError) -> StorageError:
    if error.errno in _SPACE_ERRORS:
        return StorageFull(f"data directory '{directory}': no space left: free some, then run this again")
    if isinstance(error, FileExistsError | NotADirectoryError):
        return DataDirectoryError(f"data directory '{directory}': it or a part of its path is a file, not a directory")
    return DataDirectoryError(f"data directory '{directory}': cannot be used: {error.strerror}")
