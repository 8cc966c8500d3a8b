"""Statistics of a provider: the state of a subscription and its reason."""

import asyncio
from pathlib import Path

from headrace import Event, OnFailure, Provider, RetryPolicy, StreamId
from headrace.silo.views import SubscriptionView

from ..client.consumers import until


def only(provider: Provider) -> SubscriptionView:
    (found,) = provider.statistics().subscriptions
    return found


async def test_one_paused_stream_does_not_make_a_subscription_paused_that_works(tmp_path: Path) -> None:
    working, goes_on = asyncio.Event(), asyncio.Event()

    async def handle(event: Event) -> None:
        if event.payload == b"poison":
            raise ValueError("no")
        working.set()
        await goes_on.wait()

    async with Provider.open(tmp_path, queues=1) as provider:
        once = RetryPolicy(max_attempts=1)
        await provider.subscribe("s", "n/*", handle, on_failure=OnFailure.PAUSE, retry=once)
        await provider.publish(StreamId("n", "bad"), b"poison")
        await until(lambda: only(provider).paused == 1)
        assert (only(provider).state, only(provider).reason) == ("paused", "1 stream paused until resumed")
        await provider.publish(StreamId("n", "good"), b"fine")
        await working.wait()
        state = only(provider)
        assert state.state == "running"
        assert state.reason.endswith(", 1 stream paused until resumed")
        goes_on.set()
        await until(lambda: only(provider).state == "paused")


async def test_a_stream_that_waits_for_its_next_attempt_is_named_beside_others_that_go_on(tmp_path: Path) -> None:
    goes_on = asyncio.Event()

    async def handle(event: Event) -> None:
        if event.payload == b"fails":
            raise ValueError("no")
        await goes_on.wait()

    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe(
            "s", "n/*", handle, retry=RetryPolicy(initial_delay_s=1000, max_delay_s=1000, max_elapsed_s=10_000)
        )
        await provider.publish(StreamId("n", "bad"), b"fails")
        await until(lambda: only(provider).state == "retrying")
        assert only(provider).reason == "1 stream waiting for the next attempt"
        await provider.publish(StreamId("n", "good"), b"fine")
        await until(lambda: only(provider).state == "running")
        assert only(provider).reason.endswith(", 1 stream waiting for the next attempt")
        goes_on.set()
