"""One LMDB transaction over the log's databases, in the log's own words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import lmdb

from ...streams.errors import CorruptRecord
from .blocks import BlockHeader, DamagedBlockError, events_from, read_header
from .rows import GapRow, ProducerRow, Tail, gap_key, gap_of, offset_key, offset_of, producer_of, queue_key, row_of

Database = lmdb._Database  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] (py-lmdb has no public name for it)
Transaction: TypeAlias = "lmdb.Transaction[memoryview]"


class Databases(NamedTuple):
    meta: Database
    state: Database
    producers: Database
    gaps: Database
    blocks: list[Database]
    """One per queue."""


class StoredGap(NamedTuple):
    low: int
    high: int
    time_us: int
    reason: str


class Snapshot:
    """Reads. Records are views of the map: void after the transaction, and after any change within it."""

    def __init__(self, txn: Transaction, databases: Databases) -> None:
        self._txn = txn
        self._databases = databases

    def tail(self, queue: int) -> Tail:
        return Tail.unpack(self._txn.get(queue_key(queue), db=self._databases.state))

    def first(self, queue: int) -> int | None:
        """Offset of the oldest retained batch. None where there is none."""
        cursor = self._txn.cursor(self._databases.blocks[queue])
        return offset_of(cursor.key()) if cursor.first() else None

    def block_holding(self, queue: int, offset: int) -> int | None:
        """The first offset of the block that holds batch `offset`; None where that one is not retained.

        Blocks follow each other without holes, so the last block that begins at or below it is the one, as long as
        `offset` is below the queue's next.
        """
        cursor = self._txn.cursor(self._databases.blocks[queue])
        if cursor.set_range(offset_key(offset)):
            found = offset_of(cursor.key()) == offset or cursor.prev()
        else:
            found = cursor.last()
        return offset_of(cursor.key()) if found else None

    def block_after(self, queue: int, first: int) -> int:
        """The offset of the block after the one that begins at `first`; the queue's next where that is the last."""
        cursor = self._txn.cursor(self._databases.blocks[queue])
        follows = cursor.set_range(offset_key(first + 1))
        return offset_of(cursor.key()) if follows else self.tail(queue).next

    def record(self, queue: int, first: int) -> memoryview:
        """The block that begins at `first`. Raises DamagedBlockError where it is missing."""
        record = self._txn.get(offset_key(first), db=self._databases.blocks[queue])
        if record is None:
            raise DamagedBlockError("it is missing")
        return record

    def size(self, queue: int, first: int) -> int:
        """Bytes of the block that begins at `first`; 0 where it is missing."""
        return len(self._txn.get(offset_key(first), db=self._databases.blocks[queue]) or b"")

    def header(self, queue: int, first: int) -> BlockHeader:
        """Raises CorruptRecord."""
        try:
            return read_header(self.record(queue, first))
        except DamagedBlockError as damage:
            raise CorruptRecord(queue, first, str(damage), self.block_after(queue, first)) from None

    def events_from(self, queue: int, first: int, offset: int) -> int:
        """Events of the block that begins at `first`, from batch `offset` on. Raises CorruptRecord."""
        try:
            return events_from(self.record(queue, first), offset - first)
        except DamagedBlockError as damage:
            raise CorruptRecord(queue, first, str(damage), self.block_after(queue, first)) from None

    def producer(self, producer: bytes) -> ProducerRow | None:
        row = self._txn.get(producer, db=self._databases.producers)
        return None if row is None else producer_of(row)

    def producers(self, after: bytes) -> Iterator[tuple[bytes, ProducerRow]]:
        """Producers in the order of their ids, from `after` (inclusive) on."""
        cursor = self._txn.cursor(self._databases.producers)
        if cursor.set_range(after) if after else cursor.first():
            for key, row in cursor:
                yield bytes(key), producer_of(row)

    def gaps(self, queue: int) -> Iterator[StoredGap]:
        """The gap records of a queue, oldest first."""
        cursor = self._txn.cursor(self._databases.gaps)
        if cursor.set_range(queue_key(queue)):
            for key, row in cursor:
                if bytes(key[:4]) != queue_key(queue):
                    break
                yield StoredGap(offset_of(key[4:]), *_fields(gap_of(row)))


def _fields(row: GapRow) -> tuple[int, int, str]:
    return row.high, row.time_us, row.reason


class Changes(Snapshot):
    """Reads and writes."""

    def put_tail(self, queue: int, tail: Tail) -> None:
        self._txn.put(queue_key(queue), tail.pack(), db=self._databases.state)

    def append(self, queue: int, first: int, record: memoryview) -> None:
        """Store a block after all others. Raises CorruptRecord where there is one at or above `first`."""
        if not self._txn.put(offset_key(first), record, append=True, db=self._databases.blocks[queue]):
            raise CorruptRecord(queue, first, "there is a block at or above the queue's next offset")

    def delete(self, queue: int, first: int) -> None:
        self._txn.delete(offset_key(first), db=self._databases.blocks[queue])

    def put_producer(self, producer: bytes, row: ProducerRow) -> None:
        self._txn.put(producer, row_of(row), db=self._databases.producers)

    def delete_producer(self, producer: bytes) -> None:
        self._txn.delete(producer, db=self._databases.producers)

    def touch(self) -> None:
        """Change nothing that anybody reads, so that there is something to commit."""
        self._txn.put(b"touched", b"", db=self._databases.meta)

    def put_gap(self, queue: int, gap: StoredGap) -> None:
        row = GapRow(gap.high, gap.time_us, gap.reason)
        self._txn.put(gap_key(queue, gap.low), row_of(row), db=self._databases.gaps)
