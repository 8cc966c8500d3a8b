"""When progress is stored, and how often the store is asked without any. In virtual time."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace import EventBatch, Selector
from headrace.agents import CacheLimits, HandlerService, PullingManager
from headrace.agents.checkpointer import CHECK_OWNER_S, CHECKPOINT_S
from headrace.store.control_store import ControlStore
from headrace.streams.handlers import Handler
from headrace.streams.progress import RefusedProgress
from headrace.streams.subscriptions import Checkpoint, SubscriptionDefinition
from tests.simulation.deliveries import NOW, Recorder, stream
from tests.simulation.queues import SimulatedQueues
from tests.simulation.virtual_time import virtual_time

PROVIDER = "p"


class CountingStore:
    """A control store that counts the saves."""

    def __init__(self, store: ControlStore) -> None:
        self.saves: list[bool] = []
        """Whether each save had progress."""
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def save_checkpoints(
        self,
        provider: str,
        progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
        leases: Mapping[int, int] | None = None,
        *,
        revision: int = 0,
    ) -> RefusedProgress:
        self.saves.append(any(checkpoints for _, _, checkpoints in progress))
        return await self._store.save_checkpoints(provider, progress, leases, revision=revision)


class Host:
    def __init__(self, store: ControlStore, shelf: SimulatedQueues) -> None:
        self.store = store
        self.shelf = shelf
        self.counting = CountingStore(store)
        through: Any = self.counting
        self.manager = PullingManager(PROVIDER, 1, shelf, through, CacheLimits(), detach_after_s=0.25)
        self.manager.start()

    async def serve(self, name: str) -> Recorder:
        definition, recorder = SubscriptionDefinition(name=name, selector=Selector("s/*"), retry=NOW), Recorder()
        await self.store.create_subscription(PROVIDER, definition, {0: Checkpoint(0)})
        await self.manager.subscriptions.serve(definition, HandlerService(Handler.of(recorder, batch=False), None, 100))
        return recorder


@asynccontextmanager
async def host() -> AsyncGenerator[Host]:
    store, shelf = await ControlStore.open("memory"), SimulatedQueues(1)
    built = Host(store, shelf)
    try:
        yield built
    finally:
        await built.manager.aclose(0.0)
        await shelf.aclose()
        await store.aclose()


@virtual_time
async def test_without_progress_the_store_is_asked_only_for_the_owner() -> None:
    async with host() as silo:
        await silo.serve("idle")
        await asyncio.sleep(1)
        silo.counting.saves.clear()
        await asyncio.sleep(10 * CHECK_OWNER_S)
        assert 8 <= len(silo.counting.saves) <= 10
        assert not any(silo.counting.saves)


@virtual_time
async def test_progress_is_stored_at_once_after_a_quiet_time() -> None:
    async with host() as silo:
        recorder = await silo.serve("one")
        await asyncio.sleep(10 * CHECK_OWNER_S)
        for number in range(1, 6):
            await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
            await asyncio.sleep(2 * CHECKPOINT_S)
            assert recorder.seen == number * ["x"]
            assert await silo.store.checkpoints(PROVIDER, "one") == {0: Checkpoint(number)}


@virtual_time
async def test_an_idle_subscription_that_was_moved_elsewhere_stops_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")
    async with host() as silo:
        await silo.serve("one")
        await asyncio.sleep(10 * CHECK_OWNER_S)
        await silo.store.seek(PROVIDER, "one", {0: Checkpoint(0)}, "test")
        await asyncio.sleep(2 * CHECK_OWNER_S)
        assert "one" not in silo.manager.served
