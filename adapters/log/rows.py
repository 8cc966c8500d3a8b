"""The small rows beside the blocks, and how they are written.

database     key                               value
meta         b"log"                            JSON: what this directory is
queue-NNNNN  first offset (u64, big-endian)    a block, see `blocks`
state        queue index (u32, big-endian)     `Tail`, five u64, little-endian
producers    the producer's id in UTF-8        msgpack of `ProducerRow`
gaps         queue (u32) and low (u64)         msgpack of `GapRow`
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import msgspec

FORMAT = 1
META_KEY = b"log"

_OFFSET = Struct(">Q")
_QUEUE = Struct(">I")
_GAP = Struct(">IQ")
_TAIL = Struct("<QQQQQ")

offset_key = _OFFSET.pack
queue_key = _QUEUE.pack
gap_key = _GAP.pack


class Tail(NamedTuple):
    """The state of one queue. Changes in the transaction that changes the queue's blocks."""

    next: int = 0
    """Offset of the next batch."""
    events: int = 0
    """Retained events."""
    nbytes: int = 0
    """Retained bytes of blocks."""
    time_us: int = 0
    """Time of the last commit."""
    acknowledged: int = 0
    """Every batch below it is finished."""

    def pack(self) -> bytes:
        return _TAIL.pack(*self)

    @classmethod
    def unpack(cls, row: bytes | memoryview | None) -> Tail:
        return cls() if row is None else cls._make(_TAIL.unpack(row))


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory is: written once, when it is made."""

    format: int
    queues: int
    provider: str
    created_us: int


class ProducerRow(msgspec.Struct, frozen=True, array_like=True):
    """The last call of an idempotent producer."""

    number: int
    time_us: int
    offsets: list[int]
    """Where its batches are, one offset each; empty where they were too many to note."""


class GapRow(msgspec.Struct, frozen=True, array_like=True):
    """Unfinished batches from the key's offset up to `high` (exclusive) were deleted."""

    high: int
    time_us: int
    reason: str


def offset_of(key: bytes | memoryview) -> int:
    return int.from_bytes(key, "big")


meta_of = msgspec.json.Decoder(Meta).decode
meta_row = msgspec.json.Encoder().encode
producer_of = msgspec.msgpack.Decoder(ProducerRow).decode
gap_of = msgspec.msgpack.Decoder(GapRow).decode
row_of = msgspec.msgpack.Encoder().encode
