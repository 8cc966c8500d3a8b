"""An archive's directory and its changes. A change is complete or has no effect, also if the process is killed.

    DIR/namespace=<name>/date=<day>/events-<run>-<number>.parquet
                                    the events; special characters of `<name>` are percent-encoded, as by Spark and Hive
    DIR/_headrace/state.json        `ArchiveState`: the archived positions
    DIR/_headrace/intent.json       `ArchiveIntent`: a change that is decided, and maybe half done
    DIR/_headrace/run-<n>-<unique>/ the files that Spark writes for a change, before it is decided
    DIR/_headrace/archive.lock      held (flock) by the process that archives
    DIR/_headrace/readers.lock      held by readers (shared), and by a compaction during its moves (exclusive)

A change has these steps:

1. Spark writes files to a folder of the run, which readers do not read. The files are made durable.
2. The intent is written. It lists every move, every file to remove, and the next state. Now the change is decided.
3. The files are moved and removed, the state is replaced, the intent is removed.

A process that opens the archive finishes an intent first; each of its steps may be done twice. A folder without an
intent was never decided, and is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from ...streams.durable import sync_path
from ...streams.errors import Busy, DataDirectoryError, InvalidArgument, NotFound, StorageFull
from ...streams.private_files import FILE_MODE, opener

FORMAT = 1
"""Version of the layout above."""
NAME_BYTES = 255
"""The file system's limit of a directory's name."""

_OWN = "_headrace"
_STATE, _INTENT, _READERS = "state.json", "intent.json", "readers.lock"
_NO_NAMESPACE = "__HIVE_DEFAULT_PARTITION__"
"""Hive's name of an empty namespace."""
_SPECIAL = re.compile(r"[^A-Za-z0-9._~@+ -]", re.ASCII)
_GLOB = re.compile(r"[*?\[\]{}\\]")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_Document = TypeVar("_Document", bound=msgspec.Struct)


class ArchiveGap(msgspec.Struct, frozen=True):
    """Offsets of a queue that retention removed before they were archived: from `start` up to `end` (exclusive)."""

    queue: int
    start: int
    end: int


class ArchiveState(msgspec.Struct, frozen=True):
    """The archived positions."""

    source: Mapping[str, Any]
    """The provider and the streams. Others are refused."""
    positions: Sequence[int]
    """By queue: each event before the position is in the archive, or in a gap."""
    run: int = 0
    """Number of the last change."""
    events: int = 0
    gaps: Sequence[ArchiveGap] = ()
    format: int = FORMAT


class ArchiveIntent(msgspec.Struct, frozen=True):
    """A change that is decided. Paths are relative to the archive."""

    folder: str
    moves: Sequence[tuple[str, str]]
    removes: Sequence[str]
    state: ArchiveState


class DayDirectory(NamedTuple):
    """A directory of events, and the sizes in bytes of its files, by name."""

    path: str
    sizes: Mapping[str, int]


Step = Callable[[str], object]
"""Called with the name of each step of a change, before the step. Tests stop the change there."""


