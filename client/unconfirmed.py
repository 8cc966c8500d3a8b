"""Acknowledgements that were sent on lost connections and that the silo has not confirmed as saved. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..streams.identity import StreamId

Acknowledged = tuple[StreamId, int, int, int, int]
"""Stream, queue, offset, first index, count."""

MAX_REMEMBERED = 200_000
"""Above this number the oldest are dropped: the user may get those events again."""


class UnconfirmedAcknowledgements:
    """Acknowledgements by position. As a bool: whether there are any."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._streams: dict[StreamId, dict[int, list[Acknowledged]]] = {}
        self._positions: dict[tuple[int, int], int] = {}
        """Number of acknowledged events, by queue and offset."""
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def __len__(self) -> int:
        return self._count

    def add(self, acks: Iterable[Acknowledged]) -> None:
        for ack in acks:
            stream, queue, offset = ack[:3]
            known = self._streams.setdefault(stream, {}).setdefault(offset, [])
            if ack in known:
                continue
            known.append(ack)
            self._positions[queue, offset] = self._positions.get((queue, offset), 0) + 1
            self._count += 1
        while self._count > self._limit:
            self._remove(next(iter(self._streams)))

    def take(self, stream: StreamId, offset: int, indexes: Sequence[int]) -> set[int]:
        """Of a redelivered batch with these `indexes`, remove and return the indexes that are acknowledged."""
        if offset not in self._streams.get(stream, ()):
            return set()
        acks = self._remove(stream, offset)
        known = {index for _, _, _, first, count in acks for index in range(first, first + count)}
        found = known.intersection(indexes)
        if left := sorted(known - found):
            self.add((stream, acks[0][1], offset, first, end - first) for first, end in runs(left))
        return found

    def knows(self, queue: int, offset: int) -> bool:
        """Whether an event of this batch is acknowledged."""
        return (queue, offset) in self._positions

    def passed(self, stream: StreamId, offset: int) -> list[Acknowledged]:
        """Remove and return all entries of the stream before a delivered batch: the silo has saved all earlier
        events."""
        known = self._streams.get(stream)
        if known is None:
            return []
        return [ack for before in sorted(known) if before < offset for ack in self._remove(stream, before)]

    def all_passed(self) -> list[Acknowledged]:
        """Remove and return all entries: the silo has no event left to deliver, so it has saved all
        acknowledgements."""
        return [ack for stream in list(self._streams) for ack in self._remove(stream)]

    def _remove(self, stream: StreamId, offset: int | None = None) -> list[Acknowledged]:
        known = self._streams[stream]
        removed = [ack for one in ([offset] if offset is not None else list(known)) for ack in known.pop(one)]
        if not known:
            del self._streams[stream]
        for ack in removed:
            position = ack[1], ack[2]
            self._positions[position] -= 1
            if not self._positions[position]:
                del self._positions[position]
        self._count -= len(removed)
        return removed


def runs(indexes: Sequence[int]) -> list[list[int]]:
    """Return ascending indexes as runs of first and last (exclusive)."""
    found = [[indexes[0], indexes[0]]]
    for index in indexes:
        if index != found[-1][1]:
            found.append([index, index])
        found[-1][1] += 1
    return found
