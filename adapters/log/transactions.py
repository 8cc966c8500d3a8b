"""Typed access to the log's databases within one LMDB transaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import lmdb

from ...streams.errors import CorruptRecord
from ...streams.remedies import log_remedy
from .blocks import BlockHeader, DamagedBlockError, events_from, read_header
from .rows import GapRow, ProducerRow, TailRow, gap_key, gap_of, offset_key, offset_of, producer_of, queue_key, row_of

Database = lmdb._Database  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] (py-lmdb has no public name for it)
Transaction: TypeAlias = "lmdb.Transaction[memoryview]"


class LogDatabases(NamedTuple):
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


class LogSnapshot:
    """Reads the databases. Records are views of the map: they are invalid after the transaction, and after any change
    within it."""

    def __init__(self, txn: Transaction, databases: LogDatabases, log: Path) -> None:
        self._txn = txn
        self._databases = databases
        self._log = log

    def corrupt(self, queue: int, offset: int, why: object, next_offset: int) -> CorruptRecord:
        """Return the error for records from `offset` up to `next_offset` that cannot be read."""
        remedy = log_remedy("repair queue", self._log, queue)
        return CorruptRecord(queue, offset, str(why), next_offset, remedy)

    def tail(self, queue: int) -> TailRow:
        return TailRow.unpack(self._txn.get(queue_key(queue), db=self._databases.state))

    def first(self, queue: int) -> int | None:
        """Return the offset of the oldest retained batch, None if there is none.

        Raises CorruptRecord as `beginning`, and if blocks before it are missing.
        """
        first, beginning = self.stored_first(queue), self.beginning(queue)
        found = self.tail(queue).next if first is None else first
        if beginning < found:
            raise self.corrupt(queue, beginning, "its oldest blocks are missing", found)
        return first

    def beginning(self, queue: int) -> int:
        """Return the offset of the oldest batch that must be there; the queue's end if there is none. Its block may
        be missing: then reading it raises CorruptRecord.

        Raises CorruptRecord if all blocks are behind the queue's end: a power failure may cause this with durability
        `relaxed`.
        """
        stored, tail = self.stored_first(queue), self.tail(queue)
        if stored is not None and stored >= tail.next:
            raise self.corrupt(queue, tail.next, "its oldest block is behind the queue's end", stored)
        found = tail.next if stored is None else stored
        return found if tail.first is None else min(tail.first, found)

    def stored_first(self, queue: int) -> int | None:
        """Return the offset of the first block that is found, None if there is none."""
        cursor = self._txn.cursor(self._databases.blocks[queue])
        return offset_of(cursor.key()) if cursor.first() else None

    def end(self, queue: int) -> int:
        """Return the queue's next offset. Raises CorruptRecord if it is wrong: a record is stored at or behind it."""
        end = self.tail(queue).next
        behind = next(self.blocks(queue, end), None)
        if behind is not None:
            raise self.corrupt(queue, end, "the queue ends here, but records are stored behind that", behind[0])
        return end

    def block_holding(self, queue: int, offset: int) -> int | None:
        """Return the first offset of the block that holds batch `offset`, None if that block is not retained.

        `offset` must be below the queue's next. Blocks follow each other without holes, so this is the last block that
        begins at or below `offset`.
        """
        cursor = self._txn.cursor(self._databases.blocks[queue])
        if cursor.set_range(offset_key(offset)):
            found = offset_of(cursor.key()) == offset or cursor.prev()
        else:
            found = cursor.last()
        return offset_of(cursor.key()) if found else None

    def block_after(self, queue: int, first: int) -> int:
        """Return the offset of the block after the one that begins at `first`; after the last block, the queue's next
        offset."""
        cursor = self._txn.cursor(self._databases.blocks[queue])
        follows = cursor.set_range(offset_key(first + 1))
        end = self.tail(queue).next
        return min(offset_of(cursor.key()), end) if follows else end

    def blocks(self, queue: int, start: int) -> Iterator[tuple[int, memoryview]]:
        """Yield offset and record of each block that begins at `start` or behind it."""
        cursor = self._txn.cursor(self._databases.blocks[queue])
        if cursor.set_range(offset_key(start)):
            for key, record in cursor:
                yield offset_of(key), record

    def record(self, queue: int, first: int) -> memoryview:
        """Return the block that begins at `first`. Raises DamagedBlockError if it is missing."""
        record = self._txn.get(offset_key(first), db=self._databases.blocks[queue])
        if record is None:
            raise DamagedBlockError("it is missing")
        return record

    def size(self, queue: int, first: int) -> int:
        """Return the bytes of the block that begins at `first`, 0 if it is missing."""
        return len(self._txn.get(offset_key(first), db=self._databases.blocks[queue]) or b"")

    def header(self, queue: int, first: int) -> BlockHeader:
        """Return the header of the block that begins at `first`. Raises CorruptRecord."""
        try:
            return read_header(self.record(queue, first))
        except DamagedBlockError as damage:
            raise self.corrupt(queue, first, damage, self.block_after(queue, first)) from None

    def events_from(self, queue: int, first: int, offset: int) -> int:
        """Return the number of events from batch `offset` on of the block that begins at `first`.

        Raises CorruptRecord.
        """
        try:
            return events_from(self.record(queue, first), offset - first)
        except DamagedBlockError as damage:
            raise self.corrupt(queue, first, damage, self.block_after(queue, first)) from None

    def producer(self, producer: bytes) -> ProducerRow | None:
        row = self._txn.get(producer, db=self._databases.producers)
        return None if row is None else producer_of(row)

    def producers(self, after: bytes) -> Iterator[tuple[bytes, ProducerRow]]:
        """Yield producers in the order of their ids, from `after` (inclusive) on."""
        cursor = self._txn.cursor(self._databases.producers)
        if cursor.set_range(after) if after else cursor.first():
            for key, row in cursor:
                yield bytes(key), producer_of(row)

    def gaps(self, queue: int) -> Iterator[StoredGap]:
        """Yield the gap records of a queue, oldest first."""
        cursor = self._txn.cursor(self._databases.gaps)
        if cursor.set_range(queue_key(queue)):
            for key, row in cursor:
                if bytes(key[:4]) != queue_key(queue):
                    break
                gap = gap_of(row)
                yield StoredGap(offset_of(key[4:]), gap.high, gap.time_us, gap.reason)


