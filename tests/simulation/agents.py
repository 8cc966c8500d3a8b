"""One pulling agent on one queue, in virtual time."""

import asyncio
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from headrace import EventBatch, OnFailure, RetryPolicy, Selector, SlowConsumer, SubscriptionDefinition
from headrace.adapters import Gap, QueueAdapter
from headrace.agents import CacheLimits, Delivery, HandlerDelivery, PullingAgent, QueueCache
from headrace.agents.catch_up_budget import CatchUpBudget
from headrace.agents.cursor import StreamCursor
from headrace.streams.handlers import AnyHandler, Handler
from headrace.streams.subscriptions import Checkpoint
from tests.simulation.deliveries import NOW, Sink, stream
from tests.simulation.queues import SimulatedQueues

FINE = 0.001
"""Virtual seconds between two looks at a condition."""


class SimulatedAgent:
    """`attach` subscriptions, `publish`, and look. Closed at the end of `async with`."""

    def __init__(
        self,
        adapter: QueueAdapter | None = None,
        *,
        max_events: int = 80,
        max_bytes: int = 8 << 20,
        detach_after_s: float = 0.25,
        budget: CatchUpBudget | None = None,
    ) -> None:
        self.adapter = adapter or SimulatedQueues(1)
        self.limits = CacheLimits(max_events=max_events, max_bytes=max_bytes)
        self.gaps: list[tuple[str, Gap]] = []
        self.sink = Sink()
        self.agent = PullingAgent(
            self.adapter, 0, self.limits, detach_after_s=detach_after_s, rng=random.Random(1), budget=budget,
            on_gap=lambda delivery, gap: self.gaps.append((delivery.name, gap)),
        )  # fmt: skip

    @property
    def shelf(self) -> SimulatedQueues:
        assert isinstance(self.adapter, SimulatedQueues)
        return self.adapter

    @property
    def main(self) -> QueueCache:
        assert self.agent.main is not None
        return self.agent.main.cache

    async def publish(self, key: str, *payloads: bytes) -> None:
        await self.adapter.enqueue([(0, EventBatch.of(stream(key), payloads))])

    async def publish_numbers(self, count: int, *, keys: Sequence[str] = ("a",), start: int = 0) -> None:
        """Batches of one event, round the keys, with the payloads 0, 1, …"""
        batches = [EventBatch.of(stream(keys[n % len(keys)]), [str(n).encode()]) for n in range(start, start + count)]
        await self.adapter.enqueue([(0, batch) for batch in batches])

    def attach(
        self,
        name: str,
        handler: AnyHandler,
        start: int | Checkpoint = 0,
        *,
        selector: str = "s/*",
        slow: SlowConsumer | None = None,
        retry: RetryPolicy = NOW,
        on_failure: OnFailure = OnFailure.DEAD_LETTER,
        **options: Any,
    ) -> Delivery:
        definition = SubscriptionDefinition(
            name=name, selector=Selector(selector), slow_consumer=slow, retry=retry, on_failure=on_failure
        )
        checkpoint = Checkpoint(start) if isinstance(start, int) else start
        delivery = HandlerDelivery(
            definition, 0, checkpoint, Handler.of(handler, batch=False), self.sink,
            rewindable=self.adapter.capabilities.rewindable, rng=random.Random(1), **options,
        )  # fmt: skip
        self.agent.attach(delivery)
        return delivery

    async def caught_up(self, *deliveries: Delivery, limit_s: float = 100.0) -> None:
        end = (await self.adapter.bounds(0)).next
        async with asyncio.timeout(limit_s):
            for delivery in deliveries or tuple(self.agent.deliveries.values()):
                await delivery.waiters.wait_until(end)

    def held(self) -> tuple[int, int]:
        """Events and bytes of every batch that the agent or one of its cursors keeps alive."""
        cursors = [c for d in self.agent.deliveries.values() for c in d.progress.cursors.values()]
        caches = {id(feed.cache): feed.cache for feed in self.feeds()}
        caches |= {id(c.bucket.cache): c.bucket.cache for c in cursors if c.bucket is not None}
        batches = [entry.batch for cache in caches.values() for entry in cache.entries_from(0)]
        batches += [c.batch for c in cursors if c.batch is not None and c.bucket is None]
        return sum(b.count for b in batches), sum(b.nbytes for b in batches)

    def feeds(self) -> list[Any]:
        return [feed for feed in (self.agent.main, *self.agent.catch_ups.running.values()) if feed is not None]

    def cursor(self, delivery: Delivery, key: str) -> StreamCursor:
        return delivery.progress.cursors[stream(key)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(str(self.agent.statistics()))
        await self.agent.aclose()
        await self.adapter.aclose()
