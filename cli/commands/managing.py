"""Administration of subscriptions and dead letters in a data directory or on a silo."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ...client.stream_provider import SubscriptionAdministration
from ...silo.provider import Provider
from ...silo.views import fault_at
from ...streams.states import QueueProgress, SubscriptionState
from ...streams.subscriptions import Checkpoint, DeadLetter, SubscriptionDefinition
from .options import ProviderPlace, SiloPlace, connected, opened


@asynccontextmanager
async def managed(
    place: ProviderPlace, how: Mapping[str, Any] | None = None, *, create: bool = False
) -> AsyncGenerator[SubscriptionAdministration]:
    """Open the provider at a place. For a data directory, `how` and `create` are as in `opened`."""
    if isinstance(place, SiloPlace):
        async with connected(place) as client:
            yield client
    else:
        async with opened(place, how, create=create) as provider:
            yield LocalAdministration(provider)


class LocalAdministration:
    """Administers a provider that is open in this process, by its control store. Those of `Provider` would load the
    services of a silo."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._store = provider.store
        self._name = provider.name
        self.create_subscription = provider.create_subscription
        self.delete_subscription = provider.delete_subscription
        self.resume = provider.resume
        self.seek = provider.seek

    async def subscription(self, name: str) -> SubscriptionState:
        definition = await self._store.subscription(self._name, name)
        checkpoints = await self._store.checkpoints(self._name, name)
        progress = [
            _progress(
                queue,
                at,
                end=(await self._provider.ends(queue, [at.watermark]))[at.watermark],
                fault=await fault_at(self._provider.adapter, queue, [at]),
            )
            for queue, at in checkpoints.items()
        ]
        return SubscriptionState(definition, progress, (), *await self._store.count_left_behind(self._name, name))

    async def subscriptions(self) -> list[SubscriptionDefinition]:
        return await self._store.subscriptions(self._name)

    async def dead_letters(
        self, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]:
        return await self._store.dead_letters(self._name, subscription, limit=limit, after_id=after_id)

    async def redrive(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        return await self._store.request_redrive(self._name, subscription, ids)

    async def delete_dead_letters(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        return await self._store.delete_dead_letters(self._name, subscription, ids)


def _progress(queue: int, at: Checkpoint, *, end: int, fault: str) -> QueueProgress:
    paused = {stream: behind.paused for stream, behind in at.behind.items() if behind.paused}
    return QueueProgress(
        queue=queue,
        next_offset=at.next_offset,
        watermark=at.watermark,
        end_offset=end,
        streams_behind=len(at.behind),
        streams_paused=len(paused),
        paused=paused,
        fault=fault,
    )
