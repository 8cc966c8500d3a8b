"""Fetchers, receivers, commits and publishers of Kafka: errors, and closing at a bad moment."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import cast

import pytest
from confluent_kafka import KafkaError, Message, TopicPartition

from benchmarks.kafka_servers import KafkaServer
from headrace.adapters import Bounds
from headrace.adapters.kafka.acknowledgements import KafkaAcknowledgements
from headrace.adapters.kafka.client import KafkaClients, KafkaRecord
from headrace.adapters.kafka.fetching import (
    GROUP_RECORDS,
    WAITING_RECORD_BYTES,
    FetchedGroup,
    PartitionFetcher,
    UnreadableRecord,
)
from headrace.adapters.kafka.formats import PackedFormat, RecordFormat
from headrace.adapters.kafka.options import KafkaOptions
from headrace.adapters.kafka.publisher import OutgoingRecord, RecordPublisher
from headrace.adapters.kafka.reading import read_in_thread, read_range
from headrace.adapters.kafka.receiver import KafkaReceiver, ReceiverQueue
from headrace.adapters.kafka.secrets import ClientSettings
from headrace.streams.errors import StorageError
from headrace.streams.events import EventBatch
from tests.adapters.kafka.opening import ANY, QUICK, ForeignProgram, batch, new_topic, opened, texts

Deliver = Callable[[FetchedGroup], None]


def at(offset: int, text: str) -> EventBatch:
    found = batch(text)
    found.offset = offset
    return found


REFUSED = FetchedGroup((), 5, 0, False, KafkaError(KafkaError._LOG_TRUNCATION))
ACCEPTED = FetchedGroup((), 5, 0, False)
RECORD = FetchedGroup([at(5, "five")], 6, 1, False)


@pytest.fixture
def address(kafka_server: KafkaServer) -> str:
    return kafka_server.address


def clients_of(address: str) -> KafkaClients:
    return KafkaClients(KafkaOptions(bootstrap=address), ClientSettings({}))


async def nothing() -> None: ...


async def bounds() -> Bounds:
    return Bounds(0, 100)


def receiver_over(
    fetch: Callable[[int, Deliver], PartitionFetcher],
    clients: KafkaClients,
    check: Callable[[], Awaitable[None]] = nothing,
) -> KafkaReceiver:
    """Return a receiver at offset 5 of a queue that has offsets 0 to 99."""

    def note(_: FetchedGroup) -> Sequence[int]:
        return ()

    def ignore(_: object) -> None: ...

    queue = ReceiverQueue(0, fetch, note, bounds, check, lambda: None, clients.failure, ignore)
    return KafkaReceiver(queue, 5, 0, ignore)


class AnsweringFetcher:
    """Delivers groups as if a broker had answered with them."""

    def __init__(self, groups: Sequence[FetchedGroup], deliver: Deliver) -> None:
        for group in groups:
            asyncio.get_running_loop().call_soon(deliver, group)

    def release(self, nbytes: int) -> None: ...

    def stop(self) -> None: ...

    async def stopped(self) -> None: ...


def answering(*answers: Sequence[FetchedGroup]) -> KafkaReceiver:
    """Return a receiver whose fetchers get these answers, one fetcher after the other."""
    left = iter(answers)

    def fetch(position: int, deliver: Deliver) -> PartitionFetcher:
        assert position == 5
        return cast(PartitionFetcher, AnsweringFetcher(next(left), deliver))

    return receiver_over(fetch, clients_of("127.0.0.1:1"))


async def test_refusals_of_a_position_that_was_accepted_between_them_are_no_lost_end() -> None:
    """An idle partition may refuse its end while a leader changes, and again days later."""
    receiver = answering([REFUSED], [ACCEPTED, REFUSED], [RECORD])
    assert texts((await receiver.receive(ANY, ANY)).batches) == ["five"]
    refused_twice = answering([REFUSED], [REFUSED])
    with pytest.raises(StorageError, match="truncated it below offset 5"):
        await refused_twice.receive(ANY, ANY)


class BrokenFormat(PackedFormat):
    def batch(self, record: KafkaRecord, headers: object) -> str:
        raise LookupError(f"a mistake at offset {record.offset()}")


def fetcher(address: str, topic: str, position: int, record_format: RecordFormat, deliver: Deliver) -> PartitionFetcher:
    place = TopicPartition(topic, 0, position)
    return PartitionFetcher(
        clients_of(address), place, record_format, deliver, partition_tag=b"", max_waiting_bytes=1 << 20, pause_s=60
    )


async def test_an_unexpected_error_while_a_partition_is_read_is_raised(address: str) -> None:
    topic = new_topic()
    async with opened(address, topic) as adapter:
        await asyncio.gather(*(adapter.enqueue([(0, batch(str(number)))]) for number in range(6)))
    receiver = receiver_over(
        lambda position, deliver: fetcher(address, topic, position, BrokenFormat(0), deliver), clients_of(address)
    )
    for _ in range(2):
        with pytest.raises(StorageError, match="from offset 5: a mistake at offset 5"):
            await asyncio.wait_for(receiver.receive(ANY, ANY), 20)
    await receiver.aclose()


async def test_memory_of_small_records_that_wait_is_bounded(address: str) -> None:
    """A record of a few bytes takes hundreds of bytes while it waits."""
    topic, foreign, waiting = new_topic(), ForeignProgram(address), list[UnreadableRecord]()
    foreign.make_topic(topic)
    foreign.write(topic, [b"x"] * 20_000)
    reading = fetcher(address, topic, 0, PackedFormat(0), lambda group: waiting.extend(group.unreadable))
    known = -1
    while not waiting or len(waiting) > known:
        known = len(waiting)
        await asyncio.sleep(0.5)
    reading.stop()
    await reading.stopped()
    assert len(waiting) <= (1 << 20) // WAITING_RECORD_BYTES + GROUP_RECORDS + 1


@pytest.mark.long
async def test_memory_of_unreadable_records_that_wait_for_their_consumer_is_bounded(address: str) -> None:
    topic, foreign, fetched = new_topic(), ForeignProgram(address), 0
    foreign.make_topic(topic)
    foreign.write(topic, [b"x"] * 20_000)

    def fetch(position: int, deliver: Deliver) -> PartitionFetcher:
        def arrived(group: FetchedGroup) -> None:
            nonlocal fetched
            fetched += len(group.unreadable)
            deliver(group)

        return fetcher(address, topic, position, PackedFormat(0), arrived)

    receiver = receiver_over(fetch, clients_of(address))
    assert (await receiver.receive(ANY, ANY)).gap
    known = -1
    while fetched > known:
        known = fetched
        await asyncio.sleep(0.5)
    assert fetched <= (1 << 20) // WAITING_RECORD_BYTES + GROUP_RECORDS + 2
    while fetched < 19_995:  # it goes on as the gaps are taken
        await receiver.receive(ANY, ANY)
    await receiver.aclose()


async def test_a_position_at_the_end_of_a_partition_is_answered(address: str) -> None:
    topic = new_topic()
    async with opened(address, topic) as adapter:
        await adapter.enqueue([(0, batch("only"))])
    arrived: asyncio.Queue[FetchedGroup] = asyncio.Queue()
    reading = fetcher(address, topic, 1, PackedFormat(0), arrived.put_nowait)
    group = await asyncio.wait_for(arrived.get(), 20)
    assert (group.end, group.batches, group.error) == (1, [], None)
    reading.stop()
    await reading.stopped()


async def test_closing_while_offsets_are_committed_commits_them(address: str) -> None:
    topic, clients = new_topic(), clients_of(address)
    async with opened(address, topic) as adapter:
        await asyncio.gather(*(adapter.enqueue([(0, batch(str(number)))]) for number in range(6)))
    group = f"headrace.{topic}"
    committing = KafkaAcknowledgements(group, topic, clients, QUICK._replace(commit_s=0.001))
    committing.note(0, 5)
    await asyncio.sleep(0.01)  # the commit has begun
    await committing.aclose()
    assert await KafkaAcknowledgements(group, topic, clients, QUICK).of(0) == 5


async def test_closing_a_publisher_with_a_cancelled_call_does_not_cancel_the_caller(kafka_server: KafkaServer) -> None:
    topic = new_topic()
    async with opened(kafka_server.address, topic) as adapter:
        await adapter.enqueue([(0, batch("before"))])
    clients = clients_of(kafka_server.address)
    publisher = RecordPublisher(topic, clients, QUICK)
    await publisher.send([OutgoingRecord(0, None, batch("sent").encoded)])
    with kafka_server.frozen():
        answer = publisher.send([OutgoingRecord(0, None, batch("cancelled").encoded)])
        await asyncio.sleep(0.1)
        answer.cancel()
        clients.options = KafkaOptions(bootstrap=kafka_server.address, publish_timeout_s=0.1)  # how long it waits now
        await publisher.aclose()


class ForgetfulProducer:
    """A client whose broker has stored each record in an earlier try, and does not tell the offset."""

    def __init__(self) -> None:
        self._sent = queue.SimpleQueue[Callable[..., None]]()

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, done: Callable[..., None]) -> None:
        self._sent.put(done)

    def poll(self, timeout_s: float) -> None:
        with suppress(queue.Empty):
            self._sent.get(timeout=timeout_s)(None, Message(topic="t"))

    def flush(self, timeout_s: float) -> None: ...


class ForgetfulClients(KafkaClients):
    def producer(self) -> ForgetfulProducer:
        return ForgetfulProducer()


async def test_record_that_was_stored_at_an_unknown_offset_fails_and_stops_no_other_one() -> None:
    clients = ForgetfulClients(KafkaOptions(bootstrap="127.0.0.1:1"), ClientSettings({}))
    publisher = RecordPublisher("topic", clients, QUICK)
    for _ in range(2):
        with pytest.raises(StorageError, match="may or may not be stored"):
            await asyncio.wait_for(publisher.send([OutgoingRecord(0, None, b"x")]), 10)
    await publisher.aclose()


async def test_consumer_of_a_cancelled_reader_is_closed_in_a_thread() -> None:
    """Else the garbage collector closes it on the event loop, which waits for the brokers."""
    reading, answered, closed_by = threading.Event(), threading.Event(), list[threading.Thread]()

    def groups() -> Generator[Sequence[KafkaRecord]]:
        try:
            reading.set()
            answered.wait(10)
            yield ()
            yield ()
        finally:
            closed_by.append(threading.current_thread())

    with ThreadPoolExecutor(1) as threads:

        async def read() -> None:
            async with aclosing(read_in_thread(threads, groups(), len)) as found:
                async for _ in found:
                    pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(reading.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answered.set()
        async with asyncio.timeout(10):
            while not closed_by:  # noqa: ASYNC110 (a thread closes it)
                await asyncio.sleep(0.01)
    assert closed_by[0] is not threading.main_thread()


async def test_range_above_the_end_of_a_partition_is_an_error_that_names_the_end(address: str) -> None:
    topic = new_topic()
    async with opened(address, topic) as adapter:
        await adapter.enqueue([(0, batch("x"))])

    def read() -> list[int]:
        groups = read_range(clients_of(address), topic, 0, 0, 5, timeout_s=1.0)
        return [record.offset() for group in groups for record in group]

    with pytest.raises(StorageError, match="up to 5: it ends at offset 1"):
        await asyncio.to_thread(read)


async def test_pause_during_a_check_of_the_topic_needs_a_check_of_its_own() -> None:
    checks = 0
    delivers: list[Deliver] = []

    def fetch(_: int, deliver: Deliver) -> PartitionFetcher:
        delivers.append(deliver)
        return cast(PartitionFetcher, AnsweringFetcher([RECORD._replace(paused=True)], deliver))

    async def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 1:
            delivers[0](FetchedGroup([at(6, "six")], 7, 1, True))

    receiver = receiver_over(fetch, clients_of("127.0.0.1:1"), check)
    assert texts((await receiver.receive(ANY, ANY)).batches) == ["five", "six"]
    assert checks == 2


async def test_receive_returns_a_batch_however_small_the_limits_are() -> None:
    receiver = answering([RECORD])
    assert texts((await receiver.receive(0, 0)).batches) == ["five"]
