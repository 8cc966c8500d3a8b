"""Apache Kafka, one broker: headrace's adapter in both formats, beside the clients confluent-kafka and aiokafka.

All runs share one broker, whose JVM is warm, and each has a topic of its own. The peers consume as a group of one.
Nothing is compressed: the payloads of a benchmark are all the same.
"""

from __future__ import annotations

import asyncio
import atexit
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

from headrace import EventBatch, StreamId

from ..kafka_servers import KafkaServer
from ..servers import Server
from .peer import Peer, PeerConsumer, Producer
from .provider import ProviderClient, Window

if TYPE_CHECKING:
    import confluent_kafka

STREAM = StreamId("events", "1")
WARM_UP = 300_000
"""Records that the broker takes before it is measured."""
LINGER_MS = 5
CONNECT_S = 30.0
MAX_BYTES = 4 << 20
"""Largest record: a batch of 1,000 events of 1 KiB."""
PACKED_RECORDS = 10
"""Records that a consumer of packed records takes at a time."""

Pack = Callable[[Sequence[bytes]], Sequence[bytes]]


class KafkaPeer(Peer):
    """A client of a real broker."""

    def __init__(self, name: str, client: str, *requires: str) -> None:
        self.name = name
        self.client = f"{__name__}:{client}"
        self.requires = requires

    def server(self) -> Server:
        return NewTopicOnBroker(shared_broker())


class NewTopicOnBroker(Server):
    """A new topic on a broker that runs. The address is HOST:PORT/TOPIC."""

    name = "kafka-topic"
    _numbers = count(1)

    def __init__(self, broker: KafkaServer, partitions: int = 1) -> None:
        super().__init__(broker.directory)
        self._broker = broker
        self._partitions = partitions
        self._topic = f"events-{next(self._numbers)}"

    @property
    def address(self) -> str:
        return f"{self._broker.address}/{self._topic}"

    @property
    def pid(self) -> int:
        return self._broker.pid

    def start(self) -> None:
        create_topic(self._broker.address, self._topic, self._partitions)

    def stop(self) -> None:
        """The broker goes on."""

    def command(self) -> Sequence[str]:
        return self._broker.command()

    def ping(self) -> bool:
        return self._broker.ping()


@cache
def shared_broker() -> KafkaServer:
    """A broker for all runs of this process, warm."""
    broker = KafkaServer()
    broker.start()
    atexit.register(broker.close)
    topic = "warm-up"
    create_topic(broker.address, topic, 1)
    _warm_up(broker.address, topic)
    return broker


def _warm_up(address: str, topic: str) -> None:
    from confluent_kafka import Producer as KafkaProducer  # noqa: PLC0415 (only in the process that uses it)

    producer = KafkaProducer({"bootstrap.servers": address, "linger.ms": LINGER_MS})
    for _ in range(WARM_UP // 1000):
        for _ in range(1000):
            producer.produce(topic, bytes(100))
        producer.flush(CONNECT_S)
    with confluent_group(address, topic, "warm-up") as consumer:
        taken = 0
        while taken < WARM_UP:
            taken += len(consumer.consume(1000, timeout=1.0))


def place_of(address: str) -> tuple[str, str]:
    """Return the broker's address and the topic."""
    broker, _, topic = address.partition("/")
    return broker, topic


def create_topic(address: str, topic: str, partitions: int) -> bool:
    """Create a topic. Return whether it is there."""
    from confluent_kafka import KafkaException, admin  # noqa: PLC0415 (only in the process that uses it)
    from confluent_kafka.cimpl import NewTopic  # noqa: PLC0415

    client: Any = admin.AdminClient({"bootstrap.servers": address, "log_level": 0})
    config = {"max.message.bytes": str(MAX_BYTES)}
    made = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=config)
    try:
        client.create_topics([made], operation_timeout=5, request_timeout=5)[topic].result()
    except KafkaException:
        return topic in client.list_topics(timeout=5).topics
    return True


