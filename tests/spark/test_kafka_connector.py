"""Spark's own Kafka source reads packed records, and `decode_record` makes events of them, as docs/kafka.md shows."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kafka_servers import KafkaServer, maven_jars
from benchmarks.servers import CHECKOUT
from headrace import Event, EventBatch, StreamId
from tests.adapters.kafka.opening import ForeignProgram, new_topic, opened
from tests.servers import kafka_server
from tests.spark.processes import JAVA_OPTIONS

__all__ = ("kafka_server",)

POM = Path(__file__).parent / "kafka_connector.xml"
PROGRAM = """
import json, sys
from pyspark.sql import SparkSession, functions as F
from headrace.pipeline import RECORD_EVENTS, decode_record

bootstrap, topic, jars, java_options = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]").config("spark.jars", jars).config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    .config("spark.sql.session.timeZone", "UTC").config("spark.driver.extraJavaOptions", java_options).getOrCreate()
)
"""


@pytest.mark.slow
def test_sparks_kafka_source_reads_packed_records(
    spark_environment: None, kafka_server: KafkaServer, tmp_path: Path
) -> None:
    folder = maven_jars(POM, "spark-kafka-4.2.0", "Spark's Kafka source")
    guide = (CHECKOUT / "docs" / "kafka.md").read_text()
    (example,) = re.findall(r"```python\n(records = .*?)```", guide, re.DOTALL)
    (tmp_path / "job.py").write_text(
        PROGRAM + example + "\nprint(json.dumps([row.asDict() for row in events.collect()], default=str))\n"
    )
    topic = new_topic()

    async def publish() -> None:
        async with opened(kafka_server.address, topic, queues=2) as adapter:
            for number in range(4):
                events = [Event(b"%d" % number, id=f"e{number}", headers={"a": "b"}, timestamp_us=1), b"plain"]
                batch = EventBatch.of(StreamId("orders", str(number % 2)), events, now_us=2_000_000)
                await adapter.enqueue([(number % 2, batch)])

    asyncio.run(publish())
    ForeignProgram(kafka_server.address).write(topic, [b"\xff no batch", None])
    jars = ",".join(str(jar) for jar in sorted(folder.glob("*.jar")))
    done = subprocess.run(
        [sys.executable, "job.py", kafka_server.address, topic, jars, JAVA_OPTIONS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    rows.sort(key=lambda row: (row["partition"], row["offset"], row["index"]))
    assert [(row["partition"], row["offset"], row["index"]) for row in rows] == [
        (partition, offset, index) for partition in range(2) for offset in range(2) for index in range(2)
    ]
    assert rows[0] == {
        "partition": 0,
        "offset": 0,
        "namespace": "orders",
        "key": "0",
        "payload": "b'0'",
        "headers": {"a": "b"},
        "id": "e0",
        "timestamp": "1970-01-01 00:00:00.000001",
        "index": 0,
    }
    assert (rows[1]["headers"], rows[1]["id"], rows[1]["timestamp"]) == (None, None, "1970-01-01 00:00:02")
