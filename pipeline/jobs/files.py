"""An archive's directory, and how it changes: whole, or not at all, whatever is killed when.

    DIR/namespace=<name>/date=<day>/events-<run>-<number>.parquet
                                    the events: `<name>` with what is special percent-encoded, as Spark and Hive do
    DIR/_headrace/state.json        `State`: what is archived so far
    DIR/_headrace/intent.json       `Intent`: a change that is decided, and maybe half done
    DIR/_headrace/run-<n>-<unique>/ what Spark writes for a change, before it is decided
    DIR/_headrace/archive.lock      held (flock) by the process that archives
    DIR/_headrace/readers.lock      held, shared, by who reads; exclusively while a compaction puts its files into place

A change is: Spark writes files to a folder of the run, where no reader looks; they are made durable; the intent, which
lists every move, every file to remove and the state to be, is written, and from then on the change is decided; the
files are moved and removed; the state is replaced; the intent is removed. Whoever opens the archive finishes an intent
first, and each of its steps may be done twice; a folder without an intent was never decided, and is removed.
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

from ...streams.errors import Busy, DataDirectoryError, InvalidArgument, NotFound, StorageFull

FORMAT = 1
"""Version of the layout above."""
NAME_BYTES = 255
"""Limit of a directory's name, of the file system."""

_OWN = "_headrace"
_STATE, _INTENT, _READERS = "state.json", "intent.json", "readers.lock"
_NO_NAMESPACE = "__HIVE_DEFAULT_PARTITION__"
"""What Hive's layout has for an empty name."""
_SPECIAL = re.compile(r"[^A-Za-z0-9._~@+ -]", re.ASCII)
_GLOB = re.compile(r"[*?\[\]{}\\]")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_Document = TypeVar("_Document", bound=msgspec.Struct)


class Gap(msgspec.Struct, frozen=True):
    """Offsets of a queue that retention removed before they were archived: from `start` up to `end` (exclusive)."""

    queue: int
    start: int
    end: int


class State(msgspec.Struct, frozen=True):
    """What is archived."""

    source: Mapping[str, Any]
    """The provider and the streams: another is refused."""
    positions: Sequence[int]
    """By queue: all before it is in the archive, or in a gap."""
    run: int = 0
    """Number of the last change."""
    events: int = 0
    gaps: Sequence[Gap] = ()
    format: int = FORMAT


class Intent(msgspec.Struct, frozen=True):
    """A change that is decided. Paths are relative to the archive."""

    folder: str
    moves: Sequence[tuple[str, str]]
    removes: Sequence[str]
    state: State


class Partition(NamedTuple):
    """A directory of events, and the sizes in bytes of its files, by name."""

    path: str
    sizes: Mapping[str, int]


Step = Callable[[str], object]
"""Is told of each step of a change before it is taken: tests stop there."""


class Archive:
    """An archive's directory, held by this process. All methods block."""

    def __init__(self, path: Path, lock: Lock, state: State | None, on_step: Step) -> None:
        self.path = path
        self.state = state
        """None: nothing was archived yet."""
        self._lock = lock
        self._on_step = on_step

    @classmethod
    def open(cls, path: Path, on_step: Step = lambda _step: None) -> Self:
        """Take the directory, made where it is missing, and finish what another process had begun.

        Raises Busy while another process archives into it, DataDirectoryError where it is none, or of another version.
        """
        check_path(path)
        with _telling(path):
            _check_ours(path)
            own = path / _OWN
            own.mkdir(parents=True, exist_ok=True)
            lock = Lock.take(own / "archive.lock", f"archive {path} is written")
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
        """For Spark to write to; not there yet. What a lingering process still writes goes to another."""
        run = 1 + (self.state.run if self.state else 0)
        return self.path / _OWN / f"run-{run}-{uuid.uuid4().hex}"

    def change(self, folder: Path, state: State, removes: Sequence[str] = ()) -> int:
        """Take in what was written to `folder`, remove files, and go to `state`. Returns the new files' number.

        Raises InvalidArgument for a namespace whose name is too long, StorageFull.
        """
        with _telling(self.path):
            moves = self._moves(folder, state.run)
            self._on_step("sync")
            for source, _ in moves:
                sync(self.path / source)
            self._on_step("intent")
            intent = Intent(str(folder.relative_to(self.path)), moves, removes, state)
            write_json(self.path / _OWN / _INTENT, intent)
            self._finish(intent)
        return len(moves)

    def replace(self, state: State) -> None:
        """Go to another state, with the same files."""
        with _telling(self.path):
            write_json(self.path / _OWN / _STATE, state)
        self.state = state

    def readers_lock(self) -> Lock | None:
        """Keeps readers out. None while there is one."""
        try:
            return Lock.take(self.path / _OWN / _READERS, "")
        except Busy:
            return None

    def partitions(self) -> Iterator[Partition]:
        """All directories of events."""
        for namespace in sorted(self.path.glob("namespace=*")):
            for day in sorted(namespace.glob("date=*")):
                files = [file for file in day.iterdir() if file.suffix == ".parquet" and file.name[0] not in "._"]
                sizes = {file.name: file.stat().st_size for file in sorted(files)}
                yield Partition(str(day.relative_to(self.path)), sizes)

    def _moves(self, folder: Path, run: int) -> list[tuple[str, str]]:
        found = sorted(folder.glob("n=*/date=*/part-*.parquet"))
        return [
            (str(file.relative_to(self.path)), f"{_directory(file)}/events-{run:08d}-{number:05d}.parquet")
            for number, file in enumerate(found)
        ]

    def _recover(self) -> None:
        """Finish a change that another process had decided. Raises Busy where somebody reads what is to be removed."""
        intent = read_json(self.path / _OWN / _INTENT, Intent)
        if intent is not None and intent.removes:
            with Lock.take(self.path / _OWN / _READERS, f"archive {self.path} is read"):
                self._finish(intent)
        elif intent is not None:
            self._finish(intent)

    def _finish(self, intent: Intent) -> None:
        """Do what is left of a change. Every step may have been done."""
        own = self.path / _OWN
        for source, target in intent.moves:
            self._on_step("move")
            self._move(source, target)
        for gone in intent.removes:
            self._on_step("remove")
            (self.path / gone).unlink(missing_ok=True)
        self._on_step("directories")
        for directory in {str(Path(file).parent) for file in (*(to for _, to in intent.moves), *intent.removes)}:
            sync(self.path / directory)
            sync((self.path / directory).parent)
        sync(self.path)
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
                    f"archive {self.path}: damaged, {source} is gone, and not moved to {target} yet: bring it back, or "
                    "archive into another directory"
                ) from None

    def _sweep(self) -> None:
        """Remove what no intent has decided."""
        for folder in (self.path / _OWN).glob("run-*"):
            shutil.rmtree(folder, ignore_errors=True)


