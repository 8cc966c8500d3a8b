"""The rest of headrace over Kafka: subscriptions, failures, delays, positions, consumers over the network."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from benchmarks.kafka_servers import KafkaServer
from headrace import Event, Provider, RetryPolicy, Start
from headrace.streams.errors import NotSupported
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
