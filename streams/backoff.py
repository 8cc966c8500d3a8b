"""Pauses that grow with each failure."""

from __future__ import annotations

import random


class Backoff:
    """The pauses of one caller after failures. Each failure in a row makes the pause longer, up to a maximum.

    It has no clock: the caller waits. With `rng`, a random part of up to half is taken from each pause, so that callers
    that failed at the same time do not return at the same time.
    """

    __slots__ = ("_factor", "_first_s", "_max_s", "_rng", "failures")

    def __init__(self, first_s: float, max_s: float, *, factor: float = 2.0, rng: random.Random | None = None) -> None:
        self.failures = 0
        """Failures since the last `reset`."""
        self._first_s = first_s
        self._max_s = max_s
        self._factor = factor
        self._rng = rng

    def next_s(self) -> float:
        """Count a failure. Return the pause after it, in seconds."""
        self.failures += 1
        return self.after(self.failures)

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self.failures = 0

    def after(self, failures: int) -> float:
        """Return the pause after this number of failures in a row, in seconds. Does not count."""
        try:
            ceiling = min(self._first_s * self._factor ** (failures - 1), self._max_s)
        except OverflowError:
            ceiling = self._max_s if self._first_s else 0.0
        return ceiling if self._rng is None else self._rng.uniform(ceiling / 2, ceiling)
