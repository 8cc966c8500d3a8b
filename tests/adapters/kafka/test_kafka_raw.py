"""Raw topics: an event is a record, which other programs write and read, too."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import confluent_kafka
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from sqlalchemy import create_engine

from benchmarks.kafka_servers import KafkaServer
from headrace import Client, Effects, Event, Provider, RetryPolicy, Start, Transaction
from headrace.adapters import Bounds, Gap, ProducerSequence
from headrace.adapters.kafka.ledger import CALL, CallPart, partition_tag
from headrace.adapters.kafka.partitioners import murmur2_partition
from headrace.effects.schema import migrate
from headrace.silo.why_gathering import explain_stream
from headrace.streams.errors import InvalidArgument, NotSupported, PayloadTooLarge
from headrace.streams.events import EventBatch
from headrace.streams.identity import StreamId
from tests.adapters.kafka.opening import ANY, ForeignProgram, new_topic, opened, received
from tests.adapters.kafka.test_kafka_remote import silo_on_kafka
from tests.silo.test_why_gathering import evidence

QUEUES = 4


@pytest.fixture
def address(kafka_server: KafkaServer) -> str:
    return kafka_server.address


@pytest.fixture
def topic(kafka_server: KafkaServer) -> str:
    """A topic that another program has made."""
    topic = new_topic()
    # Records may have any time, and Kafka deletes none of them because it is old.
    any_time = {"message.timestamp.after.max.ms": str((1 << 63) - 1), "retention.ms": "-1"}
    ForeignProgram(kafka_server.address).make_topic(topic, QUEUES, any_time)
    return topic


class Stored(NamedTuple):
    """A record, as a foreign consumer reads it."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes | None]


def produced(address: str, topic: str, records: Sequence[dict[str, Any]], *, partitioner: str = "") -> list[int]:
    """Produce records as another program does. Return their partitions."""
    settings = {"partitioner": partitioner} if partitioner else {}
    producer = cast(Any, Producer({"bootstrap.servers": address, "log_level": 0, **settings}))
    places: list[int] = []

    def stored(error: object, message: Any) -> None:
        assert error is None
        places.append(message.partition())

    for record in records:
        producer.produce(topic, on_delivery=stored, **record)
        producer.flush(30)
    return places


def produced_at_once(address: str, topic: str, records: Sequence[dict[str, Any]]) -> None:
    """Produce many records as another program does."""
    producer = cast(Any, Producer({"bootstrap.servers": address, "log_level": 0}))
    for record in records:
        producer.produce(topic, **record)
    assert not producer.flush(30)


def consumed(address: str, topic: str, count: int) -> list[Stored]:
    """Consume records as another program does."""
    consumer = cast(Any, Consumer({"bootstrap.servers": address, "group.id": "other", "log_level": 0}))
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(QUEUES)])
        found: list[Any] = []
        while len(found) < count:
            found += consumer.consume(count - len(found), 10)
        return [Stored(each.partition(), each.key(), each.value(), dict(each.headers() or ())) for each in found]
    finally:
        consumer.close()


def raw(address: str, topic: str, **options: Any) -> dict[str, Any]:
    """Keywords of `Provider.open`."""
    chosen = {"bootstrap": address, "topic": topic, "format": "raw", **options}
    return {"adapter": "kafka", "queues": QUEUES, "options": chosen}


class EventCollector:
    """A handler that keeps events, and refuses payloads that are told."""

    def __init__(self, *poison: bytes) -> None:
        self.found: list[Event] = []
        self.poison = set(poison)

    async def __call__(self, event: Event) -> None:
        if event.payload in self.poison:
            raise ValueError("poison")
        self.found.append(event)

    def payloads(self, key: str) -> list[bytes]:
        return [event.payload for event in self.found if event.stream is not None and event.stream.key == key]


# ---- records of other programs ---------------------------------------------------------------------------------------


