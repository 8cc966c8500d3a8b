"""Spark writes and reads queues in PostgreSQL, through a silo."""

from collections import defaultdict
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.client.silos import SiloProcess
from tests.servers import postgres_server, postgres_url
from tests.spark.test_sink import rows, wanted

__all__ = ("postgres_server", "postgres_url")


@pytest.mark.slow
def test_sink_and_source_work_on_queues_in_postgres(spark: SparkSession, postgres_url: str, tmp_path: Path):
    options = f'options = {{ url = "{postgres_url}", create = true }}'
    config = ['data = "d"', "[providers.default]", 'adapter = "postgres"', "queues = 2", options]
    (tmp_path / "silo.toml").write_text("\n".join(config))
    silo = SiloProcess(tmp_path, "silo.toml")
    address = silo.start()
    try:
        for start in (0, 50):
            writer = rows(spark, 50, start=start).write.format("headrace").mode("append")
            writer.option("server", address).option("staging", str(tmp_path / "staging")).save()
        frame = spark.read.format("headrace").option("server", address).load()
        found: defaultdict[str, list[str]] = defaultdict(list)
        for row in frame.orderBy("namespace", "key", "offset", "index").collect():
            found[f"{row['namespace']}/{row['key']}"].append(bytes(row["payload"]).decode())
    finally:
        silo.kill()
    assert {stream: sorted(numbers, key=int) for stream, numbers in found.items()} == wanted(range(100))
