"""The staging folder: it keeps the rows of a sink until they are published. Driver and executors of Spark share it.

    STAGING/<provider>/app-<application>/          of one `txnAppId`, percent-encoded; a hash of a long one
        <task>-<unique>.staged                     the rows of one attempt of one task
        <batch>.manifest                           the staged files of the batch, and the limits of its chunks
        <batch>.done                               this batch, and every one before it, is published
    STAGING/<provider>/once-<unique>/              the same for a batch write without `txnAppId`; removed at its end

A manifest appears complete or not at all, and the first one counts: each process that commits the batch publishes the
files of this manifest. The manifest and its files are removed only after the batch's `done` is durable. A file that no
manifest names is an orphan: a sweep removes it some days later.

A staged file is a sequence of segments. A segment has a header, the table of its batches, and the batches as elements
of the field `batches` of a `PublishRequest`, so publishing copies their bytes without reading them:

    4 bytes  "HRS1", or "HRS2" if some of the batches have a delay or a priority
    u32      CRC-32 of the rest of the segment
    u32      batches, n
    u64      bytes of the elements
    u32[n]   bytes of each element
    u32[n]   events of each batch
    u32[n]   length of the stream's name in each batch, in bytes

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

from ..store.datadir import write_through
from ..streams.durable import make_durable_directory, sync_path
from ..streams.errors import DataDirectoryError, InvalidArgument, StorageError, StorageFull
from ..streams.private_files import make_file, opener
from .grouping import EncodedBatches

ORPHAN_AGE_S = 3 * 24 * 3600
"""An orphan is removed at this age, in seconds. No running write has a task that finished so long ago."""

_MAGIC, _SCHEDULED = b"HRS1", b"HRS2"
_HEADER = struct.Struct("<4sIIQ")
_TABLE = np.dtype("<u4")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_LOCAL = re.compile(r"file:(?://(?:localhost)?(?=/))?", re.IGNORECASE)
_NAME_CHARACTERS = 128
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STAGED, _MANIFEST, _DONE, _UNFINISHED = ".staged", ".manifest", ".done", ".unfinished"


class PublishChunkLimits(NamedTuple):
    """Limits of a chunk, the batches that are published in one call.

    The manifest has them, because a process that goes on with a batch must cut it as the first process did.
    """

    max_bytes: int
    max_batches: int


class BatchManifest(msgspec.Struct, frozen=True):
    """The content of a batch."""

    batch: int
    files: Sequence[str]
    """Names of staged files in the folder, in the order of the tasks."""
    cutting: PublishChunkLimits
    format: int = 1


class StagedReport(NamedTuple):
    """A staged file, as the task reports it to the driver."""

    name: str
    partition: int
    events: int


class StagedFile:
    """The rows of one attempt of a task. Not a part of any batch until a manifest names it."""

    def __init__(self, folder: Path, partition: int, attempt: int) -> None:
        """Raise StorageError if the folder cannot be written."""
        self._folder = folder
        self._partition = partition
        self.name = f"{partition:05d}-{attempt}-{uuid.uuid4().hex}{_STAGED}"
        self._events = 0
        with _FileErrors(folder):
            make_durable_directory(folder)
            self._file = open(folder / self.name, "xb", opener=opener)  # noqa: SIM115 (closed by `close`)

    def add(self, batches: EncodedBatches) -> None:
        """Append batches. Raise StorageError, StorageFull."""
        columns = (batches.lengths, batches.counts, batches.prefixes)
        table = b"".join(np.array(column, _TABLE).tobytes() for column in columns)
        elements = b"".join(batches.pieces)
        crc = zlib.crc32(
            elements, zlib.crc32(table, zlib.crc32(struct.pack("<IQ", len(batches.counts), len(elements))))
        )
        with _FileErrors(self._folder):
            self._file.write(
                _HEADER.pack(_SCHEDULED if batches.scheduled else _MAGIC, crc, len(batches.counts), len(elements))
            )
            self._file.write(table)
            self._file.write(elements)
        self._events += sum(batches.counts)

    def finish(self) -> StagedReport:
        """Make the file durable. A task without rows leaves no file, and returns an empty name."""
        with _FileErrors(self._folder):
            if not self._events:
                self.discard()
                return StagedReport("", self._partition, 0)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            sync_path(self._folder)
        return StagedReport(self.name, self._partition, self._events)

    def discard(self) -> None:
        """Remove the file. Idempotent."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            (self._folder / self.name).unlink(missing_ok=True)


class StagedSegment(NamedTuple):
    """Batches that were staged together. The arrays have one value for each batch."""

    elements: bytes
    lengths: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint32]
    prefixes: npt.NDArray[np.uint32]
    scheduled: bool = False


class SegmentSpan(NamedTuple):
    """Some batches of a segment."""

    segment: StagedSegment
    first: int
    last: int
    """Exclusive."""
    start: int
    """Position of their elements in the segment, in bytes, up to `end` (exclusive)."""
    end: int


Chunk = Sequence[SegmentSpan]
"""The batches of one call."""


def read_segments(path: Path) -> Iterator[StagedSegment]:
    """Yield the segments of a staged file. Raise FileNotFoundError, or DataDirectoryError if it is damaged."""
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
            yield StagedSegment(elements, *columns, scheduled=magic == _SCHEDULED)