async def test_each_kind_of_record_is_an_event_as_documented(address: str, topic: str) -> None:
    headers = [("a", b"text"), ("a", b"again"), ("none", None), ("binary", b"\xff"), ("", b"x")]
    records: list[dict[str, Any]] = [
        {"key": b"k", "value": b"plain", "timestamp": 1_700_000_000_123},
        {"key": b"k", "value": None},
        {"key": None, "value": b"no key"},
        {"key": b"\xff\x00", "value": b"binary key"},
        {"key": b"", "value": b""},
        {"key": b"x" * 2000, "value": b"long key"},
        {"key": b"k", "value": b"headers", "headers": headers},
        {"key": b"k", "value": b"microseconds", "timestamp": 1_700_000_000_000_000_000},
    ]
    await asyncio.to_thread(produced, address, topic, [{**record, "partition": 1} for record in records])
    async with opened(address, topic, queues=QUEUES, format="raw") as adapter:
        receiver = await adapter.open_receiver(1, 0)
        found: list[EventBatch] = []
        while len(found) < len(records):
            result = await receiver.receive(ANY, ANY)
            assert result.gap is None
            found += result.batches
    events = [batch.events()[0] for batch in found]
    assert [(batch.offset, batch.count) for batch in found] == [(offset, 1) for offset in range(len(records))]
    keys = ["k", "k", "kafka:null:1", "kafka:base64:_wA=", "", events[5].stream and events[5].stream.key, "k", "k"]
    assert [event.stream for event in events] == [StreamId(topic, str(key)) for key in keys]
    assert str(keys[5]).startswith("kafka:blake2b:1:")
    assert [event.payload for event in events] == [record["value"] or b"" for record in records]
    assert events[0].timestamp_us == 1_700_000_000_123_000
    assert events[7].timestamp_us == 0
    assert [dict(event.headers) for event in events[:2]] == [{}, {"kafka.value": "null"}]
    assert dict(events[6].headers) == {"a": "again", "none": "", "binary": "kafka:base64:_w==", "": "x"}


async def test_records_that_do_not_fit_are_gaps_and_the_others_are_delivered(address: str) -> None:
    large = new_topic()
    ForeignProgram(address).make_topic(large, QUEUES, {"max.message.bytes": "4000000"})
    many = [(f"h{number}", b"x") for number in range(129)]
    records = [
        {"key": b"k", "value": b"before"},
        {"key": b"k", "value": b"x" * ((1 << 20) + 1)},
        {"key": b"k", "value": b"x", "headers": many},
        {"key": b"k", "value": b"after"},
    ]

    def produce() -> None:
        settings: dict[str, Any] = {"message.max.bytes": 4_000_000, "enable.idempotence": True}  # keeps the order
        producer = cast(Any, Producer({"bootstrap.servers": address, **settings}))
        for record in records:
            producer.produce(large, partition=0, **record)
        assert not producer.flush(30)

    await asyncio.to_thread(produce)
    async with opened(address, large, queues=QUEUES, format="raw") as adapter:
        receiver = await adapter.open_receiver(0, 0)
        assert await received(receiver, 1) == ["before"]
        gaps = [(await receiver.receive(ANY, ANY)).gap for _ in range(2)]
        assert gaps == [
            Gap(1, 2, "the record's value has 1,048,577 bytes, and an event has at most 1,048,576"),
            Gap(2, 3, "the record is not an event: an event has at most 128 headers, not 129"),
        ]
        assert await received(receiver, 1) == ["after"]