class Archive:
    """An archive's directory, held by this process. All methods block."""

    def __init__(self, path: Path, lock: ArchiveLock, state: ArchiveState | None, on_step: Step) -> None:
        self.path = path
        self.state = state
        """None: nothing was archived yet."""
        self._lock = lock
        self._on_step = on_step

    @classmethod
    def open(cls, path: Path, on_step: Step = lambda _step: None) -> Self:
        """Lock the directory, create it if it is missing, and finish the change of another process.

        Raise Busy while another process archives into it, DataDirectoryError if it is no archive or of another version.
        """
        check_path(path)
        with _file_errors(path):
            _check_ours(path)
            own = path / _OWN
            own.mkdir(parents=True, exist_ok=True)
            lock = ArchiveLock.take(own / "archive.lock", f"archive '{path}' is written")
            try:
                archive = cls(path, lock, None, on_step)
                archive._recover()
                archive.state = read_state(path)
                archive._sweep()
            except BaseException:
                lock.release()
                raise
        return archive

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_folder(self) -> Path:
        """Return a new folder for Spark, not created yet. A task that was left over from before has another folder."""
        run = 1 + (self.state.run if self.state else 0)
        return self.path / _OWN / f"run-{run}-{uuid.uuid4().hex}"

    def change(self, folder: Path, state: ArchiveState, removes: Sequence[str] = ()) -> int:
        """Move the files of `folder` into the archive, remove files, and replace the state. Return the number of moves.

        Raise InvalidArgument if the name of a namespace is too long, StorageFull.
        """
        with _file_errors(self.path):
            moves = self._moves(folder, state.run)
            self._on_step("sync")
            for source, _ in moves:
                sync_path(self.path / source)
            self._on_step("intent")
            intent = ArchiveIntent(str(folder.relative_to(self.path)), moves, removes, state)
            write_json(self.path / _OWN / _INTENT, intent)
            self._finish(intent)
        return len(moves)

    def replace_state(self, state: ArchiveState) -> None:
        """Replace the state. The files stay."""
        with _file_errors(self.path):
            write_json(self.path / _OWN / _STATE, state)
        self.state = state

    def readers_lock(self) -> ArchiveLock | None:
        """Return a lock against readers. None: a reader has it."""
        try:
            return ArchiveLock.take(self.path / _OWN / _READERS, "")
        except Busy:
            return None

    def day_directories(self) -> Iterator[DayDirectory]:
        """Yield all directories of events."""
        for namespace in sorted(self.path.glob("namespace=*")):
            for day in sorted(namespace.glob("date=*")):
                files = [file for file in day.iterdir() if file.suffix == ".parquet" and file.name[0] not in "._"]
                sizes = {file.name: file.stat().st_size for file in sorted(files)}
                yield DayDirectory(str(day.relative_to(self.path)), sizes)

    def _moves(self, folder: Path, run: int) -> list[tuple[str, str]]:
        found = sorted(folder.glob("n=*/date=*/part-*.parquet"))
        return [
            (str(file.relative_to(self.path)), f"{_directory(file)}/events-{run:08d}-{number:05d}.parquet")
            for number, file in enumerate(found)
        ]

    def _recover(self) -> None:
        """Finish a decided change of another process. Raise Busy if it removes files and a reader has the archive."""
        intent = read_json(self.path / _OWN / _INTENT, ArchiveIntent)
        if intent is not None and intent.removes:
            with ArchiveLock.take(self.path / _OWN / _READERS, f"archive '{self.path}' is read"):
                self._finish(intent)
        elif intent is not None:
            self._finish(intent)

    def _finish(self, intent: ArchiveIntent) -> None:
        """Complete a change. Each step may be done already."""
        own = self.path / _OWN
        for source, target in intent.moves:
            self._on_step("move")
            self._move(source, target)
        for gone in intent.removes:
            self._on_step("remove")
            (self.path / gone).unlink(missing_ok=True)
        self._on_step("directories")
        for directory in {str(Path(file).parent) for file in (*(to for _, to in intent.moves), *intent.removes)}:
            sync_path(self.path / directory)
            sync_path((self.path / directory).parent)
        sync_path(self.path)
        self._on_step("state")
        write_json(own / _STATE, intent.state)
        self._on_step("done")
        (own / _INTENT).unlink()
        self.state = intent.state
        shutil.rmtree(self.path / intent.folder, ignore_errors=True)

    def _move(self, source: str, target: str) -> None:
        there = self.path / target
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            (self.path / source).replace(there)
        except FileNotFoundError:
            if not there.exists():
                raise DataDirectoryError(
                    f"archive '{self.path}': damaged, {source} is gone, and not moved to {target} yet: restore it, or "
                    "archive into another directory"
                ) from None

    def _sweep(self) -> None:
        """Remove the folders of undecided changes."""
        for folder in (self.path / _OWN).glob("run-*"):
            shutil.rmtree(folder, ignore_errors=True)


