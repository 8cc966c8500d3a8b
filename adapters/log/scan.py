"""Reads a log's blocks by ranges of offsets, without a subscription. All functions block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from ...streams.errors import InvalidArgument, NotFound, OffsetsGone
from ..range_ends import RangeLimits
from .blocks import BlockHeader, BlockPlace, DamagedBlockError, check_block
from .damage import skipped_ranges
from .environment import acquire, has_log, release
from .options import LogOptions
from .range_ends import end_within
from .rows import TailRow
from .timesearch import offset_at
from .transactions import LogSnapshot

_READ_BYTES = 1 << 20
"""Bytes copied by one transaction. No transaction is open while the caller works on the bytes, because LMDB does not
reuse deleted pages during an open transaction."""


class QueueTail(NamedTuple):
    """The state of a queue, and the offset of its oldest retained batch."""

    first: int
    tail: TailRow


class StoredBlock(NamedTuple):
    """A block whose checksum was verified."""

    first: int
    """Offset of its first batch."""
    header: BlockHeader
    at: int
    """The index of its first byte in `StoredBlocks.records`."""


class StoredBlocks(NamedTuple):
    """Blocks that follow each other. The module `blocks` describes their records."""

    records: bytes
    blocks: Sequence[StoredBlock]
    end: int
    """The offset at which the next read begins."""


class LogScan:
    """An existing log, opened to read it. Use as a context manager, or close it."""

    def __init__(self, directory: Path) -> None:
        """`directory` is that of the provider. Raises NotFound if it has no log, DataDirectoryError if it is
        damaged."""
        log = directory / "log"
        if not has_log(log):
            raise NotFound(f"'{directory}' has no log: there is no such provider, or its adapter is not 'log'")
        self._environment = acquire(log, LogOptions(), directory.name, None)
        self.queues = self._environment.queues
        self.provider = self._environment.made_for
        """The provider that the log was made for."""
        self.created_us = self._environment.created_us
        """When the log was made, in microseconds since 1970 UTC. Differs from that of an earlier log in this place."""
        self._open = True

    def is_current(self) -> bool:
        """Return False if the log was deleted or replaced. This scan then still reads the old one."""
        return self._environment.is_current()

    def tails(self) -> Sequence[QueueTail]:
        """Return the retained range and the state of each queue."""
        with self._environment.reading() as snapshot:
            return [_tail(snapshot, queue) for queue in range(self.queues)]

    def offsets_at(self, time_us: int) -> Sequence[int]:
        """Return for each queue the offset of the first batch stored at or after a time, in microseconds since 1970
        UTC."""
        with self._environment.reading() as snapshot:
            return [offset_at(snapshot, queue, time_us) for queue in range(self.queues)]

    def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        """See QueueAdapter.end_within."""
        with self._environment.reading() as snapshot:
            return end_within(snapshot, queue, start, end, RangeLimits(max_events, max_bytes))

    def blocks(self, queue: int, start: int, end: int) -> Iterator[StoredBlocks]:
        """Yield the blocks that hold the batches from `start` up to `end` (exclusive), about 1 MiB at a time.

        Blocks are whole: the first and the last may hold other batches too. Skipped blocks are left out. Raises
        OffsetsGone if `start` is not retained, InvalidArgument if `end` is behind the queue's end, CorruptRecord for a
        damaged block.
        """
        while start < end:
            read = self._read(queue, start, end)
            if read.blocks:
                yield read
            start = read.end

    def _read(self, queue: int, start: int, end: int) -> StoredBlocks:
        """Return the next blocks. They are empty only if the first one was skipped."""
        with self._environment.reading() as snapshot:
            if end > (queue_end := snapshot.tail(queue).next):
                raise InvalidArgument(f"queue {queue} ends at offset {queue_end}: it cannot be read to {end}")
            first = snapshot.block_holding(queue, start)
            if first is None:
                if start >= (beginning := snapshot.beginning(queue)):
                    snapshot.first(queue)  # raises CorruptRecord: the block is missing
                raise OffsetsGone(queue, start, beginning)
            return self._checked(snapshot, queue, start, end, first)

    def _checked(self, snapshot: LogSnapshot, queue: int, start: int, end: int, first: int) -> StoredBlocks:
        blocks: list[StoredBlock] = []
        views: list[memoryview] = []
        at = 0
        while first < end and at < _READ_BYTES:
            try:
                record = snapshot.record(queue, first)
                header = check_block(record, BlockPlace(queue, first))
            except DamagedBlockError as damage:
                if blocks:  # return them first; the next read begins at the damage
                    break
                after = snapshot.block_after(queue, first)
                raise snapshot.corrupt(queue, max(start, first), damage, after) from None
            if header.skipped:
                if blocks:
                    break
                return StoredBlocks(b"", (), first + header.batches)
            views.append(record)
            blocks.append(StoredBlock(first, header, at))
            at += len(record)
            first += header.batches
        return StoredBlocks(b"".join(views), blocks, first)

    def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        """Return the damaged ranges of offsets from `start` up to `end` (exclusive) that an operator skipped."""
        with self._environment.reading() as snapshot:
            return skipped_ranges(snapshot, queue, start, end)

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            release(self._environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tail(snapshot: LogSnapshot, queue: int) -> QueueTail:
    return QueueTail(snapshot.beginning(queue), snapshot.tail(queue))
