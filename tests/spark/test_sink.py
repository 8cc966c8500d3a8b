"""Writing streams with Spark: each batch is published once, whatever Spark repeats."""

import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headrace import Event, Provider, Start, StreamId
from headrace.pipeline import publisher
from headrace.streams.events import EventBatch
from tests.client.silos import SiloProcess, silo, silos, stored

__all__ = ("silo", "silos")


def look(data: Path) -> dict[str, list[str]]:
    """All events, by stream."""
    return {str(stream): [each.decode() for each in events] for stream, events in asyncio.run(stored(data)).items()}


def events(data: Path) -> list[Event]:
    found: list[Event] = []

    async def note(batch: EventBatch) -> None:
        found.extend(batch.events())

    async def run() -> None:
        async with Provider.open(data) as provider:
            subscription = await provider.subscribe("events", "*/*", note, batch=True, start=Start.earliest())
            await subscription.caught_up()

    asyncio.run(run())
    return found


def write(frame: DataFrame, data: Path, **options: str) -> None:
    frame.write.format("headrace").mode("append").option("data", str(data)).options(**options).save()


def rows(spark: SparkSession, count: int, parts: int = 2, start: int = 0) -> DataFrame:
    columns = ("'n' AS namespace", "concat('k', id % 5) AS key", "cast(id AS string) AS payload")
    return spark.range(start, start + count, numPartitions=parts).selectExpr(*columns)


def wanted(numbers: Sequence[int]) -> dict[str, list[str]]:
    return {f"n/k{key}": [str(number) for number in numbers if number % 5 == key] for key in range(5)}


def told(caught: "pytest.ExceptionInfo[PySparkException]", text: str) -> None:
    """The driver's error says it, on one line."""
    assert any(text in line for line in str(caught.value).splitlines()), caught.value


