"""Queues on Kafka whose partitions lose their beginning, have holes, or are replaced, and clients that are refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from benchmarks.kafka_servers import KafkaCluster, KafkaServer, java_command
from benchmarks.servers import free_port
from headrace.adapters import Bounds, Gap, ProducerSequence
from headrace.streams.errors import InvalidArgument, NotFound, PayloadTooLarge, QueueFull, StorageError
from headrace.streams.events import Event, EventBatch
from headrace.streams.identity import StreamId
from tests.adapters.kafka.opening import ANY, QUICK, ForeignProgram, batch, new_topic, opened, received, texts


@pytest.fixture
def foreign(kafka_server: KafkaServer) -> ForeignProgram:
    return ForeignProgram(kafka_server.address)


@pytest.fixture
def address(kafka_server: KafkaServer) -> str:
    return kafka_server.address


# ---- offsets ---------------------------------------------------------------------------------------------------------


async def test_retention_that_passes_a_reader_is_one_gap_with_its_range(address: str, foreign: ForeignProgram) -> None:
    topic = new_topic()
    async with opened(address, topic, limits=QUICK._replace(waiting_bytes=0)) as adapter:
        for number in range(10):
            await adapter.enqueue([(0, batch(str(number) * 1000))])
        receiver = await adapter.open_receiver(0, 0)
        assert texts((await receiver.receive(1, 1)).batches) == ["0" * 1000]
        await receiver.aclose()
        for deleted in foreign.admin.delete_records([TopicPartition(topic, 0, 7)]).values():
            await asyncio.to_thread(deleted.result, 30)
        receiver = await adapter.open_receiver(0, 1)
        assert await receiver.receive(ANY, ANY) == ((), 7, Gap(1, 7, "removed by retention"))
        assert await received(receiver, 3) == [str(number) * 1000 for number in (7, 8, 9)]
        assert await adapter.bounds(0) == Bounds(7, 10)


async def test_retention_below_an_open_reader_is_one_gap(address: str, foreign: ForeignProgram) -> None:
    """The reader has fetched nothing yet when the records are deleted."""
    topic = new_topic()
    async with opened(address, topic) as adapter:
        for number in range(10):
            await adapter.enqueue([(0, batch(str(number)))])
        receiver = await adapter.open_receiver(0, 2)
        for deleted in foreign.admin.delete_records([TopicPartition(topic, 0, 7)]).values():
            await asyncio.to_thread(deleted.result, 30)
        result = await receiver.receive(ANY, ANY)
        assert (result.next_offset, result.gap) == (7, Gap(2, 7, "removed by retention"))
        assert await received(receiver, 3) == ["7", "8", "9"]


async def test_marker_of_a_transaction_at_the_end_is_passed_without_a_gap(
    address: str, foreign: ForeignProgram
) -> None:
    topic = new_topic()
    async with opened(address, topic) as adapter:
        await adapter.enqueue([(0, batch("before"))])
        encoded = [batch(text).encoded for text in ("one", "two")]
        await asyncio.to_thread(foreign.write, topic, encoded, transaction=topic)
        async with asyncio.timeout(30):
            while await adapter.bounds(0) != Bounds(0, 4):  # noqa: ASYNC110 (the broker writes the marker later)
                await asyncio.sleep(0.05)
        receiver = await adapter.open_receiver(0, 0)
        assert await received(receiver, 3) == ["before", "one", "two"]
        at_marker = await adapter.open_receiver(0, 3)
        assert await at_marker.receive(ANY, ANY) == ((), 4, None)
        assert (await adapter.backlog(0, 3)).batches == 0
        assert await adapter.end_within(0, 0, 4, 100, None) == 4
        await adapter.enqueue([(0, batch("after"))])
        assert await received(receiver, 1) == ["after"]
        assert await received(at_marker, 1) == ["after"]


async def test_record_that_is_no_batch_is_a_gap(
    address: str, foreign: ForeignProgram, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    async with opened(address, topic) as adapter:
        await asyncio.to_thread(foreign.write, topic, [b"\xff no batch", None, batch("good").encoded])
        receiver = await adapter.open_receiver(0)
        for low in (0, 1):
            gap = (await receiver.receive(ANY, ANY)).gap
            assert gap is not None
            assert (gap.low, gap.high) == (low, low + 1)
        assert await received(receiver, 1) == ["good"]
    (line,) = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert "queue 0, offset 0: " in line
    assert line.endswith("; it is skipped, and 1 more record up to offset 1, too")


async def test_finished_batches_above_their_age_are_deleted_and_others_stay(address: str) -> None:
    async with opened(address, new_topic(), retain_age_s=0.001) as adapter:
        for number in range(5):
            await adapter.enqueue([(0, batch(str(number)))])
        await asyncio.sleep(0.05)
        await adapter.apply_retention({0: 3})
        assert await adapter.bounds(0) == Bounds(3, 5)
    async with opened(address, new_topic()) as adapter:
        await adapter.enqueue([(0, batch("x"))])
        await adapter.apply_retention({0: 1})
        assert await adapter.bounds(0) == Bounds(0, 1)


async def test_time_of_a_record_is_that_of_storing_not_that_of_its_event(address: str, foreign: ForeignProgram) -> None:
    """Else Kafka's retention by age would delete old events at once."""
    topic = new_topic()
    async with opened(address, topic, retain_unfinished=False, retain_age_s=86400) as adapter:
        old = EventBatch.of(StreamId("flights", "1"), [Event(b"x" * 100_000, timestamp_us=1_356_998_400_000_000)])
        for _ in range(30):  # more than a segment
            await adapter.enqueue([(0, old)])
        since_us = (await adapter.backlog(0, 0)).since_us
        assert since_us is not None
        assert abs(time.time() - since_us / 1e6) < 60
        assert await adapter.bounds(0) == Bounds(0, 30)


