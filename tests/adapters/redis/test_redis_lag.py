"""Lag of subscriptions on queues in Redis: events that are not due yet are no lag, and no call waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace import Client, Consumer, Event, Provider, Selector, StreamId, SubscriptionDefinition
from tests.cli.commandline import Headrace
from tests.cli.conftest import headrace
from tests.client.silos import SiloProcess

__all__ = ("headrace",)

STREAM = StreamId("orders", "1")
HOUR = timedelta(hours=1)


@asynccontextmanager
async def served(folder: Path, url: str, *flags: str) -> AsyncGenerator[str]:
    """A silo, or several, by its address."""
    config = ['data = "d"', "[providers.default]", 'adapter = "redis"', "queues = 2", f'options = {{ url = "{url}" }}']
    (folder / "silo.toml").write_text("\n".join([*config, "[http]", "port = 0"]))
    silo = SiloProcess(folder, "silo.toml", *flags)
    try:
        yield await asyncio.to_thread(silo.start)
    finally:
        await asyncio.to_thread(silo.kill)


async def consume(consumer: Consumer, got: list[bytes]) -> None:
    async for batch in consumer:
        got += batch.payloads()
        await batch.ack()


def streams(count: int) -> Sequence[StreamId]:
    return [StreamId("orders", str(number)) for number in range(count)]


# ---- caught up -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one silo", "two silos"])
async def test_a_client_is_caught_up_though_the_last_event_is_not_due(
    tmp_path: Path, url: str, flags: Sequence[str]
) -> None:
    got: list[bytes] = []
    async with served(tmp_path, url, *flags) as address, Client(address) as client:
        async with client.subscribe("s", "orders/*") as consumer, client.subscribe("t", "others/*") as other:
            consuming = [asyncio.create_task(consume(consumer, got)), asyncio.create_task(consume(other, []))]
            for stream in streams(20):
                await client.publish(stream, [b"now"])
                await client.publish(stream, [Event(b"later", delay=HOUR)])
            async with asyncio.timeout(20):
                await client.caught_up("s")
                assert got == [b"now"] * 20
                await other.caught_up()
            for task in consuming:
                task.cancel()
            await asyncio.gather(*consuming, return_exceptions=True)


async def test_a_client_is_not_caught_up_before_all_that_is_due_is_done(tmp_path: Path, url: str) -> None:
    async with served(tmp_path, url) as address, Client(address) as client:
        await client.create_subscription(SubscriptionDefinition(name="s", selector=Selector("orders/*")))
        await client.publish(STREAM, [b"now", Event(b"later", delay=HOUR)])
        waiting = asyncio.create_task(client.caught_up("s"))
        async with client.subscribe("s", "orders/*") as consumer:
            batch = await anext(aiter(consumer))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.5)
            await batch.ack()
            async with asyncio.timeout(20):
                await waiting


@pytest.mark.long
async def test_subscribe_ends_with_the_due_events(tmp_path: Path, url: str, headrace: Headrace) -> None:
    async with served(tmp_path, url) as address, Client(address) as client:
        await client.create_subscription(SubscriptionDefinition(name="s", selector=Selector("orders/*")))
        await client.publish(STREAM, [b"now", Event(b"later", delay=HOUR)])
        arguments = ("subscribe", "orders/*", "--server", address, "--name", "s", "--format", "raw")
        async with asyncio.timeout(30):
            ran = await asyncio.to_thread(headrace, *arguments, "--no-follow")
    assert (ran.code, ran.out) == (0, "now\n")


# ---- lag -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(data: Path, url: str) -> AsyncGenerator[Provider]:
    async with Provider.open(data, adapter="redis", queues=1, options={"url": url}) as provider:
        yield provider


async def test_lag_counts_due_events(tmp_path: Path, url: str) -> None:
    async with opened(tmp_path, url) as provider:
        stream = provider.stream(STREAM)
        await stream.publish([b"1", b"2", b"3"])
        await stream.publish([Event(b"urgent", priority=9)])
        await stream.publish([Event(b"later", delay=HOUR)] * 2)
        await stream.publish([Event(b"later still", delay=2 * HOUR, priority=5)])
        backlog = await provider.adapter.backlog(0, 0)
    assert (backlog.batches, backlog.events, backlog.estimated) == (2, 4, False)
    assert (backlog.later, backlog.later_events) == (2, 3)
    assert backlog.since_us is not None
    assert backlog.later_us is not None
    assert 3590 < (backlog.later_us - backlog.since_us) / 1e6 < 3610


async def test_lag_counts_events_that_are_read_and_not_done(tmp_path: Path, url: str) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handle(_: Event) -> None:
        begun.set()
        await go_on.wait()

    async with opened(tmp_path, url) as provider:
        subscription = await provider.subscribe("s", "orders/*", handle)
        await provider.stream(STREAM).publish([b"1", b"2", Event(b"later", delay=HOUR)])
        await begun.wait()
        behind = await provider.adapter.backlog(0, 0)
        go_on.set()
        await subscription.caught_up()
        end = await provider.adapter.due_end(0)
        done = await provider.adapter.backlog(0, end or 0)
    assert (behind.batches, behind.events, behind.later) == (1, 2, 1)
    assert behind.since_us
    assert (done.batches, done.events, done.since_us, done.later) == (0, 0, None, 1)


async def test_events_of_many_batches_are_estimated(tmp_path: Path, url: str) -> None:
    async with opened(tmp_path, url) as provider:
        for stream in streams(150):
            await provider.stream(stream).publish([b"1", b"2"])
            await provider.stream(stream).publish([Event(b"later", delay=HOUR)] * 3)
        backlog = await provider.adapter.backlog(0, 0)
    assert (backlog.batches, backlog.events, backlog.estimated) == (150, 300, True)
    assert (backlog.later, backlog.later_events) == (150, 450)


@pytest.mark.long
async def test_a_silo_shows_lag_without_events_that_are_not_due(tmp_path: Path, url: str, headrace: Headrace) -> None:
    async with served(tmp_path, url) as address, Client(address) as client:
        await client.create_subscription(SubscriptionDefinition(name="s", selector=Selector("orders/*")))
        await client.publish(STREAM, [b"1", b"2", Event(b"later", delay=HOUR)])
        (queue,) = [one for one in await _queues(headrace, address) if one["lag_batches"]]
        assert (queue["lag_batches"], queue["lag_events"], queue["lag_estimated"]) == (1, 2, False)
        assert queue["lag_s"] > 0
        assert (queue["delayed_events"], 3000 < queue["due_in_s"] <= 3600) == (1, True)
        async with client.subscribe("s", "orders/*") as consumer:
            await (await anext(aiter(consumer))).ack()
            await consumer.caught_up()
            assert [one.lag for one in (await client.subscription("s")).progress] == [0, 0]
        for one in await _queues(headrace, address):
            assert (one["lag_batches"], one["lag_events"], one["lag_s"]) == (0, 0, 0.0)
        shown = await asyncio.to_thread(headrace, "queues", "--server", address)
        assert "delayed  due in s" in shown.out


@pytest.mark.long
async def test_a_data_directory_shows_due_and_delayed_events(tmp_path: Path, url: str, headrace: Headrace) -> None:
    async with Provider.open(tmp_path / "d", adapter="redis", queues=2, options={"url": url}) as provider:
        subscription = await provider.subscribe("s", "orders/*", _nothing)
        await provider.stream(STREAM).publish([b"done"])
        await subscription.caught_up()
        await subscription.close()
        await provider.stream(STREAM).publish([b"1", b"2", Event(b"later", delay=HOUR)])
        index = provider.queue_of(STREAM)
    arguments = ("--data", "d", "--option", f"url={url}", "--json")
    queue = (await asyncio.to_thread(headrace, "queues", *arguments)).json[index]
    assert (queue["lag_batches"], queue["lag_events"], queue["subscriptions"]["s"]["lag"]) == (1, 2, 1)
    assert (queue["delayed_events"], 3000 < queue["due_in_s"] <= 3600) == (1, True)


async def _nothing(_: Event) -> None: ...


async def _queues(headrace: Headrace, address: str) -> list[dict[str, Any]]:
    return (await asyncio.to_thread(headrace, "queues", "--server", address, "--json")).json
