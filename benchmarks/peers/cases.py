"""The processes of a peer's measurement: what `Peer` runs, over any `PeerClient`."""

from __future__ import annotations

import asyncio
import importlib
import os
import struct
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager as Connection
from contextlib import AsyncExitStack

from ..results import Latency
from ..worker import StartingGate
from .peer import PeerClient, PeerConsumer, Producer

WARM_UP = 0.1
"""Share of the events of a latency run that does not count: connections, caches and branches are cold."""
PACED_READ = 1000
"""Most events that a consumer of a latency run takes at a time."""

_STAMP = struct.Struct("<q")


def publish(gate: StartingGate, *, client: str, address: str, events: int, size: int, batch: int) -> None:
    asyncio.run(_publish(gate, find(client).producer(address, batch=batch), events, size, batch))


def consume(gate: StartingGate, *, client: str, address: str, events: int, size: int, batch: int) -> None:
    asyncio.run(_consume(gate, find(client).consumer(address, batch=batch), events, size))


def consume_each(
    gate: StartingGate, *, client: str, address: str, events: int, size: int, batch: int, consumers: int
) -> None:
    connections = [find(client).consumer(address, batch=batch, number=number) for number in range(consumers)]
    asyncio.run(_consume_each(gate, connections, events, size))


def publish_paced(gate: StartingGate, *, client: str, address: str, events: int, size: int, rate: int) -> None:
    asyncio.run(_publish_paced(gate, find(client).producer(address, batch=1, paced=True), events, size, rate))


def consume_stamped(gate: StartingGate, *, client: str, address: str, events: int) -> dict[str, float]:
    consumer = find(client).consumer(address, batch=PACED_READ, paced=True)
    return asyncio.run(_consume_stamped(gate, consumer, events))._asdict()


async def _publish(gate: StartingGate, connection: Connection[Producer], events: int, size: int, batch: int) -> None:
    payload = os.urandom(size)
    payloads = [payload] * batch
    async with connection as producer:
        gate.wait()
        for _ in range(events // batch):
            await producer.send(payloads)
        if rest := events % batch:
            await producer.send(payloads[:rest])
        await producer.flush()
        gate.done()


async def _consume(gate: StartingGate, connection: Connection[PeerConsumer], events: int, size: int) -> None:
    async with connection as consumer:
        gate.wait()
        await _take(consumer, events, size)
        gate.done()


async def _consume_each(
    gate: StartingGate, connections: Sequence[Connection[PeerConsumer]], events: int, size: int
) -> None:
    async with AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(connection) for connection in connections]
        gate.wait()
        async with asyncio.TaskGroup() as group:
            for consumer in consumers:
                group.create_task(_take(consumer, events, size))
        gate.done()


async def _take(consumer: PeerConsumer, events: int, size: int) -> None:
    count = volume = 0
    while count < events:
        payloads = await consumer.receive()
        count += len(payloads)
        volume += sum(map(len, payloads))
    await consumer.finish()
    if (count, volume) != (events, events * size):
        raise RuntimeError(f"{count:,} events with {volume:,} bytes came, of {events:,} with {events * size:,}")


async def _publish_paced(
    gate: StartingGate, connection: Connection[Producer], events: int, size: int, rate: int
) -> None:
    filling = os.urandom(size - _STAMP.size)
    async with connection as producer:
        gate.wait()
        began_ns, sent = time.monotonic_ns(), 0
        while sent < events:
            await asyncio.sleep(max(0.0, began_ns / 1e9 + sent / rate - time.monotonic()))
            now_ns = time.monotonic_ns()
            due = min(events, (now_ns - began_ns) * rate // 1_000_000_000 + 1)
            await producer.send([_STAMP.pack(time.monotonic_ns()) + filling for _ in range(sent, due)])
            sent = due
        await producer.flush()
        gate.done()


async def _consume_stamped(gate: StartingGate, connection: Connection[PeerConsumer], events: int) -> Latency:
    samples_ms: list[float] = []
    async with connection as consumer:
        gate.wait()
        while len(samples_ms) < events:
            payloads = await consumer.receive()
            now_ns = time.monotonic_ns()
            samples_ms += [(now_ns - _STAMP.unpack_from(payload)[0]) / 1e6 for payload in payloads]
        await consumer.finish()
        gate.done()
    return Latency.of(samples_ms[int(WARM_UP * events) :])


def find(client: str) -> PeerClient:
    module, _, attribute = client.partition(":")
    found: PeerClient = getattr(importlib.import_module(module), attribute)
    return found
