"""Reads the blocks of queues from the segments of a provider."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from ...streams.errors import CorruptRecord, StorageError
from ...streams.events import EventBatch
from ..log.blocks import Block, BlockPlace, DamagedBlockError, ReadBudget, StreamTable, events_from
from ..receiving import RETENTION, Bounds, Gap, LostEndError
from ..seam import Backlog, QueueStatistics
from .group import CHUNK_BYTES
from .limits import PostgresLimits
from .queries import QueryConnections, rows
from .schema import ProviderRow, segment_table

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EVERYTHING = ReadBudget(1 << 60, 1 << 60)
_QUEUE = """
    SELECT queue, next, acknowledged, events, bytes, time_us FROM headrace_queue WHERE provider = %s AND queue = %s
"""
_SEGMENTS = """
    SELECT queue, segment, first, events, bytes FROM headrace_segment WHERE provider = %s ORDER BY queue, segment
"""


class SegmentStart(NamedTuple):
    """The position at which a queue begins in a segment, and its events and bytes before that."""

    segment: int
    first: int
    events: int
    nbytes: int


class QueueFacts(NamedTuple):
    """The state of a queue, with its segments, from one snapshot."""

    next: int
    acknowledged: int
    events: int
    nbytes: int
    time_us: int
    """Commit time of the last block."""
    segments: Sequence[SegmentStart]

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.segments[0].first, self.next)

    def segment_holding(self, offset: int) -> SegmentStart | None:
        """Return the segment that has an offset, None if retention has deleted it."""
        index = bisect_right(self.segments, offset, key=lambda each: each.first)
        return self.segments[index - 1] if index else None


class Fetched(NamedTuple):
    """The batches from a position on, up to `next_offset`. There may be more."""

    batches: Sequence[EventBatch]
    next_offset: int
    gap: Gap | None = None
    time_us: int | None = None
    """Commit time of the block that ends at `next_offset`, if it is known."""


class BlockRow(NamedTuple):
    """The first row of a block, without its contents."""

    first: int
    batches: int
    events: int
    time_us: int


class CountedBlocks(NamedTuple):
    """The number of events in blocks that follow one another, up to offset `end`."""

    end: int
    events: int


class QueueReads:
    """Reads the queues of one provider. All methods raise StorageError."""

    def __init__(self, connections: QueryConnections, provider: ProviderRow, limits: PostgresLimits) -> None:
        self._connections = connections
        self._provider = provider
        self._limits = limits
        self._streams = StreamTable()
        self._segments: Mapping[int, Sequence[SegmentStart]] = {}

    async def facts(self, queue: int) -> QueueFacts:
        """Return the state of a queue now."""
        return await self._connections.run(lambda connection: self._facts(connection, queue))

    async def _facts(self, connection: AsyncConnection[TupleRow], queue: int) -> QueueFacts:
        # Read the queue's row before the segments. Then every offset below `next` has a segment, even if a new one
        # begins between the two queries.
        found = await rows(connection, _QUEUE, self._provider.provider, queue)
        segments: dict[int, list[SegmentStart]] = {}
        for number, *start in await rows(connection, _SEGMENTS, self._provider.provider):
            segments.setdefault(number, []).append(SegmentStart(*start))
        self._segments = segments
        if not found or queue not in segments:
            raise StorageError(f"queue {queue}: the database does not have it any more")
        _, end, acknowledged, events, nbytes, time_us = found[0]
        return QueueFacts(max(end, segments[queue][0].first), acknowledged, events, nbytes, time_us, segments[queue])

    async def statistics(self, queue: int) -> QueueStatistics:
        facts = await self.facts(queue)
        oldest = facts.segments[0]
        return QueueStatistics(facts.bounds, facts.events - oldest.events, facts.nbytes - oldest.nbytes)

    # ---- batches ---------------------------------------------------------------------------------------------------

    async def fetch(self, queue: int, position: int, before_us: int | None = None) -> Fetched:
        """Return batches from `position` on, or a gap, or nothing at the end of the queue.

        `before_us` is the commit time of the block before `position`, if the caller has read it. Raises StorageError if
        the server has another block there: it has lost the end of the queue, and stored other batches. Raises
        CorruptRecord if the block at `position` is damaged or missing. If a later block is damaged, return the batches
        before it; the next call, which begins there, raises CorruptRecord.
        """
        return await self._connections.run(lambda connection: self._fetch(connection, queue, position, before_us))

    async def _fetch(
        self, connection: AsyncConnection[TupleRow], queue: int, position: int, before_us: int | None
    ) -> Fetched:
        known = self._segments.get(queue)
        if known:
            holding = QueueFacts(0, 0, 0, 0, 0, known).segment_holding(position)
            chunks = await self._chunks(connection, queue, holding.segment, position) if holding else ()
            if chunks and chunks[0][0] <= position and before_us in (None, chunks[0][6]):
                return self._decode(queue, position, chunks)
        while True:
            facts = await self._facts(connection, queue)
            if before_us is not None and position <= facts.next:
                await self._check_before(connection, queue, position, before_us, facts)
            if position == facts.next:
                return Fetched((), position, time_us=facts.time_us if position else None)
            if position > facts.next:
                # The block before `position` was the last one read: later blocks are new.
                since_us = None if before_us is None else before_us + 1
                end = facts.next if since_us is None else await self._offset_at(connection, queue, since_us)
                raise _lost_end(queue, position, facts.next, min(end, facts.next))
            holding = facts.segment_holding(position)
            if holding is None:
                first = facts.bounds.first
                return Fetched((), first, Gap(position, first, RETENTION))
            if chunks := await self._chunks(connection, queue, holding.segment, position):
                return self._decode(queue, position, chunks)
            if (await self._facts(connection, queue)).segment_holding(position) == holding:
                following = facts.segments[facts.segments.index(holding) + 1 :]
                raise CorruptRecord(queue, position, "it is missing", following[0].first if following else facts.next)

    async def _check_before(
        self, connection: AsyncConnection[TupleRow], queue: int, position: int, before_us: int, facts: QueueFacts
    ) -> None:
        """Raise StorageError if the block before a position has another commit time. Its block may be deleted."""
        if position < facts.next:
            block = await self._block(connection, queue, facts, position - 1)
            found_us = None if block is None else block.time_us
        else:
            found_us = facts.time_us
        if found_us in (None, before_us):
            return
        # Blocks that were stored later than the one that was read are new. Clocks may differ between servers.
        low = min(await self._offset_at(connection, queue, before_us + 1), position - 1)
        block = await self._block(connection, queue, facts, low)
        since_us = before_us + 1 if block is None else min(before_us + 1, block.time_us)
        since = _EPOCH + timedelta(microseconds=since_us)
        raise StorageError(
            f"queue {queue} has lost its end: offsets from {low} to {position - 1} have other batches than those that "
            f"were read: close the silos, seek their subscriptions back to {since.isoformat()}, and start them again"
        )

    async def _chunks(
        self, connection: AsyncConnection[TupleRow], queue: int, segment: int, position: int
    ) -> Sequence[Any]:
        """Return the rows of blocks from the one that holds `position` on: none if the segment was dropped.

        The last column is the commit time of the last block of this segment that begins before `position`, or None.
        """
        table = segment_table(self._provider.provider, segment)
        limit = max(self._limits.fetch_bytes // CHUNK_BYTES, 1)
        query = f"""
            SELECT first, part, parts, batches, time_us, chunk, (
                SELECT time_us FROM {table} WHERE queue = {queue} AND first < %s ORDER BY first DESC LIMIT 1
            ) FROM {table} WHERE queue = {queue} AND first >= coalesce((
                SELECT first FROM {table} WHERE queue = {queue} AND first <= %s ORDER BY first DESC LIMIT 1
            ), %s) ORDER BY first, part LIMIT {limit}
        """  # noqa: S608 (numbers)
        try:
            cursor = await connection.execute(query.encode(), [position, position, position], binary=True)
            found = await cursor.fetchall()
        except psycopg.errors.UndefinedTable:
            return ()
        last = found[-1] if found else None
        if last is not None and last[1] + 1 < last[2]:  # the limit has cut a block
            if last[0] != found[0][0]:
                return found[: len(found) - last[1] - 1]
            rest = f"""
                SELECT first, part, parts, batches, time_us, chunk FROM {table}
                WHERE queue = {queue} AND first = {last[0]} AND part > {last[1]} ORDER BY part
            """  # noqa: S608 (numbers)
            found += await (await connection.execute(rest.encode(), binary=True)).fetchall()
        start = next((index for index, row in enumerate(found) if row[0] + row[3] > position), len(found))
        return found[start:]  # without a block that ends before the position, if a later segment has the next one

    def _decode(self, queue: int, position: int, chunks: Sequence[Any]) -> Fetched:
        batches: list[EventBatch] = []
        at, index, last_us = position, 0, None
        while index < len(chunks):
            first, _, parts, count, time_us, chunk, _ = chunks[index]
            rest = [row[5] for row in chunks[index + 1 : index + parts] if row[0] == first]
            try:
                block = _block(b"".join((chunk, *rest)) if rest else chunk, BlockPlace(queue, first), count, at)
                batches += block.batches(at - first, _EVERYTHING, self._streams)
            except DamagedBlockError as damage:
                if batches:  # return them first; the next call begins here
                    break
                raise CorruptRecord(queue, at, str(damage), first + count if first <= at else first) from None
            at, index, last_us = first + count, index + parts, time_us
        return Fetched(batches, at, time_us=last_us)

    # ---- searching -------------------------------------------------------------------------------------------------

    async def offset_at(self, queue: int, time_us: int) -> int:
        """Return the offset of the first batch stored at or after a time, or the queue's end if there is none."""
        return await self._connections.run(lambda connection: self._offset_at(connection, queue, time_us))

    async def _offset_at(self, connection: AsyncConnection[TupleRow], queue: int, time_us: int) -> int:
        """See `offset_at`. A binary search: times never decrease in a queue; the batches of a block share one."""
        facts = await self._facts(connection, queue)
        low, high = facts.bounds
        while low < high:
            middle = (low + high) // 2
            block = await self._block_from(connection, queue, facts, middle)
            if block is None or block.first > middle:
                now = await self._facts(connection, queue)
                if now.segment_holding(middle) != facts.segment_holding(middle):  # retention has dropped it
                    facts = now
                    low, high = facts.bounds
                    continue
            if block is not None and block.time_us < time_us:
                low = block.first + block.batches
            else:
                high = min(middle, block.first) if block is not None else middle
        return low

    async def _block_from(
        self, connection: AsyncConnection[TupleRow], queue: int, facts: QueueFacts, offset: int
    ) -> BlockRow | None:
        """Return the block that holds an offset. If it is missing, return the next one, or None at the end."""
        if (block := await self._block(connection, queue, facts, offset)) is not None:
            return block
        holding = facts.segment_holding(offset)
        for start in facts.segments if holding is None else facts.segments[facts.segments.index(holding) :]:
            query = f"""
                SELECT first, batches, events, time_us FROM {segment_table(self._provider.provider, start.segment)}
                WHERE queue = %s AND first > %s AND part = 0 ORDER BY first LIMIT 1
            """  # noqa: S608 (numbers)
            with suppress(psycopg.errors.UndefinedTable):
                if found := await rows(connection, query, queue, offset):
                    return BlockRow(*found[0])
        return None

    async def _block(
        self, connection: AsyncConnection[TupleRow], queue: int, facts: QueueFacts, offset: int
    ) -> BlockRow | None:
        """Return the block that holds an offset, None if there is none."""
        holding = facts.segment_holding(offset)
        if holding is None:
            return None
        query = f"""
            SELECT first, batches, events, time_us FROM {segment_table(self._provider.provider, holding.segment)}
            WHERE queue = %s AND first <= %s AND part = 0 ORDER BY first DESC LIMIT 1
        """  # noqa: S608 (numbers)
        try:
            found = await rows(connection, query, queue, offset)
        except psycopg.errors.UndefinedTable:
            return None
        return BlockRow(*found[0]) if found and found[0][0] + found[0][1] > offset else None

    async def backlog(self, queue: int, offset: int) -> Backlog:
        """See QueueAdapter."""
        return await self._connections.run(lambda connection: self._backlog(connection, queue, offset))

    async def _backlog(self, connection: AsyncConnection[TupleRow], queue: int, offset: int) -> Backlog:
        facts = await self._facts(connection, queue)
        start = max(offset, facts.bounds.first)
        if start >= facts.next:
            return Backlog(0, 0)
        block = await self._block(connection, queue, facts, start)
        if block is None:
            return Backlog(facts.next - start)
        end = block.first + block.batches
        events = await self._events_in(connection, queue, facts, block, start)
        counted = await self._counted(connection, queue, facts, end)
        if counted is not None:
            events, end = events + counted.events, counted.end
        left = facts.next - end
        oldest = facts.segments[0]
        if left:
            events += round(left * (facts.events - oldest.events) / (facts.next - oldest.first))
        return Backlog(facts.next - start, events, estimated=left > 0, since_us=block.time_us)

    async def _events_in(
        self, connection: AsyncConnection[TupleRow], queue: int, facts: QueueFacts, block: BlockRow, start: int
    ) -> int:
        """Return the number of events of a block's batches from offset `start` on."""
        if start == block.first:
            return block.events
        holding = facts.segment_holding(start)
        chunks = await self._chunks(connection, queue, holding.segment, start) if holding else ()
        record = b"".join(row[5] for row in chunks if row[0] == block.first)
        try:
            return events_from(record, start - block.first)
        except DamagedBlockError:
            return 0  # readers get the error

    async def _counted(
        self, connection: AsyncConnection[TupleRow], queue: int, facts: QueueFacts, start: int
    ) -> CountedBlocks | None:
        """Count the events of some blocks of a segment from offset `start` on. None: there are none."""
        holding = facts.segment_holding(start)
        if holding is None or start >= facts.next:
            return None
        query = f"""
            SELECT max(first + batches), sum(events) FROM (
                SELECT first, batches, events FROM {segment_table(self._provider.provider, holding.segment)}
                WHERE queue = %s AND first >= %s AND part = 0 ORDER BY first LIMIT {self._limits.counted_blocks}
            ) AS counted
        """  # noqa: S608 (numbers)
        try:
            ((end, events),) = await rows(connection, query, queue, start)
        except psycopg.errors.UndefinedTable:
            return None
        return None if end is None else CountedBlocks(min(end, facts.next), int(events))


def _block(record: bytes, place: BlockPlace, batches: int, position: int) -> Block:
    """Return the block at a place. Raises DamagedBlockError if it is damaged, or does not hold `position`: then the
    right block is missing."""
    if not place.first <= position < place.first + batches:
        raise DamagedBlockError("it is missing")
    return Block(record, place)


def _lost_end(queue: int, position: int, next_offset: int, end: int) -> LostEndError:
    return LostEndError(
        f"queue {queue} has lost its end: offsets from {next_offset} to {position - 1} are not in the database any "
        "more: close the silo, and start it again or seek its subscriptions there",
        end=end,
    )
