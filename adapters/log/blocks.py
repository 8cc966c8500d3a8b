"""The stored record: a block of batches that one commit put into one queue.

    offset  size  field
    0       4     magic and version, b"HRB1"
    4       4     CRC-32 of everything after it
    8       8     commit time, microseconds since 1970 UTC; never decreases within a queue
    16      4     n, number of batches
    20      4     number of events of all batches
    24      4n    encoded size of each batch
            4n    how many of those bytes name the stream (`StreamId.prefix`); 0 where the batch begins otherwise
            4n    number of events of each batch
            ...   the encoded batches, unchanged, one after the other

All integers are unsigned and little-endian. A block is stored under the offset of its first batch; the others have the
offsets that follow, so the next block's key is this one's plus n.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import accumulate
from struct import Struct
from typing import NamedTuple

from ...streams.events import EventBatch
from ...streams.identity import StreamId

BLOCK_TARGET_BYTES = 256 << 10
"""Small batches of one commit share a block up to this size; a larger batch is a block of its own."""

HEADER_BYTES = 24
"""What comes before the columns."""
COLUMNS_BYTES = 12
"""What each batch has in the columns."""

_MAGIC = b"HRB1"
_HEADER = Struct("<4sIQII")
_CRC = Struct("<I")
_CHECKED_FROM = 8
_KEEP_BUFFER_BYTES = 2 << 20
_COPY_WHOLE_BELOW_BYTES = 8 << 10
_LITTLE_ENDIAN = sys.byteorder == "little"


class DamagedBlockError(ValueError):
    """The bytes are no block, or not the one that was written."""


class BlockHeader(NamedTuple):
    crc: int
    time_us: int
    batches: int
    events: int


def split(batches: Sequence[EventBatch], target_bytes: int = BLOCK_TARGET_BYTES) -> Iterator[Sequence[EventBatch]]:
    """Cut what one commit stores in one queue into blocks."""
    ends = list(accumulate(len(batch.encoded) for batch in batches))
    start = 0
    while start < len(ends):
        base = ends[start - 1] if start else 0
        stop = max(bisect_right(ends, base + target_bytes, start), start + 1)
        yield batches[start:stop]
        start = stop


class BlockEncoder:
    """Builds records in one buffer that is used again: faulting in fresh memory would cost more than the copy."""

    def __init__(self) -> None:
        self._buffer = BytesIO()

    def encode(self, batches: Sequence[EventBatch], time_us: int) -> memoryview:
        """The record of one block; release it before the next call. Each payload byte is copied once."""
        encoded = [batch.encoded for batch in batches]
        counts = [batch.count for batch in batches]
        columns = array("I", map(len, encoded))
        columns.extend(map(_prefix_bytes, batches))
        columns.extend(counts)
        if not _LITTLE_ENDIAN:
            columns.byteswap()
        self._buffer.seek(0)
        self._buffer.write(_HEADER.pack(_MAGIC, 0, time_us, len(batches), sum(counts)))
        self._buffer.write(columns)
        self._buffer.writelines(encoded)
        record = self._buffer.getbuffer()[: self._buffer.tell()]
        _CRC.pack_into(record, 4, zlib.crc32(record[_CHECKED_FROM:]))
        if len(record) > _KEEP_BUFFER_BYTES:
            self._buffer = BytesIO()
        return record


def _prefix_bytes(batch: EventBatch) -> int:
    prefix = batch.stream.prefix
    return len(prefix) if batch.encoded.startswith(prefix) else 0


def read_header(record: bytes | memoryview) -> BlockHeader:
    """Read the fixed fields alone, without checking the rest. Raises DamagedBlockError."""
    if len(record) < _HEADER.size:
        raise DamagedBlockError(f"{len(record)} bytes, too short for a block")
    magic, crc, time_us, count, events = _HEADER.unpack_from(record)
    if magic != _MAGIC:
        raise DamagedBlockError(f"begins with {magic!r}, not {_MAGIC!r}")
    return BlockHeader(crc, time_us, count, events)


def events_from(record: bytes | memoryview, start: int) -> int:
    """Events of the block's batches from index `start` on, without checking the rest. Raises DamagedBlockError."""
    return sum(columns(record)[1][start:])


