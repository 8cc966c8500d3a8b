"""Calls of idempotent producers: the ledger alone, and over a broker."""

from __future__ import annotations

import asyncio
import time

import pytest
from confluent_kafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kafka_servers import KafkaServer
from headrace.adapters import ProducerSequence
from headrace.adapters.kafka import KafkaAdapter
from headrace.adapters.kafka.client import KafkaClients, KafkaRecord
from headrace.adapters.kafka.ledger import CALL, CallPart, QueueLedger, call_part, partition_tag, producer_state
from headrace.adapters.kafka.ledgers import ledger_topic
from headrace.adapters.kafka.limits import KAFKA_LIMITS
from headrace.adapters.kafka.options import KafkaOptions
from headrace.adapters.kafka.reading import read_range
from headrace.adapters.kafka.secrets import ClientSettings
from headrace.adapters.kafka.topics import KafkaTopics
from headrace.streams.errors import StorageError
from tests.adapters.kafka.opening import QUICK, ForeignProgram, batch, new_topic, opened, received


@pytest.fixture
def address(kafka_server: KafkaServer) -> str:
    return kafka_server.address


HERE = partition_tag("id", 0)


def part(number: int, index: int = 0, count: int = 1, producer: str = "p") -> CallPart:
    return CallPart(producer, number, number - 1, index, count)


def test_header_of_a_call_is_read_as_it_was_written() -> None:
    written = CallPart("ü" * 64, 1 << 62, 7, 3, 10_000)
    assert CallPart.decode(written.encode(HERE), HERE) == written
    assert call_part([("other", b"x"), (CALL, written.encode(HERE))], HERE) == written


@pytest.mark.parametrize(
    "header", [b"", b"\x01", b"\x03" + part(1).encode(HERE)[1:], part(1).encode(HERE)[:-1] + b"\xff"]
)
def test_header_of_another_version_belongs_to_no_call(header: bytes) -> None:
    assert call_part([(CALL, header)], HERE) is None


@pytest.mark.parametrize("partition", [("id", 1), ("other", 0)])
def test_header_that_was_written_for_another_partition_or_topic_belongs_to_no_call(partition: tuple[str, int]) -> None:
    assert call_part([(CALL, part(1).encode(HERE))], partition_tag(*partition)) is None


def test_call_that_is_stored_in_part_is_not_the_last_one() -> None:
    ledgers = [QueueLedger(), QueueLedger()]
    ledgers[0].observe(0, part(1), 0)
    ledgers[0].observe(1, part(2, 0, 3), 0)
    ledgers[1].observe(0, part(2, 2, 3), 0)
    state = producer_state([call for ledger in ledgers if (call := ledger.stored("p")) is not None])
    assert (state.last.number, state.begun, state.parts) == (1, 2, {0: 1, 2: 0})
    assert state.missing(ProducerSequence("p", 2, 1), 3) == [1]
    ledgers[1].observe(1, part(2, 1, 3), 0)
    state = producer_state([call for ledger in ledgers if (call := ledger.stored("p")) is not None])
    assert (state.last.number, state.last.offsets, state.begun) == (2, [1, 1, 0], 0)