def write_with_header_names(address: str, topic: str, names: Sequence[bytes]) -> None:
    """Write a record for each name of a header, by the functions of librdkafka: those of Python take text only."""
    (file,) = Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka*")
    kafka, error = ctypes.CDLL(str(file)), ctypes.create_string_buffer(500)
    kafka.rd_kafka_conf_new.restype = kafka.rd_kafka_new.restype = ctypes.c_void_p
    settings = ctypes.c_void_p(kafka.rd_kafka_conf_new())
    for name, value in ((b"bootstrap.servers", address.encode()), (b"enable.idempotence", b"true")):
        assert kafka.rd_kafka_conf_set(settings, name, value, error, ctypes.c_size_t(500)) == 0, error.value
    producer = ctypes.c_void_p(kafka.rd_kafka_new(0, settings, error, ctypes.c_size_t(500)))
    assert producer.value, error.value
    size, end, to_topic, partition, value, flags, header = ctypes.c_size_t, 0, 1, 3, 4, 7, 9
    for number, name in enumerate(names):
        text = str(number).encode()
        assert not kafka.rd_kafka_producev(
            producer, to_topic, topic.encode(), partition, ctypes.c_int32(0), value, text, size(len(text)), flags, 2,
            header, name, b"x", size(1), end,
        )  # fmt: skip
    assert kafka.rd_kafka_flush(producer, 30_000) == 0
    kafka.rd_kafka_destroy(producer)


async def test_header_names_that_are_not_text_are_gaps(address: str, topic: str) -> None:
    """Python runs a call that it has made often in another way, which does not notice the error of confluent-kafka."""
    names = [b"good"] * 100 + [b"\xff\xfe", b"also good"]
    await asyncio.to_thread(write_with_header_names, address, topic, names)
    async with opened(address, topic, queues=QUEUES, format="raw", partitioner="any") as adapter:
        assert await adapter.last_sequence("p") == 0
        receiver = await adapter.open_receiver(0, 0)
        assert await received(receiver, 100) == [str(number) for number in range(100)]
        gap = (await receiver.receive(ANY, ANY)).gap
        assert gap == Gap(100, 101, "the record is not an event: the name of a header is not text in UTF-8")
        assert await received(receiver, 1) == ["101"]


async def test_marker_of_a_transaction_at_the_end_is_passed(address: str, topic: str, tmp_path: Path) -> None:
    await asyncio.to_thread(ForeignProgram(address).write, topic, [b"one", b"two"], transaction=topic)
    async with asyncio.timeout(30), Provider.open(tmp_path, **raw(address, topic)) as provider:
        while await provider.adapter.bounds(0) != Bounds(0, 3):  # noqa: ASYNC110 (the broker writes the marker later)
            await asyncio.sleep(0.05)
        collector = EventCollector()
        subscription = await provider.subscribe("s", f"{topic}/*", collector, start=Start.earliest())
        await subscription.caught_up()
        assert collector.payloads("kafka:null:0") == [b"one", b"two"]
        assert await provider.gaps("s") == []


async def test_poison_of_each_key_is_a_dead_letter_that_can_be_redriven(
    address: str, topic: str, tmp_path: Path
) -> None:
    """Mistake 6 of others: it commits past the failed one, or loops."""
    values = [f"{number}" for number in range(20)]
    records = [{"key": f"k{key}".encode(), "value": f"{key}.{value}".encode()} for value in values for key in range(3)]
    await asyncio.to_thread(produced, address, topic, records)
    collector = EventCollector(*(f"{key}.7".encode() for key in range(3)))
    async with asyncio.timeout(60), Provider.open(tmp_path, **raw(address, topic)) as provider:
        retry = RetryPolicy(max_attempts=2, initial_delay_s=0.01)
        subscription = await provider.subscribe("s", f"{topic}/*", collector, start=Start.earliest(), retry=retry)
        await subscription.caught_up()
        for key in range(3):
            expected = [f"{key}.{value}".encode() for value in values if value != "7"]
            assert collector.payloads(f"k{key}") == expected
        letters = await provider.dead_letters("s")
        assert sorted(letter.payload for letter in letters) == [b"0.7", b"1.7", b"2.7"]
        assert {letter.attempts for letter in letters} == {2}
        collector.poison.clear()
        assert await subscription.redrive() == 3
        while await provider.dead_letters("s"):  # noqa: ASYNC110 (the redrive is done in the background)
            await asyncio.sleep(0.05)
        assert [collector.payloads(f"k{key}")[-1] for key in range(3)] == [f"{key}.7".encode() for key in range(3)]