# ---- the topic -------------------------------------------------------------------------------------------------------


async def test_topic_that_was_created_again_is_a_fault_and_delivers_nothing(
    address: str, foreign: ForeignProgram
) -> None:
    topic = new_topic()
    async with opened(address, topic, limits=QUICK._replace(watch_s=60.0)) as adapter:
        await adapter.enqueue([(0, batch("old"))])
        receiver = await adapter.open_receiver(0, 0)
        assert await received(receiver, 1) == ["old"]
        await asyncio.to_thread(foreign.delete_topic, topic)
        await asyncio.to_thread(foreign.make_topic, topic)
        await asyncio.to_thread(foreign.write, topic, [batch(str(number)).encoded for number in range(20)])
        with pytest.raises(StorageError, match="deleted and created again"):
            async with asyncio.timeout(20):
                await receiver.receive(ANY, ANY)
        with pytest.raises(StorageError, match="created again"):
            await adapter.enqueue([(0, batch("new"))])
        location = adapter.location
    with pytest.raises(InvalidArgument, match="created again"):
        async with opened(address, topic, location=location):
            pass


@pytest.mark.parametrize("watch_s", [0.2, 60.0])
async def test_publish_that_waits_while_its_topic_is_created_again_is_not_confirmed(
    address: str, foreign: ForeignProgram, watch_s: float
) -> None:
    """The client sends the records that wait to the new topic."""
    topic = new_topic()
    async with opened(address, topic, queues=2, limits=QUICK._replace(watch_s=watch_s)) as adapter:
        await adapter.enqueue([(0, batch("old"))])
        await asyncio.to_thread(foreign.delete_topic, topic)
        calls = [asyncio.ensure_future(adapter.enqueue([(queue, batch("waits"))])) for queue in range(2)]
        await asyncio.sleep(1.0)
        await asyncio.to_thread(foreign.make_topic, topic, 2)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, StorageError)
            assert "was deleted" in str(outcome)


@pytest.mark.parametrize("stored", [0, 3])
async def test_publish_after_the_topic_was_created_again_is_not_confirmed(
    address: str, foreign: ForeignProgram, stored: int
) -> None:
    """Also before the watch has noticed it. The offsets of the new topic begin at 0 again."""
    topic = new_topic()
    async with opened(address, topic, limits=QUICK._replace(watch_s=60.0, doubt_s=60.0)) as adapter:
        for number in range(stored):
            await adapter.enqueue([(0, batch(str(number)))])
        await asyncio.to_thread(foreign.delete_topic, topic)
        await asyncio.to_thread(foreign.make_topic, topic)
        with pytest.raises(StorageError, match=r"not known whether events are stored: .* created again"):
            await adapter.enqueue([(0, batch("new"))])


@pytest.mark.parametrize("end", [0, 3])
async def test_ends_of_a_topic_that_was_created_again_are_not_those_of_its_queues(
    address: str, foreign: ForeignProgram, end: int
) -> None:
    """Else `caught_up` would return, and readers would step back."""
    topic = new_topic()
    async with opened(address, topic, limits=QUICK._replace(watch_s=60.0)) as adapter:
        for number in range(3):
            await adapter.enqueue([(0, batch(str(number)))])
        assert await adapter.due_end(0) == 3
        await asyncio.to_thread(foreign.delete_topic, topic)
        await asyncio.to_thread(foreign.make_topic, topic)
        with pytest.raises(StorageError, match="created again"):
            await (adapter.due_end(0) if end else adapter.resume_at(0, 3))
        with pytest.raises(StorageError, match="created again"):
            await adapter.bounds(0)