@given(st.lists(st.tuples(st.sampled_from("pq"), st.integers(1, 4), st.integers(0, 1)), max_size=30), st.data())
def test_every_reader_leaves_out_the_same_records_wherever_it_begins(
    records: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """Also if it continues from a snapshot. Of each part of a call, the first record is delivered."""
    whole, delivered = QueueLedger(), list[bool]()
    snapshots = [whole.snapshot(0, 0)]
    for offset, (producer, number, index) in enumerate(records):
        delivered.append(whole.observe(offset, part(number, index, 2, producer), 1))
        snapshots.append(QueueLedger.copy_of(whole).snapshot(0, 0))
    found = [record for record, wanted in zip(records, delivered, strict=True) if wanted]
    assert len(found) == len(set(found))
    known = data.draw(st.integers(0, len(records)))
    other = QueueLedger()
    other.adopt(snapshots[known])
    start = data.draw(st.integers(0, known))
    parts = [part(number, index, 2, producer) for producer, number, index in records]
    again = [other.observe(offset, parts[offset], 1) for offset in range(start, len(records))]
    assert again == delivered[start:]


async def publish(adapter: KafkaAdapter, number: int, *places: tuple[int, str]) -> list[bool]:
    """Publish a call. Return whether each of its batches is a duplicate."""
    batches = [(queue, batch(text)) for queue, text in places]
    receipts = await adapter.enqueue(batches, sequence=ProducerSequence("p", number, number - 1))
    return [receipt.duplicate for receipt in receipts]


async def test_late_write_of_a_call_that_was_sent_again_is_not_delivered(address: str) -> None:
    """As of a publisher that was given up, and whose record was still on its way."""
    topic, foreign = new_topic(), ForeignProgram(address)
    async with opened(address, topic) as adapter:
        assert await publish(adapter, 1, (0, "first")) == [False]
        late = {CALL: part(1).encode(partition_tag(adapter.identity, 0))}
        await asyncio.to_thread(lambda: foreign.write(topic, [batch("first").encoded], headers=late))
        assert await publish(adapter, 2, (0, "second")) == [False]
        assert await received(await adapter.open_receiver(0, 0), 2) == ["first", "second"]
    async with opened(address, topic) as adapter:
        assert await received(await adapter.open_receiver(0, 1), 1) == ["second"]


async def test_call_that_was_stored_in_part_is_completed(address: str) -> None:
    topic, foreign = new_topic(), ForeignProgram(address)
    async with opened(address, topic, queues=2) as adapter:
        stored = {CALL: part(1, 0, 2).encode(partition_tag(adapter.identity, 0))}
        await asyncio.to_thread(lambda: foreign.write(topic, [batch("zero").encoded], headers=stored))
        assert await adapter.last_sequence("p") == 0
        assert await publish(adapter, 1, (0, "zero"), (1, "one")) == [True, False]
        assert await adapter.last_sequence("p") == 1
        assert [(await adapter.bounds(queue)).next for queue in range(2)] == [1, 1]


async def test_snapshot_knows_calls_whose_records_are_deleted(address: str) -> None:
    topic, foreign = new_topic(), ForeignProgram(address)
    limits = QUICK._replace(snapshot_records=3)
    async with opened(address, topic, limits=limits) as adapter:
        for number in range(1, 5):
            await publish(adapter, number, (0, str(number)))
        assert await received(await adapter.open_receiver(0, 0), 4) == ["1", "2", "3", "4"]
        await adapter.snapshots_stored()
    for deleted in foreign.admin.delete_records([TopicPartition(topic, 0, 4)]).values():
        await asyncio.to_thread(deleted.result, 30)
    async with opened(address, topic) as adapter:
        assert await publish(adapter, 4, (0, "4")) == [True]
        assert await publish(adapter, 5, (0, "5")) == [False]


async def test_snapshots_of_queues_that_are_read_fast_are_stored_in_turns(address: str) -> None:
    """Each turn makes a client. Before, many were made at once, with hundreds of threads."""
    topic = new_topic()
    async with opened(address, topic, limits=QUICK._replace(snapshot_records=1)) as adapter:
        receiver = await adapter.open_receiver(0, 0)
        for number in range(100):
            await adapter.enqueue([(0, batch(str(number)))])
            assert await received(receiver, 1) == [str(number)]
        await adapter.snapshots_stored()
    assert await _end_of_ledger(address, topic) < 50


async def _end_of_ledger(address: str, topic: str) -> int:
    clients = KafkaClients(KafkaOptions(bootstrap=address), ClientSettings({}))
    return (await KafkaTopics(clients, clients.admin(), KAFKA_LIMITS).bounds(ledger_topic(topic), [0]))[0].next


async def test_call_that_timed_out_is_stored_once_when_it_is_sent_again(kafka_server: KafkaServer) -> None:
    topic = new_topic()
    async with opened(kafka_server.address, topic, publish_timeout_s=1.0) as adapter:
        assert await publish(adapter, 1, (0, "1")) == [False]
        with kafka_server.frozen():
            with pytest.raises(StorageError, match="may or may not be stored"):
                await publish(adapter, 2, (0, "2"))
        # another process sends the call again, while the first one may still write
        async with opened(kafka_server.address, topic) as other:
            await publish(other, 2, (0, "2"))
            assert await publish(other, 3, (0, "3")) == [False]
            assert await received(await other.open_receiver(0, 0), 3) == ["1", "2", "3"]


async def test_full_ledger_forgets_the_producers_of_the_longest_time_ago(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    limits = QUICK._replace(snapshot_records=20, ledger_bytes=400)
    async with opened(address, topic, limits=limits) as adapter:
        for number in range(20):
            sequence = ProducerSequence(f"producer-{number:02}", 1, 0)
            await adapter.enqueue([(0, batch("x"))], sequence=sequence)
        assert len(await received(await adapter.open_receiver(0, 0), 20)) == 20
        await adapter.snapshots_stored()
        assert "its ledger of producers is full" in caplog.text
        assert "task" not in caplog.text
    async with opened(address, topic) as adapter:
        assert await adapter.last_sequence("producer-19") == 1
        assert await adapter.last_sequence("producer-00") == 0


async def test_call_without_batches_that_another_process_stored_later_is_not_deleted(address: str) -> None:
    topic = new_topic()
    limits = QUICK._replace(snapshot_records=3, producers_kept_s=3600.0)
    two_hours_ago = int((time.time() - 7200) * 1000)
    async with opened(address, topic) as other:
        await publish(other, 1)
        await other.enqueue([], sequence=ProducerSequence("gone", 1, 0))
        rows = {row.key() or b"": row.value() for row in await _ledger_rows(address, topic)}
        for key, value in rows.items():
            ForeignProgram(address).write(ledger_topic(topic), [value], key=key, time_ms=two_hours_ago)
        async with opened(address, topic, limits=limits) as adapter:
            receiver = await adapter.open_receiver(0, 0)
            await publish(other, 2)
            for _ in range(3):
                await adapter.enqueue([(0, batch("x"))])
            assert len(await received(receiver, 3)) == 3
            await adapter.snapshots_stored()
    deleted = [row.key() for row in await _ledger_rows(address, topic) if row.value() is None]
    assert deleted == [key for key in rows if key.endswith(b"gone")]
    assert len(rows) == 2


async def _ledger_rows(address: str, topic: str) -> list[KafkaRecord]:
    clients = KafkaClients(KafkaOptions(bootstrap=address), ClientSettings({}))
    end = await _end_of_ledger(address, topic)

    def read() -> list[KafkaRecord]:
        groups = read_range(clients, ledger_topic(topic), 0, 0, end, timeout_s=5.0)
        return [record for group in groups for record in group]

    return await asyncio.to_thread(read)


async def test_call_that_has_begun_is_stored_before_the_adapter_is_closed(address: str) -> None:
    async with opened(address, new_topic()) as adapter:
        call = asyncio.ensure_future(publish(adapter, 1, (0, "x")))
        await asyncio.sleep(0)  # it has begun to read the ledger
        await adapter.aclose()
        assert await call == [False]
