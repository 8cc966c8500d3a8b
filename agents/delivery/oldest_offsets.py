"""The lowest offset that many cursors need, found without a look at all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from ...streams.identity import StreamId
from ..cursor import CursorState, StreamCursor

SPARE = 1000
"""Entries that may be out of date, besides one for each cursor."""


class OldestOffsets:
    """Keeps cursors in the order of the offsets that they needed at some time. An offset only rises, so the first
    cursor whose entry is up to date needs the lowest one. Paused cursors do not count."""

    def __init__(self, cursors: Mapping[StreamId, StreamCursor], needed: Callable[[StreamCursor], int]) -> None:
        """`cursors` are the present ones by stream. `needed` returns the offset that a cursor needs."""
        self._cursors = cursors
        self._needed = needed
        self._numbers = count()
        self._heap: list[tuple[int, int, StreamCursor]] = []
        self.new: list[StreamCursor] = list(cursors.values())
        """Cursors that came, or go on, since the last call of `lowest`. Append them here."""

    def lowest(self) -> int | None:
        """Return the lowest offset that a cursor needs, None if there is no cursor that is not paused."""
        come = [(self._needed(one), next(self._numbers), one) for one in self.new]
        self.new.clear()
        if len(come) > len(self._heap) // 4:  # as at the start
            self._heap += come
            heapify(self._heap)
        else:
            for entry in come:
                heappush(self._heap, entry)
        self._tidy()
        heap = self._heap
        while heap:
            offset, _, cursor = heap[0]
            if not self._counts(cursor):
                heappop(heap)
            elif (now := self._needed(cursor)) > offset:
                heapreplace(heap, (now, next(self._numbers), cursor))
            else:
                return offset
        return None

    def _counts(self, cursor: StreamCursor) -> bool:
        return self._cursors.get(cursor.stream) is cursor and cursor.state is not CursorState.PAUSED

    def _tidy(self) -> None:
        """Forget cursors that are gone, once they are more than half. That takes the same time per entry on average."""
        if len(self._heap) > 2 * len(self._cursors) + SPARE:
            self._heap = [
                (self._needed(cursor), next(self._numbers), cursor)
                for cursor in self._cursors.values()
                if cursor.state is not CursorState.PAUSED
            ]
            heapify(self._heap)