@pytest.mark.long
async def test_consumers_over_the_network_read_a_raw_topic(address: str, topic: str, tmp_path: Path) -> None:
    await asyncio.to_thread(produced, address, topic, [{"key": b"k", "value": b"%d" % n} for n in range(20)])
    async with silo_on_kafka(tmp_path, address, topic, queues=QUEUES, format="raw") as silo, Client(silo) as client:
        await client.stream(topic, "k").publish(b"20")
        found: list[bytes] = []
        # One stream alone: it may be in any partition.
        async with client.subscribe("s", f"{topic}/k", start="earliest") as consumer:
            async for delivered in consumer:
                found += delivered.payloads()
                await delivered.ack()
                if len(found) == 21:
                    break
        assert sorted(map(int, found)) == list(range(21))


async def test_why_looks_into_each_partition_that_may_have_the_key(address: str, topic: str, tmp_path: Path) -> None:
    async with Provider.open(tmp_path, **raw(address, topic)) as provider:
        subscription = await provider.subscribe(
            "s", f"{topic}/*", EventCollector(b"poison"), retry=RetryPolicy(max_attempts=1)
        )
        stream = StreamId(topic, "k")
        other = next(queue for queue in range(QUEUES) if queue != provider.queue_of(stream))
        await provider.publish(stream, b"x")
        await asyncio.to_thread(produced, address, topic, [{"key": b"k", "value": b"poison", "partition": other}])
        await subscription.caught_up()
        assert "poison" in await evidence(provider, "dead_lettered", stream)


async def test_why_tells_a_key_without_events_from_one_whose_events_are_done(
    address: str, topic: str, tmp_path: Path
) -> None:
    await asyncio.to_thread(produced, address, topic, [{"key": b"k", "value": b"x", "partition": 1}] * 3)
    async with Provider.open(tmp_path, **raw(address, topic)) as provider:
        subscription = await provider.subscribe("s", f"{topic}/*", EventCollector(), start=Start.earliest())
        await subscription.caught_up()
        await evidence(provider, "nothing_pending", StreamId(topic, "k"))
        await evidence(provider, "no_such_stream", StreamId(topic, "mistyped"))


@pytest.mark.long
async def test_why_shows_the_dead_letter_of_an_event_before_the_marker_of_its_transaction(
    address: str, topic: str, tmp_path: Path
) -> None:
    async with Provider.open(tmp_path, **raw(address, topic)) as provider:
        subscription = await provider.subscribe(
            "s", f"{topic}/*", EventCollector(b"poison"), retry=RetryPolicy(max_attempts=1)
        )
        program = ForeignProgram(address)
        await asyncio.to_thread(program.write, topic, [b"poison"], key=b"k", transaction=topic)
        while not await provider.dead_letters("s"):  # noqa: ASYNC110 (real time, in another process)
            await asyncio.sleep(0.05)
        await subscription.caught_up()
        (found,) = await explain_stream(provider, StreamId(topic, "k"))
        # Kafka tells too late that nothing follows the marker: a later event may be there.
        assert [cause.code for cause in found.causes] == ["nothing_pending"]
        assert "poison" in found.causes[0].evidence


# ---- partitions of keys ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("partitioner", "client"), [("murmur2", "murmur2_random"), ("crc32", "consistent_random")])
async def test_each_key_is_in_one_partition_also_beside_another_producer(
    address: str, topic: str, tmp_path: Path, partitioner: str, client: str
) -> None:
    """Mistake 9 of others: keys that two clients hash differently."""
    keys = [f"key-{number}" for number in range(30)] + ["ключ"]
    records = [{"key": key.encode(), "value": b"foreign"} for key in keys]
    places = await asyncio.to_thread(produced, address, topic, records, partitioner=client)
    async with Provider.open(tmp_path, **raw(address, topic, partitioner=partitioner)) as provider:
        for key in keys:
            await provider.stream(topic, key).publish(b"ours")
        for key, place in zip(keys, places, strict=True):
            assert provider.queues_with(StreamId(topic, key)) == (place,)
        collector = EventCollector()
        subscription = await provider.subscribe("one", f"{topic}/key-3", collector, start=Start.earliest())
        await subscription.caught_up()
        assert collector.payloads("key-3") == [b"foreign", b"ours"]
    found = await asyncio.to_thread(consumed, address, topic, 2 * len(keys))
    assert {(record.key, record.partition) for record in found} == {
        (key.encode(), place) for key, place in zip(keys, places, strict=True)
    }