def events_of(payloads: Sequence[bytes]) -> Sequence[bytes]:
    """A record is an event."""
    return payloads


def pack(payloads: Sequence[bytes]) -> Sequence[bytes]:
    """A record is a batch, as headrace packs it."""
    return [EventBatch.of(STREAM, payloads).encoded]


def unpack(records: Sequence[bytes]) -> Sequence[bytes]:
    return [payload for record in records for payload in EventBatch.decode(record).payloads()]


# ---- confluent-kafka -------------------------------------------------------------------------------------------------


class ConfluentClient:
    def __init__(self, to_records: Pack, to_events: Pack, *, packed: bool) -> None:
        self._to_records = to_records
        self._to_events = to_events
        self._packed = packed

    @asynccontextmanager
    async def producer(self, address: str, *, batch: int, paced: bool = False) -> AsyncGenerator[Producer]:
        from confluent_kafka import Producer as KafkaProducer  # noqa: PLC0415

        broker, topic = place_of(address)
        settings: dict[str, str | int | float | bool] = {
            "bootstrap.servers": broker,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 0 if paced else LINGER_MS,
            "message.max.bytes": MAX_BYTES,
            "delivery.report.only.error": True,
        }
        producer = KafkaProducer(settings)
        producer.list_topics(topic, timeout=CONNECT_S)
        yield _ConfluentProducer(producer, topic, self._to_records)

    @asynccontextmanager
    async def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AsyncGenerator[PeerConsumer]:
        records = 1 if paced else PACKED_RECORDS if self._packed else batch
        with confluent_group(*place_of(address), f"group-{number}") as consumer:
            yield _ConfluentConsumer(consumer, records, self._to_events)


@contextmanager
def confluent_group(address: str, topic: str, group: str) -> Generator[confluent_kafka.Consumer]:
    """A group of one consumer, which has its partitions."""
    from confluent_kafka import Consumer as KafkaConsumer  # noqa: PLC0415

    settings: dict[str, str | int | float | bool] = {
        "bootstrap.servers": address,
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "fetch.queue.backoff.ms": 10,  # the default, a second, stalls the reading
        "fetch.message.max.bytes": MAX_BYTES,
    }
    consumer = KafkaConsumer(settings)
    try:
        consumer.subscribe([topic])
        ends_at = time.monotonic() + CONNECT_S
        while not consumer.assignment() and time.monotonic() < ends_at:
            if message := consumer.poll(0.05):
                consumer.seek(_position(message))  # it is read again
        yield consumer
    finally:
        consumer.close()


def _position(message: confluent_kafka.Message) -> confluent_kafka.TopicPartition:
    from confluent_kafka import TopicPartition  # noqa: PLC0415

    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    return TopicPartition(topic, partition, offset)


class _ConfluentProducer:
    def __init__(self, producer: confluent_kafka.Producer, topic: str, to_records: Pack) -> None:
        self._producer = producer
        self._topic = topic
        self._to_records = to_records
        self._refused: object = None

    async def send(self, payloads: Sequence[bytes]) -> None:
        produce, refused = self._producer.produce, self._on_refused
        for record in self._to_records(payloads):
            while True:
                try:
                    produce(self._topic, record, on_delivery=refused)
                except BufferError:  # as much is on its way as the client allows itself
                    self._producer.poll(0.01)
                else:
                    break
        self._producer.poll(0)

    async def flush(self) -> None:
        if left := self._producer.flush(CONNECT_S):
            raise RuntimeError(f"{left:,} records were not acknowledged within {CONNECT_S:.0f} seconds")
        if self._refused:
            raise RuntimeError(f"the broker refused a record: {self._refused}")

    def _on_refused(self, error: object, _message: object) -> None:
        self._refused = error


