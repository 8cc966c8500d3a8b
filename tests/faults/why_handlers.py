"""Loaded by the silos of `test_why_injected.py` (`modules`): handlers that block, fail or are slow, each in a namespace
of its own. The last three are in other providers."""

import asyncio

from headrace import Event, OnFailure, RetryPolicy, SlowConsumer, Start, Unavailable
from headrace.streams.handlers import subscription

ONCE = RetryPolicy(max_attempts=1)
LATER = RetryPolicy(initial_delay_s=100, max_delay_s=1000, max_elapsed_s=10_000, max_attempts=8)


async def _never() -> None:
    await asyncio.Event().wait()


@subscription("done", "done/*", start=Start.earliest())
async def done(event: Event) -> None: ...


@subscription("running", "running/*", start=Start.earliest())
async def running(event: Event) -> None:
    await _never()


@subscription("retrying", "retrying/*", start=Start.earliest(), retry=LATER)
async def retrying(event: Event) -> None:
    raise ValueError("no such customer")


@subscription("paused", "paused/*", start=Start.earliest(), retry=ONCE, on_failure=OnFailure.PAUSE)
async def paused(event: Event) -> None:
    raise ValueError("the account is closed")


@subscription("dead", "dead/*", start=Start.earliest(), retry=ONCE)
async def dead(event: Event) -> None:
    raise ValueError("no such currency")


@subscription("held", "held/*", start=Start.earliest())
async def held(event: Event) -> None:
    raise Unavailable("the database of invoices is down")


@subscription("full", "full/*", start=Start.earliest(), concurrency=1)
async def full(event: Event) -> None:
    await _never()


@subscription("stuck", "n/*", provider="throttled", start=Start.earliest(), slow_consumer=SlowConsumer.THROTTLE)
async def stuck(event: Event) -> None:
    if str(event.stream) == "n/0":
        await _never()


@subscription("quick", "n/*", provider="throttled", start=Start.earliest())
async def quick(event: Event) -> None: ...


@subscription("slow", "n/*", provider="behind", start=Start.earliest(), concurrency=2)
async def slow(event: Event) -> None:
    await asyncio.sleep(0.5)
