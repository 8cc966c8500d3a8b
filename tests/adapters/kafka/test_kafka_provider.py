"""The rest of headrace over Kafka: subscriptions, failures, delays, positions, consumers over the network."""

from __future__ import annotations

import asyncio
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from benchmarks.kafka_servers import KafkaServer, java_command
from headrace import Event, Provider, RetryPolicy, Start
from headrace.streams.errors import DataDirectoryError, NotSupported
from tests.adapters.kafka.opening import ForeignProgram, batch, new_topic


class Collector:
    """A handler that keeps payloads, and refuses the one that it is told to refuse."""

    def __init__(self, poison: bytes = b"") -> None:
        self.found: list[bytes] = []
        self._poison = poison

    async def __call__(self, event: Event) -> None:
        if event.payload == self._poison:
            raise ValueError("poison")
        self.found.append(event.payload)


@pytest.fixture
def kafka(kafka_server: KafkaServer) -> dict[str, Any]:
    """Keywords of `Provider.open`."""
    return {"adapter": "kafka", "queues": 2, "options": {"bootstrap": kafka_server.address, "topic": new_topic()}}


def one_queue(kafka: dict[str, Any]) -> dict[str, Any]:
    return {**kafka, "queues": 1}


async def test_events_are_delivered_in_order_and_positions_outlive_the_process(
    kafka: dict[str, Any], tmp_path: Path
) -> None:
    async with Provider.open(tmp_path, **kafka) as provider:
        first = Collector()
        subscription = await provider.subscribe("s", "orders/*", first)
        for number in range(20):
            await provider.stream("orders", str(number % 3)).publish(str(number).encode())
        await subscription.caught_up()
        for key in range(3):
            mine = [int(payload) for payload in first.found if int(payload) % 3 == key]
            assert mine == list(range(key, 20, 3))
    async with Provider.open(tmp_path) as provider:  # the control store knows where the queues are
        second = Collector()
        subscription = await provider.subscribe("s", "orders/*", second)
        await provider.stream("orders", "0").publish(b"new")
        await subscription.caught_up()
        assert second.found == [b"new"]
        replayed = Collector()
        replay = await provider.subscribe("again", "orders/*", replayed, start=Start.earliest())
        await replay.caught_up()
        assert len(replayed.found) == 21


async def test_topic_of_another_data_directory_is_refused_with_a_way_out(kafka: dict[str, Any], tmp_path: Path) -> None:
    async with Provider.open(tmp_path / "one", **kafka) as provider:
        await provider.stream("orders", "1").publish(b"x")
    with pytest.raises(DataDirectoryError, match=r"of another data directory .* with the option topic, or delete it"):
        async with Provider.open(tmp_path / "two", **kafka):
            pass


async def test_poison_becomes_a_dead_letter_and_holds_up_no_other_stream(kafka: dict[str, Any], tmp_path: Path) -> None:
    async with Provider.open(tmp_path, **kafka) as provider:
        collector = Collector(b"poison")
        subscription = await provider.subscribe("s", "orders/*", collector, retry=RetryPolicy(max_attempts=1))
        for key in range(4):
            for payload in (b"before", b"poison" if key == 1 else b"fine", b"after"):
                await provider.stream("orders", str(key)).publish(payload)
        await subscription.caught_up()
        assert sorted(collector.found) == sorted([b"before"] * 4 + [b"fine"] * 3 + [b"after"] * 4)
        (letter,) = await provider.dead_letters("s")
        assert letter.payload == b"poison"


async def test_caught_up_ends_where_a_marker_of_a_transaction_is_last(
    kafka: dict[str, Any], tmp_path: Path, kafka_server: KafkaServer
) -> None:
    foreign = ForeignProgram(kafka_server.address)
    async with Provider.open(tmp_path, **kafka) as provider:
        collector = Collector()
        subscription = await provider.subscribe("s", "tests/*", collector)
        topic = kafka["options"]["topic"]
        await asyncio.to_thread(lambda: foreign.write(topic, [batch("foreign").encoded], transaction=topic))
        async with asyncio.timeout(30):
            while (await provider.adapter.bounds(0)).next < 2:  # noqa: ASYNC110 (the broker writes the marker later)
                await asyncio.sleep(0.05)
            await subscription.caught_up()
        assert collector.found == [b"foreign"]
        assert await provider.gaps("s") == []


