"""Consumers and Spark's source over the network, at a silo whose queues are on Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

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
