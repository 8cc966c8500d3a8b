"""The stored record: a block of batches that one commit put into one queue.

    offset  size  field
    0       4     magic and version, b"HRB2"
    4       4     CRC-32 of the block's place (queue, 4 bytes, and offset, 8 bytes) and of everything after this field
    8       8     commit time, microseconds since 1970 UTC; never decreases within a queue
    16      4     n, number of batches
    20      4     number of events of all batches
    24      4n    encoded size of each batch
            4n    how many of those bytes name the stream (`StreamId.prefix`); 0 if the batch begins differently
            4n    number of events of each batch
            ...   the encoded batches, unchanged, one after the other

The checksum includes the place. A block that is found in another queue or at another offset is therefore damaged.
Blocks with the older magic b"HRB1" have a checksum without the place.

An operator can skip a damaged block for all readers. The block is then replaced by a record with the
magic b"HRP1", no events, no columns, and the reason as UTF-8 text after the header. This record keeps the offsets of
the lost batches. If it has more than 2³²-1 batches, its magic is b"HRP2", and the field for the number of events has
the upper 32 bits of the number of batches.

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
from ...streams.identity import StreamId, read_varint

BLOCK_TARGET_BYTES = 256 << 10
"""Small batches of one commit share a block up to this size; a larger batch is a block of its own."""

HEADER_BYTES = 24
"""Size of the fixed fields before the columns."""
COLUMNS_BYTES = 12
"""Size of each batch's entries in the columns."""

_MAGIC = b"HRB2"
_FIRST_MAGIC = b"HRB1"
_SKIPPED_MAGIC = b"HRP1"
_LARGE_SKIPPED_MAGIC = b"HRP2"
_MAGICS = (_MAGIC, _FIRST_MAGIC, _SKIPPED_MAGIC, _LARGE_SKIPPED_MAGIC)
_UINT32 = (1 << 32) - 1
_PLACE = Struct("<IQ")
_HEADER = Struct("<4sIQII")
_CRC = Struct("<I")
_CHECKED_FROM = 8
_KEEP_BUFFER_BYTES = 2 << 20
_COPY_WHOLE_BELOW_BYTES = 8 << 10
_LITTLE_ENDIAN = sys.byteorder == "little"


class DamagedBlockError(ValueError):
    """The bytes are not a block, or differ from the block that was written."""


class BlockPlace(NamedTuple):
    """The queue and the offset at which a block is stored."""

    queue: int
    first: int
    """The offset of its first batch."""


class BlockHeader(NamedTuple):
    crc: int
    time_us: int
    batches: int
    events: int
    skipped: bool = False
    """An operator skipped the block because it was damaged. It is empty."""
    has_place: bool = True
    """Whether the checksum covers the place of the block."""


def skipped_record(place: BlockPlace, batches: int, time_us: int, reason: str) -> bytes:
    """Return the record of a skipped block that takes the offsets of `batches` batches."""
    magic = _SKIPPED_MAGIC if batches <= _UINT32 else _LARGE_SKIPPED_MAGIC
    record = bytearray(_HEADER.pack(magic, 0, time_us, batches & _UINT32, batches >> 32) + reason.encode())
    _CRC.pack_into(record, 4, _checksum(record, place))
    return bytes(record)


def _checksum(record: bytes | bytearray | memoryview, place: BlockPlace | None) -> int:
    start = 0 if place is None else zlib.crc32(_PLACE.pack(*place))
    return zlib.crc32(memoryview(record)[_CHECKED_FROM:], start)


def skipped_reason(record: bytes | memoryview) -> str:
    """Return the reason why a block was skipped."""
    return bytes(record[_HEADER.size :]).decode(errors="replace")


