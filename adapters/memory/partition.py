"""One queue in memory: a linked list of fixed segments. Pure: no clock, no I/O, no asyncio.

The design is that of Mocha's MemoryBufferQueue:

    first                                    next
      │                                        │
    [ · · 2 3 ] ──► [ 4 5 6 7 ] ──► [ 8 9 _ _ ]        spare: [ _ _ _ _ ]
      head                            tail

An item's offset is an unbounded integer that only grows. An item is deleted when it is committed. Reading deletes
nothing, so a new reader reads the same items again. A segment is unlinked when all of its items are deleted: the last
such segment is kept as the spare and becomes the next tail.

Three rules keep readers safe. A slot is filled before it counts as written. Items are returned in new lists, never in a
segment's slots. A reader is never before the first item, so the segment that holds its position is still linked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from ...streams.errors import InvalidArgument
from ..limits import SizedT, within_limits


class PartitionSegment(Generic[SizedT]):
    """A fixed array of slots for the items from offset `start` on."""

    __slots__ = ("following", "slots", "start", "written")

    def __init__(self, size: int, start: int) -> None:
        self.slots: list[SizedT | None] = [None] * size
        self.start = start
        self.written = 0
        self.following: PartitionSegment[SizedT] | None = None

    @property
    def end(self) -> int:
        """The offset after the last slot."""
        return self.start + len(self.slots)

    @property
    def full(self) -> bool:
        return self.written == len(self.slots)

    def append(self, item: SizedT) -> None:
        self.slots[self.written] = item
        self.written += 1

    def remove(self, offset: int) -> SizedT:
        """Empty the slot of `offset`, and return its item."""
        index = offset - self.start
        item = self.slots[index]
        assert item is not None
        self.slots[index] = None
        return item

    def reuse(self, start: int) -> None:
        """Use the segment for the items from `start` on. Every slot has been emptied by `remove`."""
        self.start = start
        self.written = 0
        self.following = None

    def items(self, offset: int) -> Iterator[SizedT]:
        """Yield the items from `offset` on."""
        for index in range(offset - self.start, self.written):
            item = self.slots[index]
            assert item is not None
            yield item


class PartitionReader(Generic[SizedT]):
    """Reads a partition from its first item on."""

    __slots__ = ("_partition", "_position", "_segment")

    def __init__(self, partition: MemoryPartition[SizedT]) -> None:
        self._partition = partition
        self._position = partition.first
        self._segment = partition.segment_at(self._position)

    @property
    def position(self) -> int:
        """The next offset to read: after the items that this reader took, and never below the first item."""
        return max(self._position, self._partition.first)

    def take(self, max_events: int, max_bytes: int) -> list[SizedT]:
        """Return the next items in a new list, up to the one that reaches a limit. It is empty at the end."""
        self._position = self.position
        taken = list(within_limits(self._ahead(), max_events, max_bytes))
        self._position += len(taken)
        return taken

    def _ahead(self) -> Iterator[SizedT]:
        position = self._position
        segment = self._segment = self._partition.segment_at(position, near=self._segment)
        yield from segment.items(position)
        while segment.following is not None:
            segment = self._segment = segment.following
            yield from segment.items(segment.start)


class MemoryPartition(Generic[SizedT]):
    """Items in order, kept until they are committed."""

    def __init__(self, segment_size: int) -> None:
        self._segment_size = segment_size
        self._head = self._tail = PartitionSegment[SizedT](segment_size, 0)
        self._spare: PartitionSegment[SizedT] | None = None
        self._first = 0
        self.events = 0
        """Events retained."""
        self.bytes = 0
        """Encoded bytes retained."""

    @property
    def first(self) -> int:
        """The lowest retained offset."""
        return self._first

    @property
    def next(self) -> int:
        """The offset of the next item appended."""
        return self._tail.start + self._tail.written

    def append(self, item: SizedT) -> int:
        """Add an item at the end, and return its offset."""
        if self._tail.full:
            self._grow()
        offset = self.next
        self._tail.append(item)
        self.events += item.count
        self.bytes += item.nbytes
        return offset

    def commit(self, offset: int) -> int:
        """Delete the items below `offset`. Return the number of their events. Raises InvalidArgument if `offset` is
        above `next`."""
        if offset > self.next:
            raise InvalidArgument(
                f"cannot acknowledge up to offset {offset}: the next batch will have offset {self.next}"
            )
        before = self.events
        while self._first < offset:
            item = self._head.remove(self._first)
            self.events -= item.count
            self.bytes -= item.nbytes
            self._first += 1
            self._unlink_finished()
        return before - self.events

    def segments(self) -> Iterator[PartitionSegment[SizedT]]:
        """Yield the segments from head to tail."""
        segment = self._head
        while segment is not self._tail:
            yield segment
            assert segment.following is not None
            segment = segment.following
        yield segment

    def segment_at(self, offset: int, near: PartitionSegment[SizedT] | None = None) -> PartitionSegment[SizedT]:
        """Return the segment that holds `offset`, or the tail if no item has this offset yet. `near` is tried first."""
        if near is not None and near.start <= offset < near.end:
            return near
        for segment in self.segments():
            if offset < segment.end:
                return segment
        return self._tail

    def _grow(self) -> None:
        """Link a new tail: the spare segment if there is one."""
        tail, self._spare = self._spare or PartitionSegment[SizedT](self._segment_size, 0), None
        tail.reuse(start=self._tail.end)
        self._tail.following = tail
        self._tail = tail
        self._unlink_finished()

    def _unlink_finished(self) -> None:
        while self._first >= self._head.end and self._head.following is not None:
            self._spare, self._head = self._head, self._head.following
