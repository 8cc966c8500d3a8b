"""The connection of a provider to one of its servers, which belongs to one control store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...streams.background import BackgroundTasks
from ...streams.errors import HeadraceError, InvalidArgument, StorageError
from .limits import RedisLimits
from .scripts import OWN, RedisScript
from .server import RedisConnection, ServerAway


class QueuesOwner(NamedTuple):
    """The record of the owner on each server."""

    key: str
    provider: str
    control_data: str
    """The identity of the control store. Empty: queues of any control store are used."""
    queues: int


class OwnedConnection(RedisConnection):
    """A connection that refuses scripts once it knows that the queues belong to another control store. Two control
    stores map streams differently, and an event that one provider finishes is lost for the other.

    A server that has lost its data has also lost who owns the queues. So the owner is stored again before the first
    script after an outage, and every few seconds, because FLUSHALL is no outage. In a cluster, an outage of one node
    says nothing about the node with the owner, so the owner is only stored every few seconds.
    """

    def __init__(self, url: str, owner: QueuesOwner, *, cluster: bool, limits: RedisLimits) -> None:
        super().__init__(url, cluster=cluster, variables=True, limits=limits)
        self._owner = owner
        self._cluster = cluster
        self._checks_wanted = 1
        self._checks_done = 0
        """If it is lower, the owner is stored again before the next script."""
        self._storing: asyncio.Future[None] | None = None
        """The attempt under way. All calls that need it share it, and its error: while a server is silent, each attempt
        takes seconds."""
        self._refusal = ""
        """Why the queues cannot be used, or empty."""
        self._repeating = BackgroundTasks()
        self._owning = BackgroundTasks()

    async def open(self) -> None:
        """Raises InvalidArgument if the server or its queues cannot be used, ServerAway."""
        self._repeating.start(self._repeat(), f"headrace redis owner {self.address}")
        await self.check()
        await self.store_owner()
        if self._refusal:
            raise InvalidArgument(self._refusal)

    def check_again(self) -> None:
        """Store the owner again before the next script."""
        self._checks_wanted += 1

    async def run(self, script: RedisScript, keys: Sequence[str], *args: str | bytes | float) -> Any:
        """See RedisConnection. Raises StorageError, before anything is done, if the queues belong to another control
        store."""
        while self._checks_done < self._checks_wanted and not self._cluster:
            await self.store_owner()
        if self._refusal:
            raise StorageError(self._refusal)
        try:
            return await super().run(script, keys, *args)
        except ServerAway:
            self.check_again()
            raise

    async def bell(self, key: str, timeout_s: float) -> bool:
        try:
            return await super().bell(key, timeout_s)
        except ServerAway:
            self.check_again()
            raise

    async def store_owner(self) -> None:
        """Store the owner if none is stored. Find out whether this provider is the stored owner."""
        if self._storing is None or self._storing.done():
            self._storing = self._owning.hold(self._store_owner(), f"headrace redis owner {self.address}")
        await asyncio.shield(self._storing)

    async def _store_owner(self) -> None:
        wanted, owner = self._checks_wanted, self._owner
        try:
            other = await super().run(OWN, [owner.key], owner.control_data, owner.queues)
        except ServerAway:
            self.check_again()
            raise
        self._refusal = self._refusal_by(int(other[1])) if other else ""
        self._checks_done = wanted

    def _refusal_by(self, queues: int) -> str:
        name = repr(self._owner.provider)
        if queues != self._owner.queues:
            return (
                f"provider {name} has {queues} queues in Redis at {self.address}, not {self._owner.queues}: open it "
                f"with queues = {queues}, or choose another name or prefix"
            )
        return (
            f"Redis at {self.address} has the queues of another provider {name}, with other control data: choose "
            "another name or prefix, or the same data directory or control store; if that provider is gone, "
            f"delete the key {self._owner.key} there"
        )

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self.limits.owner_s)
            with suppress(HeadraceError):
                await self.store_owner()

    async def aclose(self) -> None:
        await self._repeating.aclose()
        await super().aclose()
        await self._owning.join(self.limits.command_s)
        await self._owning.aclose()
