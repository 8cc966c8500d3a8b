"""The part of a silo that looks after the groups of consumers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace import (
    Busy,
    Event,
    Fenced,
    HeadraceError,
    LimitExceeded,
    Mode,
    NotFound,
    Provider,
    Selector,
    StreamId,
    Unavailable,
)
from headrace.silo import consumer_groups
from headrace.silo.consumer_groups import AttachedConsumer, ConsumerGroups
from headrace.streams.subscriptions import Checkpoint, SubscriptionDefinition


async def test_a_group_that_cannot_be_looked_after_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        places: list[AttachedConsumer] = []
        for name in ("bad", "good"):
            definition = SubscriptionDefinition(name=name, selector=Selector("n/*"))
            await provider.create_subscription(definition)
            places.append(await served.join(definition, "c", 0.5))
        bad, good = places
        monkeypatch.setattr(bad.group, "tick", lambda: 1 // 0)
        async with asyncio.timeout(30):
            while good.group.members:  # noqa: ASYNC110 (that somebody went tells nobody)
                await asyncio.sleep(0.05)
        assert bad.group.members
        assert "the check of the consumers of subscription 'bad' failed" in caplog.text
        caplog.clear()


async def test_a_silo_that_ends_does_not_wait_for_pulled_events_that_nobody_can_acknowledge(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"))
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        async with ConsumerGroups.opened(provider, 10.0) as served:
            await provider.create_subscription(definition)
            await provider.publish(StreamId("n", "1"), b"x")
            group, member = await served.join(definition, "c", 10.0, pulls=True)
            group.grant(member, 1, 1000)
            async with asyncio.timeout(30):
                while not member.in_flight:  # noqa: ASYNC110 (that a parcel was handed out tells nobody)
                    await asyncio.sleep(0.01)
            group.disconnect(member)
        await provider.aclose(2.0)
    assert "were not acknowledged" not in caplog.text


@asynccontextmanager
async def limited(tmp_path: Path) -> AsyncGenerator[tuple[Provider, ConsumerGroups]]:
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        async with ConsumerGroups.opened(provider, 10.0, max_positions=3) as served:
            yield provider, served


async def test_ids_with_mode_broadcast_are_limited(tmp_path: Path) -> None:
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=Mode.BROADCAST)
    says = r"'s' has positions of 3 consumers already.*under the id that it had"
    async with limited(tmp_path) as (provider, served):
        await provider.create_subscription(definition)
        for number in range(3):
            await served.join(definition, f"c{number}", 10.0, None if number else {})
        with pytest.raises(LimitExceeded, match=says):
            await served.join(definition, "c3", 10.0)
    async with limited(tmp_path) as (_, served):
        await served.join(definition, "c1", 10.0)
        await served.join(definition, "c3", 10.0)  # nothing is kept of the one that keeps its position itself
        with pytest.raises(LimitExceeded, match=says):
            await served.join(definition, "c4", 10.0, {})


async def test_consumers_of_a_subscription_join_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes when the one before has just failed, and another waits."""
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"))
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        await provider.create_subscription(definition)
        serve, joins, at_once = provider.serve, list[asyncio.Task[AttachedConsumer]](), [0, 0]

        def join() -> None:
            joins.append(asyncio.create_task(served.join(definition, f"c{len(joins)}", 10.0)))

        async def failing_first(*arguments: Any, **options: Any) -> None:
            at_once[0] += 1
            at_once[1] = max(at_once)
            try:
                await asyncio.sleep(0.01)
                if len(joins) == 2:
                    join()
                    raise Busy("not now")
                await serve(*arguments, **options)
            finally:
                at_once[0] -= 1

        monkeypatch.setattr(provider, "serve", failing_first)
        join()
        join()
        failed, *others = await asyncio.wait_for(asyncio.gather(*joins[:2], return_exceptions=True), 30)
        others.append(await asyncio.wait_for(joins[2], 30))
        assert isinstance(failed, Busy)
        assert [place.member.id for place in others if isinstance(place, AttachedConsumer)] == ["c1", "c2"]
        assert at_once == [0, 1]


@asynccontextmanager
async def moving(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[asyncio.Task[int]]:
    """A seek of subscription "s", which waits for the store for the length of an `async with`."""
    seek, begun, goes_on = provider.store.seek, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any) -> int:
        begun.set()
        await goes_on.wait()
        return await seek(*arguments)

    monkeypatch.setattr(provider.store, "seek", slow)
    task = asyncio.create_task(provider.seek("s", "earliest"))
    await begun.wait()
    yield task
    goes_on.set()
    await task


async def test_a_consumer_joins_its_group_while_the_subscription_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"))
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        await provider.create_subscription(definition)
        first = await served.join(definition, "a", 10.0)
        async with moving(provider, monkeypatch):
            second = await served.join(definition, "b", 10.0)
        assert second.group is first.group
        assert [*first.group.members] == ["a", "b"]


