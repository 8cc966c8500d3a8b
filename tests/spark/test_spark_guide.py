"""docs/spark.md: its programs run in their order, in one session, on a small directory of flights."""

import asyncio
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace import Event, Provider
from tests.documents.reader import code_blocks

FOLDERS = (
    "demo-data", "out", "out-checkpoint", "late-checkpoint", "totals-checkpoint", "kept", "restored", "sums",
    "written-by-billing",
)  # fmt: skip
FLIGHT = b'{"carrier": "UA", "dep_delay": 90.0}'

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


async def some_flights(data: Path) -> None:
    """Flights of two aircraft, which the subscription `billing` has handled."""

    async def handle(_: Event) -> None:
        pass

    async with Provider.open(data, queues=2) as provider:
        billing = await provider.subscribe("billing", "flights/*", handle)
        for aircraft in ("N1", "U2"):
            await provider.stream("flights", aircraft).publish([FLIGHT] * 3)
        await billing.caught_up()


def placed(text: str, folder: Path) -> str:
    """The text with its folders below `folder`: the JVM has a working directory of its own."""
    return re.sub(rf'(?<!namespace=)"({"|".join(FOLDERS)})"', lambda name: repr(str(folder / name[1])), text)


def test_the_programs_run(spark: SparkSession, tmp_path: Path) -> None:
    data = str(tmp_path / "demo-data")
    asyncio.run(some_flights(Path(data)))
    scope: dict[str, Any] = {"__name__": "guide", "timedelta": timedelta}
    for block in code_blocks("docs/spark.md"):
        if block.language != "python":
            continue
        if block.text.startswith("late.selectExpr"):
            scope["frame"] = spark.createDataFrame([("N1", b"{}")], "key STRING, payload BINARY")
        if "publisher(" in block.text:
            scope["flights"] = spark.readStream.format("headrace").options(data=data, namespace="flights").load()
            scope["flights"] = scope["flights"].selectExpr("'UA' AS carrier")
        if "found = audit" in block.text:
            delivered = spark.read.format("headrace").options(data=data, namespace="flights").load()
            delivered.write.parquet(str(tmp_path / "written-by-billing"))
        text = block.text
        if "rollup(spark" in text:  # it runs until it is stopped
            text = text.replace("awaitTermination", "processAllAvailable")
        print(block)
        exec(compile(placed(text, tmp_path), str(block), "exec", dont_inherit=True), scope)
        for query in spark.streams.active:
            query.processAllAvailable()
            query.stop()