def _damaged(path: Path) -> DataDirectoryError:
    return DataDirectoryError(f"'{path}' is damaged: it is not what was staged")


def chunks(segments: Iterable[StagedSegment], cutting: PublishChunkLimits) -> Iterator[Chunk]:
    """Cut the batches of all segments into chunks of at least one batch. Pure: the same input gives the same chunks."""
    chunk: list[SegmentSpan] = []
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
            chunk.append(SegmentSpan(segment, first, last, start, end))
            left = PublishChunkLimits(left.max_bytes - (end - start), left.max_batches - (last - first))
            first, start = last, end
    if chunk:
        yield chunk


class StagingFolder:
    """The folder of one application. All methods block. Several processes may use the folder at a time."""

    def __init__(self, path: Path, *, once: bool = False) -> None:
        """`once`: the application has only one batch."""
        self.path = path
        self._once = once

    @classmethod
    def of(cls, staging: Path, provider: str, app: str, *, once: bool = False) -> Self:
        return cls(staging / provider / (f"once-{app}" if once else f"app-{_folder_name(app)}"), once=once)

    def claim(self, manifest: BatchManifest) -> BatchManifest:
        """Store the manifest of a batch if it has none. Return its manifest: the one that was stored first."""
        path = self._manifest(manifest.batch)
        unfinished = self.path / f"{manifest.batch}.{uuid.uuid4().hex}{_UNFINISHED}"
        with _FileErrors(self.path):
            make_durable_directory(self.path)
            write_through(unfinished, msgspec.json.encode(manifest))
            try:
                os.link(unfinished, path)
            except FileExistsError:
                return self.manifest(manifest.batch) or self.claim(manifest)
            finally:
                unfinished.unlink(missing_ok=True)
            sync_path(self.path)
        return manifest

    def manifest(self, batch: int) -> BatchManifest | None:
        """Return the manifest of a batch. None: it has none, or has none any more."""
        path = self._manifest(batch)
        try:
            return msgspec.json.decode(path.read_bytes(), type=BatchManifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            raise _damaged(path) from None

    def age_s(self, batch: int) -> float:
        """Return the age of a batch's manifest in seconds, 0 if the batch is done."""
        try:
            return time.time() - self._manifest(batch).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def pending(self, up_to: int) -> list[BatchManifest]:
        """Return the manifests of batches up to `up_to` that are not done, in order."""
        done = self.done()
        batches = sorted(batch for batch in self._numbers(_MANIFEST) if done < batch <= up_to)
        return [manifest for batch in batches if (manifest := self.manifest(batch)) is not None]

    def done(self) -> int:
        """Return the number of the last published batch, -1 if there is none."""
        return max(self._numbers(_DONE), default=-1)

    def finish(self, batch: int) -> None:
        """Note durably that this batch and all before it are published, and remove their manifests and files."""
        with _FileErrors(self.path):
            if not self._once:
                make_durable_directory(self.path)
                make_file(self.path / f"{batch}{_DONE}")
                sync_path(self.path)
            self.clear(batch)

    def clear(self, batch: int) -> None:
        """Remove the manifests and files of batches up to this one."""
        for each in sorted(number for number in self._numbers(_MANIFEST) if number <= batch):
            if (manifest := self.manifest(each)) is not None:
                self.remove(manifest.files)
                self._manifest(each).unlink(missing_ok=True)
        for each in self._numbers(_DONE):
            if each < batch:
                (self.path / f"{each}{_DONE}").unlink(missing_ok=True)
        if self._once:
            with suppress(OSError):  # another attempt of a task has left a file: a sweep removes it
                self.path.rmdir()

    def missing(self, names: Collection[str]) -> str | None:
        """Return one of the files that do not exist, or None."""
        return next((name for name in names if not (self.path / name).exists()), None)

    def discard(self, names: Collection[str]) -> None:
        """Remove staged files, but not those that a manifest names."""
        self.remove(set(names) - self._named())

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            if name:
                (self.path / name).unlink(missing_ok=True)

    def sweep(self, age_s: float = ORPHAN_AGE_S) -> None:
        """Remove orphans of at least this age, in this folder and in those of batch writes without `txnAppId`."""
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
    """Return a name that fits into a file name, and is different for every application."""
    name = quote(app, safe="")
    return name if len(name) <= _NAME_CHARACTERS else "=" + hashlib.sha256(app.encode()).hexdigest()


def staging_directory(option: str, text: str) -> Path:
    """Return the directory that an option names, a path or a `file:` URL. Raise InvalidArgument for other URLs."""
    path = text
    if scheme := _SCHEME.match(text):
        path = _LOCAL.sub("", text) if scheme[1].lower() == "file" else ""
    if not path or path.startswith("//"):
        raise InvalidArgument(
            f"{option} {text!r} is on no file system: name a directory that the driver and all executors share, "
            "for example on NFS, in option 'staging'"
        )
    return Path(path).absolute()


class _FileErrors:
    """Turns errors of the file system into errors of headrace that name the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in _NO_SPACE:
            raise StorageFull(f"staging '{self._folder}': no space left: free some, then run this again") from None
        raise StorageError(
            f"staging '{self._folder}': cannot be used: {error.strerror}: the driver and all executors have to share "
            "and write this directory"
        ) from None
