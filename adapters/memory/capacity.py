"""The capacity gate of the memory adapter: first come, first served. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound="CapacityRequest")


class CapacityRequest(Protocol):
    """A call that needs capacity, in one step or in several."""

    @property
    def weight(self) -> int:
        """Capacity that the next step needs. Read when it is this request's turn."""
        ...

    def enter(self) -> bool:
        """Take the next step; its capacity is reserved. Return whether it was the last step."""
        ...


class CapacityGate(Generic[RequestT]):
    """Admits requests in their order, while there is capacity.

    The first waiting request blocks all others, even smaller ones that would fit, until its last step. So no request
    overtakes another, and large ones are not starved.
    """

    def __init__(self, capacity: int | None) -> None:
        self._free: float = math.inf if capacity is None else capacity
        self._requests: deque[RequestT] = deque()

    @property
    def free(self) -> float:
        """Free capacity; `math.inf` if there is no bound."""
        return self._free

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._requests)

    def enter(self, request: RequestT) -> None:
        """Admit the request, now or when its turn comes."""
        self._requests.append(request)
        self._serve()

    def enter_nowait(self, request: RequestT) -> bool:
        """Let the request take its first step now. Return False if there is no capacity, or if other requests wait."""
        if self._requests or request.weight > self._free:
            return False
        self.enter(request)
        return True

    def withdraw(self, request: RequestT) -> None:
        """Remove a waiting request; the ones behind it may enter. No effect if it does not wait."""
        if request in self._requests:
            self._requests.remove(request)
            self._serve()

    def release(self, weight: int) -> None:
        """Give capacity back, and admit waiting requests."""
        self._free += weight
        self._serve()

    def dismiss(self) -> Sequence[RequestT]:
        """Remove all waiting requests without admitting them, and return them."""
        dismissed = tuple(self._requests)
        self._requests.clear()
        return dismissed

    def _serve(self) -> None:
        while self._requests and (weight := self._requests[0].weight) <= self._free:
            self._free -= weight
            if self._requests[0].enter():
                self._requests.popleft()


def cut(items: Sequence[T], weight: Callable[[T], int], capacity: int | None) -> list[Sequence[T]]:
    """Divide items into slices, in order, each as large as the capacity allows. A larger item has its own slice."""
    if capacity is None or sum(map(weight, items)) <= capacity:
        return [items]
    slices: list[list[T]] = []
    free = 0
    for item in items:
        free -= weight(item)
        if free < 0:
            slices.append([])
            free = capacity - weight(item)
        slices[-1].append(item)
    return list(slices)