class Lock:
    """A right to a directory, freed by `release` or when the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, what: str, *, shared: bool = False) -> Self:
        """At once. Raises Busy, saying `what` is going on, where another process has it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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


def lock_for_reading(path: Path) -> Lock:
    """While it is held no compaction puts its files into place. One that was left half done is finished first.

    Raises Busy at the moment when one does so, NotFound where there is no archive.
    """
    if not (path / _OWN).is_dir():
        raise NotFound(f"archive {path}: there is none: it has no {_OWN}")
    with _telling(path):
        lock = Lock.take(path / _OWN / _READERS, f"archive {path} is compacted", shared=True)
        intent = read_json(path / _OWN / _INTENT, Intent)
        if intent is None or not intent.removes:
            return lock
        lock.release()
        Archive.open(path).close()
        return Lock.take(path / _OWN / _READERS, f"archive {path} is compacted", shared=True)


def check_path(path: Path) -> None:
    """Raise InvalidArgument for a directory that Spark would take for a pattern."""
    if _GLOB.search(str(path)):
        raise InvalidArgument(f"archive {path}: Spark takes one of *?[]{{}}\\ in a path for a pattern: name another")


def read_state(path: Path) -> State | None:
    """What is archived, None where nothing is. Raises DataDirectoryError for a damaged one, or another version's."""
    state = read_json(path / _OWN / _STATE, State)
    if state is not None and state.format != FORMAT:
        raise DataDirectoryError(
            f"archive {path}: has format {state.format}, this headrace reads format {FORMAT}: use the version that "
            "wrote it"
        )
    return state


def folder_name(namespace: str) -> str:
    """The directory's name of a namespace. Raises InvalidArgument where the file system has no such long names."""
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
    """Where a file goes: Spark's `n=<namespace in hex>/date=<day>`."""
    namespace = bytes.fromhex(file.parent.parent.name.removeprefix("n=x")).decode()
    return f"{folder_name(namespace)}/{file.parent.name}"


def _check_ours(path: Path) -> None:
    if path.exists() and not (path / _OWN).is_dir() and (found := next(path.iterdir(), None)):
        raise DataDirectoryError(
            f"archive {path}: not empty and not made by headrace (it has {found.name!r} and no {_OWN}): name another "
            "directory"
        )


class _telling:  # noqa: N801 (used as a function)
    """Errors of the file system as those of headrace."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in _NO_SPACE:
            raise StorageFull(f"archive {self._path}: no space left: free some, then run this again") from None
        named = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
        raise DataDirectoryError(f"archive {self._path}: cannot be used: {error.strerror}{named}") from None


def write_json(path: Path, document: msgspec.Struct) -> None:
    """Replace a file, durably: there is the old one, or the new one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(document)))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, kind: type[_Document]) -> _Document | None:
    """None where there is none. Raises DataDirectoryError for a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise DataDirectoryError(f"{path} is damaged: {error}: bring back a copy of it") from None
