"""A subscription is served again only after its former handlers have ended, also in the same process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace import Busy, Event, NotFound, Provider
from headrace.silo.subscription_locks import SubscriptionLocks
from headrace.store.datadir import open_data_directory
from headrace.streams.subscriptions import Checkpoint, SubscriptionDefinition
from tests.silo.test_standby import STREAM, Orders, until


class SlowOrders:
    """Keeps the payloads of handlers that began, and holds each handler until `release`."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.running = 0
        self.most_running = 0
        self.release = asyncio.Event()

    async def on_next(self, event: Event) -> None:
        self.payloads.append(event.payload)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.release.wait()
        self.running -= 1


@pytest.mark.parametrize("rewindable", [False, True])
@pytest.mark.parametrize("how", ["close", "cancelled close", "delete"])
async def test_without_a_directory_a_subscription_is_not_served_again_before_its_handlers_have_ended(
    how: str, rewindable: bool
) -> None:
    orders = SlowOrders()
    async with Provider.open(adapter="memory", options={"rewindable": rewindable}) as provider:
        subscription = await provider.subscribe("billing", "orders/*", orders)
        await provider.publish(STREAM, b"1")
        await until(lambda: orders.running)
        ending = asyncio.create_task(subscription.delete() if how == "delete" else subscription.close())
        await until(lambda: "billing" not in provider.manager.served)
        if how == "cancelled close":
            ending.cancel()
            await asyncio.wait([ending])
        with pytest.raises(Busy, match="has not ended in this process yet"):
            await provider.subscribe("billing", "orders/*", orders)
        if how != "delete":
            await provider.publish(STREAM, b"2")
        orders.release.set()
        await asyncio.wait([ending])
        await provider.stopping.join()
        again = await provider.subscribe("billing", "orders/*", orders)
        if how == "delete":
            await provider.publish(STREAM, b"2")
        await again.caught_up()
        assert (orders.payloads, orders.most_running) == ([b"1", b"2"], 1)


async def test_a_process_stands_by_for_its_own_handlers_that_still_end(tmp_path: Path) -> None:
    """Also if they end while the new service reads the stored subscription."""
    slow, second = SlowOrders(), Orders()
    async with Provider.open(tmp_path) as provider:
        subscription = await provider.subscribe("billing", "orders/*", slow)
        await provider.publish(STREAM, b"1")
        await until(lambda: slow.running)
        closing = asyncio.create_task(subscription.close())
        await until(lambda: "billing" not in provider.manager.served)
        ensure = provider.ensure_subscription

        async def slowly(definition: SubscriptionDefinition) -> bool:
            slow.release.set()
            await closing
            return await ensure(definition)

        provider.ensure_subscription = slowly  # type: ignore[method-assign]
        again = await provider.subscribe("billing", "orders/*", second)
        assert again.stands_by
        await until(lambda: not again.stands_by)
        await provider.publish(STREAM, b"2")
        await again.caught_up()
        assert (slow.payloads, second.payloads) == ([b"1"], [b"2"])


@pytest.mark.parametrize("is_stored", [False, True])
async def test_this_process_takes_each_right_once_also_in_a_cluster(tmp_path: Path, is_stored: bool) -> None:
    directory = await asyncio.to_thread(open_data_directory, tmp_path / "data") if is_stored else None
    locks = SubscriptionLocks(directory, "default", shared=True, one_reader=False)
    await locks.take("billing")
    with pytest.raises(Busy, match="subscription 'billing' has not ended in this process yet"):
        await locks.take("billing")
    assert list(await locks.take_free(["billing", "shipping"])) == ["billing"]
    assert await locks.holds("billing")
    locks.release("billing")
    assert not await locks.holds("billing")
    assert not await locks.take_free(["billing"])
    locks.release_all()


async def test_a_second_close_does_not_unlock_before_the_first_one_has_ended() -> None:
    """The first one still waits for the observer's `on_completed`."""
    completing, release = asyncio.Event(), asyncio.Event()

    class SlowEnd(Orders):
        async def on_completed(self) -> None:
            completing.set()
            await release.wait()

    async with Provider.open(adapter="memory") as provider:
        subscription = await provider.subscribe("billing", "orders/*", SlowEnd())
        closing = asyncio.create_task(subscription.close())
        await completing.wait()
        with pytest.raises(NotFound):
            await provider.withdraw("billing")
        with pytest.raises(Busy):
            await provider.subscribe("billing", "orders/*", Orders())
        release.set()
        await closing
        await provider.subscribe("billing", "orders/*", Orders())


async def test_a_service_that_is_closed_while_it_stops_keeps_its_lock_until_it_has_stopped(tmp_path: Path) -> None:
    detaching, release = asyncio.Event(), asyncio.Event()
    async with Provider.open(tmp_path, queues=1) as provider, Provider.open(tmp_path) as other:
        await provider.subscribe("billing", "orders/*", Orders())
        agent = provider.manager.agents[0]
        detach = agent.detach

        async def slowly(name: str, drain_s: float) -> Checkpoint | None:
            detaching.set()
            await release.wait()
            return await detach(name, drain_s)

        agent.detach = slowly  # type: ignore[method-assign]
        runner = provider.manager.subscriptions
        stopping = asyncio.create_task(runner.end_for_positions("billing"))
        await detaching.wait()
        with pytest.raises(NotFound):
            await provider.withdraw("billing")
        orders = Orders()
        again = await provider.subscribe("billing", "orders/*", orders)
        assert again.stands_by
        release.set()
        await stopping
        await until(lambda: not again.stands_by)
        await provider.publish(STREAM, b"1")
        await again.caught_up()
        assert orders.payloads == [b"1"]
        assert (await other.subscribe("billing", "orders/*", Orders())).stands_by
