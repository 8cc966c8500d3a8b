"""Watches whether the server of a shard answers, so that callers with other shards do not wait for a silent one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ...streams.background import BackgroundTasks
from ...streams.backoff import Backoff
from ...streams.errors import StorageError
from .server import ServerAway, ServerSilent
from .shard import RedisShard

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Shortest and longest pause between two probes of a silent server, in seconds."""

Answer = TypeVar("Answer")


class ShardWatch:
    """A shard, for callers that can use other shards of the queue instead.

    Its server is silent once it has left a command without an answer. Then one task probes it repeatedly, and all other
    commands fail at once until it answers. Call `aclose` when done.
    """

    def __init__(self, shard: RedisShard, *, alone: bool) -> None:
        """`alone`: the queue has no other shard, so commands always wait."""
        self.shard = shard
        self._alone = alone
        self._probing = BackgroundTasks()
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)

    @property
    def silent(self) -> bool:
        return bool(self._probing)

    async def ask(self, command: Callable[[], Awaitable[Answer]]) -> Answer:
        """Run a command of the shard. Raises ServerSilent at once if the server is silent already."""
        if self.silent:
            raise ServerSilent(f"Redis at {self.shard.server.address} does not answer, and is asked from time to time")
        try:
            answer = await command()
        except ServerSilent:
            if not self._alone and not self.silent:
                self._probing.start(self._probe(), f"headrace silent {self.shard.name}")
            raise
        self._backoff.reset()
        return answer

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self._backoff.next_s())
            try:
                await self.shard.get("")
            except ServerAway:
                continue
            except StorageError:  # an answer, too
                pass
            return

    async def aclose(self) -> None:
        self._alone = True
        await self._probing.aclose()


def watched(shards: Sequence[RedisShard]) -> list[ShardWatch]:
    """Return a watch for each shard of a queue."""
    return [ShardWatch(shard, alone=len(shards) == 1) for shard in shards]
