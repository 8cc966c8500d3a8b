"""The rows of all databases, and their encoding.

database     key                               value
meta         b"log"                            JSON of `MetaRow`
queue-NNNNN  first offset (u64, big-endian)    a block, see `blocks`
state        queue index (u32, big-endian)     `TailRow`, six u64, little-endian; five before 0.2.0
producers    the producer's id in UTF-8        msgpack of `ProducerRow`
gaps         queue (u32) and low (u64)         msgpack of `GapRow`
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import lmdb
import msgspec

FORMAT = 1
META_KEY = b"log"

_OFFSET = Struct(">Q")
_QUEUE = Struct(">I")
_GAP = Struct(">IQ")
_TAIL = Struct("<QQQQQQ")
_TAIL_OF_0_1 = Struct("<QQQQQ")
_UNKNOWN = (1 << 64) - 1

offset_key = _OFFSET.pack
queue_key = _QUEUE.pack
gap_key = _GAP.pack


class TailRow(NamedTuple):
    """The state of one queue. Written by the transaction that changes the queue's blocks."""

    next: int = 0
    """Offset of the next batch."""
    events: int = 0
    """Retained events."""
    nbytes: int = 0
    """Retained bytes of blocks."""
    time_us: int = 0
    """Time of the last commit."""
    acknowledged: int = 0
    """Every batch below this offset is finished."""
    first: int | None = 0
    """Offset of the oldest retained batch; `next` if there is none. None: unknown, because 0.1 made the log, and
    neither retention nor a repair has set it since."""

    def pack(self) -> bytes:
        return _TAIL.pack(*self[:-1], _UNKNOWN if self.first is None else self.first)

    @classmethod
    def unpack(cls, row: bytes | memoryview | None) -> TailRow:
        """Return the state in a row, that of an empty queue for None. Raises lmdb.CorruptedError for a wrong size."""
        if row is None:
            return cls()
        if len(row) == _TAIL_OF_0_1.size:
            return cls(*_TAIL_OF_0_1.unpack(row), first=None)
        *others, first = _unpacked(_TAIL, row)
        return cls(*others, first=None if first == _UNKNOWN else first)


class MetaRow(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a log. Written once, when it is made."""

    format: int
    queues: int
    provider: str
    created_us: int


class ProducerRow(msgspec.Struct, frozen=True, array_like=True):
    """The last call of an idempotent producer."""

    number: int
    time_us: int
    offsets: list[int]
    """The offset of each of its batches; empty if they were too many to store."""


class GapRow(msgspec.Struct, frozen=True, array_like=True):
    """Unfinished batches from the key's offset up to `high` (exclusive) were deleted."""

    high: int
    time_us: int
    reason: str


def offset_of(key: bytes | memoryview) -> int:
    """Return the offset in a key. Raises lmdb.CorruptedError if it is none."""
    return _unpacked(_OFFSET, key)[0]


def _unpacked(struct: Struct, row: bytes | memoryview) -> tuple[int, ...]:
    if len(row) != struct.size:  # LMDB does not verify its pages
        raise lmdb.CorruptedError(f"a key or a row has {len(row):,} bytes, not {struct.size}")
    return struct.unpack(row)


meta_of = msgspec.json.Decoder(MetaRow).decode
meta_row = msgspec.json.Encoder().encode
producer_of = msgspec.msgpack.Decoder(ProducerRow).decode
gap_of = msgspec.msgpack.Decoder(GapRow).decode
row_of = msgspec.msgpack.Encoder().encode