async def test_a_subscription_that_moves_can_be_closed_and_not_served_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(event: Event) -> None: ...

    async with Provider.open(tmp_path / "data", queues=1) as provider:
        subscription = await provider.subscribe("s", "n/*", handler)
        async with moving(provider, monkeypatch):
            with pytest.raises(Busy, match="already served by this process"):
                await provider.subscribe("s", "n/*", handler)
            closing = asyncio.create_task(subscription.close())
            await asyncio.sleep(0.01)
            assert not closing.done()
        await closing
        assert not provider.manager.served
        await provider.subscribe("s", "n/*", handler)


async def test_a_seek_goes_on_if_its_caller_is_cancelled(tmp_path: Path) -> None:
    """As by a deadline, while a handler still runs."""
    begun, ends, handled = asyncio.Event(), asyncio.Event(), list[bytes]()

    async def handler(event: Event) -> None:
        begun.set()
        await ends.wait()
        handled.append(event.payload)

    async with Provider.open(tmp_path / "data", queues=1) as provider:
        await provider.subscribe("s", "n/*", handler)
        await provider.publish(StreamId("n", "1"), b"1")
        await begun.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await provider.seek("s", "earliest")
        ends.set()
        async with asyncio.timeout(30):
            while handled != [b"1", b"1"]:  # noqa: ASYNC110 (the handler tells nobody)
                await asyncio.sleep(0.01)


async def test_a_consumer_does_not_join_the_group_of_a_subscription_that_was_created_anew(tmp_path: Path) -> None:
    old, new = (SubscriptionDefinition(name="s", selector=Selector(f"{name}/*")) for name in ("old", "new"))
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        await provider.create_subscription(old)
        await served.join(old, "a", 10.0)
        await provider.store.delete_subscription(provider.name, "s")  # as another process does
        await provider.create_subscription(new)
        with pytest.raises(Unavailable, match="'s' was created anew: connect again"):
            await served.join(new, "b", 10.0)


@pytest.mark.parametrize("mode", Mode)
async def test_joining_does_not_create_a_deleted_subscription_again(tmp_path: Path, mode: Mode) -> None:
    """A consumer joins after its call looked the subscription up. It was deleted in between."""
    deleted = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=mode)
    async with (
        Provider.open(tmp_path / "data", queues=1) as provider,
        ConsumerGroups.opened(provider, 10.0) as served,
        ConsumerGroups.opened(provider, 10.0, stands_by=True) as standing_by,
    ):
        await provider.create_subscription(deleted)
        await provider.delete_subscription("s")
        with pytest.raises(NotFound, match=r"no subscription 's'$"):
            await served.join(deleted, "c", 10.0)
        async with provider.exclusive("s"), provider.exclusive("s~c"):  # as if another process served it
            with pytest.raises(NotFound, match=r"no subscription 's'$"):
                await standing_by.join(deleted, "c", 10.0)
        if mode is Mode.BROADCAST:
            with pytest.raises(NotFound, match=r"no subscription 's'$"):
                await served.prepare(deleted, "c", None)
        assert not await provider.store.subscriptions(provider.name)
        await provider.create_subscription(replace(deleted, selector=Selector("m/*")))
        for groups in (served, standing_by):
            with pytest.raises(Fenced, match="'s' was deleted, and has another definition now"):
                await groups.join(deleted, "c", 10.0)


@pytest.mark.parametrize("mode", Mode)
async def test_a_consumer_that_joins_during_the_deletion_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=mode)
    async with Provider.open(adapter="memory", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        await provider.create_subscription(definition)
        delete, gone = provider.store.delete_subscription, asyncio.get_running_loop().create_future()

        async def joined_before(*arguments: Any) -> None:
            (await served.join(definition, "late", 10.0)).member.on_gone = gone.set_result
            await delete(*arguments)

        monkeypatch.setattr(provider.store, "delete_subscription", joined_before)
        await provider.delete_subscription("s")
        assert isinstance(await asyncio.wait_for(gone, 30), Fenced)
        assert not await provider.store.subscriptions(provider.name)


async def gone_after_joining(
    groups: ConsumerGroups, definition: SubscriptionDefinition, positions: dict[int, Checkpoint] | None
) -> asyncio.Future[HeadraceError]:
    """Join as consumer "c". Return a future that gets the error with which the consumer ends."""
    gone = asyncio.get_running_loop().create_future()
    (await groups.join(definition, "c", 10.0, positions)).member.on_gone = gone.set_result
    return gone


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("again", [True, False])
async def test_a_consumer_that_keeps_its_positions_ends_when_its_subscription_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool, elsewhere: bool
) -> None:
    """In this process or another one, and also if the same subscription is created anew at once."""
    monkeypatch.setattr(consumer_groups, "CHECK_DELETED_S", 0.01)
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=Mode.BROADCAST)
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        await provider.create_subscription(definition)
        gone = await gone_after_joining(served, definition, {})
        if elsewhere:
            await provider.store.delete_subscription(provider.name, "s")
        else:
            await provider.delete_subscription("s")
        if again:
            await provider.create_subscription(definition)
        error = await asyncio.wait_for(gone, 30)
        assert isinstance(error, Fenced)
        assert "subscription 's' was deleted" in str(error)
        if again:
            await gone_after_joining(served, definition, {})
            await provider.delete_subscription("s")
        assert not provider.manager.served
        with pytest.raises(NotFound, match=r"no subscription 's'$"):
            await served.join(definition, "c", 10.0, {})