def split(batches: Sequence[EventBatch], target_bytes: int = BLOCK_TARGET_BYTES) -> Iterator[Sequence[EventBatch]]:
    """Divide the batches that one commit stores in one queue into blocks."""
    ends = list(accumulate([len(batch.encoded) for batch in batches]))
    start = 0
    while start < len(ends):
        base = ends[start - 1] if start else 0
        stop = max(bisect_right(ends, base + target_bytes, start), start + 1)
        yield batches[start:stop]
        start = stop


class BlockEncoder:
    """Builds records in one buffer and reuses it: page faults of new memory would cost more than the copy."""

    def __init__(self) -> None:
        self._buffer = BytesIO()

    def encode(self, place: BlockPlace, batches: Sequence[EventBatch], time_us: int) -> memoryview:
        """Return the record of one block. Release it before the next call. Each payload byte is copied once."""
        encoded = [batch.encoded for batch in batches]
        prefixes = [batch.stream.prefix for batch in batches]
        counts = [batch.count for batch in batches]
        columns = array("I", map(len, encoded))
        prefix_sizes = [
            len(prefix) if each.startswith(prefix) else 0 for each, prefix in zip(encoded, prefixes, strict=True)
        ]
        columns.extend(prefix_sizes)
        columns.extend(counts)
        if not _LITTLE_ENDIAN:
            columns.byteswap()
        self._buffer.seek(0)
        self._buffer.write(_HEADER.pack(_MAGIC, 0, time_us, len(batches), sum(counts)))
        self._buffer.write(columns)
        self._buffer.writelines(encoded)
        record = self._buffer.getbuffer()[: self._buffer.tell()]
        _CRC.pack_into(record, 4, _checksum(record, place))
        if len(record) > _KEEP_BUFFER_BYTES:
            self._buffer = BytesIO()
        return record


def read_header(record: bytes | memoryview) -> BlockHeader:
    """Return the fixed fields, without checking the rest. Raises DamagedBlockError."""
    if len(record) < _HEADER.size:
        raise DamagedBlockError(f"{len(record)} bytes, too short for a block")
    magic, crc, time_us, count, events = _HEADER.unpack_from(record)
    if magic not in _MAGICS:
        raise DamagedBlockError(f"begins with {magic!r}, not {_MAGIC!r}")
    if magic == _LARGE_SKIPPED_MAGIC:
        return BlockHeader(crc, time_us, events << 32 | count, 0, skipped=True)
    return BlockHeader(crc, time_us, count, events, magic == _SKIPPED_MAGIC, magic != _FIRST_MAGIC)


def check_block(record: bytes | memoryview, place: BlockPlace) -> BlockHeader:
    """Check a whole record that is stored at `place`; it may be a skipped block. Raises DamagedBlockError."""
    header = read_header(record)
    if not header.skipped:
        return Block(record, place).header
    _check_sum(record, place, header)
    return header


def _check_sum(record: bytes | memoryview, place: BlockPlace, header: BlockHeader) -> None:
    if _checksum(record, place if header.has_place else None) != header.crc:
        raise DamagedBlockError("its checksum does not match")


def events_from(record: bytes | memoryview, start: int) -> int:
    """Return the number of events of the block's batches from index `start` on, without checking the rest.

    Raises DamagedBlockError.
    """
    return 0 if read_header(record).skipped else sum(columns(record)[1][start:])


def columns(record: bytes | memoryview) -> tuple[array[int], array[int]]:
    """Return encoded size and number of events of each batch, without checking the rest. Raises DamagedBlockError."""
    batches = read_header(record).batches
    values = array("I")
    values.frombytes(memoryview(record)[_HEADER.size : _HEADER.size + COLUMNS_BYTES * batches])
    if len(values) != 3 * batches:
        raise DamagedBlockError("its sizes do not add up")
    if not _LITTLE_ENDIAN:
        values.byteswap()
    return values[:batches], values[2 * batches :]


class ReadBudget(NamedTuple):
    """How much to read: batches are read up to and including the one that reaches either number."""

    events: int
    nbytes: int

    def minus(self, batches: Sequence[EventBatch]) -> ReadBudget:
        """Return the budget that is left after these batches."""
        return ReadBudget(
            self.events - sum(batch.count for batch in batches),
            self.nbytes - sum(len(batch.encoded) for batch in batches),
        )


