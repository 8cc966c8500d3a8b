"""What is measured of headrace itself: one function per process of a case, see `harness`."""

from __future__ import annotations

import asyncio
import os
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace import CacheOptions, Event, EventBatch, Provider, SlowConsumer, Start, Stream, StreamId

from .results import Latency
from .worker import StartingGate

STAMP = struct.Struct("<q")
IN_FLIGHT = 16
"""Publishes that wait for their commit at a time, where batches are published."""
WARM_UP = 0.1


def publish(
    gate: StartingGate, *, data: str, events: int, size: int, batch: int, streams: int = 8, queues: int = 8
) -> None:
    """Durable publish of batches, `IN_FLIGHT` at a time."""
    asyncio.run(_publish(gate, data, events, size, batch=batch, streams=streams, queues=queues))


def publish_singly(gate: StartingGate, *, data: str, events: int, size: int, publishers: int) -> None:
    """Durable publish of one awaited event at a time by each of `publishers`."""
    asyncio.run(_publish_singly(gate, data, events, size, publishers))


def consume(gate: StartingGate, *, data: str, events: int, per_event: bool = False) -> None:
    """The consuming process beside `publish`."""
    asyncio.run(_consume(gate, data, events, per_event=per_event))


def in_process(
    gate: StartingGate,
    *,
    events: int,
    size: int,
    batch: int,
    consumers: int = 1,
    how: str = "batch",
    stuck: bool = False,
    policy: str = "detach",
    cache_mb: int = 64,
) -> dict[str, Any]:
    """Durable publish and delivery to `consumers` subscriptions in one process; one more never returns if `stuck`.

    `how`: `batch` reads the payloads of every batch, `whole` only counts them, `event` has a handler per event.
    """
    with tempfile.TemporaryDirectory() as data:
        run = _in_process(
            gate,
            data,
            events,
            size,
            batch=batch,
            consumers=consumers,
            how=how,
            stuck=stuck,
            policy=SlowConsumer(policy),
            cache_mb=cache_mb,
        )
        return asyncio.run(run)


def drain(gate: StartingGate, *, events: int, size: int, batch: int, streams: int, suspend: bool = False) -> None:
    """Delivery of a backlog of one queue, spread over `streams`; `batch` events of a stream stand together."""
    with tempfile.TemporaryDirectory() as data:
        asyncio.run(_drain(gate, data, events, size, batch=batch, streams=streams, suspend=suspend))


