"""Watches whether the server of a shard answers, so that callers with other shards do not wait for a silent one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ...streams.backoff import Backoff
from ...streams.errors import StorageError
from .server import ServerAway, ServerSilent, end
from .shard import RedisShard

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Shortest and longest pause between two probes of a silent server, in seconds."""

Answer = TypeVar("Answer")


class Watch:
    """A shard, for callers that can use other shards of the queue instead.

    Its server is silent once it has left a command without an answer. Then one task probes it repeatedly, and all other
    commands fail at once until it answers. Call `aclose` when done.
    """

    def __init__(self, shard: RedisShard, *, alone: bool) -> None:
        """`alone`: the queue has no other shard, so commands always wait."""
        self.shard = shard
        self._alone = alone
        self._asking: asyncio.Task[None] | None = None
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)

    @property
    def silent(self) -> bool:
        return self._asking is not None and not self._asking.done()

    async def ask(self, command: Callable[[], Awaitable[Answer]]) -> Answer:
        """Run a command of the shard. Raises ServerSilent at once if the server is silent already."""
        if self.silent:
            raise ServerSilent(f"Redis at {self.shard.server.address} does not answer, and is asked from time to time")
        try:
            answer = await command()
        except ServerSilent:
            if not self._alone and not self.silent:
                self._asking = asyncio.create_task(self._ask(), name=f"headrace silent {self.shard.name}")
            raise
        self._backoff.reset()
        return answer

    async def _ask(self) -> None:
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
        if self._asking is not None:
            await end(self._asking)


def watched(shards: Sequence[RedisShard]) -> list[Watch]:
    return [Watch(shard, alone=len(shards) == 1) for shard in shards]
