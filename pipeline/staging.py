"""Where a sink keeps what is written and not published yet: a folder that the driver and the executors of Spark share.

    STAGING/<provider>/app-<application>/          of one `txnAppId`, percent-encoded; a hash of it where that is long
        <task>-<unique>.staged                     what one attempt of one task wrote
        <batch>.manifest                           which staged files are the batch, and how they are cut into chunks
        <batch>.done                               this batch, and every one before it, is published
    STAGING/<provider>/once-<unique>/              of a batch write without `txnAppId`, the same; removed at its end

A manifest appears complete or not at all, and the first one is the one: whoever commits the batch again, or at the same
time, publishes what it lists. It goes, with its files, only after the batch's `done` is durable. What no manifest names
is nobody's, and a sweep removes it some days later.

A staged file is a row of segments. A segment has a header, the table of its batches, and the batches as elements of the
field `batches` of a `PublishRequest`, so that publishing looks at none of their bytes:

    4 bytes  "HRS1", or "HRS2" where some of the batches have a delay or a priority
    u32      CRC-32 of all that follows in the segment
    u32      batches, n
    u64      bytes of the elements
    u32[n]   bytes of each element
    u32[n]   events of each batch
    u32[n]   how many bytes of each batch name its stream

All numbers are little-endian.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt

from ..silo.datadir import sync_directory, write_through
from ..streams.errors import DataDirectoryError, InvalidArgument, StorageError, StorageFull
from .grouping import Grouped

ORPHAN_AGE_S = 3 * 24 * 3600
"""What nobody names is removed after so long, in seconds: no task of a write that is alive has finished so long ago."""

_MAGIC, _SCHEDULED = b"HRS1", b"HRS2"
_HEADER = struct.Struct("<4sIIQ")
_TABLE = np.dtype("<u4")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_LOCAL = re.compile(r"file:(?://(?:localhost)?(?=/))?", re.IGNORECASE)
_NAME_CHARACTERS = 128
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STAGED, _MANIFEST, _DONE, _UNFINISHED = ".staged", ".manifest", ".done", ".unfinished"


class Cutting(NamedTuple):
    """How batches are cut into chunks, each published at once: noted in the manifest, since who goes on with a batch
    has to cut as it was begun."""

    max_bytes: int
    max_batches: int


class Manifest(msgspec.Struct, frozen=True):
    """What a batch is."""

    batch: int
    files: Sequence[str]
    """Names of staged files in the folder, in the order of the tasks."""
    cutting: Cutting
    format: int = 1


class Staged(NamedTuple):
    """A staged file, as the task tells the driver."""

    name: str
    partition: int
    events: int


class StagedFile:
    """What one attempt of a task writes. Visible to nobody until a manifest names it."""

    def __init__(self, folder: Path, partition: int, attempt: int) -> None:
        """Raises StorageError where the folder cannot be written."""
        self._folder = folder
        self._partition = partition
        self.name = f"{partition:05d}-{attempt}-{uuid.uuid4().hex}{_STAGED}"
        self._events = 0
        with _Telling(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / self.name).open("xb")

    def add(self, batches: Grouped) -> None:
        """Write batches behind those before. Raises StorageError, StorageFull."""
        columns = (batches.lengths, batches.counts, batches.prefixes)
        table = b"".join(np.array(column, _TABLE).tobytes() for column in columns)
        elements = b"".join(batches.pieces)
        crc = zlib.crc32(
            elements, zlib.crc32(table, zlib.crc32(struct.pack("<IQ", len(batches.counts), len(elements))))
        )
        with _Telling(self._folder):
            self._file.write(
                _HEADER.pack(_SCHEDULED if batches.scheduled else _MAGIC, crc, len(batches.counts), len(elements))
            )
            self._file.write(table)
            self._file.write(elements)
        self._events += sum(batches.counts)

    def finish(self) -> Staged:
        """Make it durable. A task without rows leaves no file, and an empty name."""
        with _Telling(self._folder):
            if not self._events:
                self.discard()
                return Staged("", self._partition, 0)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            sync_directory(self._folder)
        return Staged(self.name, self._partition, self._events)

    def discard(self) -> None:
        """Remove it. Idempotent."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            (self._folder / self.name).unlink(missing_ok=True)


