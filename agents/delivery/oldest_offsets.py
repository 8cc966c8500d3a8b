"""The lowest offset that many cursors need, found without a look at all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from ...streams.identity import StreamId
from ..cursor import CursorState, StreamCursor

SCANNED = 1000
"""So many cursors are looked at one by one: that takes less time than to keep them in order."""
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
        self.complete = False
        """Whether `add` was called for each cursor that came. If not, they are all put in order anew."""
        self._new: list[StreamCursor] = []
        """Cursors that came, or go on, since the last call of `lowest`."""
        self._most = SPARE
        """The number of new cursors at which those that are gone are forgotten."""

    def add(self, cursor: StreamCursor) -> None:
        """A cursor came, or goes on after a pause."""
        self._new.append(cursor)
        if len(self._new) > self._most:
            cursors = self._cursors
            self._new = [one for one in self._new if cursors.get(one.stream) is one]
            self._most = 2 * len(self._new) + SPARE

    def lowest(self) -> int | None:
        """Return the lowest offset that a cursor needs, None if there is no cursor that is not paused."""
        if len(self._cursors) <= SCANNED:
            self._heap, self._new, self.complete = [], [], False
            live = (cursor for cursor in self._cursors.values() if cursor.state is not CursorState.PAUSED)
            return min(map(self._needed, live), default=None)
        if not self.complete or len(self._heap) > 2 * len(self._cursors) + SPARE:
            self._order_all()
        for cursor in self._new:
            heappush(self._heap, (self._needed(cursor), next(self._numbers), cursor))
        self._new = []
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

    def _order_all(self) -> None:
        """Put all cursors in order. Later it is done only once more than half of the entries are of cursors that are
        gone, which takes the same time per entry on average."""
        self._heap = [(self._needed(one), next(self._numbers), one) for one in self._cursors.values()]
        heapify(self._heap)
        self._new, self.complete = [], True

    def _counts(self, cursor: StreamCursor) -> bool:
        return self._cursors.get(cursor.stream) is cursor and cursor.state is not CursorState.PAUSED
