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
    """What each server stores of a provider."""

    key: str
    provider: str
    control_data: str
    """The identity of the control store. Empty: queues of any control store are used."""
    queues: int


class OwnedConnection(RedisConnection):
    """A connection that carries out no script while the queues belong to another control store: that one would map
    streams differently, and events that one of the two finishes would be lost for the other.

    A server that has lost its data has also lost who owns the queues. So the owner is stored again before the first
    script after an outage, and every few seconds, because FLUSHALL is no outage. In a cluster, an outage of one node
    says nothing about the node with the owner, so only the latter is done.
    """

    def __init__(self, url: str, owner: QueuesOwner, *, cluster: bool, limits: RedisLimits) -> None:
        super().__init__(url, cluster=cluster, variables=True, limits=limits)
        self._owner = owner
        self._cluster = cluster
        self._doubts = 1
        self._settled = 0
        """The owner is stored, unless it was lost after this many doubts."""
        self._refusal = ""
        """Why the queues cannot be used, or empty."""
        self._repeating = BackgroundTasks()

    async def open(self) -> None:
        """Raises InvalidArgument if the server or its queues cannot be used, ServerAway."""
        self._repeating.start(self._repeat(), f"headrace redis owner {self.address}")
        await self.check()
        await self.store_owner()
        if self._refusal:
            raise InvalidArgument(self._refusal)

    def doubt(self) -> None:
        """Store the owner again before the next script."""
        self._doubts += 1

    async def run(self, script: RedisScript, keys: Sequence[str], *args: str | bytes | float) -> Any:
        """See RedisConnection. Raises StorageError, before anything is done, if the queues belong to another control
        store."""
        if self._settled < self._doubts and not self._cluster:
            await self.store_owner()
        if self._refusal:
            raise StorageError(self._refusal)
        try:
            return await super().run(script, keys, *args)
        except ServerAway:
            self.doubt()
            raise

    async def bell(self, key: str, timeout_s: float) -> bool:
        try:
            return await super().bell(key, timeout_s)
        except ServerAway:
            self.doubt()
            raise

    async def store_owner(self) -> None:
        """Store the owner if none is stored. Find out whether the stored one may use the queues."""
        doubts = self._doubts
        owner = self._owner
        other = await super().run(OWN, [owner.key], owner.control_data, owner.queues)
        self._refusal, self._settled = self._refusal_by(int(other[1])) if other else "", doubts

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