async def test_a_consumer_learns_the_name_of_its_deleted_subscription(tmp_path: Path) -> None:
    """Not the name under which the silo keeps its position."""
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=Mode.BROADCAST)
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        for elsewhere in (False, True):
            await provider.create_subscription(definition)
            gone = await gone_after_joining(served, definition, None)
            if elsewhere:
                await provider.store.delete_subscription(provider.name, "s")
                provider.manager.subscriptions.stop_fenced("s~c")  # the checkpointer notices it within a second
            else:
                await provider.delete_subscription("s")
            assert str(await asyncio.wait_for(gone, 30)).startswith("subscription 's' was ")


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("stored", [True, False])
async def test_a_subscription_that_is_closed_after_a_move_elsewhere_does_not_go_on(
    tmp_path: Path, stored: bool, again: bool
) -> None:
    """Also without a directory, in which a lock would tell; and if it is served again, by another handler."""
    begun, cancelled, ends = asyncio.Event(), asyncio.Event(), asyncio.Event()
    handled: list[tuple[str, bytes]] = []

    async def former(event: Event) -> None:
        handled.append(("former", event.payload))
        begun.set()
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.set()
            await ends.wait()

    async def present(event: Event) -> None:
        handled.append(("present", event.payload))

    options: dict[str, Any] = {} if stored else {"adapter": "memory"}
    async with Provider.open(tmp_path / "data" if stored else None, queues=1, **options) as provider:
        closed = await provider.subscribe("s", "n/*", former)
        await provider.publish(StreamId("n", "1"), b"1")
        await begun.wait()
        provider.manager.subscriptions.stop_fenced("s")
        await cancelled.wait()
        with suppress(NotFound):
            await closed.close()
        if again and stored:
            assert (await provider.subscribe("s", "n/*", present)).stands_by
        if again and not stored:
            with pytest.raises(Busy, match="has not ended"):
                await provider.subscribe("s", "n/*", present)
        ends.set()
        await asyncio.sleep(0.1)
        if again and not stored:
            await provider.subscribe("s", "n/*", present)
        await provider.publish(StreamId("n", "2"), b"2")
        await asyncio.sleep(0.1)
        assert [name for name, payload in handled if payload == b"2"] == (["present"] if again else [])
        assert [*provider.manager.served] == (["s"] if again else [])


async def test_one_consumer_that_does_not_end_keeps_no_other_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=Mode.BROADCAST)
    monkeypatch.setattr(consumer_groups, "CHECK_DELETED_S", 0.01)
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        await provider.create_subscription(definition)
        first, second = [await served.join(definition, consumer, 10.0, {}) for consumer in "ab"]
        gone = asyncio.get_running_loop().create_future()
        second.member.on_gone = gone.set_result

        def fail(_: object) -> None:
            raise RuntimeError("it does not end")

        with monkeypatch.context() as patch:
            patch.setattr(first.group, "dissolve", fail)
            await provider.store.delete_subscription(provider.name, "s")  # as another process does
            assert isinstance(await asyncio.wait_for(gone, 30), Fenced)
        assert provider.service_of("s~a") is first.group
        assert "consumer 's~a' of a deleted subscription did not end" in caplog.text


async def test_the_errors_of_a_consumer_name_its_subscription(tmp_path: Path) -> None:
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=Mode.BROADCAST)
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        await provider.create_subscription(definition)
        async with provider.exclusive("s~c"):
            with pytest.raises(Busy, match="subscription 's' of provider 'default' is served by process"):
                await served.join(definition, "c", 10.0)
        group = (await served.join(definition, "c", 10.0)).group
        with pytest.raises(Busy, match="subscription 's' is already served by this process"):
            await provider.serve(group.definition, group)


async def test_a_seek_says_how_many_consumers_keep_their_positions(tmp_path: Path) -> None:
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=Mode.BROADCAST)
    async with Provider.open(tmp_path / "data", queues=1) as provider, ConsumerGroups.opened(provider, 10.0) as served:
        await provider.create_subscription(definition)
        for consumer, keeps in (("was-stored", False), ("was-stored", True), ("other", True), ("stored", False)):
            group = (await served.join(definition, consumer, 10.0, {} if keeps else None)).group
        fences = {name: one.deliveries[0].generation for name, one in provider.manager.served.items()}
        assert await provider.seek("s", "earliest") == 2
        moved = {name: one.deliveries[0].generation for name, one in provider.manager.served.items()}
        assert {name for name in moved if moved[name] != fences[name]} == {group.definition.name} == {"s~stored"}
        await provider.create_subscription(replace(definition, name="t", mode=Mode.SHARED))
        assert await provider.seek("t", "earliest") == 0