async def test_retention_below_a_subscription_is_one_gap_record(
    kafka: dict[str, Any], tmp_path: Path, kafka_server: KafkaServer
) -> None:
    foreign = ForeignProgram(kafka_server.address)
    async with Provider.open(tmp_path, **one_queue(kafka)) as provider:
        await (await provider.subscribe("s", "orders/*", Collector())).caught_up()
    async with Provider.open(tmp_path) as provider:
        for number in range(10):
            await provider.stream("orders", "1").publish(str(number).encode())
        place = TopicPartition(kafka["options"]["topic"], 0, 6)
        for deleted in foreign.admin.delete_records([place]).values():
            await asyncio.to_thread(deleted.result, 30)
        collector = Collector()
        subscription = await provider.subscribe("s", "orders/*", collector)
        await subscription.caught_up()
        assert collector.found == [b"6", b"7", b"8", b"9"]
        async with asyncio.timeout(30):
            while not (gaps := await provider.gaps("s")):  # noqa: ASYNC110 (it is stored in the background)
                await asyncio.sleep(0.05)
        (gap,) = gaps
        assert (gap.low.offset, gap.high.offset) == (0, 6)


async def test_delayed_events_wait_in_the_control_store(kafka: dict[str, Any], tmp_path: Path) -> None:
    async with Provider.open(tmp_path, delays="store", **kafka) as provider:
        collector = Collector()
        await provider.subscribe("s", "orders/*", collector)
        stream = provider.stream("orders", "1")
        await stream.publish(b"later", delay=timedelta(milliseconds=300))
        await stream.publish(b"now")
        async with asyncio.timeout(30):
            while len(collector.found) < 2:  # noqa: ASYNC110 (the handler is called in its own time)
                await asyncio.sleep(0.02)
        assert collector.found == [b"now", b"later"]


async def test_lag_is_that_of_the_unfinished_batches(kafka: dict[str, Any], tmp_path: Path) -> None:
    async with Provider.open(tmp_path, **one_queue(kafka)) as provider:
        for number in range(5):
            await provider.stream("orders", "1").publish([str(number).encode()] * 10)
        collector = Collector()
        subscription = await provider.subscribe("all", "orders/*", collector, start=Start.earliest())
        await subscription.caught_up()
        lag = await provider.adapter.backlog(0, 2)
        assert (lag.batches, lag.events, lag.estimated) == (3, 30, True)
        assert lag.since_us is not None


async def test_priorities_are_refused(kafka: dict[str, Any], tmp_path: Path) -> None:
    async with Provider.open(tmp_path, **kafka) as provider:
        with pytest.raises(NotSupported, match="no priorities"):
            await provider.stream("orders", "1").publish(b"x", priority=1)


async def test_progress_of_each_subscription_is_committed_for_the_tools_of_kafka(
    kafka: dict[str, Any], tmp_path: Path, kafka_server: KafkaServer
) -> None:
    topic = kafka["options"]["topic"]
    name = f"p{topic}"
    async with Provider.open(tmp_path, name=name, **one_queue(kafka)) as provider:
        subscription = await provider.subscribe("billing", "orders/*", Collector())
        for number in range(5):
            await provider.stream("orders", "1").publish(str(number).encode())
        await subscription.caught_up()
        async with asyncio.timeout(60):
            while await committed(kafka_server.address, f"headrace.{name}.billing", topic) != 5:  # noqa: ASYNC110
                await asyncio.sleep(0.2)  # every few seconds


@pytest.mark.slow
async def test_the_command_of_kafka_shows_the_lag_of_a_subscription(
    kafka: dict[str, Any], tmp_path: Path, kafka_server: KafkaServer
) -> None:
    topic = kafka["options"]["topic"]
    async with Provider.open(tmp_path, name=f"p{topic}", **one_queue(kafka)) as provider:
        adapter = provider.adapter
        for number in range(5):
            await provider.stream("orders", "1").publish(str(number).encode())
        await adapter.show_progress({"billing": {0: 3}})
        group = f"headrace.p{topic}.billing"
        arguments = ("--bootstrap-server", kafka_server.address, "--describe", "--group", group)

        def describe() -> str:
            command = java_command("org.apache.kafka.tools.consumer.group.ConsumerGroupCommand", *arguments)
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        lines = (await asyncio.to_thread(describe)).splitlines()
        (row,) = [line.split() for line in lines if line.startswith(group)]
        assert row[:6] == [group, topic, "0", "3", "5", "2"]


async def committed(address: str, group: str, topic: str) -> int:
    """Return the offset that a group has committed for partition 0; below 0 if there is none."""

    def ask() -> int:
        consumer = Consumer({"bootstrap.servers": address, "group.id": group})
        try:
            return consumer.committed([TopicPartition(topic, 0)], 10)[0].offset
        finally:
            consumer.close()

    return await asyncio.to_thread(ask)
