"""Acknowledgements of one queue that were made for earlier sessions and are not confirmed as saved. No I/O.

They are named in reports as soon as a session serves the queue. The silo confirms them when they are done in the store.
Until then, events that are delivered again are recognised by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ..streams.identity import StreamId

Acknowledged = tuple[StreamId, int, int, int]
"""Stream, offset, first index, count."""

MAX_NAMED = 100_000
"""The most acknowledgements that are named and not confirmed in one session: a silo refuses more."""


class UnconfirmedAcknowledgements:
    """Acknowledgements by position. As a bool: whether there are any."""

    def __init__(self) -> None:
        self._offsets: dict[int, list[Acknowledged]] = {}
        self._count = 0
        self._unnamed: deque[Acknowledged] = deque()
        self._named: deque[tuple[int, list[Acknowledged]]] = deque()
        """Numbers of reports, and the acknowledgements that they name."""
        self._named_count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, acks: Iterable[Acknowledged]) -> None:
        for ack in acks:
            self._put(ack)
            self._unnamed.append(ack)

    def take(self, offset: int, indexes: Sequence[int]) -> set[int]:
        """Of a batch that is delivered again with these `indexes`, remove and return the acknowledged indexes."""
        found: set[int] = set()
        for ack in self._offsets.get(offset, ())[:]:
            found.update(self._remove(ack, indexes))
        return found

    # ---- confirmation ----------------------------------------------------------------------------------------------

    @property
    def can_name(self) -> bool:
        """Whether a report can name acknowledgements."""
        return bool(self._unnamed) and self._named_count < MAX_NAMED

    def name(self, number: int, limit: int) -> list[Acknowledged]:
        """Return acknowledgements to be named in the report with this number, at most `limit`."""
        unnamed, named = self._unnamed, list[Acknowledged]()
        limit = min(limit, MAX_NAMED - self._named_count)
        while unnamed and len(named) < limit:
            ack = unnamed.popleft()
            if ack[1] in self._offsets:  # otherwise it was delivered again meanwhile
                named.append(ack)
        if named:
            self._named.append((number, named))
            self._named_count += len(named)
        return named

    def confirm(self, number: int) -> None:
        """All acknowledgements named in reports up to this number are saved."""
        while self._named and self._named[0][0] <= number:
            for ack in self._named.popleft()[1]:
                self._named_count -= 1
                self._remove_all(ack)

    def end_session(self) -> None:
        """Name everything again in the next session."""
        self._named.clear()
        self._named_count = 0
        self._unnamed = deque(ack for acks in self._offsets.values() for ack in acks)

    # ---- by position -----------------------------------------------------------------------------------------------

    def _put(self, ack: Acknowledged) -> None:
        self._offsets.setdefault(ack[1], []).append(ack)
        self._count += 1

    def _remove_all(self, ack: Acknowledged) -> None:
        _, offset, first, count = ack
        for known in self._offsets.get(offset, ())[:]:
            self._remove(known, range(first, first + count))

    def _remove(self, ack: Acknowledged, indexes: Sequence[int]) -> set[int]:
        """Remove these indexes from one entry, and return those that it had."""
        stream, offset, first, count = ack
        removed = set(range(first, first + count)).intersection(indexes)
        if removed:
            known = self._offsets[offset]
            known.remove(ack)
            self._count -= 1
            if not known:
                del self._offsets[offset]
            if left := [index for index in range(first, first + count) if index not in removed]:
                for start, end in runs(left):
                    self._put((stream, offset, start, end - start))
        return removed


def runs(indexes: Sequence[int]) -> list[list[int]]:
    """Return ascending indexes as runs of first and last (exclusive)."""
    found = [[indexes[0], indexes[0]]]
    for index in indexes:
        if index != found[-1][1]:
            found.append([index, index])
        found[-1][1] += 1
    return found
