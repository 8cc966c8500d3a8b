"""Waits for new events of a shard without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...streams.background import BackgroundTasks
from .server import ServerAway
from .shard import RedisShard

AWAY_S = 0.5
"""Seconds between two attempts to reach a server that is away."""


class ShardBell:
    """The bell of one shard: all tasks of this process wait for it by one blocking command on one connection."""

    def __init__(self, shard: RedisShard) -> None:
        self._shard = shard
        self._listening = BackgroundTasks()
        self._ringing: asyncio.Task[None] | None = None
        self.waiting = 0

    def ringing(self) -> asyncio.Task[None]:
        """Return a task that ends when the bell rings, or after `RedisLimits.block_s`. Callers must not cancel it."""
        if self._ringing is None or self._ringing.done():
            self._ringing = self._listening.start(self._listen(), f"headrace bell {self._shard.name}")
        return self._ringing

    async def aclose(self) -> None:
        await self._listening.aclose()

    async def _listen(self) -> None:
        try:
            if await self._shard.bell(self._shard.server.limits.block_s) and not self.waiting:
                await self._shard.ring()  # no task waits here any more: pass it on to another process
        except ServerAway:
            await asyncio.sleep(AWAY_S)


async def wait_for_bell(bells: Sequence[ShardBell], seconds: float) -> None:
    """Return when one of the bells rings, or after `seconds`."""
    for bell in bells:
        bell.waiting += 1
    try:
        await asyncio.wait([bell.ringing() for bell in bells], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for bell in bells:
            bell.waiting -= 1