async def test_deleted_topic_is_a_fault(address: str, foreign: ForeignProgram) -> None:
    topic = new_topic()
    async with opened(address, topic) as adapter:
        receiver = await adapter.open_receiver(0)
        waiting = asyncio.create_task(receiver.receive(ANY, ANY))
        await asyncio.to_thread(foreign.delete_topic, topic)
        with pytest.raises(StorageError, match="was deleted"):
            async with asyncio.timeout(20):
                await waiting


async def test_packed_topic_with_more_partitions_is_read_and_written_further(
    address: str, foreign: ForeignProgram, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()

    async def warned() -> None:
        async with asyncio.timeout(20):
            while "partitions from 2 on are not read" not in caplog.text:  # noqa: ASYNC110 (the watch logs it)
                await asyncio.sleep(0.05)

    async with opened(address, topic, queues=2) as adapter:
        receiver = await adapter.open_receiver(1)
        await asyncio.to_thread(foreign.add_partitions, topic, 4)
        await warned()
        await adapter.enqueue([(1, batch("after"))])
        assert await received(receiver, 1) == ["after"]
        location = adapter.location
        assert caplog.text.count("are not read") == 1
    caplog.clear()
    async with opened(address, topic, queues=2, location=location) as adapter:
        await warned()
        await adapter.enqueue([(1, batch("again"))])
        assert await received(await adapter.open_receiver(1, 0), 2) == ["after", "again"]


async def test_raw_topic_with_more_partitions_is_a_fault_whose_remedy_works(
    address: str, foreign: ForeignProgram
) -> None:
    """Other programs have moved keys to the new partitions."""
    topic = new_topic()
    await asyncio.to_thread(foreign.make_topic, topic, 1)
    remedy = "create a provider of another name with queues = 3 and this topic"
    async with opened(address, topic, format="raw") as adapter:
        await asyncio.to_thread(foreign.write, topic, [b"before"])
        receiver = await adapter.open_receiver(0, 0)
        await asyncio.to_thread(foreign.add_partitions, topic, 3)
        with pytest.raises(StorageError, match=remedy):
            await asyncio.wait_for(received(receiver, 2), 20)
        with pytest.raises(StorageError, match=remedy):
            await adapter.enqueue([(0, EventBatch.of(StreamId(topic, "k"), [b"x"]))])
        location = adapter.location
    with pytest.raises(InvalidArgument, match=remedy):
        async with opened(address, topic, location=location):
            pass
    async with opened(address, topic, queues=3, format="raw", provider="another") as adapter:
        await adapter.enqueue([(2, EventBatch.of(StreamId(topic, "k"), [b"x"]))])
        assert await received(await adapter.open_receiver(0, 0), 1) == ["before"]
        assert await received(await adapter.open_receiver(2, 0), 1) == ["x"]


@pytest.mark.parametrize(
    ("settings", "partitions", "message"),
    [
        ({"cleanup.policy": "compact"}, 1, "is compacted.*--add-config cleanup.policy=delete"),
        ({"unclean.leader.election.enable": "true"}, 1, "--add-config unclean.leader.election.enable=false"),
        ({"max.message.bytes": "1000000"}, 1, "--add-config max.message.bytes=8388608"),
        ({}, 1, "retention.ms=-1, or set retain_unfinished = false"),
        ({"retention.ms": "-1", "max.message.bytes": "8388608"}, 3, "3 partitions, and the provider has 1 queues"),
    ],
)
async def test_topics_that_would_lose_events_are_refused_with_the_command_that_mends_them(
    address: str, foreign: ForeignProgram, settings: dict[str, str], partitions: int, message: str
) -> None:
    topic = new_topic()
    chosen = {"max.message.bytes": "8388608"} | settings
    await asyncio.to_thread(foreign.make_topic, topic, partitions, chosen)
    with pytest.raises(InvalidArgument, match=message):
        async with opened(address, topic):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"replication": 1}, {"format": "raw"}])
