"""Apply the limits of `receive`, for adapters that hold their batches in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class LimitedItem(Protocol):
    """An item that counts against the limits of `receive`."""

    @property
    def count(self) -> int:
        """Number of events."""
        ...

    @property
    def nbytes(self) -> int:
        """Encoded size in bytes."""
        ...


SizedT = TypeVar("SizedT", bound=LimitedItem)


def within_limits(items: Iterable[SizedT], max_events: int, max_bytes: int) -> Iterator[SizedT]:
    """Yield items up to and including the one that reaches or exceeds either limit; at least one if there is any."""
    for item in items:
        yield item
        max_events -= item.count
        max_bytes -= item.nbytes
        if max_events <= 0 or max_bytes <= 0:
            return
