"""When progress is stored, and how often the store is asked without any. In virtual time."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace import Event, EventBatch, Selector, StreamId
from headrace.agents import CacheLimits, HandlerService, PullingManager
from headrace.agents.checkpointer import CHECK_OWNER_S, CHECKPOINT_S
from headrace.agents.redriver import REDRIVE_S
from headrace.store.control_store import ControlStore
from headrace.streams.handlers import Handler
from headrace.streams.progress import RefusedProgress
from headrace.streams.subscriptions import Checkpoint, SubscriptionDefinition
from tests.simulation.deliveries import NOW, Recorder, stream
from tests.simulation.queues import SimulatedQueues
from tests.simulation.virtual_time import virtual_time

PROVIDER = "p"


class CountingStore:
    """A control store that counts the saves. `private`: no other process has it."""

    def __init__(self, store: ControlStore, *, private: bool) -> None:
        self.private = private
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
    def __init__(self, store: ControlStore, shelf: SimulatedQueues, *, private: bool) -> None:
        self.store = store
        self.shelf = shelf
        self.counting = CountingStore(store, private=private)
        through: Any = self.counting
        self.manager = PullingManager(PROVIDER, 1, shelf, through, CacheLimits(), detach_after_s=0.25)
        self.manager.start()

    async def serve(self, name: str) -> Recorder:
        definition, recorder = SubscriptionDefinition(name=name, selector=Selector("s/*"), retry=NOW), Recorder()
        await self.store.create_subscription(PROVIDER, definition, {0: Checkpoint(0)})
        await self.manager.subscriptions.serve(definition, HandlerService(Handler.of(recorder, batch=False), None, 100))
        return recorder


@asynccontextmanager
async def host(*, private: bool = False) -> AsyncGenerator[Host]:
    store, shelf = await ControlStore.open("memory"), SimulatedQueues(1)
    built = Host(store, shelf, private=private)
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


@virtual_time
async def test_without_progress_and_other_processes_nothing_wakes() -> None:
    async with host(private=True) as silo:
        await silo.serve("idle")
        await asyncio.sleep(1)
        looks = silo.manager.checkpointer.durations.count
        silo.counting.saves.clear()
        await asyncio.sleep(600)
        assert silo.manager.checkpointer.durations.count == looks
        assert silo.counting.saves == []
        assert silo.manager.checkpointer.age_s() == 0


@virtual_time
async def test_a_change_wakes_the_saving_of_progress_also_in_the_store_of_one_process() -> None:
    async with host(private=True) as silo:
        await silo.serve("one")
        await silo.serve("two")
        for number in range(1, 4):
            await asyncio.sleep(600)
            await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
            ages = list[float]()
            for _ in range(20):
                await asyncio.sleep(CHECKPOINT_S / 10)
                ages.append(silo.manager.checkpointer.age_s())
            assert max(ages) < 1  # not the whole quiet time
            for name in ("one", "two"):
                assert await silo.store.checkpoints(PROVIDER, name) == {0: Checkpoint(number)}


@virtual_time
async def test_events_that_the_subscription_does_not_select_move_its_stored_position() -> None:
    async with host(private=True) as silo:
        await silo.serve("one")
        await asyncio.sleep(600)
        await silo.shelf.enqueue([(0, EventBatch.of(StreamId("other", "a"), [b"x"]))])
        await asyncio.sleep(2 * CHECKPOINT_S)
        assert await silo.store.checkpoints(PROVIDER, "one") == {0: Checkpoint(1)}


@pytest.mark.long
@virtual_time
async def test_while_a_handler_runs_the_events_that_it_has_finished_are_stored() -> None:
    async with host() as silo:
        handled = list[bytes]()

        async def takes_a_minute(event: Event) -> None:
            await asyncio.sleep(60)
            handled.append(event.payload)

        definition = SubscriptionDefinition(name="slow", selector=Selector("s/*"), retry=NOW)
        await silo.store.create_subscription(PROVIDER, definition, {0: Checkpoint(0)})
        service = HandlerService(Handler.of(takes_a_minute, batch=False), None, 100)
        await silo.manager.subscriptions.serve(definition, service)
        await asyncio.sleep(600)
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x", b"y", b"z"]))])
        await asyncio.sleep(130)
        assert handled == [b"x", b"y"]
        [checkpoint] = (await silo.store.checkpoints(PROVIDER, "slow")).values()
        assert checkpoint.behind[stream("a")].token == (0, 2)


@virtual_time
async def test_a_redrive_is_delivered_after_a_quiet_time_also_in_the_store_of_one_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")
    async with host(private=True) as silo:
        recorder = await silo.serve("one")
        recorder.fail("x")
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
        await asyncio.sleep(600)
        recorder.fails.clear()
        assert await silo.store.request_redrive(PROVIDER, "one") == 1
        await asyncio.sleep(2 * REDRIVE_S)
        assert recorder.seen[-1] == "x"
        assert await silo.store.dead_letters(PROVIDER) == []
