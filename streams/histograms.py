"""Histograms of durations that cost little: plain counts in buckets whose bounds are powers of two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil, inf

FINEST = 11
"""The first bucket ends at 2^-11 seconds, about half a millisecond."""
COARSEST = 6
"""The last bucket with an end ends at 2^6 seconds."""
BOUNDS: Sequence[float] = [2.0**power for power in range(-FINEST, COARSEST + 1)]
"""The end of each bucket but the last in seconds, inclusive. The last bucket has no end."""
_LAST = len(BOUNDS)
_NONE = [0] * (_LAST + 1)
_UNITS = 1 << FINEST


class Histogram:
    """Counts durations. They only grow, so a monitoring server can compute rates. One thread at a time may observe."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts: list[int] = []
        """The number of durations in each bucket; empty while there are none: most histograms of a silo stay empty."""
        self.sum_s = 0.0
        """The sum of all durations, in seconds."""

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count a duration `count` times. A negative one counts as 0: a clock may have been set back."""
        if not self.counts:
            self.counts = [0] * (_LAST + 1)
        units = ceil(seconds * _UNITS) - 1
        if units <= 0:
            self.counts[0] += count
            self.sum_s += max(seconds, 0.0) * count
        else:
            self.counts[min(units.bit_length(), _LAST)] += count
            self.sum_s += seconds * count

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts)

    @classmethod
    def sum_of(cls, histograms: Iterable[Histogram]) -> Histogram:
        """Return a histogram with the counts of all of them."""
        total = cls()
        for one in histograms:
            if one.counts:
                total.counts = [mine + its for mine, its in zip(total.counts or _NONE, one.counts, strict=True)]
                total.sum_s += one.sum_s
        return total

    def buckets(self) -> list[tuple[float, int]]:
        """Return the end of each bucket, and the number of durations up to there. The last end is infinite."""
        return list(zip([*BOUNDS, inf], accumulate(self.counts or _NONE), strict=True))