async def test_missing_topic_is_refused_with_a_command_that_makes_one(address: str, options: dict[str, Any]) -> None:
    topic = new_topic()
    with pytest.raises(NotFound, match=r"create it with kafka-topics\.sh ") as refused:
        async with opened(address, topic, create=False, **options):
            pass
    arguments = str(refused.value).partition("kafka-topics.sh ")[2].split()

    def run() -> None:
        command = java_command("org.apache.kafka.tools.TopicCommand", *arguments)
        subprocess.run(command, capture_output=True, check=True)

    await asyncio.to_thread(run)
    async with opened(address, topic, create=False, **options):
        pass


async def test_missing_topic_is_not_created_unless_it_may_be(address: str) -> None:
    with pytest.raises(NotFound, match=r"kafka-topics\.sh --bootstrap-server .* --config max\.message\.bytes=8388608"):
        async with opened(address, new_topic(), create=False):
            pass


async def test_topic_of_a_known_provider_that_was_deleted_is_not_to_be_made_again(
    address: str, foreign: ForeignProgram
) -> None:
    """A new topic of this name would be refused, because it has another id."""
    topic = new_topic()
    async with opened(address, topic) as adapter:
        location = adapter.location
    await asyncio.to_thread(foreign.delete_topic, topic)
    with pytest.raises(NotFound, match="create a provider of another name") as refused:
        async with opened(address, topic, location=location):
            pass
    assert "kafka-topics.sh" not in str(refused.value)


async def test_age_by_which_kafka_deletes_is_that_of_the_topic(address: str) -> None:
    topic = new_topic()
    async with opened(address, topic, retain_unfinished=False, retain_age_s=60) as adapter:
        location = adapter.location
    async with opened(address, topic, location=location):
        pass
    async with opened(address, topic, location=location, retain_age_s=60):
        pass
    with pytest.raises(InvalidArgument, match=r"retention\.ms = 60000, and retain_age_s = 90 asks for 90000"):
        async with opened(address, topic, location=location, retain_age_s=90):
            pass


@pytest.fixture
def three_brokers() -> Iterator[KafkaCluster]:
    """With Kafka's default of `min.insync.replicas`."""
    with KafkaCluster(settings={"min.insync.replicas": 1}) as cluster:
        yield cluster


@pytest.mark.slow  # starts three brokers
async def test_topic_with_the_replicas_of_the_cluster_is_accepted_by_the_adapter_that_made_it(
    three_brokers: KafkaCluster,
) -> None:
    topic = new_topic()
    async with opened(three_brokers.address, topic, limits=QUICK._replace(request_s=20.0)) as adapter:
        await adapter.enqueue([(0, batch("x"))])
    foreign = ForeignProgram(three_brokers.address)
    for each in (topic, f"{topic}.producers"):
        assert await asyncio.to_thread(foreign.setting, each, "min.insync.replicas") == "2"


async def test_another_topic_than_the_stored_one_is_refused(address: str) -> None:
    async with opened(address, new_topic()) as adapter:
        location = adapter.location
    with pytest.raises(InvalidArgument, match="open it with topic ="):
        async with opened(address, new_topic(), location=location):
            pass


# ---- brokers that do not answer --------------------------------------------------------------------------------------


async def test_opening_without_a_broker_is_a_storage_error() -> None:
    with pytest.raises(StorageError):
        async with opened(f"127.0.0.1:{free_port()}", new_topic()):
            pass


async def test_bounds_are_an_error_while_the_broker_does_not_answer(kafka_server: KafkaServer) -> None:
    """The client answers with offset -1001, and without an error."""
    async with opened(kafka_server.address, new_topic(), limits=QUICK._replace(request_s=1.0)) as adapter:
        await adapter.enqueue([(0, batch("x"))])
        with kafka_server.frozen():
            for ask in (lambda: adapter.bounds(0), lambda: adapter.resume_at(0, 1), lambda: adapter.offset_at(0, 0)):
                with pytest.raises(StorageError):
                    await ask()


@pytest.fixture
def own_broker() -> Iterator[KafkaServer]:
    with KafkaServer() as broker:
        yield broker


@pytest.mark.long
async def test_ledger_of_producers_is_read_again_after_a_broker_has_started_again(own_broker: KafkaServer) -> None:
    """The client keeps the epoch of the leader from before, and the broker refuses it."""
    async with opened(own_broker.address, new_topic()) as adapter:
        assert await adapter.last_sequence("one") == 0
        await asyncio.to_thread(own_broker.stop)
        await asyncio.to_thread(own_broker.start)
        async with asyncio.timeout(30):  # the client keeps it for 15 minutes
            while True:
                try:
                    assert await adapter.last_sequence("two") == 0
                    break
                except StorageError:
                    await asyncio.sleep(0.1)