def columns(record: bytes | memoryview) -> tuple[array[int], array[int]]:
    """Encoded size and number of events of each batch, without checking the rest. Raises DamagedBlockError."""
    batches = read_header(record).batches
    values = array("I")
    values.frombytes(memoryview(record)[_HEADER.size : _HEADER.size + 12 * batches])
    if len(values) != 3 * batches:
        raise DamagedBlockError("its sizes do not add up")
    if not _LITTLE_ENDIAN:
        values.byteswap()
    return values[:batches], values[2 * batches :]


class Want(NamedTuple):
    """How much to read: up to the batch with which one of them is reached."""

    events: int
    nbytes: int

    def less(self, batches: Sequence[EventBatch]) -> Want:
        return Want(
            self.events - sum(batch.count for batch in batches),
            self.nbytes - sum(len(batch.encoded) for batch in batches),
        )


class Block:
    """A stored block, opened for reading. Valid as long as the bytes behind it are."""

    def __init__(self, record: bytes | memoryview, *, check: bool = True) -> None:
        """Raises DamagedBlockError where the checksum (unless `check` is False) or the sizes do not agree."""
        view = memoryview(record)
        self.header = read_header(view)
        if check and zlib.crc32(view[_CHECKED_FROM:]) != self.header.crc:
            raise DamagedBlockError("its checksum does not match")
        count = self.header.batches
        start = _HEADER.size + 12 * count
        columns = array("I")
        columns.frombytes(view[_HEADER.size : start])
        if not _LITTLE_ENDIAN:
            columns.byteswap()
        self._sizes = columns[:count]
        self._prefixes = columns[count : 2 * count]
        self._counts = columns[2 * count :]
        self._body = view[start:]
        if len(columns) != 3 * count or sum(self._sizes) != len(self._body):
            raise DamagedBlockError("its sizes do not add up")

    def batches(self, first: int, start: int, want: Want, streams: StreamTable) -> list[EventBatch]:
        """The batches from index `start` up to the one with which a limit is reached. `first` is the block's offset."""
        stop = self._stop(start, want)
        sizes = self._sizes[start:stop]
        at = sum(self._sizes[:start])
        end = at + sum(sizes)
        body, at, end = self._source(at, end, stop - start)
        known, learn = streams.known, streams.learn
        batches: list[EventBatch] = []
        columns = zip(sizes, self._prefixes[start:stop], self._counts[start:stop], strict=True)
        for offset, (size, prefix, count) in enumerate(columns, first + start):
            encoded = bytes(body[at : at + size])
            at += size
            stream = known.get(encoded[:prefix]) or learn(encoded, prefix)
            batches.append(EventBatch(stream, encoded, count, offset))
        return batches

    def _stop(self, start: int, want: Want) -> int:
        by_events = bisect_left(list(accumulate(self._counts[start:])), want.events)
        by_bytes = bisect_left(list(accumulate(self._sizes[start:])), want.nbytes)
        return min(start + min(by_events, by_bytes) + 1, self.header.batches)

    def _source(self, at: int, end: int, count: int) -> tuple[bytes | memoryview, int, int]:
        """Slicing bytes costs a third of slicing a view: small batches are worth one copy of them all."""
        if end - at < count * _COPY_WHOLE_BELOW_BYTES:
            return bytes(self._body[at:end]), 0, end - at
        return self._body, at, end


class StreamTable:
    """Names of streams already met, by the bytes with which their batches begin; so that no batch is parsed to learn
    its stream. Forgets everything when it is full."""

    def __init__(self, limit: int = 1 << 17) -> None:
        self.known: dict[bytes, StreamId] = {}
        self._limit = limit

    def learn(self, encoded: bytes, prefix: int) -> StreamId:
        """The stream of an encoded batch, remembered where its first `prefix` bytes name it."""
        if not prefix:
            return EventBatch.decode(encoded).stream
        name = encoded[:prefix]
        if len(self.known) >= self._limit:
            self.known.clear()
        stream = self.known[name] = _stream_of(name)
        return stream


def _stream_of(prefix: bytes) -> StreamId:
    """Read a `StreamId.prefix`: two fields of text, each after a tag and its size."""
    size, at = _size_at(prefix, 1)
    namespace = prefix[at : at + size]
    size, at = _size_at(prefix, at + size + 1)
    return StreamId(namespace.decode(), prefix[at : at + size].decode())


def _size_at(prefix: bytes, at: int) -> tuple[int, int]:
    low = prefix[at]
    # At most MAX_NAME_BYTES, so a varint of one byte or two.
    return (low, at + 1) if low < 0x80 else (low & 0x7F | prefix[at + 1] << 7, at + 2)
