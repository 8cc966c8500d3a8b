"""Mistakes of other programs that read Kafka. docs/kafka.md lists all ten with their tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kafka_servers import KafkaServer
from benchmarks.servers import CHECKOUT
from headrace import Event, Provider, Start, StreamId
from headrace.adapters import ProducerSequence
from headrace.adapters.kafka import KafkaAdapter
from headrace.streams.errors import StorageError
from headrace.streams.events import EventBatch
from tests.adapters.kafka.opening import ForeignProgram, batch, new_topic, opened, received

pytestmark = pytest.mark.slow


@pytest.fixture
def address(kafka_server: KafkaServer) -> str:
    return kafka_server.address


@pytest.fixture
def foreign(address: str) -> ForeignProgram:
    return ForeignProgram(address)


class Collector:
    """A handler that keeps payloads."""

    def __init__(self) -> None:
        self.found: list[bytes] = []

    async def __call__(self, event: Event) -> None:
        self.found.append(event.payload)


async def until(reached: Callable[[], Awaitable[bool]], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not await reached():  # noqa: ASYNC110 (brokers do it in their own time)
            await asyncio.sleep(0.05)


async def test_holes_in_the_offsets_are_no_gaps(address: str, foreign: ForeignProgram, tmp_path: Path) -> None:
    """Mistake 3: markers of transactions and aborted records were taken for lost ones."""
    topic = new_topic()
    options = {"bootstrap": address, "topic": topic}
    async with Provider.open(tmp_path, adapter="kafka", queues=1, options=options) as provider:
        await provider.stream("tests", "s").publish(b"before")  # offset 0
        for text, aborted in (("committed", False), ("aborted", True), ("again", False)):  # two offsets each
            values = [batch(text).encoded]
            await asyncio.to_thread(foreign.write, topic, values, transaction=topic, aborted=aborted)
        await provider.stream("tests", "s").publish(b"after")
        assert (await provider.adapter.bounds(0)).next == 8
        collector = Collector()
        subscription = await provider.subscribe("s", "tests/*", collector, start=Start.earliest())
        await subscription.caught_up()
        assert collector.found == [b"before", b"committed", b"again", b"after"]
        assert await provider.gaps("s") == []
        assert (await provider.adapter.backlog(0, 8)).batches == 0


async def test_topic_that_was_created_again_is_a_fault_within_five_seconds(
    address: str, foreign: ForeignProgram, tmp_path: Path
) -> None:
    """Mistake 4: readers went on in the new topic at their old offset."""
    topic = new_topic()
    options = {"bootstrap": address, "topic": topic}
    async with Provider.open(tmp_path, adapter="kafka", queues=1, options=options) as provider:
        collector = Collector()
        subscription = await provider.subscribe("s", "tests/*", collector)
        await provider.stream("tests", "s").publish(b"old")
        await subscription.caught_up()
        await asyncio.to_thread(foreign.delete_topic, topic)
        await asyncio.to_thread(foreign.make_topic, topic)
        await asyncio.to_thread(foreign.write, topic, [batch(str(number)).encoded for number in range(20)])

        async def faulted() -> bool:
            (queue,) = provider.statistics().queues
            return queue.state == "faulted" and "created again" in str(queue.reason)

        await until(faulted, 5)
        with pytest.raises(StorageError, match="created again"):
            await provider.stream("tests", "s").publish(b"new")
        with pytest.raises(StorageError, match="created again"):
            await subscription.caught_up()
        assert collector.found == [b"old"]


@pytest.mark.parametrize("record_format", ["packed", "raw"])
async def test_retention_by_age_keeps_old_events_that_were_published_now(
    address: str, foreign: ForeignProgram, record_format: str
) -> None:
    """Mistake 5: the record had the time of its event, and was deleted at once."""
    old_ms = 1_356_998_400_000  # 2013
    topic, other = new_topic(), new_topic()
    day = {"retention.ms": str(24 * 3600 * 1000), "max.message.bytes": str(8 << 20)}
    for each in (topic, other):
        await asyncio.to_thread(foreign.make_topic, each, 1, day)
    options: dict[str, Any] = {"format": record_format, "retain_unfinished": False}
    async with opened(address, topic, **options) as adapter, opened(address, other, **options) as deleted:
        event = Event(b"x", timestamp_us=old_ms * 1000)
        await adapter.enqueue([(0, EventBatch.of(StreamId(topic, "k"), [event]))])
        await asyncio.to_thread(foreign.write, other, [b"x"], time_ms=old_ms)

        async def cleaned() -> bool:
            return (await deleted.bounds(0)).first == 1

        await until(cleaned)  # Kafka has rolled and deleted the segment with the time of the event
        assert await adapter.bounds(0) == (0, 1)
        (found,) = (await (await adapter.open_receiver(0, 0)).receive(1, 1)).batches
        assert list(found.timestamps_us()) == [old_ms * 1000]


class BlockedTime:
    """The times that a thread has waited in single calls of its event loop: neither computing nor waiting for a
    processor, which a busy machine makes long."""

    def __init__(self) -> None:
        self._schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self.found: list[tuple[float, str]] = []

    def _running_s(self) -> float:
        computing, waiting, _ = self._schedule.read_text().split()
        return (int(computing) + int(waiting)) / 1e9

    @contextmanager
    def of_each_call(self) -> Generator[None]:
        run: Any = asyncio.Handle._run

        def timed(handle: Any) -> None:
            before, start = self._running_s(), time.perf_counter()
            run(handle)
            self.found.append((time.perf_counter() - start - (self._running_s() - before), str(handle)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", timed)
            yield


async def open_and_cancel(adapter: KafkaAdapter, rounds: int) -> None:
    """Open receivers, cancel one that waits, and close them, at each state in which their thread can be."""
    for number in range(rounds):
        receiver = await adapter.open_receiver(number % 2, 0)
        if number % 3:
            assert (await receiver.receive(100, 1 << 20)).batches
        waiting = asyncio.create_task(receiver.receive(1, 1))
        await asyncio.sleep(0.01 * (number % 4))
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await receiver.aclose()


async def test_event_loop_is_not_blocked_while_receivers_open_and_close_under_load(address: str) -> None:
    """Mistake 8: a consumer was closed or paused while its thread was in a fetch, and the loop waited for it."""
    blocked = BlockedTime()
    async with opened(address, new_topic(), queues=2) as adapter:
        await adapter.enqueue([(queue, batch("first")) for queue in range(2)])
        with blocked.of_each_call():
            loading = True

            async def load() -> None:
                while loading:
                    await adapter.enqueue([(queue, batch("x" * 1000)) for queue in range(2)])

            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(load())
                await asyncio.gather(*(open_and_cancel(adapter, 10) for _ in range(3)))
                loading = False
    assert len(blocked.found) > 100
    seconds, call = max(blocked.found)
    assert seconds < 0.05, call


def python(program: str) -> subprocess.Popen[str]:
    """Start a Python that reads and writes lines."""
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)


async def test_call_is_stored_once_after_a_frozen_broker_and_a_killed_publisher(kafka_server: KafkaServer) -> None:
    """Mistake 10: a call that had timed out was sent again and stored twice."""
    topic = new_topic()
    program = f"""
