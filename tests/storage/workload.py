"""The process that is recorded: publishers, a subscription with a handler and dead letters, and one with a consumer.

    python -m tests.storage.workload DATA JOURNAL DURABILITY RETAIN_BYTES PART SEED CALLS [BUG]

Part 0 kills itself in the middle. Part 1 goes on from there, and closes in order.
"""

import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

from headrace import Event, Provider, RetryPolicy, Selector, Start, StreamId, SubscriptionDefinition
from headrace.adapters import ProducerSequence
from headrace.streams.errors import HeadraceError
from headrace.streams.handlers import EventHandler, SubscriptionDeclaration
from tests.storage.events import NAMESPACE, JournalWriter, Named, event_of, payload_of
from tests.storage.planted import planted

QUEUES = 3
PUBLISHERS = 3
STREAMS_EACH = 3
HANDLED, CONSUMED = "handled", "consumed"
SELECTOR = f"{NAMESPACE}/*"
PART_FIRST = 1_000_000
"""Numbers of events begin here in each part, times the part."""
_SIZES = (40, 200, 900, 3_000, 9_000, 40_000)
_WEIGHTS = (30, 30, 20, 12, 6, 1)


def options_of(durability: str, retain_bytes: int) -> dict[str, Any]:
    retain = {"retain_bytes": retain_bytes} if retain_bytes else {}
    return {"queues": QUEUES, "options": {"durability": durability, "map_bytes": 64 << 20, **retain}}


def is_poison(event: Named) -> bool:
    return event.number % 23 == 7


class Publisher:
    """Publishes to streams of its own, so the order within each is known."""

    def __init__(self, provider: Provider, journal: JournalWriter, number: int, part: int, rng: random.Random) -> None:
        self._provider = provider
        self._journal = journal
        self._rng = rng
        self._name = f"producer-{number}-{part}"
        self._sequence = 0
        self._streams = [f"s{number}-{each}" for each in range(STREAMS_EACH)]
        self._numbers = {stream: count(part * PART_FIRST) for stream in self._streams}

    async def run(self, calls: int) -> None:
        kinds = (self._one, self._several, self._idempotent, self._refused, self._too_large)
        for _ in range(calls):
            kind = self._rng.choices(kinds, (10, 5, 5, 1, 1))[0]
            await kind()
            if self._rng.random() < 0.1:
                await asyncio.sleep(0.005)

    def _new(self, stream: str) -> tuple[Named, bytes]:
        event = Named(stream, next(self._numbers[stream]))
        return event, payload_of(event, self._rng.choices(_SIZES, _WEIGHTS)[0] + self._rng.randrange(30))

    async def _one(self) -> None:
        event, payload = self._new(self._rng.choice(self._streams))
        self._journal.note("asked", [event])
        await self._provider.publish(StreamId(NAMESPACE, event.stream), payload)
        self._journal.note("acknowledged", [event])

    async def _several(self) -> None:
        """Calls that are made one after the other without waiting."""
        made = [self._new(self._rng.choice(self._streams)) for _ in range(self._rng.randrange(2, 8))]
        self._journal.note("asked", [event for event, _ in made])

        async def publish(event: Named, payload: bytes) -> None:
            await self._provider.publish(StreamId(NAMESPACE, event.stream), payload)
            self._journal.note("acknowledged", [event])

        await asyncio.gather(*(publish(event, payload) for event, payload in made))

    async def _idempotent(self) -> None:
        made = [self._new(stream) for stream in self._streams]
        self._journal.note("asked", [event for event, _ in made])
        self._sequence += 1
        sequence = ProducerSequence(self._name, number=self._sequence, previous=self._sequence - 1)
        for _ in range(self._rng.randrange(1, 3)):  # a second time: nothing more is stored
            await self._provider.publish_many(self._items(made), sequence=sequence)
            self._journal.note("acknowledged", [event for event, _ in made])

    async def _refused(self) -> None:
        """A call with a hole before it."""
        made = [self._new(stream) for stream in self._streams]
        wrong = ProducerSequence(self._name, number=self._sequence + 9, previous=self._sequence + 8)
        try:
            await self._provider.publish_many(self._items(made), sequence=wrong)
        except HeadraceError:
            self._journal.note("refused", [event for event, _ in made])

    async def _too_large(self) -> None:
        event = Named(self._streams[0], next(self._numbers[self._streams[0]]))
        try:
            await self._provider.publish(StreamId(NAMESPACE, event.stream), payload_of(event, 2 << 20))
        except HeadraceError:
            self._journal.note("refused", [event])

    def _items(self, made: Sequence[tuple[Named, bytes]]) -> list[tuple[StreamId, bytes | Event]]:
        return [(StreamId(NAMESPACE, event.stream), payload) for event, payload in made]


def declared(handler: EventHandler) -> SubscriptionDeclaration:
    """The subscription with a handler. Poison in many streams must not hold it."""
    definition = SubscriptionDefinition(
        name=HANDLED,
        selector=Selector(SELECTOR),
        start=Start.earliest(),
        retry=RetryPolicy(max_attempts=1),
        circuit_breaker=False,
    )
    return SubscriptionDeclaration("default", definition, handler, batch=False, filter=None, concurrency=100)


async def handle(provider: Provider, journal: JournalWriter) -> None:
    async def handler(event: Event) -> None:
        named = event_of(event.payload)
        if is_poison(named):
            raise ValueError("poison")
        journal.note(f"done/{HANDLED}", [named])

    await provider.attach(declared(handler))


async def consume(provider: Provider, journal: JournalWriter) -> None:
    """Acknowledge each batch, and wait now and then until that is saved."""
    acknowledged: list[Named] = []
    async with provider.subscribe(CONSUMED, SELECTOR, start="earliest") as consumer:
        journal.note("opened")
        async for batch in consumer:
            events = [event_of(payload) for payload in batch.payloads()]
            journal.note(f"done/{CONSUMED}", events)
            await batch.ack()
            acknowledged += events
            if len(acknowledged) >= 20:
                await consumer.saved()
                journal.note(f"saved/{CONSUMED}", acknowledged)
                acknowledged.clear()


async def watch(provider: Provider, journal: JournalWriter) -> None:
    """Note the dead letters that the store shows, and let the log delete finished events."""
    last = 0
    while True:
        for letter in await provider.store.dead_letters(provider.name, HANDLED, after_id=last):
            journal.note("dead", [event_of(letter.payload)])
            last = letter.id
        await provider.manager.retention.apply()
        await asyncio.sleep(0.05)


async def main(arguments: Sequence[str]) -> None:
    data, journal_path, durability, retain_bytes, part, seed, calls = arguments[:7]
    journal = JournalWriter(journal_path)
    options: Mapping[str, Any] = options_of(durability, int(retain_bytes))
    async with Provider.open(data, **options) as provider:
        await handle(provider, journal)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(consume(provider, journal)), group.create_task(watch(provider, journal))]
            publishers = [
                Publisher(provider, journal, number, int(part), random.Random(f"{seed}/{part}/{number}"))
                for number in range(PUBLISHERS)
            ]
            await asyncio.gather(*(publisher.run(int(calls)) for publisher in publishers))
            if int(part) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            await provider.caught_up(HANDLED)
            for task in tasks:
                task.cancel()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with ExitStack() as stack:
        if len(sys.argv) > 8:
            planted(sys.argv[8], stack)
        asyncio.run(main(sys.argv[1:]))
