"""Spark and its jobs over queues on Kafka: the partitions are read in Spark's own processes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from benchmarks.kafka_servers import KafkaServer
from headrace import Event, Provider, Start, StreamId
from headrace.pipeline import archive, audit, replay
from headrace.pipeline.jobs.rollup import follow, rollup
from tests.adapters.kafka.opening import ForeignProgram, new_topic
from tests.servers import kafka_server

__all__ = ("kafka_server",)

QUEUES = 2


def with_events(data: Path, server: KafkaServer, topic: str, record_format: str) -> None:
    """Publish 60 events of six streams, and let a subscription get them. A marker of a transaction is last."""
    options = {"bootstrap": server.address, "topic": topic, "format": record_format}

    async def run() -> None:
        found: list[bytes] = []

        async def keep(event: Event) -> None:
            found.append(event.payload)

        async with Provider.open(data, adapter="kafka", queues=QUEUES, options=options) as provider:
            for number in range(60):
                await provider.publish(StreamId(topic, f"k{number % 6}"), [Event(b"%d" % number, id=f"e{number}")])
            subscription = await provider.subscribe("s", f"{topic}/*", keep, start=Start.earliest())
            await subscription.caught_up()
        assert len(found) == 60

    asyncio.run(run())
    if record_format == "raw":
        ForeignProgram(server.address).write(topic, [b"of a transaction"], transaction=topic)


@pytest.mark.slow
@pytest.mark.parametrize("record_format", ["packed", "raw"])
def test_archive_replay_and_audit_of_queues_on_kafka(
    spark: SparkSession, kafka_server: KafkaServer, tmp_path: Path, record_format: str
) -> None:
    data, topic = tmp_path / "data", new_topic()
    with_events(data, kafka_server, topic, record_format)
    done = archive(spark, tmp_path / "kept", data=data)
    assert done.events == 60 + (record_format == "raw")
    audited = audit(spark, ["s"], data=data)
    assert audited.holes == 0
    assert audited.findings == []
    assert audited.ok
    replayed = replay(spark, tmp_path / "kept", streams=f"{topic}/k?", data=data)
    assert replayed.events == 60
    rows = spark.read.format("headrace").option("data", str(data)).option("namespace", topic).load().collect()
    by_stream: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row.queue, row.offset, row["index"])):
        if row.key.startswith("k") and not row.key.startswith("kafka:"):
            by_stream.setdefault(row.key, []).append(int(row.payload))
    assert by_stream == {f"k{key}": [*range(key, 60, 6), *range(key, 60, 6)] for key in range(6)}


@pytest.mark.slow
@pytest.mark.parametrize("record_format", ["packed", "raw"])
def test_rollup_of_queues_on_kafka(
    spark: SparkSession, kafka_server: KafkaServer, tmp_path: Path, record_format: str
) -> None:
    data, topic, hour_us = tmp_path / "data", new_topic(), 3_600_000_000
    with_events(data, kafka_server, topic, record_format)

    async def close_windows() -> None:
        """Publish an event whose time is later than the end of all windows before it."""
        async with Provider.open(data) as provider:
            later = Event(b"later", timestamp_us=time.time_ns() // 1000 + hour_us)
            await provider.publish(StreamId(topic, "later"), [later])

    asyncio.run(close_windows())
    to = tmp_path / "rolled"
    done = follow(rollup(spark, to=to, every=None, data=str(data), namespace=topic, by="stream"), lambda *_: None)
    assert done.events == 61 + (record_format == "raw")
    counts: Counter[str] = Counter()
    for row in spark.read.parquet(str(to)).collect():
        counts[row.key] += row.events
    assert {key: number for key, number in counts.items() if not key.startswith("kafka:")} == {
        f"k{key}": 10 for key in range(6)
    }


@pytest.mark.slow
def test_streaming_query_ends_behind_the_marker_of_a_transaction(
    spark: SparkSession, kafka_server: KafkaServer, tmp_path: Path
) -> None:
    """Mistake 2 of others: waiting for an offset that is a marker."""
    data, topic = tmp_path / "data", new_topic()
    with_events(data, kafka_server, topic, "raw")
    source = spark.readStream.format("headrace").options(data=str(data), start="earliest", maxEventsPerTrigger="25")
    found: list[Any] = []
    query = (
        source.load()
        .writeStream.foreachBatch(lambda frame, _: found.extend(frame.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert sorted(bytes(row.payload) for row in found) == sorted([*(b"%d" % n for n in range(60)), b"of a transaction"])