import asyncio
from headrace.adapters import ProducerSequence
from headrace.streams.errors import StorageError
from tests.adapters.kafka.opening import batch, opened

async def main():
    async with opened({kafka_server.address!r}, {topic!r}, publish_timeout_s=2.0) as adapter:
        await adapter.enqueue([(0, batch("1"))], sequence=ProducerSequence("p", 1, 0))
        print("ready", flush=True)
        input()
        try:
            await adapter.enqueue([(0, batch("2"))], sequence=ProducerSequence("p", 2, 1))
        except StorageError:
            print("timed out", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
    publisher = python(program)

    def told(line: str = "") -> str:
        assert publisher.stdin is not None
        assert publisher.stdout is not None
        publisher.stdin.write(line)
        publisher.stdin.flush()
        return publisher.stdout.readline()

    try:
        assert await asyncio.to_thread(told) == "ready\n"
        with kafka_server.frozen():
            assert await asyncio.to_thread(told, "go\n") == "timed out\n"
        publisher.kill()
    finally:
        publisher.kill()
        await asyncio.to_thread(publisher.communicate)
    async with opened(kafka_server.address, topic) as adapter:
        for number in (2, 2, 3):
            sequence = ProducerSequence("p", number, number - 1)
            await adapter.enqueue([(0, batch(str(number)))], sequence=sequence)
        assert await received(await adapter.open_receiver(0, 0), 3) == ["1", "2", "3"]
        assert await adapter.last_sequence("p") == 3