class Segment(NamedTuple):
    """Batches as they were staged together. The arrays have one value for each."""

    elements: bytes
    lengths: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint32]
    prefixes: npt.NDArray[np.uint32]
    scheduled: bool = False


class Span(NamedTuple):
    """Some batches of a segment."""

    segment: Segment
    first: int
    last: int
    """Exclusive."""
    start: int
    """Where their elements begin in the segment, and end."""
    end: int


Chunk = Sequence[Span]
"""What is published at once."""


def read_segments(path: Path) -> Iterator[Segment]:
    """The segments of a staged file. Raises FileNotFoundError, DataDirectoryError where it is damaged."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while head := file.read(_HEADER.size):
            try:
                magic, crc, count, size = _HEADER.unpack(head)
            except struct.error:
                raise _damaged(path) from None
            if 3 * 4 * count + size > end - file.tell():
                raise _damaged(path)
            table, elements = file.read(3 * 4 * count), file.read(size)
            read = zlib.crc32(elements, zlib.crc32(table, zlib.crc32(head[8:])))
            if magic not in (_MAGIC, _SCHEDULED) or crc != read:
                raise _damaged(path)
            columns = np.frombuffer(table, _TABLE).reshape(3, count)
            yield Segment(elements, *columns, scheduled=magic == _SCHEDULED)


def _damaged(path: Path) -> DataDirectoryError:
    return DataDirectoryError(f"{path} is damaged: it is not what was staged")


def chunks(segments: Iterable[Segment], cutting: Cutting) -> Iterator[Chunk]:
    """The batches of all segments in chunks, of at least one batch each. Pure: the same each time."""
    chunk: list[Span] = []
    left = cutting
    for segment in segments:
        ends = np.cumsum(segment.lengths, dtype=np.int64)
        first = start = 0
        while first < len(ends):
            within = int(np.searchsorted(ends, start + left.max_bytes, "right"))
            last = min(within, first + left.max_batches)
            if last <= first and chunk:
                yield chunk
                chunk, left = [], cutting
                continue
            last = max(last, first + 1)
            end = int(ends[last - 1])
            chunk.append(Span(segment, first, last, start, end))
            left = Cutting(left.max_bytes - (end - start), left.max_batches - (last - first))
            first, start = last, end
    if chunk:
        yield chunk


class StagingFolder:
    """The folder of one application. All methods block; those of several processes go together."""

    def __init__(self, path: Path, *, once: bool = False) -> None:
        """`once`: the application has one batch and does not come again."""
        self.path = path
        self._once = once

    @classmethod
    def of(cls, staging: Path, provider: str, app: str, *, once: bool = False) -> Self:
        return cls(staging / provider / (f"once-{app}" if once else f"app-{_folder_name(app)}"), once=once)

    def claim(self, manifest: Manifest) -> Manifest:
        """Say what a batch is. Returns what it is: that which was said first."""
        path = self._manifest(manifest.batch)
        unfinished = self.path / f"{manifest.batch}.{uuid.uuid4().hex}{_UNFINISHED}"
        with _Telling(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_through(unfinished, msgspec.json.encode(manifest))
            try:
                os.link(unfinished, path)
            except FileExistsError:
                return self.manifest(manifest.batch) or self.claim(manifest)
            finally:
                unfinished.unlink(missing_ok=True)
            sync_directory(self.path)
        return manifest

    def manifest(self, batch: int) -> Manifest | None:
        """None where there is none, or none any more."""
        path = self._manifest(batch)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            raise _damaged(path) from None

    def age_s(self, batch: int) -> float:
        """How long ago a batch was claimed, in seconds; 0 where it is done."""
        try:
            return time.time() - self._manifest(batch).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def pending(self, up_to: int) -> list[Manifest]:
        """What is begun and not known to be published, of batches up to `up_to`, in order."""
        done = self.done()
        batches = sorted(batch for batch in self._numbers(_MANIFEST) if done < batch <= up_to)
        return [manifest for batch in batches if (manifest := self.manifest(batch)) is not None]

    def done(self) -> int:
        """The last batch that is published, -1 where there is none."""
        return max(self._numbers(_DONE), default=-1)

    def finish(self, batch: int) -> None:
        """Note, durably, that this batch and those before it are published, and remove what they needed."""
        with _Telling(self.path):
            if not self._once:
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / f"{batch}{_DONE}").touch()
                sync_directory(self.path)
            self.clear(batch)

    def clear(self, batch: int) -> None:
        """Remove what batches up to this one needed."""
        for each in sorted(number for number in self._numbers(_MANIFEST) if number <= batch):
            if (manifest := self.manifest(each)) is not None:
                self.remove(manifest.files)
                self._manifest(each).unlink(missing_ok=True)
        for each in self._numbers(_DONE):
            if each < batch:
                (self.path / f"{each}{_DONE}").unlink(missing_ok=True)
        if self._once:
            with suppress(OSError):  # another attempt of a task has left something: the sweep takes it
                self.path.rmdir()

    def missing(self, names: Collection[str]) -> str | None:
        """One of the files that is not there."""
        return next((name for name in names if not (self.path / name).exists()), None)

    def discard(self, names: Collection[str]) -> None:
        """Remove staged files, but not those that a manifest names."""
        self.remove(set(names) - self._named())

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            if name:
                (self.path / name).unlink(missing_ok=True)

    def sweep(self, age_s: float = ORPHAN_AGE_S) -> None:
        """Remove what was left behind so long ago, here and by writes of one batch."""
        before = time.time() - age_s
        self._sweep_files(before)
        for folder in self.path.parent.glob("once-*"):
            with suppress(OSError):
                if folder != self.path and folder.stat().st_mtime < before:
                    other = StagingFolder(folder, once=True)
                    other._sweep_files(before, keep=False)
                    folder.rmdir()

    def _sweep_files(self, before: float, *, keep: bool = True) -> None:
        named: Collection[str] = self._named() if keep else ()
        kinds = (_STAGED, _UNFINISHED) if keep else (_STAGED, _UNFINISHED, _MANIFEST)
        for path in list(self.path.iterdir()) if self.path.exists() else ():
            with suppress(OSError):
                if path.suffix in kinds and path.name not in named and path.stat().st_mtime < before:
                    path.unlink()

    def _named(self) -> set[str]:
        manifests = (self.manifest(batch) for batch in self._numbers(_MANIFEST))
        return {name for manifest in manifests if manifest is not None for name in manifest.files}

    def _manifest(self, batch: int) -> Path:
        return self.path / f"{batch}{_MANIFEST}"

    def _numbers(self, kind: str) -> list[int]:
        try:
            names = [path.name for path in self.path.iterdir()]
        except FileNotFoundError:
            return []
        return [int(name.removesuffix(kind)) for name in names if name.endswith(kind)]


def _folder_name(app: str) -> str:
    """Not longer than a file's name may be, and different for every application."""
    name = quote(app, safe="")
    return name if len(name) <= _NAME_CHARACTERS else "=" + hashlib.sha256(app.encode()).hexdigest()


def staging_directory(option: str, text: str) -> Path:
    """The directory that an option names, also as a URL with `file:`. Raises InvalidArgument for other URLs."""
    path = text
    if scheme := _SCHEME.match(text):
        path = _LOCAL.sub("", text) if scheme[1].lower() == "file" else ""
    if not path or path.startswith("//"):
        raise InvalidArgument(
            f"{option} {text!r} is on no file system: name a directory that the driver and all executors share, "
            "for example on NFS, in option 'staging'"
        )
    return Path(path).absolute()


class _Telling:
    """Errors of the file system as those of headrace, with the folder's name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in _NO_SPACE:
            raise StorageFull(f"staging {self._folder}: no space left: free some, then run this again") from None
        raise StorageError(
            f"staging {self._folder}: cannot be used: {error.strerror}: the driver and all executors have to share and "
            "write this directory"
        ) from None