async def test_publish_waits_for_a_frozen_broker_then_fails_and_readers_report_it(kafka_server: KafkaServer) -> None:
    async with opened(kafka_server.address, new_topic(), publish_timeout_s=1.5) as adapter:
        await adapter.enqueue([(0, batch("before"))])
        receiver = await adapter.open_receiver(0)
        assert await received(receiver, 1) == ["before"]
        with kafka_server.frozen():
            call = asyncio.ensure_future(adapter.enqueue([(0, batch("lost or not"))]))
            with pytest.raises(StorageError):
                async with asyncio.timeout(20):
                    await receiver.receive(ANY, ANY)
            with pytest.raises(StorageError, match="may or may not be stored"):
                await call
        async with asyncio.timeout(30):
            while True:
                try:
                    await adapter.enqueue([(0, batch("after"))])
                    break
                except StorageError:
                    continue
            found: list[str] = []
            while "after" not in found:
                try:
                    found += texts((await receiver.receive(ANY, ANY)).batches)
                except StorageError:
                    await asyncio.sleep(0.1)
        assert found.index("after") == len(found) - 1


async def test_publish_is_answered_only_after_the_broker_has_stored_it(kafka_server: KafkaServer) -> None:
    async with opened(kafka_server.address, new_topic()) as adapter:
        await adapter.enqueue([(0, batch("before"))])
        with kafka_server.frozen():
            call = asyncio.ensure_future(adapter.enqueue([(0, batch("acknowledged"))]))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(call), 0.5)
        (receipt,) = await call
        assert receipt.token is not None
        receiver = await adapter.open_receiver(0, receipt.token.offset)
        assert await received(receiver, 1) == ["acknowledged"]


# ---- publishing ------------------------------------------------------------------------------------------------------


async def test_publish_is_refused_while_too_much_is_pending(address: str) -> None:
    async with opened(address, new_topic(), limits=QUICK._replace(pending_records=3)) as adapter:
        first = adapter.enqueue([(0, batch(str(number))) for number in range(3)])
        with pytest.raises(QueueFull):
            await adapter.enqueue([(0, batch("more"))])
        assert len(await first) == 3
        await adapter.enqueue([(0, batch("more"))])


async def test_record_that_does_not_fit_any_more_may_be_stored_in_part(address: str, foreign: ForeignProgram) -> None:
    """So it is no PayloadTooLarge, which promises that nothing is stored."""
    topic = new_topic()
    async with opened(address, topic, queues=2) as adapter:
        await asyncio.to_thread(foreign.set_topic, topic, "max.message.bytes", "100000")
        large = EventBatch.of(StreamId("s", "s"), [os.urandom(400_000)])
        with pytest.raises(StorageError, match=r"above max\.message\.bytes .*may or may not be stored"):
            await adapter.enqueue([(0, batch("fits")), (1, large)])
        assert await received(await adapter.open_receiver(0, 0), 1) == ["fits"]


async def test_a_topic_for_records_of_any_size_can_be_used(address: str, foreign: ForeignProgram) -> None:
    topic = new_topic()
    await asyncio.to_thread(foreign.make_topic, topic, 1, {"max.message.bytes": str((1 << 31) - 1)})
    async with opened(address, topic, retain_unfinished=False) as adapter:
        await adapter.enqueue([(0, batch("fits"))])
        assert await received(await adapter.open_receiver(0, 0), 1) == ["fits"]


@pytest.mark.long
@pytest.mark.parametrize("headers", [0, 128])
async def test_largest_raw_event_of_an_idempotent_call_fits(
    address: str, foreign: ForeignProgram, headers: int
) -> None:
    topic, limit = new_topic(), 100_000
    await asyncio.to_thread(foreign.make_topic, topic, 1, {"max.message.bytes": str(limit)})
    names = {f"h{number:03}": "v" for number in range(headers)}

    async with opened(address, topic, format="raw", compression="none") as adapter:

        async def is_stored(size: int) -> bool:
            event = EventBatch.of(StreamId(topic, "k"), [Event(os.urandom(size), headers=names)])
            try:
                await adapter.enqueue([(0, event)], sequence=ProducerSequence("p" * 128, 1, 0))
            except PayloadTooLarge:
                return False
            return True

        size = limit - 300
        while not await is_stored(size):
            size -= 1
        assert size > limit - 3000


async def test_batch_above_the_limit_of_the_topic_is_refused(address: str) -> None:
    async with opened(address, new_topic()) as adapter:
        large = EventBatch.of(StreamId("s", "s"), [b"x" * (1 << 20)] * 9)
        with pytest.raises(PayloadTooLarge):
            await adapter.enqueue([(0, large)])
