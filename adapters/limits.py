"""How much one `receive` returns: the rule of the seam, for adapters that hold their batches in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What counts against the limits of `receive`."""

    @property
    def count(self) -> int:
        """Events."""
        ...

    @property
    def nbytes(self) -> int:
        """Encoded size in bytes."""
        ...


SizedT = TypeVar("SizedT", bound=Sized)


def within_limits(items: Iterable[SizedT], max_events: int, max_bytes: int) -> Iterator[SizedT]:
    """The items up to and including the one with which either limit is reached or passed: at least one."""
    for item in items:
        yield item
        max_events -= item.count
        max_bytes -= item.nbytes
        if max_events <= 0 or max_bytes <= 0:
            return