class ArchiveLock:
    """A lock on a directory. `release` or the end of the process frees it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, what: str, *, shared: bool = False) -> Self:
        """Take the lock, without waiting. Raise Busy if another process has it; its text begins with `what`."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise Busy(f"{what} by another process: wait until it has ended") from None
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_for_reading(path: Path) -> ArchiveLock:
    """Return a lock that prevents the moves of compactions. A half done compaction is finished first.

    Raise Busy during the moves of a compaction, NotFound if there is no archive.
    """
    if not (path / _OWN).is_dir():
        raise NotFound(f"archive '{path}': there is none: it has no {_OWN}")
    with _file_errors(path):
        lock = ArchiveLock.take(path / _OWN / _READERS, f"archive '{path}' is compacted", shared=True)
        intent = read_json(path / _OWN / _INTENT, ArchiveIntent)
        if intent is None or not intent.removes:
            return lock
        lock.release()
        Archive.open(path).close()
        return ArchiveLock.take(path / _OWN / _READERS, f"archive '{path}' is compacted", shared=True)


def check_path(path: Path) -> None:
    """Raise InvalidArgument for a directory that Spark would take for a pattern."""
    if _GLOB.search(str(path)):
        raise InvalidArgument(f"archive '{path}': Spark takes one of *?[]{{}}\\ in a path for a pattern: name another")


def read_state(path: Path) -> ArchiveState | None:
    """Return the archive's state, or None. Raise DataDirectoryError if it is damaged or of another version."""
    state = read_json(path / _OWN / _STATE, ArchiveState)
    if state is not None and state.format != FORMAT:
        raise DataDirectoryError(
            f"archive '{path}': has format {state.format}, this headrace reads format {FORMAT}: use the version that "
            "wrote it"
        )
    return state


def folder_name(namespace: str) -> str:
    """Return the directory's name of a namespace. Raise InvalidArgument if it is too long for the file system."""
    escaped = _SPECIAL.sub(lambda match: match[0] if match[0] > "\x7f" else f"%{ord(match[0]):02X}", namespace)
    if escaped == _NO_NAMESPACE:
        escaped = f"%5F{escaped[1:]}"
    name = f"namespace={escaped or _NO_NAMESPACE}"
    if len(name.encode()) > NAME_BYTES:
        raise InvalidArgument(
            f"namespace {namespace!r} is too long for the name of a directory, which has {NAME_BYTES} bytes: leave it "
            "out, by the namespaces that are archived"
        )
    return name


def _directory(file: Path) -> str:
    """Return the directory for a file of Spark, in `n=<namespace in hex>/date=<day>`."""
    namespace = bytes.fromhex(file.parent.parent.name.removeprefix("n=x")).decode()
    return f"{folder_name(namespace)}/{file.parent.name}"


def _check_ours(path: Path) -> None:
    if path.exists() and not (path / _OWN).is_dir() and (found := next(path.iterdir(), None)):
        raise DataDirectoryError(
            f"archive '{path}': not empty and not made by headrace (it has {found.name!r} and no {_OWN}): name another "
            "directory"
        )


class _file_errors:  # noqa: N801 (used as a function)
    """Turns errors of the file system into errors of headrace."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in _NO_SPACE:
            raise StorageFull(f"archive '{self._path}': no space left: free some, then run this again") from None
        named = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
        raise DataDirectoryError(f"archive '{self._path}': cannot be used: {error.strerror}{named}") from None


def write_json(path: Path, document: msgspec.Struct) -> None:
    """Replace a file, durably and atomically."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "wb", opener=opener) as file:
        file.write(msgspec.json.format(msgspec.json.encode(document)))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_path(path.parent)


def read_json(path: Path, kind: type[_Document]) -> _Document | None:
    """Return the document in a file, or None if there is no file. Raise DataDirectoryError if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise DataDirectoryError(f"'{path}' is damaged: {error}: restore a copy of it") from None
