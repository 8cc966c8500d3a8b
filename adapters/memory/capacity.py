"""Admission by weight, first come, first served: the capacity gate of the memory adapter. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
EntrantT = TypeVar("EntrantT", bound="Entrant")


class Entrant(Protocol):
    """Who asks for room, in one step or in several."""

    @property
    def weight(self) -> int:
        """Room that the next step takes. Asked when it is this entrant's turn."""
        ...

    def enter(self) -> bool:
        """Take the next step, for which room has been made. Returns whether that was the last."""
        ...


class CapacityGate(Generic[EntrantT]):
    """Lets entrants in while there is room, in the order in which they came.

    The first in the line holds up all others, also smaller ones that would fit, and stays first until its last step: so
    nothing overtakes, and a large entrant is not starved.
    """

    def __init__(self, capacity: int | None) -> None:
        self._free: float = math.inf if capacity is None else capacity
        self._line: deque[EntrantT] = deque()

    @property
    def free(self) -> float:
        """Room left; `math.inf` where there is no bound."""
        return self._free

    @property
    def waiting(self) -> int:
        """Entrants in the line."""
        return len(self._line)

    def enter(self, entrant: EntrantT) -> None:
        """Let the entrant in, now or when its turn comes."""
        self._line.append(entrant)
        self._serve()

    def enter_nowait(self, entrant: EntrantT) -> bool:
        """Let the entrant take its first step now, or return False: while anyone waits, too."""
        if self._line or entrant.weight > self._free:
            return False
        self.enter(entrant)
        return True

    def withdraw(self, entrant: EntrantT) -> None:
        """Leave the line; those behind may be next. No effect for one that does not wait."""
        if entrant in self._line:
            self._line.remove(entrant)
            self._serve()

    def release(self, weight: int) -> None:
        """Give room back, and serve the line."""
        self._free += weight
        self._serve()

    def dismiss(self) -> Sequence[EntrantT]:
        """Empty the line without serving it, and return who was in it."""
        dismissed = tuple(self._line)
        self._line.clear()
        return dismissed

    def _serve(self) -> None:
        while self._line and (weight := self._line[0].weight) <= self._free:
            self._free -= weight
            if self._line[0].enter():
                self._line.popleft()


def cut(items: Sequence[T], weight: Callable[[T], int], capacity: int | None) -> list[Sequence[T]]:
    """Cut items into slices, in order, each as long as fits the capacity. An item above it is a slice of its own."""
    if capacity is None or sum(map(weight, items)) <= capacity:
        return [items]
    slices: list[list[T]] = []
    room = 0
    for item in items:
        room -= weight(item)
        if room < 0:
            slices.append([])
            room = capacity - weight(item)
        slices[-1].append(item)
    return list(slices)
