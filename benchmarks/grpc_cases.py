"""What is measured of headrace over gRPC: one function per process of a case, see `harness`. The publishing ones do
what those of `cases` do, over a client in the place of a provider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from headrace import Client, Selector, Start, SubscriptionDefinition
from headrace.client.consumer import Consumer

from .cases import Counter, Stamps, pace, publish_batches
from .results import Latency
from .worker import StartingGate

SELECTOR = "bench/*"


def publish(gate: StartingGate, *, address: str, events: int, size: int, batch: int) -> None:
    """Durable publish of batches."""
    asyncio.run(_publish(gate, address, events, size, batch))


def publish_paced(gate: StartingGate, *, address: str, events: int, size: int, rate: int) -> None:
    asyncio.run(_publish_paced(gate, address, events, size, rate))


def consume(gate: StartingGate, *, address: str, events: int, consumers: int) -> None:
    """Consumers that share a subscription; each has a connection of its own."""
    asyncio.run(_consume(gate, address, events, consumers))


def consume_each(gate: StartingGate, *, address: str, events: int, subscriptions: int) -> None:
    """A consumer of each of several subscriptions, which get a backlog from its beginning."""
    asyncio.run(_consume_each(gate, address, events, subscriptions))


def consume_stamped(gate: StartingGate, *, address: str, events: int) -> dict[str, float]:
    return asyncio.run(_consume_stamped(gate, address, events))._asdict()


async def _publish(gate: StartingGate, address: str, events: int, size: int, batch: int) -> None:
    async with Client(address) as client:
        gate.wait()
        await publish_batches(client, events, size, batch, streams=8)
        gate.done()


async def _publish_paced(gate: StartingGate, address: str, events: int, size: int, rate: int) -> None:
    async with Client(address) as client:
        gate.wait()
        await pace(client, events, size, rate)
        gate.done()


async def _consume(gate: StartingGate, address: str, events: int, consumers: int) -> None:
    counter = Counter(events)
    async with _clients(address, consumers) as clients, AsyncExitStack() as attached, asyncio.TaskGroup() as group:
        members = [
            await attached.enter_async_context(client.subscribe("bench", SELECTOR, start=Start.earliest()))
            for client in clients
        ]
        gate.wait()
        tasks = [group.create_task(take(member, counter)) for member in members]
        await counter.whole()
        gate.done()
        for task in tasks:
            task.cancel()


async def _consume_each(gate: StartingGate, address: str, events: int, subscriptions: int) -> None:
    counters = [Counter(events) for _ in range(subscriptions)]
    async with _clients(address, subscriptions) as clients:
        for number, client in enumerate(clients):
            await client.create_subscription(_definition(number))
        gate.wait()
        async with asyncio.TaskGroup() as group:
            for number, (client, counter) in enumerate(zip(clients, counters, strict=True)):
                group.create_task(_take_all(client, number, counter))
        gate.done()


async def _take_all(client: Client, number: int, counter: Counter) -> None:
    async with client.subscribe(_definition(number).name) as consumer, asyncio.TaskGroup() as group:
        taking = group.create_task(take(consumer, counter))
        await counter.whole()
        taking.cancel()


async def _consume_stamped(gate: StartingGate, address: str, events: int) -> Latency:
    stamps = Stamps(events)
    async with Client(address) as client, client.subscribe("bench", SELECTOR, start=Start.earliest()) as consumer:
        gate.wait()
        async with asyncio.TaskGroup() as group:
            taking = group.create_task(take(consumer, stamps))
            found = await stamps.latency()
            gate.done()
            taking.cancel()
    return found


async def take(consumer: Consumer, counter: Counter | Stamps) -> None:
    async for batch in consumer:
        await counter.on_batch(batch)
        await batch.ack()


def _definition(number: int) -> SubscriptionDefinition:
    return SubscriptionDefinition(name=f"bench-{number}", selector=Selector(SELECTOR), start=Start.earliest())


@asynccontextmanager
async def _clients(address: str, number: int) -> AsyncGenerator[list[Client]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Client(address)) for _ in range(number)]
