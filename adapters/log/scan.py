"""Reading a log's blocks by ranges of offsets, for who does not consume it. Blocking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from ...streams.errors import CorruptRecord, InvalidArgument, NotFound, OffsetsGone
from ..reaching import Limits
from .blocks import Block, BlockHeader, DamagedBlockError
from .environment import acquire, release
from .options import LogOptions
from .reach import reach
from .rows import Tail
from .timesearch import offset_at
from .transactions import Snapshot

_READ_BYTES = 1 << 20
"""Copied at once. A transaction does not stay open while somebody works on what it read: it keeps deleted pages from
being used again."""


class QueueTail(NamedTuple):
    """What a queue retains, from `first` (inclusive) on."""

    first: int
    tail: Tail


class StoredBlock(NamedTuple):
    """A block that was checked."""

    first: int
    """Offset of its first batch."""
    header: BlockHeader
    at: int
    """Where its record begins."""


class StoredBlocks(NamedTuple):
    """Blocks that follow each other. Their records are as `blocks` describes them."""

    records: bytes
    blocks: Sequence[StoredBlock]

    @property
    def end(self) -> int:
        """The offset after their last batch."""
        last = self.blocks[-1]
        return last.first + last.header.batches


class LogScan:
    """The log of a directory that has one. Use as a context manager, or close it."""

    def __init__(self, directory: Path) -> None:
        """`directory` is the provider's own. Raises NotFound where it has no log, DataDirectoryError."""
        log = directory / "log"
        if not (log / "data.mdb").exists():
            raise NotFound(f"{directory} has no log: its provider is not there, or has another adapter than 'log'")
        self._environment = acquire(log, LogOptions(), directory.name, None)
        self.queues = self._environment.queues
        self.created_us = self._environment.created_us
        """When the log was made: what tells it from one that was here before."""
        self._open = True

    def is_current(self) -> bool:
        """False where the log was deleted or replaced: this one still reads what was there."""
        return self._environment.is_current()

    def tails(self) -> Sequence[QueueTail]:
        """What each queue retains."""
        with self._environment.reading() as snapshot:
            return [_tail(snapshot, queue) for queue in range(self.queues)]

    def offsets_at(self, time_us: int) -> Sequence[int]:
        """For each queue the offset of the first batch stored at or after a time, microseconds since 1970 UTC."""
        with self._environment.reading() as snapshot:
            return [offset_at(snapshot, queue, time_us) for queue in range(self.queues)]

    def reach(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        """See QueueAdapter.reach."""
        with self._environment.reading() as snapshot:
            return reach(snapshot, queue, start, end, Limits(max_events, max_bytes))

    def blocks(self, queue: int, start: int, end: int) -> Iterator[StoredBlocks]:
        """The blocks that hold the batches from `start` up to `end` (exclusive), whole, though they hold others too.

        About a MiB at once. Raises OffsetsGone where the first of them is not retained, InvalidArgument where the last
        is not there yet, CorruptRecord.
        """
        while start < end:
            read = self._read(queue, start, end)
            yield read
            start = read.end

    def _read(self, queue: int, start: int, end: int) -> StoredBlocks:
        """Some blocks, and at least one."""
        with self._environment.reading() as snapshot:
            if end > (there := snapshot.tail(queue).next):
                raise InvalidArgument(f"queue {queue} ends at offset {there}: it cannot be read to {end}")
            first = snapshot.block_holding(queue, start)
            if first is None:
                raise OffsetsGone(queue, start, _tail(snapshot, queue).first)
            return self._checked(snapshot, queue, start, end, first)

    def _checked(self, snapshot: Snapshot, queue: int, start: int, end: int, first: int) -> StoredBlocks:
        blocks: list[StoredBlock] = []
        views: list[memoryview] = []
        at = 0
        while first < end and at < _READ_BYTES:
            try:
                record = snapshot.record(queue, first)
                header = Block(record).header
            except DamagedBlockError as damage:
                if blocks:  # what is before it comes first
                    break
                after = snapshot.block_after(queue, first)
                raise CorruptRecord(queue, max(start, first), str(damage), after) from None
            views.append(record)
            blocks.append(StoredBlock(first, header, at))
            at += len(record)
            first += header.batches
        return StoredBlocks(b"".join(views), blocks)

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            release(self._environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tail(snapshot: Snapshot, queue: int) -> QueueTail:
    tail, first = snapshot.tail(queue), snapshot.first(queue)
    return QueueTail(tail.next if first is None else first, tail)
