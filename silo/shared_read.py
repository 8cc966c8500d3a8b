"""A read of the store that calls of clients cause."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from ..streams.errors import StorageError

INTERVAL_S = 0.5
"""Shortest time from the beginning of one read to that of the next, in seconds."""


class SharedRead:
    """Calls at the same time share a read, and reads keep an interval: any client may cause them, and they wait in line
    with the renewal of leases."""

    def __init__(self, read: Callable[[], Awaitable[None]]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._next_at = -math.inf
        """Loop time before which no read begins."""
        self._began_at = -math.inf
        """Loop time when the last read began that has ended."""
        self._error = ""
        """Why it failed; "" if it did not."""

    async def read(self) -> None:
        """Return when a read has ended that began after this call. Raise StorageError if it failed."""
        loop = asyncio.get_running_loop()
        came_at = loop.time()
        async with self._reading:
            if self._began_at < came_at:
                await asyncio.sleep(self._next_at - loop.time())
                began_at = loop.time()
                self._next_at = began_at + INTERVAL_S
                try:
                    await self._read()
                    self._error = ""
                except StorageError as error:
                    self._error = error.problem
                self._began_at = began_at
            if self._error:
                raise StorageError(self._error)