async def test_record_in_an_unexpected_partition_is_reported_and_delivered(
    address: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    records = [{"key": b"k", "value": b"x", "partition": partition} for partition in range(2)]
    await asyncio.to_thread(produced, address, topic, records)
    with caplog.at_level(logging.ERROR):
        async with opened(address, topic, queues=QUEUES, format="raw", partitioner="murmur2") as adapter:
            for partition in range(2):
                assert await received(await adapter.open_receiver(partition, 0), 1) == ["x"]
    assert "create the provider anew with the partitioner of its producers, or with partitioner = 'any'" in caplog.text


async def test_another_partitioner_or_format_is_refused(address: str, topic: str, tmp_path: Path) -> None:
    async with Provider.open(tmp_path, **raw(address, topic, partitioner="murmur2")):
        pass
    for options in ({"partitioner": "crc32"}, {"format": "packed"}, {"namespace": "other"}):
        with pytest.raises(InvalidArgument, match="or create another provider"):
            async with Provider.open(tmp_path, options=options):
                pass
    async with Provider.open(tmp_path) as provider:  # the control store knows the rest
        assert provider.queues_with(StreamId(topic, "k")) == (provider.queue_of(StreamId(topic, "k")),)


async def test_token_is_no_start_if_producers_may_use_any_partition(address: str, topic: str, tmp_path: Path) -> None:
    async with Provider.open(tmp_path, **raw(address, topic)) as provider:
        token = await provider.stream(topic, "k").publish(b"x")
        with pytest.raises(InvalidArgument, match="any queue of provider 'default' may have events"):
            await provider.subscribe("s", f"{topic}/k", EventCollector(), start=Start.at(token))


async def test_effects_are_refused_if_producers_may_use_any_partition(address: str, topic: str, tmp_path: Path) -> None:
    """Their position is one for each stream."""

    async def handle(event: Event, tx: Transaction) -> None:
        raise AssertionError((event, tx))

    engine = create_engine(f"sqlite:///{tmp_path / 'effects.db'}")
    async with Provider.open(tmp_path, **raw(address, topic)) as provider:
        with pytest.raises(NotSupported, match=r"effects need one queue for each stream.*option `partitioner`"):
            await provider.subscribe("s", f"{topic}/*", handle, effects=Effects(engine))


@pytest.mark.long
@pytest.mark.parametrize("foreign_first", [False, True])
async def test_effects_give_up_on_records_in_another_partition_than_the_partitioner_says(
    address: str, topic: str, tmp_path: Path, *, foreign_first: bool
) -> None:
    """Offsets of two partitions have no order, so the position of a stream would skip events of one of them."""
    applied: list[bytes] = []

    async def apply(event: Event, tx: Transaction) -> None:
        applied.append(event.payload)

    engine = create_engine(f"sqlite:///{tmp_path / 'effects.db'}")
    with engine.begin() as connection:
        migrate(connection)
    async with Provider.open(tmp_path / "data", **raw(address, topic, partitioner="murmur2")) as provider:
        effects, stream = Effects(engine), provider.stream(topic, "k")
        subscription = await provider.subscribe("s", f"{topic}/*", apply, start=Start.earliest(), effects=effects)
        home = murmur2_partition(b"k", QUEUES)
        foreign = [{"key": b"k", "value": b"foreign", "partition": (home + 1) % QUEUES}] * 3
        for is_foreign in (foreign_first, not foreign_first):
            if is_foreign:
                produced(address, topic, foreign)
            else:
                for _ in range(2):
                    await stream.publish(b"own")
            await subscription.caught_up()
        letters = await provider.dead_letters("s")
        assert (applied, [letter.attempts for letter in letters]) == ([b"own"] * 2, [1] * 3)
        expected = rf"stream {topic}/k is in queue {(home + 1) % QUEUES}.*`partitioner`.*expects it in queue {home}"
        assert all(re.search(expected, letter.reason) for letter in letters)
    engine.dispose()


# ---- publishing ------------------------------------------------------------------------------------------------------


async def test_published_events_are_plain_records_for_other_consumers(address: str, topic: str) -> None:
    stream = StreamId(topic, "k")
    events = [
        Event(b"{}", headers={"type": "paid"}, id="e1", timestamp_us=5),
        Event(b"", headers={"kafka.value": "null"}),
        Event(b""),
    ]
    async with opened(address, topic, queues=QUEUES, format="raw") as adapter:
        await adapter.enqueue([(2, EventBatch.of(stream, events, now_us=7))])
        await adapter.enqueue([(3, EventBatch.of(StreamId(topic, "kafka:null:3"), [b"no key"], now_us=7))])
    records = await asyncio.to_thread(consumed, address, topic, 4)
    assert [(each.partition, each.key, each.value) for each in records if each.partition == 3] == [(3, None, b"no key")]
    of_stream = [each for each in records if each.partition == 2]
    assert {each.key for each in of_stream} == {b"k"}
    assert [each.headers for each in of_stream if each.value == b"{}"] == [
        {"type": b"paid", "headrace.id": b"e1", "headrace.time": b"5"}
    ]
    assert sorted(repr(each.value) for each in of_stream) == ["None", "b''", "b'{}'"]


async def test_streams_that_cannot_be_records_are_refused(address: str, topic: str) -> None:
    async with opened(address, topic, queues=QUEUES, format="raw") as adapter:

        def refused(stream: StreamId, event: Event, message: str) -> None:
            with pytest.raises(InvalidArgument, match=message):
                adapter.enqueue([(0, EventBatch.of(stream, [event]))])

        refused(StreamId("other", "k"), Event(b"x"), "the records of this topic are the streams of the namespace")
        refused(StreamId(topic, "kafka:k"), Event(b"x"), "the name of no record's key")
        refused(StreamId(topic, f"kafka:blake2b:0:{'0' * 32}"), Event(b"x"), "headrace only reads it")
        refused(StreamId(topic, "k"), Event(b"x", headers={"headrace.x": ""}), "belong to headrace")
        with pytest.raises(PayloadTooLarge):
            adapter.enqueue([(0, EventBatch.of(StreamId(topic, "k"), [b"x" * (1 << 20)]))])
        assert await adapter.bounds(0) == Bounds(0, 0)


async def test_delayed_events_become_records_when_they_are_due(address: str, topic: str, tmp_path: Path) -> None:
    async with asyncio.timeout(30), Provider.open(tmp_path, delays="store", **raw(address, topic)) as provider:
        collector = EventCollector()
        await provider.subscribe("s", f"{topic}/*", collector)
        stream = provider.stream(topic, "k")
        await stream.publish(b"later", delay=timedelta(milliseconds=300))
        await stream.publish(b"now")
        while len(collector.found) < 2:  # noqa: ASYNC110 (the handler is called in its own time)
            await asyncio.sleep(0.02)
        assert collector.payloads("k") == [b"now", b"later"]


async def test_repeated_call_is_stored_once_also_in_another_process(address: str, topic: str) -> None:
    """Records of other programs, before and in between, do not matter."""
    await asyncio.to_thread(produced, address, topic, [{"key": b"k", "value": b"old", "partition": 0}] * 3)
    batch = EventBatch.of(StreamId(topic, "k"), [b"a", b"b"])

    async def publish(number: int) -> list[tuple[bool, int]]:
        async with opened(address, topic, queues=QUEUES, format="raw") as adapter:
            receipts = await adapter.enqueue([(0, batch)], sequence=ProducerSequence("p", number, number - 1))
            return [(each.duplicate, each.token.offset) for each in receipts if each.token is not None]

    assert await publish(1) == [(False, 3)]
    await asyncio.to_thread(produced, address, topic, [{"key": b"k", "value": b"between", "partition": 0}])
    assert await publish(1) == [(True, 3)]
    assert await publish(2) == [(False, 6)]
    async with opened(address, topic, queues=QUEUES, format="raw") as adapter:
        late = {"headers": [(CALL, CallPart("p", 2, 1, 1, 2).encode(partition_tag(adapter.identity, 0)))]}
        record = {"key": b"k", "value": b"b", "partition": 0, **late}
        await asyncio.to_thread(produced, address, topic, [record, {"key": b"k", "value": b"end", "partition": 0}])
        found = await received(await adapter.open_receiver(0, 0), 9)
    assert found == ["old"] * 3 + ["a", "b", "between", "a", "b", "end"]  # without the late duplicate


async def test_record_that_is_copied_with_its_headers_is_an_event_of_its_own(address: str, topic: str) -> None:
    """As a program does that retries: it copies a record into another partition, or into a topic of retries. Calls of
    the provider there go on, whatever numbers the copies have."""
    batch = EventBatch.of(StreamId(topic, "k"), [b"a"])
    async with opened(address, topic, queues=QUEUES, format="raw") as adapter:
        for number in (1, 2):
            await adapter.enqueue([(0, batch)], sequence=ProducerSequence("p", number, number - 1))
    stored = await asyncio.to_thread(consumed, address, topic, 2)
    copies = [{"key": each.key, "value": each.value, "headers": list(each.headers.items())} for each in stored]
    retries = new_topic()
    ForeignProgram(address).make_topic(retries, 2)
    for place, queues in ((topic, QUEUES), (retries, 2)):
        await asyncio.to_thread(produced, address, place, [{**copy, "partition": 1} for copy in (*copies, *copies)])
        async with opened(address, place, queues=queues, format="raw") as adapter:
            assert await adapter.last_sequence("p") == (2 if place == topic else 0)
            assert await received(await adapter.open_receiver(1, 0), 4) == ["a"] * 4


@pytest.mark.long
async def test_checkpoint_has_only_the_keys_that_are_stuck_however_many_events_pass(
    address: str, topic: str, tmp_path: Path
) -> None:
    """Mistake 7 of others: progress grows with each event beside a stuck key, until it does not fit."""
    keys, rounds, stuck = 100, 10, {"k7", "k70"}
    records = [{"key": f"k{key}".encode(), "value": b"%d" % turn} for turn in range(rounds) for key in range(keys)]
    await asyncio.to_thread(produced_at_once, address, topic, records)
    released, done = asyncio.Event(), list[bytes]()

    async def handle(event: Event) -> None:
        if event.stream is not None and event.stream.key in stuck:
            await released.wait()
        done.append(event.payload)

    async with asyncio.timeout(60), Provider.open(tmp_path, **raw(address, topic)) as provider:
        subscription = await provider.subscribe("s", f"{topic}/*", handle, start=Start.earliest())
        free = rounds * (keys - len(stuck))
        ends = {queue: (await provider.adapter.bounds(queue)).next for queue in range(QUEUES)}
        while True:
            checkpoints = await provider.store.checkpoints(provider.name, "s")
            reached = {queue: checkpoint.next_offset for queue, checkpoint in checkpoints.items()}
            behind = [stream.key for checkpoint in checkpoints.values() for stream in checkpoint.behind]
            if len(done) == free and reached == ends and len(behind) == len(stuck):
                break
            await asyncio.sleep(0.05)
        assert set(behind) == stuck
        released.set()
        await subscription.caught_up()
    assert len(done) == rounds * keys
