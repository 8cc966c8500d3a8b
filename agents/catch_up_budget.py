"""How many bytes the catch-ups of all queues of a provider may hold together.

A catch-up has a cache of its own, and reads whole batches. Many that begin at one time would hold a large batch each,
even with small caches. So a read is reserved before it begins, with the size of the largest batch. When it ends, the
bytes that it read replace the reservation.
"""

from __future__ import annotations

import asyncio
from collections import deque

READ_BYTES = 4 << 20
"""Bytes reserved for a read: the 1 MiB that it asks for, and 3 MiB, because it may exceed that by the largest batch."""
MIN_READS = 4
"""At least this number of reads fits into an empty budget. In a small budget a read may exceed its reservation."""


class CatchUpBudget:
    """The bytes that the catch-ups of a provider hold, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.read_bytes = min(READ_BYTES, limit // MIN_READS)
        self.held = 0
        """In caches and reserved."""
        self._waiters: deque[tuple[CatchUpShare, asyncio.Future[None]]] = deque()

    @property
    def is_contended(self) -> bool:
        """Whether a catch-up that holds nothing waits for space."""
        return bool(self._waiters)

    @property
    def fits(self) -> bool:
        """Whether one more read fits. If nothing is held, a read always fits."""
        return not self.held or self.held + self.read_bytes <= self.limit

    def wake(self) -> None:
        """Reserve reads for the catch-ups that wait, as far as they fit."""
        while self._waiters and self.fits:
            share, future = self._waiters.popleft()
            if not future.done():
                share.hold(reserved=self.read_bytes)
                future.set_result(None)

    async def wait(self, share: CatchUpShare) -> None:
        """Return when a read is reserved for `share`."""
        entry = share, asyncio.get_running_loop().create_future()
        self._waiters.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiters:
                self._waiters.remove(entry)
            raise


class CatchUpShare:
    """The bytes of one catch-up."""

    __slots__ = ("_budget", "_cached", "_reserved")

    def __init__(self, budget: CatchUpBudget) -> None:
        self._budget = budget
        self._cached = 0
        self._reserved = 0

    @property
    def receive_bytes(self) -> int:
        """Bytes that a read asks for. It may return up to one batch more, for which the reservation has space."""
        return max(1, self._budget.read_bytes // 4)

    @property
    def fits(self) -> bool:
        """Whether a read fits, and no other catch-up has waited longer for one."""
        return not self._budget.is_contended and self._budget.fits

    async def reserve(self) -> None:
        """Reserve a read, in the order of the calls."""
        if self.fits:
            self.hold(reserved=self._budget.read_bytes)
        else:
            await self._budget.wait(self)

    def hold(self, cached: int | None = None, reserved: int | None = None) -> None:
        """Set the bytes in its cache, and the bytes reserved for a read. None leaves a number as it is."""
        before = self._cached + self._reserved
        self._cached = self._cached if cached is None else cached
        self._reserved = self._reserved if reserved is None else reserved
        more = self._cached + self._reserved - before
        self._budget.held += more
        if more < 0:
            self._budget.wake()

    def close(self) -> None:
        """Free all. Idempotent."""
        self.hold(0, 0)
