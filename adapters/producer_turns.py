"""Lets the calls of each idempotent producer run one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class ProducerTurns:
    """A lock for each producer that has calls."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._calls = Counter[str]()
        """Calls that hold the lock or wait for it."""

    @asynccontextmanager
    async def turn(self, producer: str) -> AsyncGenerator[None]:
        """Wait until the producer's earlier calls have ended. Later ones wait for the length of the `async with`."""
        lock = self._locks.setdefault(producer, asyncio.Lock())
        self._calls[producer] += 1
        try:
            async with lock:
                yield
        finally:
            self._calls[producer] -= 1
            if not self._calls[producer]:
                del self._calls[producer], self._locks[producer]
