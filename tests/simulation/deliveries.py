"""Deliveries without an agent: a feed that is filled by hand, and a sink that remembers."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Self, TypeVar

from headrace import (
    CorruptRecord,
    Event,
    EventBatch,
    OnFailure,
    RetryPolicy,
    Selector,
    StreamId,
    SubscriptionDefinition,
)
from headrace.agents import Delivery, HandlerDelivery, QueueCache
from headrace.agents.cursor import StreamCursor
from headrace.agents.delivery.breaker import Gate
from headrace.balancer.held_leases import LeaseTerm
from headrace.streams.handlers import AnyHandler, Handler
from headrace.streams.options import EventFilter
from headrace.streams.subscriptions import Checkpoint

D = TypeVar("D", bound=Delivery)

NOW = RetryPolicy(max_attempts=3, initial_delay_s=0.0)
"""Three attempts, no waiting."""


def stream(key: str) -> StreamId:
    return StreamId("s", key)


class Sink:
    """Remembers the events that were given up on. Fails first, once with each of `failures`."""

    def __init__(self) -> None:
        self.dead: list[tuple[bytes, str, int]] = []
        self.gaps: list[tuple[bytes, str]] = []
        self.failures: list[BaseException] = []
        self.gate: asyncio.Event | None = None

    async def dead_letter(self, delivery: Delivery, events: Sequence[Event], reason: str, attempts: int) -> None:
        await self._trouble()
        self.dead += [(event.payload, reason, attempts) for event in events]

    async def skipped(self, delivery: Delivery, events: Sequence[Event], reason: str) -> None:
        await self._trouble()
        self.gaps += [(event.payload, reason) for event in events]

    async def _trouble(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)


class SimulatedFeed(Generic[D]):
    """A feed with one delivery. `publish` offers a batch as if it had just been received."""

    caught_up = True
    finished = False
    delivery: D

    def __init__(self, max_events: int, start: int = 0) -> None:
        self.cache = QueueCache(max_events, 100 << 20)
        self.cache.next_offset = start
        self.damage: CorruptRecord | None = None
        self.parked: list[StreamCursor] = []

    def join(self, delivery: D) -> None:
        """Have the delivery join. Cursors that a former one parks do not count from now on."""
        self.delivery, self.parked = delivery, []
        delivery.progress.on_parked = self.parked.append
        delivery.join(self)

    def publish(self, key: str, *payloads: str | bytes) -> EventBatch:
        return self.publish_all([(key, payloads)])[0]

    def publish_all(self, parts: Iterable[tuple[str, str | bytes | Sequence[str | bytes]]]) -> list[EventBatch]:
        """Offer batches at once: streams, and their payload or payloads."""
        made = [EventBatch.of(stream(key), _encoded(payloads)) for key, payloads in parts]
        for offset, batch in enumerate(made, self.cache.next_offset):
            batch.offset = offset
        self.delivery.offer(self, self.cache.add(made))
        self.delivery.waiters.notify()
        return made

    def all_seen(self) -> None: ...

    def unpark(self) -> None:
        """Bring the next batch of every parked cursor, as a catch-up would."""
        parked, self.parked[:] = list(self.parked), []
        for cursor in parked:
            self.delivery.adopt(cursor, self)

    def cursor(self, key: str) -> StreamCursor:
        return self.delivery.progress.cursors[stream(key)]


def _encoded(payloads: str | bytes | Sequence[str | bytes]) -> list[bytes]:
    several = [payloads] if isinstance(payloads, str | bytes) else payloads
    return [payload.encode() if isinstance(payload, str) else payload for payload in several]


class HandlerFeed(SimulatedFeed[HandlerDelivery]):
    """Its delivery calls a handler."""

    def __init__(
        self,
        handler: AnyHandler,
        *,
        batch: bool = False,
        selector: str = "s/*",
        retry: RetryPolicy = NOW,
        on_failure: OnFailure = OnFailure.DEAD_LETTER,
        checkpoint: Checkpoint = Checkpoint(0),  # noqa: B008 (immutable)
        predicate: EventFilter | None = None,
        concurrency: int = 100,
        rewindable: bool = True,
        max_events: int = 10_000,
        term: LeaseTerm | None = None,
        circuit_breaker: bool = True,
        gate: Gate | None = None,
        sink: "Sink | None" = None,
    ) -> None:
        definition = SubscriptionDefinition(
            name="sub", selector=Selector(selector), retry=retry, on_failure=on_failure, circuit_breaker=circuit_breaker
        )
        super().__init__(max_events)
        self.sink = sink or Sink()
        self.join(HandlerDelivery(
            definition, 0, checkpoint, Handler.of(handler, batch=batch), self.sink, predicate=predicate,
            concurrency=concurrency, rewindable=rewindable, term=term, gate=gate, rng=random.Random(1),
        ))  # fmt: skip

    async def done(self) -> None:
        await self.delivery.waiters.wait_until(self.cache.next_offset)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.delivery.stop(0.0)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition`."""
    while not condition():  # noqa: ASYNC110 (whatever the loop does next may make it true)
        await asyncio.sleep(0)


class Recorder:
    """A handler that remembers payloads as text, and for each key does what `does` says, if anything."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.started: list[str] = []
        self.running = 0
        self.most_running = 0
        self.gates: dict[str, asyncio.Event] = {}
        self.fails: dict[str, int] = {}

    def hold(self, payload: str) -> asyncio.Event:
        """This event's handler waits for the gate."""
        gate = self.gates[payload] = asyncio.Event()
        return gate

    def fail(self, payload: str, times: int = 1_000_000) -> None:
        self.fails[payload] = times

    async def __call__(self, event: Event) -> None:
        payload = event.payload.decode()
        self.started.append(payload)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if payload in self.gates:
                await self.gates[payload].wait()
            if self.fails.get(payload, 0) > 0:
                self.fails[payload] -= 1
                raise ValueError(f"no {payload}")
            self.seen.append(payload)
        finally:
            self.running -= 1
