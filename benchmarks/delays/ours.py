"""headrace: `RedisQueue`, and a provider whose queues are in Redis."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

from headrace import Event, EventBatch, Provider, Start
from headrace.adapters.redis import PushedEvent, RedisOptions, RedisQueue

from .kinds import DelayKind, Handle, Place, Push, running

WAIT_S = 5.0


class Queue(DelayKind):
    requires = ("redis", "hiredis")

    @asynccontextmanager
    async def producer(self, place: Place) -> AsyncGenerator[Push]:
        async with RedisQueue.open("bench", RedisOptions(url=place.url)) as queue:

            async def push(payloads: Sequence[bytes], delays_s: Sequence[float]) -> None:
                delays = delays_s or [0.0] * len(payloads)
                await queue.push_many([PushedEvent(body, "", s) for body, s in zip(payloads, delays, strict=True)])

            yield push

    @asynccontextmanager
    async def consumer(self, place: Place, batch: int, handle: Handle) -> AsyncGenerator[None]:
        async with RedisQueue.open("bench", RedisOptions(url=place.url)) as queue, running(take(queue, batch, handle)):
            yield


async def take(queue: RedisQueue, batch: int, handle: Handle) -> None:
    while True:
        if taken := await queue.pop(batch, wait_s=WAIT_S):
            handle([one.body for one in taken])
            await queue.acknowledge(*taken)


class Published(DelayKind):
    """Publish to one of eight streams; a subscription with a handler per batch."""

    connections = 1
    requires = ("redis", "hiredis")

    @asynccontextmanager
    async def producer(self, place: Place) -> AsyncGenerator[Push]:
        async with _provider(place) as provider:
            streams = [provider.stream("bench", str(number)) for number in range(8)]
            turn = 0

            async def push(payloads: Sequence[bytes], delays_s: Sequence[float]) -> None:
                nonlocal turn
                turn += 1
                events = [Event(body, delay=timedelta(seconds=s)) for body, s in zip(payloads, delays_s, strict=False)]
                await streams[turn % 8].publish(events or payloads)

            yield push

    @asynccontextmanager
    async def consumer(self, place: Place, batch: int, handle: Handle) -> AsyncGenerator[None]:
        async def on_batch(events: EventBatch) -> None:
            handle(events.payloads())

        async with _provider(place) as provider:
            await provider.subscribe("bench", "bench/*", on_batch, batch=True, start=Start.earliest())
            yield


def _provider(place: Place):  # noqa: ANN202 (what Provider.open returns)
    return Provider.open(place.data, adapter="redis", options={"url": place.url})