class Input:
    """Files that a query reads, a batch each."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder / "input"
        self._folder.mkdir()

    def add(self, numbers: Sequence[int]) -> None:
        number = len(list(self._folder.iterdir()))
        path = self._folder / f"{number:03}.json"
        lines = [f'{{"namespace": "n", "key": "k{each % 5}", "payload": "{each}"}}' for each in numbers]
        path.write_text("\n".join(lines))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))  # by this Spark orders them

    def read(self) -> DataFrame:
        reader = self._spark.readStream.schema("namespace string, key string, payload string")
        return reader.option("maxFilesPerTrigger", 1).json(str(self._folder))


def run(frame: DataFrame, checkpoint: Path, **options: str) -> None:
    """Write the available rows, and end."""
    writer = frame.writeStream.format("headrace").option("checkpointLocation", str(checkpoint)).options(**options)
    end(writer.trigger(availableNow=True).start())


def end(query: StreamingQuery) -> None:
    try:
        assert query.awaitTermination(300)
    finally:
        query.stop()


def forget(checkpoint: Path, batch: int) -> None:
    """As if Spark had been killed when the sink was done, before it noted that: the batch comes again."""
    for path in (checkpoint / "commits").glob(f"*{batch}*"):
        path.unlink()


def test_a_frame_is_published_in_order(spark: SparkSession, tmp_path: Path):
    data = tmp_path / "d"
    write(rows(spark, 1000), data)
    assert look(data) == wanted(range(1000))
    assert list((data / "staging" / "default").iterdir()) == []


def test_every_column_arrives(spark: SparkSession, tmp_path: Path):
    when = datetime(2026, 11, 21, 10, 0, 0, 123456, UTC)
    given = [("k/1", bytearray(b"\x00\xff"), {"a": "1", "b": ""}, "e1", when), ("é", bytearray(), None, None, None)]
    columns = "key string, payload binary, headers map<string,string>, id string, timestamp timestamp"
    write(spark.createDataFrame(given, columns), tmp_path / "d", namespace="a%2Fb")
    found = {event.stream: event for event in events(tmp_path / "d")}
    first, second = found[StreamId("a/b", "k/1")], found[StreamId("a/b", "é")]
    assert (first.payload, first.headers, first.id, first.time) == (b"\x00\xff", {"a": "1", "b": ""}, "e1", when)
    assert (second.payload, second.headers, second.id) == (b"", {}, None)
    assert second.time is not None
    assert abs((second.time - datetime.now(UTC)).total_seconds()) < 24 * 3600


def test_a_write_is_repeated_only_by_a_number_of_its_own(spark: SparkSession, tmp_path: Path):
    data = tmp_path / "d"
    for version, start in (("1", 0), ("1", 100), ("2", 200), ("1", 300)):
        write(rows(spark, 10, start=start), data, txnAppId="app", txnVersion=version)
    assert look(data) == wanted([*range(10), *range(200, 210)])
    write(rows(spark, 10, 1), data)
    write(rows(spark, 10, 1), data)
    assert sum(map(len, look(data).values())) == 40


def test_an_empty_frame_is_nothing(spark: SparkSession, tmp_path: Path):
    write(rows(spark, 0), tmp_path / "d", txnAppId="app", txnVersion="1")
    assert look(tmp_path / "d") == {}


def test_a_query_publishes_each_batch_once_even_if_batches_are_repeated(spark: SparkSession, tmp_path: Path):
    data, checkpoint, source = tmp_path / "d", tmp_path / "c", Input(spark, tmp_path)
    for start in (0, 100, 200):
        source.add(range(start, start + 100))
    run(source.read(), checkpoint, data=str(data))
    assert look(data) == wanted(range(300))
    forget(checkpoint, 2)
    source.add(range(300, 310))
    run(source.read(), checkpoint, data=str(data))
    assert look(data) == wanted(range(310))
    (folder,) = (data / "staging" / "default").iterdir()
    assert [path.name for path in folder.iterdir()] == ["3.done"]


def test_a_query_with_a_new_checkpoint_is_another_one_unless_it_is_named(spark: SparkSession, tmp_path: Path):
    source = Input(spark, tmp_path)
    source.add(range(10))
    for checkpoint in ("1", "2"):
        run(source.read(), tmp_path / checkpoint, data=str(tmp_path / "unnamed"))
        run(source.read(), tmp_path / f"named-{checkpoint}", data=str(tmp_path / "named"), txnAppId="app")
    assert look(tmp_path / "named") == wanted(range(10))
    assert sum(map(len, look(tmp_path / "unnamed").values())) == 20


def test_totals_that_change_are_published_by_foreach_batch(spark: SparkSession, tmp_path: Path):
    data, checkpoint, source = tmp_path / "d", tmp_path / "c", Input(spark, tmp_path)

    def totals() -> None:
        counted = source.read().groupBy("key").count().selectExpr("key", "cast(count AS string) AS payload")
        publish = publisher(data=str(data), namespace="totals", txnAppId="totals")
        writer = counted.writeStream.outputMode("update").option("checkpointLocation", str(checkpoint))
        end(writer.foreachBatch(publish).trigger(availableNow=True).start())

    source.add([0, 1, 5])
    source.add([5, 2])
    totals()
    assert look(data) == {"totals/k0": ["2", "3"], "totals/k1": ["1"], "totals/k2": ["1"]}
    forget(checkpoint, 1)
    totals()
    assert look(data) == {"totals/k0": ["2", "3"], "totals/k1": ["1"], "totals/k2": ["1"]}


# slow: a replay writes rows that it read
@pytest.mark.slow
def test_rows_that_are_read_may_be_written(spark: SparkSession, tmp_path: Path):
    write(rows(spark, 100), tmp_path / "a")
    source = spark.readStream.format("headrace").option("data", str(tmp_path / "a")).load()
    copied = source.select("namespace", "key", "payload", "headers", "id", "timestamp")
    run(copied, tmp_path / "c", data=str(tmp_path / "b"))
    assert look(tmp_path / "b") == wanted(range(100))


def test_a_silo_is_published_to(
    spark: SparkSession,
    silo: SiloProcess,
    tmp_path: Path,
):
    checkpoint, source, staging = tmp_path / "c", Input(spark, tmp_path), tmp_path / "staging"
    source.add(range(100))
    run(source.read(), checkpoint, server=silo.address)
    forget(checkpoint, 0)
    run(source.read(), checkpoint, server=silo.address)
    frame = rows(spark, 10, start=100).write.format("headrace").mode("append")
    frame.options(server=silo.address, staging=str(staging)).save()
    silo.stop()
    assert look(silo.data) == wanted(range(110))
    assert list((staging / "default").iterdir()) == []
    assert [path.name for path in (checkpoint / "headrace-staging" / "default").glob("*/*")] == ["0.done"]


def test_a_row_that_cannot_be_published_fails_the_whole_write_on_one_line(spark: SparkSession, tmp_path: Path):
    data = tmp_path / "d"
    bad = rows(spark, 100, 4).selectExpr("namespace", "key", "if(payload = '77', null, payload) AS payload")
    with pytest.raises(PySparkException) as caught:
        write(bad, data)
    told(caught, "InvalidArgument: column 'payload': null (filter such rows out, or give an empty payload) in a row of")
    assert look(data) == {}
    # Of another partition there may be a file: a task that Spark ends late. Nothing names it, and a sweep removes it.
    assert [path.name for path in (data / "staging").rglob("00003-*.staged")] == []


def test_unsupported_modes_are_refused_in_one_line(spark: SparkSession, tmp_path: Path):
    data, source = tmp_path / "d", Input(spark, tmp_path)
    with pytest.raises(PySparkException) as caught:
        rows(spark, 1).write.format("headrace").mode("overwrite").option("data", str(data)).save()
    told(caught, "InvalidArgument: mode 'overwrite': streams are append only")
    with pytest.raises(PySparkException) as caught:
        write(rows(spark, 1).selectExpr("*", "1 AS more"), data)
    told(caught, "InvalidArgument: column 'more' is not a column of events")
    source.add([1])
    counted = source.read().groupBy("namespace", "key").count().selectExpr("namespace", "key", "'' AS payload")
    writer = counted.writeStream.format("headrace").outputMode("complete").option("data", str(data))
    query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
    with pytest.raises(PySparkException) as caught:
        query.awaitTermination(300)
    told(caught, "InvalidArgument: output mode 'complete': streams are append only")


def test_rows_may_come_later(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "d"
    frame = rows(spark, 10).selectExpr("*", "IF(payload < 5, NULL, INTERVAL '1' HOUR) AS delay")
    with pytest.raises(PySparkException) as caught:
        write(frame, tmp_path / "other")
    told(caught, "provider 'default' cannot delay events")
    write(frame, data, delays="store")
    assert sorted(event.payload for event in events(data)) == [b"%d" % number for number in range(5)]

    async def waiting() -> int:
        async with Provider.open(data) as provider:
            return sum(each.events for each in (await provider.store.delay_store().backlogs("default")).values())

    assert asyncio.run(waiting()) == 5
