"""Paused streams that go on: when this is stored, and while their queue moves."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace import Event, OnFailure, Provider, RetryPolicy, StreamId, Unavailable
from headrace.silo.options import ProviderOptions

STREAM = StreamId("orders", "42")


async def subscribed(provider: Provider, handler: Callable[[Event], Awaitable[None]]) -> None:
    retry = RetryPolicy(max_attempts=1)
    await provider.subscribe("billing", "orders/*", handler, on_failure=OnFailure.PAUSE, retry=retry)


async def fail(_: Event) -> None:
    raise ValueError("no such customer")


async def until_paused(provider: Provider) -> None:
    while not await is_paused(provider):  # noqa: ASYNC110 (the store does not notify)
        await asyncio.sleep(0.01)


async def is_paused(provider: Provider) -> bool:
    """Whether the store has the pause."""
    stored = await provider.store.checkpoints(provider.name, "billing")
    return any(at.paused for checkpoint in stored.values() for at in checkpoint.behind.values())


async def test_a_stream_that_is_resumed_goes_on_after_a_kill(tmp_path: Path) -> None:
    calls, ends = 0, asyncio.Event()

    async def fail_once(event: Event) -> None:
        nonlocal calls
        calls += 1
        await (fail(event) if calls == 1 else ends.wait())

    async with Provider.open(tmp_path, queues=1) as provider:
        await subscribed(provider, fail_once)
        await provider.publish(STREAM, b"1")
        await until_paused(provider)
        assert await provider.resume("billing", STREAM)
        assert not await is_paused(provider)
        ends.set()


async def test_a_stream_is_not_resumed_while_its_queue_moves(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await subscribed(provider, fail)
        await provider.publish(STREAM, b"1")
        await until_paused(provider)
        (delivery,) = provider.manager.served["billing"].deliveries.values()
        delivery.halt()
        with pytest.raises(Unavailable, match="not served at this moment"):
            await provider.resume("billing", STREAM)


async def test_a_silo_without_the_queue_does_not_know_whether_a_stream_is_paused(tmp_path: Path) -> None:
    provider = await Provider.start(tmp_path, ProviderOptions(queues=1), leased=True)
    try:
        await subscribed(provider, fail)
        with pytest.raises(Unavailable, match="not served at this moment"):
            await provider.resume("billing", STREAM)
    finally:
        await provider.aclose()
