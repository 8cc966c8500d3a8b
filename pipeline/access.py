"""Reading a provider's queues by ranges of offsets, as Spark does: from the driver to plan, in the executors to read.

All calls block. Each process opens its own `QueueAccess`: it is never pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..adapters.log import LogScan
from ..adapters.log.blocks import COLUMNS_BYTES, HEADER_BYTES
from ..adapters.log.scan import StoredBlock, StoredBlocks
from ..balancer import StreamQueueMapper
from ..store.datadir import find_data_directory
from ..streams.identity import StreamId
from ..streams.subscriptions import Selector, check_provider_name


class RetainedRange(NamedTuple):
    """The batches that a queue retains: from `first` (inclusive) to `next` (exclusive)."""

    first: int
    next: int
    events: int | None = None
    """None: the adapter does not know."""
    nbytes: int | None = None


class BatchChunk(NamedTuple):
    """Encoded batches of one queue in one buffer, by offset. Each array has one value for each batch."""

    source: bytes
    starts: npt.NDArray[np.int64]
    """Position in `source` of each encoded batch; `ends` are exclusive."""
    ends: npt.NDArray[np.int64]
    prefixes: npt.NDArray[np.int64]
    """Length of the stream's name in the batch, in bytes (`StreamId.prefix`); 0 if it is not known."""
    counts: npt.NDArray[np.int64]
    """Events of each batch."""
    offsets: npt.NDArray[np.int64]
    stored_us: npt.NDArray[np.int64] | None = None
    """When each batch was stored, in microseconds since 1970 UTC. None: the adapter does not know."""


class QueueAccess(ABC):
    """The queues of one provider, 0 to `queues` - 1."""

    queues: int
    identity: int | None = None
    """Differs from the identity of earlier queues of the same name, and of those elsewhere. None: not known."""
    dense: bool = True
    """Whether every retained offset has a batch. A missing one is then damage."""

    def is_current(self) -> bool:
        """Return False if another provider has replaced the opened one: open that."""
        return True

    def queues_with(self, stream: StreamId) -> Sequence[int]:
        """Return the queues that may have events of a stream."""
        return StreamQueueMapper(self.queues).queues_with(stream)

    @abstractmethod
    def states(self) -> Sequence[RetainedRange]:
        """Return the retained range of each queue. One cheap call for all."""

    @abstractmethod
    def offsets_at(self, time_us: int) -> Sequence[int]:
        """Return for each queue the offset of the first batch stored at or after `time_us` (µs since 1970 UTC)."""

    @abstractmethod
    def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        """Return the exclusive end of the batches from `start` up to `end` that are within both limits.

        At least one batch is within the limits, if there is one.
        """

    @abstractmethod
    def read(self, queue: int, start: int, end: int, selector: Selector) -> Iterator[BatchChunk]:
        """Yield the batches from `start` up to `end` (exclusive) of the selected streams.

        Batches of other streams may be among them: filtering may cost more than it saves. Raise OffsetsGone,
        StorageError, CorruptRecord.
        """

    @abstractmethod
    def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        """Return the damaged ranges from `start` up to `end` (exclusive) that an operator skipped.

        `read` leaves them out.
        """

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class LogAccess(QueueAccess):
    """The log of a data directory, read in this process."""

    def __init__(self, data: str | Path, provider: str) -> None:
        """Raise DataDirectoryError if `data` is no data directory or one of another version, NotFound if the provider
        has no log in it."""
        directory = find_data_directory(data)
        self._scan = LogScan(directory.path / "providers" / check_provider_name(provider))
        self.queues = self._scan.queues
        self.identity = self._scan.created_us

    def is_current(self) -> bool:
        return self._scan.is_current()

    def states(self) -> Sequence[RetainedRange]:
        return [RetainedRange(first, tail.next, tail.events, tail.nbytes) for first, tail in self._scan.tails()]

    def offsets_at(self, time_us: int) -> Sequence[int]:
        return self._scan.offsets_at(time_us)

    def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        return self._scan.end_within(queue, start, end, max_events, max_bytes)

    def read(self, queue: int, start: int, end: int, selector: Selector) -> Iterator[BatchChunk]:
        for blocks in self._scan.blocks(queue, start, end):
            yield _chunk(blocks, start, end)

    def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        return self._scan.skipped(queue, start, end)

    def close(self) -> None:
        self._scan.close()


def _chunk(blocks: StoredBlocks, start: int, end: int) -> BatchChunk:
    """Return the batches of the blocks that are in the range."""
    parts = [_block_columns(blocks.records, block) for block in blocks.blocks]
    starts, ends, prefixes, counts, offsets, stored = (np.concatenate(column) for column in zip(*parts, strict=True))
    part = slice(max(start - int(offsets[0]), 0), min(end - int(offsets[0]), len(offsets)))
    return BatchChunk(
        blocks.records, starts[part], ends[part], prefixes[part], counts[part], offsets[part], stored[part]
    )


def _block_columns(records: bytes, block: StoredBlock) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the arrays of a chunk, for the batches of one block."""
    batches = block.header.batches
    columns = np.frombuffer(records, "<u4", 3 * batches, block.at + HEADER_BYTES).astype(np.int64)
    sizes, prefixes, counts = columns.reshape(3, batches)
    ends = np.cumsum(sizes) + (block.at + HEADER_BYTES + COLUMNS_BYTES * batches)
    offsets = np.arange(block.first, block.first + batches)
    return ends - sizes, ends, prefixes, counts, offsets, np.full(batches, block.header.time_us, np.int64)
