"""The leader epochs of the records that were read, by which brokers tell whether they have lost them. Pure.

Each leader of a partition writes records with an epoch of its own, higher than those before. A broker knows where the
records of an epoch end. If they end below a position up to which they were read, the end of the partition was lost,
also if it has grown past the position since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class EpochRange(NamedTuple):
    """Records of one epoch were read from offset `low` up to `high` (exclusive), without a pause between them."""

    epoch: int
    low: int
    high: int


class ReadEpochs:
    """The epochs of one queue that were read. Only offsets that were read are in a range: the epoch of a position
    that a user chose is not known."""

    def __init__(self) -> None:
        self._ranges: dict[int, EpochRange] = {}
        self._unsaved: set[int] = set()

    def note(self, ranges: Iterable[EpochRange]) -> None:
        """Note ranges that were read now."""
        for new in ranges:
            if self._add(new):
                self._unsaved.add(new.epoch)

    def adopt(self, stored: EpochRange) -> None:
        """Note a range that is stored."""
        self._add(stored)

    def _add(self, new: EpochRange) -> bool:
        old = self._ranges.get(new.epoch)
        if old is not None and new.low <= old.high and old.low <= new.high:  # they touch
            new = EpochRange(new.epoch, min(old.low, new.low), max(old.high, new.high))
        elif old is not None and old.high > new.high:
            return False  # of two separate ranges, the higher one is kept
        self._ranges[new.epoch] = new
        return new != old

    def epoch_before(self, position: int) -> int | None:
        """Return the highest epoch in which the record before this position was read; None if it was not read."""
        return max((each.epoch for each in self._ranges.values() if each.low < position <= each.high), default=None)

    def take_unsaved(self) -> Sequence[EpochRange]:
        """Return the ranges that must be stored. They count as stored, unless they are put back."""
        found = [self._ranges[epoch] for epoch in sorted(self._unsaved)]
        self._unsaved.clear()
        return found

    def put_back(self, taken: Iterable[EpochRange]) -> None:
        """Let the next call take these ranges again, because they could not be stored."""
        self._unsaved.update(each.epoch for each in taken)