class LogChanges(LogSnapshot):
    """Reads and writes the databases."""

    def put_tail(self, queue: int, tail: TailRow) -> None:
        self._txn.put(queue_key(queue), tail.pack(), db=self._databases.state)

    def append(self, queue: int, first: int, record: memoryview) -> None:
        """Store a block after all others. Raises CorruptRecord if a block is stored at or behind `first`."""
        if not self._txn.put(offset_key(first), record, append=True, db=self._databases.blocks[queue]):
            why = "the queue ends here, but records are stored behind that"
            raise CorruptRecord(queue, first, why, remedy=log_remedy("repair queue", self._log, queue))

    def put(self, queue: int, first: int, record: bytes) -> None:
        """Store a block at any offset."""
        self._txn.put(offset_key(first), record, db=self._databases.blocks[queue])

    def delete(self, queue: int, first: int) -> None:
        self._txn.delete(offset_key(first), db=self._databases.blocks[queue])

    def put_producer(self, producer: bytes, row: ProducerRow) -> None:
        self._txn.put(producer, row_of(row), db=self._databases.producers)

    def delete_producer(self, producer: bytes) -> None:
        self._txn.delete(producer, db=self._databases.producers)

    def touch(self) -> None:
        """Write a row that is never read, so that the transaction has a change to commit."""
        self._txn.put(b"touched", b"", db=self._databases.meta)

    def put_gap(self, queue: int, gap: StoredGap) -> None:
        row = GapRow(gap.high, gap.time_us, gap.reason)
        self._txn.put(gap_key(queue, gap.low), row_of(row), db=self._databases.gaps)