def latency_in_process(gate: StartingGate, *, events: int, size: int, rate: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as data:
        return asyncio.run(_latency_in_process(gate, data, events, size, rate))._asdict()


def publish_paced(gate: StartingGate, *, data: str, events: int, size: int, rate: int) -> None:
    asyncio.run(_publish_paced(gate, data, events, size, rate))


def consume_stamped(gate: StartingGate, *, data: str, events: int) -> dict[str, float]:
    return asyncio.run(_consume_stamped(gate, data, events))._asdict()


class HasStreams(Protocol):
    """A provider, here or over gRPC."""

    def stream(self, namespace: str, key: str) -> Stream: ...


class Counter:
    """A handler that counts, and knows when all has come."""

    def __init__(self, expected: int) -> None:
        self.count = 0
        self.complete = asyncio.Event()
        self._expected = expected

    def handler(self, how: str) -> Callable[..., Awaitable[None]]:
        return {"batch": self.on_batch, "whole": self.on_whole_batch, "event": self.on_event}[how]

    async def on_batch(self, batch: EventBatch) -> None:
        self.count += len(batch.payloads())
        if self.count >= self._expected:
            self.complete.set()

    async def on_whole_batch(self, batch: EventBatch) -> None:
        """Counts without reading the payloads: delivery alone."""
        self.count += batch.count
        if self.count >= self._expected:
            self.complete.set()

    async def on_event(self, _: Event) -> None:
        self.count += 1
        if self.count >= self._expected:
            self.complete.set()

    async def suspending(self, batch: EventBatch) -> None:
        await asyncio.sleep(0)
        await self.on_batch(batch)

    async def whole(self) -> None:
        await self.complete.wait()
        if self.count != self._expected:
            raise RuntimeError(f"{self.count:,} events came, of {self._expected:,}")


class Stamps:
    """A handler that takes the age of every event."""

    def __init__(self, expected: int) -> None:
        self._samples_ms: list[float] = []
        self._counter = Counter(expected)

    async def on_batch(self, batch: EventBatch) -> None:
        now_ns = time.monotonic_ns()
        self._samples_ms += [(now_ns - STAMP.unpack_from(payload)[0]) / 1e6 for payload in batch.payloads()]
        await self._counter.on_batch(batch)

    async def latency(self) -> Latency:
        await self._counter.whole()
        return Latency.of(self._samples_ms[int(WARM_UP * len(self._samples_ms)) :])


async def _publish(
    gate: StartingGate, data: str, events: int, size: int, *, batch: int, streams: int, queues: int
) -> None:
    async with Provider.open(data, queues=queues) as provider:
        gate.wait()
        await publish_batches(provider, events, size, batch, streams)
        gate.done()


async def publish_batches(provider: HasStreams, events: int, size: int, batch: int, streams: int) -> None:
    handles = [provider.stream("bench", str(i)) for i in range(streams)]
    payloads = [os.urandom(size)] * batch
    publishes = (handles[i % streams].publish(payloads) for i in range(events // batch))
    await in_flight(publishes, IN_FLIGHT)


async def in_flight(publishes: Iterable[Awaitable[object]], limit: int) -> None:
    """Await them all, in order, `limit` at a time."""

    async def lane() -> None:
        for publish in publishes:
            await publish

    await asyncio.gather(*(lane() for _ in range(limit)))


async def _publish_singly(gate: StartingGate, data: str, events: int, size: int, publishers: int) -> None:
    payload = os.urandom(size)
    async with Provider.open(data) as provider:
        handles = [provider.stream("bench", str(i)) for i in range(publishers)]

        async def publisher(i: int) -> None:
            stream = handles[i]
            for _ in range(events // publishers):
                await stream.publish(payload)

        gate.wait()
        await asyncio.gather(*(publisher(i) for i in range(publishers)))
        gate.done()


async def _consume(gate: StartingGate, data: str, events: int, *, per_event: bool) -> None:
    async with Provider.open(data) as provider:
        counter = Counter(events)
        handler = counter.handler("event" if per_event else "batch")
        await provider.subscribe("bench", "bench/*", handler, batch=not per_event, start=Start.earliest())
        gate.wait()
        await counter.whole()
        gate.done()


async def _in_process(
    gate: StartingGate,
    data: str,
    events: int,
    size: int,
    *,
    batch: int,
    consumers: int,
    how: str,
    stuck: bool,
    policy: SlowConsumer,
    cache_mb: int,
) -> dict[str, Any]:
    async with Provider.open(data, queues=1, cache=CacheOptions(max_bytes=cache_mb << 20)) as provider:
        counters = [Counter(events) for _ in range(consumers)]
        for number, counter in enumerate(counters):
            handler = counter.handler(how)
            await provider.subscribe(f"bench-{number}", "bench/*", handler, batch=how != "event", slow_consumer=policy)
        release = asyncio.Event()
        if stuck:
            await provider.subscribe("stuck", "bench/*", never_returning(release), batch=True, slow_consumer=policy)
        gate.wait()
        await publish_batches(provider, events, size, batch, streams=1)
        for counter in counters:
            await counter.whole()
        gate.done()
        cached = max(queue.cache_bytes for queue in provider.statistics().queues)
        release.set()
        return {"cached_bytes": cached, "own_rss_bytes": _own_rss_bytes()}


def _own_rss_bytes() -> int:
    """Resident memory without the pages of mapped files: those of the log belong to the page cache."""
    status = Path("/proc/self/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(kib) * 1024


def never_returning(release: asyncio.Event) -> Callable[[EventBatch], Awaitable[None]]:
    async def stuck(_: EventBatch) -> None:
        await release.wait()

    return stuck


async def _drain(
    gate: StartingGate, data: str, events: int, size: int, *, batch: int, streams: int, suspend: bool
) -> None:
    async with Provider.open(data, queues=1) as provider:
        await fill(provider, events, size, batch, [StreamId("bench", str(i)) for i in range(streams)])
        counter = Counter(events)
        gate.wait()
        handler = counter.suspending if suspend else counter.on_batch
        await provider.subscribe("bench", "bench/*", handler, batch=True, start=Start.earliest())
        await counter.whole()
        gate.done()


async def fill(provider: Provider, events: int, size: int, batch: int, streams: Sequence[StreamId]) -> None:
    """A backlog whose batches go round the streams, as they come when many publishers commit together."""
    payload = os.urandom(size)
    step = max(1, 4000 // batch)
    for first in range(0, events // batch, step):
        chosen = [streams[i % len(streams)] for i in range(first, min(first + step, events // batch))]
        await provider.adapter.enqueue([(0, EventBatch.of(stream, [payload] * batch)) for stream in chosen])


async def _latency_in_process(gate: StartingGate, data: str, events: int, size: int, rate: int) -> Latency:
    async with Provider.open(data, queues=1) as provider:
        stamps = Stamps(events)
        await provider.subscribe("bench", "bench/*", stamps.on_batch, batch=True)
        gate.wait()
        await pace(provider, events, size, rate)
        found = await stamps.latency()
        gate.done()
        return found


async def _publish_paced(gate: StartingGate, data: str, events: int, size: int, rate: int) -> None:
    async with Provider.open(data) as provider:
        gate.wait()
        await pace(provider, events, size, rate)
        gate.done()


async def pace(provider: HasStreams, events: int, size: int, rate: int) -> None:
    """Publish at a steady rate, each event stamped just before; nothing waits for another's commit."""
    stream, filling = provider.stream("bench", "paced"), os.urandom(size - STAMP.size)
    began_ns, sent = time.monotonic_ns(), 0
    async with asyncio.TaskGroup() as group:
        while sent < events:
            await asyncio.sleep(max(0.0, began_ns / 1e9 + sent / rate - time.monotonic()))
            due = min(events, (time.monotonic_ns() - began_ns) * rate // 1_000_000_000 + 1)
            payloads = [STAMP.pack(time.monotonic_ns()) + filling for _ in range(sent, due)]
            group.create_task(_publish_all(stream.publish(payloads)))
            sent = due


async def _publish_all(publish: Awaitable[object]) -> None:
    await publish


async def _consume_stamped(gate: StartingGate, data: str, events: int) -> Latency:
    async with Provider.open(data) as provider:
        stamps = Stamps(events)
        await provider.subscribe("bench", "bench/*", stamps.on_batch, batch=True, start=Start.earliest())
        gate.wait()
        found = await stamps.latency()
        gate.done()
        return found