class _ConfluentConsumer:
    def __init__(self, consumer: confluent_kafka.Consumer, records: int, to_events: Pack) -> None:
        self._consumer = consumer
        self._records = records
        self._to_events = to_events
        self._last: confluent_kafka.Message | None = None

    async def receive(self) -> Sequence[bytes]:
        messages = self._consumer.consume(self._records, timeout=1.0)
        if not messages:
            return ()
        self._last = messages[-1]
        self._consumer.commit(message=self._last, asynchronous=True)
        return self._to_events([value_of(message) for message in messages])

    async def finish(self) -> None:
        if self._last is not None:
            self._consumer.commit(message=self._last, asynchronous=False)


def value_of(message: confluent_kafka.Message) -> bytes:
    """Return the record's value. Raises RuntimeError for an error in its place."""
    if message.error():
        raise RuntimeError(f"reading failed: {message.error()}")
    payload = message.value()
    assert isinstance(payload, bytes)
    return payload


# ---- aiokafka --------------------------------------------------------------------------------------------------------


class AiokafkaClient:
    @asynccontextmanager
    async def producer(self, address: str, *, batch: int, paced: bool = False) -> AsyncGenerator[Producer]:
        client: Any = import_module("aiokafka")  # it has no types
        broker, topic = place_of(address)
        async with client.AIOKafkaProducer(
            bootstrap_servers=broker, acks="all", enable_idempotence=True, linger_ms=0 if paced else LINGER_MS
        ) as producer:
            yield _AiokafkaProducer(producer, topic)

    @asynccontextmanager
    async def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AsyncGenerator[PeerConsumer]:
        client: Any = import_module("aiokafka")
        broker, topic = place_of(address)
        async with client.AIOKafkaConsumer(
            topic, bootstrap_servers=broker, group_id=f"group-{number}", enable_auto_commit=False,
            auto_offset_reset="earliest", max_partition_fetch_bytes=MAX_BYTES,
        ) as consumer:  # fmt: skip
            while not consumer.assignment():  # noqa: ASYNC110 (it tells nobody)
                await asyncio.sleep(0.05)
            yield _AiokafkaConsumer(consumer, batch)


class _AiokafkaProducer:
    def __init__(self, producer: Any, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self._window = Window()

    async def send(self, payloads: Sequence[bytes]) -> None:
        answers = [await self._producer.send(self._topic, payload) for payload in payloads]
        await self._window.add(asyncio.gather(*answers))

    async def flush(self) -> None:
        await self._window.flush()


class _AiokafkaConsumer:
    def __init__(self, consumer: Any, batch: int) -> None:
        self._consumer = consumer
        self._batch = batch

    async def receive(self) -> Sequence[bytes]:
        records = await self._consumer.getmany(timeout_ms=1000, max_records=self._batch)
        if not records:
            return ()
        await self._consumer.commit()
        return [record.value for each in records.values() for record in each]

    async def finish(self) -> None:
        """Every batch was committed when `receive` returned."""


def _packed(address: str) -> Mapping[str, Any]:
    broker, topic = place_of(address)
    return {"bootstrap": broker, "topic": f"{topic}-packed", "compression": "none"}


def _raw(address: str) -> Mapping[str, Any]:
    broker, topic = place_of(address)
    return {
        "bootstrap": broker,
        "topic": topic,
        "format": "raw",
        "namespace": STREAM.namespace,
        "partitioner": "murmur2",
        "compression": "none",
    }


packed = ProviderClient("kafka", _packed)
raw = ProviderClient("kafka", _raw)
confluent = ConfluentClient(events_of, events_of, packed=False)
confluent_packed = ConfluentClient(pack, unpack, packed=True)
asyncio_client = AiokafkaClient()

PACKED = KafkaPeer("headrace, packed", "packed", "confluent_kafka")
RAW = KafkaPeer("headrace, raw topic", "raw", "confluent_kafka")
CONFLUENT = KafkaPeer("confluent-kafka, a record per event", "confluent", "confluent_kafka")
CONFLUENT_PACKED = KafkaPeer("confluent-kafka, the packed records", "confluent_packed", "confluent_kafka")
AIOKAFKA = KafkaPeer("aiokafka, a record per event", "asyncio_client", "aiokafka")
