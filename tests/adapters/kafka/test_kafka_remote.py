"""Consumers and Spark's source over the network, at a silo whose queues are on Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kafka_servers import KafkaServer
from headrace import Client, EventBatch, Provider, Selector
from headrace.client.connection import GrpcTransport
from headrace.pipeline.remote import RemoteAccess
from tests.adapters.kafka.opening import ForeignProgram, batch, new_topic
from tests.client.silos import SiloProcess

QUEUES = 2


@asynccontextmanager
async def silo_on_kafka(
    folder: Path, address: str, topic: str, *, queues: int = QUEUES, **more: Any
) -> AsyncGenerator[str]:
    """Run a silo, and return its address. `more` are options of the adapter."""
    options = {"bootstrap": address, "topic": topic, **more}
    async with Provider.open(folder / "d", adapter="kafka", queues=queues, options=options):
        pass  # the control store knows now where the queues are
    silo = SiloProcess(folder)
    try:
        yield await asyncio.to_thread(silo.start)
    finally:
        await asyncio.to_thread(silo.stop)


async def test_consumer_gets_events_in_order_over_the_network(kafka_server: KafkaServer, tmp_path: Path) -> None:
    async with silo_on_kafka(tmp_path, kafka_server.address, new_topic()) as address, Client(address) as client:
        await client.stream("orders", "1").publish([str(number).encode() for number in range(20)])
        found: list[bytes] = []
        async with client.subscribe("s", "orders/*", start="earliest") as consumer:
            async for delivered in consumer:
                found += delivered.payloads()
                await delivered.ack()
                if len(found) == 20:
                    break
        assert found == [str(number).encode() for number in range(20)]


class TwoMembers:
    """Two consumers of a group. `found` has the queue and the key of each event, by consumer."""

    def __init__(self, client: Client, topic: str, mode: str) -> None:
        self.found: dict[str, list[tuple[int, str]]] = {"a": [], "b": []}
        self._client = client
        self._topic = topic
        self._mode = mode
        self._open = asyncio.Semaphore(0)

    async def publish(self, keys: Sequence[str]) -> None:
        """Publish an event for each key, and wait until the consumers have all of them."""
        for each in self.found.values():
            each.clear()
        for key in keys:
            await self._client.stream(self._topic, key).publish(b"x")
        wanted = len(keys) * (2 if self._mode == "broadcast" else 1)
        while sum(map(len, self.found.values())) < wanted:  # noqa: ASYNC110 (the consumers take their own time)
            await asyncio.sleep(0.05)

    def keys(self) -> list[list[str]]:
        return [sorted(key for _, key in each) for each in self.found.values()]

    async def _consume(self, name: str) -> None:
        async with self._client.subscribe(self._mode, f"{self._topic}/*", consumer=name, mode=self._mode) as consumer:
            self._open.release()
            async for delivered in consumer:
                self.found[name] += [(delivered.queue, delivered.stream.key)] * len(delivered)
                await delivered.ack()

    @asynccontextmanager
    async def consuming(self) -> AsyncGenerator[None]:
        members = [asyncio.create_task(self._consume(name)) for name in self.found]
        try:
            async with asyncio.timeout(60):
                for _ in members:
                    await self._open.acquire()
                yield
        finally:
            for member in members:
                member.cancel()
            await asyncio.wait(members)


@pytest.mark.long
@pytest.mark.parametrize("record_format", ["packed", "raw"])
async def test_each_mode_delivers_over_kafka(kafka_server: KafkaServer, tmp_path: Path, record_format: str) -> None:
    """Bound: each queue has one of the consumers. Broadcast: each consumer gets all events."""
    topic, keys = new_topic(), [f"k{number}" for number in range(12)]
    silo = silo_on_kafka(tmp_path, kafka_server.address, topic, format=record_format)
    async with silo as address, Client(address) as client:
        broadcast = TwoMembers(client, topic, "broadcast")
        async with broadcast.consuming():
            await broadcast.publish(keys)
        assert broadcast.keys() == [keys_sorted := sorted(keys), keys_sorted]
        bound = TwoMembers(client, topic, "bound")
        async with bound.consuming():
            await bound.publish(keys)  # meanwhile, the queues are dealt out
            assert sorted(chain.from_iterable(bound.keys())) == keys_sorted
            await bound.publish(keys)
            assert sorted(chain.from_iterable(bound.keys())) == keys_sorted
        assert [len({queue for queue, _ in each}) for each in bound.found.values()] == [1, 1]


async def test_range_of_a_queue_is_read_over_the_network_past_a_marker(
    kafka_server: KafkaServer, tmp_path: Path
) -> None:
    """As Spark's source reads it."""
    topic, foreign = new_topic(), ForeignProgram(kafka_server.address)
    async with silo_on_kafka(tmp_path, kafka_server.address, topic) as address:
        encoded = [batch(str(number)).encoded for number in range(10)]
        await asyncio.to_thread(lambda: foreign.write(topic, encoded, transaction=topic))

        def read() -> list[bytes]:
            with closing(RemoteAccess(GrpcTransport(address), "default", outage_s=30.0)) as access:
                while (end := access.states()[0].next) < 11:
                    pass
                assert access.end_within(0, 0, end, 3, None) == 3
                found: list[bytes] = []
                for chunk in access.read(0, 0, end, Selector("*/*")):
                    for start, stop in zip(chunk.starts.tolist(), chunk.ends.tolist(), strict=True):
                        found += EventBatch.decode(chunk.source[start:stop]).payloads()
                return found

        assert await asyncio.to_thread(read) == [str(number).encode() for number in range(10)]