class Block:
    """A stored block, opened for reading. It refers to the bytes of its record and is valid only as long as they
    are."""

    def __init__(self, record: bytes | memoryview, place: BlockPlace, *, check: bool = True) -> None:
        """Raises DamagedBlockError if the sizes or, unless `check` is False, the checksum do not match."""
        view = memoryview(record)
        self._first = place.first
        self.header = read_header(view)
        count = self.header.batches
        start = _HEADER.size + COLUMNS_BYTES * count
        # Check sizes before the checksum: LMDB's size of the record may be wrong too, and reach beyond the file's end.
        if start > len(view):
            raise DamagedBlockError("its sizes do not add up")
        columns = array("I")
        columns.frombytes(view[_HEADER.size : start])
        if not _LITTLE_ENDIAN:
            columns.byteswap()
        self._sizes = columns[:count]
        self._prefixes = columns[count : 2 * count]
        self._counts = columns[2 * count :]
        self._body = view[start:]
        if sum(self._sizes) != len(self._body):
            raise DamagedBlockError("its sizes do not add up")
        if check:
            _check_sum(view, place, self.header)

    def batches(self, start: int, budget: ReadBudget, streams: StreamTable) -> list[EventBatch]:
        """Return the batches from index `start` up to the one that reaches the budget."""
        stop = self._stop(start, budget)
        sizes = self._sizes[start:stop]
        at = sum(self._sizes[:start])
        end = at + sum(sizes)
        body, at, end = self._source(at, end, stop - start)
        known, learn = streams.known, streams.learn
        batches: list[EventBatch] = []
        columns = zip(sizes, self._prefixes[start:stop], self._counts[start:stop], strict=True)
        for offset, (size, prefix, count) in enumerate(columns, self._first + start):
            encoded = bytes(body[at : at + size])
            at += size
            stream = known.get(encoded[:prefix]) or learn(encoded, prefix)
            batches.append(EventBatch(stream, encoded, count, offset))
        return batches

    def _stop(self, start: int, budget: ReadBudget) -> int:
        by_events = bisect_left(list(accumulate(self._counts[start:])), budget.events)
        by_bytes = bisect_left(list(accumulate(self._sizes[start:])), budget.nbytes)
        return min(start + min(by_events, by_bytes) + 1, self.header.batches)

    def _source(self, at: int, end: int, count: int) -> tuple[bytes | memoryview, int, int]:
        """Return the buffer to slice batches from, and where they begin and end in it.

        Slicing bytes costs a third of slicing a view, so small batches are first copied together.
        """
        if end - at < count * _COPY_WHOLE_BELOW_BYTES:
            return bytes(self._body[at:end]), 0, end - at
        return self._body, at, end


class StreamTable:
    """Streams by the bytes with which their batches begin, so that a batch is not parsed to find its stream.

    It drops all entries when it is full.
    """

    def __init__(self, limit: int = 1 << 17) -> None:
        self.known: dict[bytes, StreamId] = {}
        self._limit = limit

    def learn(self, encoded: bytes, prefix: int) -> StreamId:
        """Return the stream of an encoded batch. Remember it if the first `prefix` bytes name it, that is `prefix` >
        0."""
        if not prefix:
            return EventBatch.decode(encoded).stream
        name = encoded[:prefix]
        if len(self.known) >= self._limit:
            self.known.clear()
        stream = self.known[name] = _stream_of(name)
        return stream


def _stream_of(prefix: bytes) -> StreamId:
    """Parse a `StreamId.prefix`: two text fields, each after a tag and its size."""
    size, at = read_varint(prefix, 1)
    namespace = prefix[at : at + size]
    size, at = read_varint(prefix, at + size + 1)
    return StreamId(namespace.decode(), prefix[at : at + size].decode())
