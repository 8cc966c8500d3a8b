"""Reading streams with Spark: batch and streaming queries read exactly the published events."""

import asyncio
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from headrace import Event, Provider, StreamId
from headrace.pipeline import lag
from headrace.proto.v1 import events_pb2


def publish(data: Path, items: Iterable[tuple[str, bytes | Event]], *, queues: int = 2, **options: Any) -> None:
    """Each item one batch, by the text of its stream."""

    async def run() -> None:
        async with Provider.open(data, queues=queues, options=options) as provider:
            await asyncio.gather(*(provider.publish(StreamId.parse(stream), event) for stream, event in items))

    asyncio.run(run())


def numbered(count: int, streams: int = 5, namespace: str = "n") -> list[tuple[str, bytes]]:
    return [(f"{namespace}/{number % streams}", b"%d" % number) for number in range(count)]


def read(spark: SparkSession, data: Path, **options: Any) -> DataFrame:
    return spark.read.format("headrace").option("data", str(data)).options(**options).load()


def payloads(frame: DataFrame) -> list[bytes]:
    return [bytes(row.payload) for row in frame.select("payload").collect()]


def told(caught: "pytest.ExceptionInfo[PySparkException]", text: str) -> None:
    """The driver's error says it, on one line."""
    assert any(text in line for line in str(caught.value).splitlines()), caught.value


def test_published_events_are_read_in_order(spark: SparkSession, tmp_path: Path):
    when = datetime(2026, 11, 21, 10, tzinfo=UTC)
    rich = Event(b"rich", headers={"a": "1"}, id="e1", timestamp_us=int(when.timestamp() * 1_000_000))
    publish(tmp_path, [*numbered(100), ("rare/one", rich)])
    rows = read(spark, tmp_path).collect()
    for key in range(5):
        of_stream = [row for row in rows if (row.namespace, row.key) == ("n", str(key))]
        assert [int(row.payload) for row in of_stream] == list(range(key, 100, 5))
        assert len({row.queue for row in of_stream}) == 1
        assert [(row.offset, row.index) for row in of_stream] == sorted((row.offset, row.index) for row in of_stream)
    (found,) = [row for row in rows if row.namespace == "rare"]
    assert (found.id, found.headers, found.timestamp) == ("e1", {"a": "1"}, when.replace(tzinfo=None))
    assert {row.headers for row in rows if row.namespace == "n"} == {None}


def test_namespaces_keys_and_columns_are_chosen_by_options(spark: SparkSession, tmp_path: Path):
    publish(tmp_path, [*numbered(20), *numbered(20, namespace="m")])
    chosen = read(spark, tmp_path, namespace="m", key="[*", columns="key,payload,stored")
    assert chosen.columns == ["key", "payload", "stored"]
    assert chosen.count() == 0
    chosen = read(spark, tmp_path, namespace="m", key="?", columns="key,payload,stored")
    assert sorted(int(payload) for payload in payloads(chosen)) == list(range(20))
    now = datetime.now()  # noqa: DTZ005 (Spark gives times of the session's zone, which is UTC, without it)
    assert all(abs(row.stored - now) < timedelta(hours=24) for row in chosen.collect())
    assert read(spark, tmp_path, key="4").count() == 8


def test_a_range_is_read_by_offsets_token_or_time(spark: SparkSession, tmp_path: Path):
    publish(tmp_path, numbered(10, streams=1), queues=1)
    assert payloads(read(spark, tmp_path, start='{"0": 3}', end='{"0": 5}')) == [b"3", b"4"]
    assert payloads(read(spark, tmp_path, namespace="n", key="0", start="8")) == [b"8", b"9"]
    assert payloads(read(spark, tmp_path, start="2099-01-01T00:00:00+00:00")) == []
    assert len(payloads(read(spark, tmp_path, start="2020-01-01T00:00:00+00:00"))) == 10
    assert payloads(read(spark, tmp_path, start="latest")) == []
    assert payloads(read(spark, tmp_path, start='{"0": 7}', end='{"0": 5}')) == []


def test_large_queues_are_cut_and_small_ones_share_a_partition(spark: SparkSession, tmp_path: Path):
    publish(tmp_path, numbered(300, streams=50), queues=4)
    assert read(spark, tmp_path).rdd.getNumPartitions() == 1
    cut = read(spark, tmp_path, eventsPerPartition="20")
    assert cut.rdd.getNumPartitions() >= 12
    assert sorted(int(payload) for payload in payloads(cut)) == list(range(300))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"colums": "key"}, "option 'colums' is unknown"),
        ({"columns": "keys"}, "option 'columns': there is no column 'keys'"),
        ({"start": "yesterday"}, "option 'start' is earliest, latest, a time"),
        ({"start": '{"7": 1}'}, "options 'start' and 'startingOffsets': there is no queue 7, there are queues 0 to 1"),
        ({"start": '{"0": 1000}'}, "options 'start' and 'startingOffsets': queue 0 ends at offset"),
        ({"namespace": "other"}, "option 'namespace': no event was ever published to 'other'; there are: n"),
        ({"provider": "other"}, "has no log: there is no such provider"),
        ({"server": "127.0.0.1:1"}, "option 'data' or 'server': give one of them"),
        ({"decode": "json"}, "option 'payloadSchema' is missing"),
        (
            {"decode": "json", "payloadSchema": "a INT, b TEXT"},
            "option 'payloadSchema': expected a type such as STRING, INT, DOUBLE or ARRAY<STRING>, found 'TEXT'",
        ),
        (
            {"decode": "json", "payloadSchema": "a DATE"},
            "option 'payloadSchema': a has a type that JSON cannot express",
        ),
        (
            {"decode": "protobuf", "descriptor": "/nowhere", "message": "m"},
            "option 'descriptor': /nowhere cannot be read",
        ),
    ],
)
def test_wrong_options_are_named(spark: SparkSession, tmp_path: Path, options: dict[str, str], text: str):
    publish(tmp_path, numbered(5))
    with pytest.raises(PySparkException) as caught:
        read(spark, tmp_path, **options).collect()
    told(caught, text)


def test_a_directory_that_is_none_or_of_another_version_is_refused(spark: SparkSession, tmp_path: Path):
    with pytest.raises(PySparkException) as caught:
        read(spark, tmp_path / "nothing").collect()
    told(caught, "is no data directory: it has no headrace.json")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "headrace.json").write_text('{"format": 99}')
    with pytest.raises(PySparkException) as caught:
        read(spark, tmp_path).collect()
    told(caught, "has format 99, this headrace reads format 1")


def test_a_schema_of_ones_own_is_refused(spark: SparkSession, tmp_path: Path):
    publish(tmp_path, numbered(5))
    with pytest.raises(PySparkException) as caught:
        spark.read.format("headrace").schema("a INT").option("data", str(tmp_path)).load().collect()
    told(caught, "the columns are namespace, key, payload")


def test_a_damaged_block_is_named(spark: SparkSession, tmp_path: Path):
    publish(tmp_path, [("n/0", b"whatever it is " * 20)], queues=1)
    file = tmp_path / "providers" / "default" / "log" / "data.mdb"
    content = file.read_bytes()
    assert content.count(b"whatever it is " * 20) == 1
    file.write_bytes(content.replace(b"whatever it is " * 20, b"whatever it was" * 20))
    with pytest.raises(PySparkException) as caught:
        read(spark, tmp_path).collect()
    told(caught, "queue 0, offset 0: the stored record is damaged (its checksum does not match)")


def test_json_payloads_become_columns(spark: SparkSession, tmp_path: Path):
    texts = [
        {"id": 1, "carrier": "UA", "delay": 2.5, "tags": ["a"], "at": "2026-11-21T10:00:00Z", "more": {"x": 1}},
        {"id": 2, "unknown": [1, {"y": 2}]},
    ]
    items = [("n/0", json.dumps(text, indent=indent).encode()) for text in texts for indent in (None, 2)]
    publish(tmp_path, items, queues=1)
    schema = "id BIGINT, carrier STRING, delay DOUBLE, tags ARRAY<STRING>, at TIMESTAMP, more STRUCT<x: INT>"
    frame = read(spark, tmp_path, decode="json", payloadSchema=schema)
    assert "payload" not in frame.columns
    rows = frame.select("value.*").collect()
    whole = (1, "UA", 2.5, ["a"], datetime(2026, 11, 21, 10), (1,))  # noqa: DTZ001
    assert [tuple(row) for row in rows] == [whole] * 2 + [(2, None, None, None, None, None)] * 2


def test_a_payload_that_is_no_json_is_named_or_null(spark: SparkSession, tmp_path: Path):
    items = [b'{"id": 1}', b"nonsense", b'{"id": 2}{"id": 3}', b'{"id": "4"}', b"", b"[5]", b'{"id": 6}']
    publish(tmp_path, [("n/0", item) for item in items], queues=1)
    options = {"decode": "json", "payloadSchema": "id INT"}
    with pytest.raises(PySparkException) as caught:
        read(spark, tmp_path, **options).collect()
    told(caught, "queue 0, offset 1, index 0: the payload cannot be decoded")
    rows = read(spark, tmp_path, **options, decodeErrors="null", columns="value,offset").collect()
    assert [row.value and row.value.id for row in rows] == [1, None, None, None, None, None, 6]


def test_protobuf_payloads_become_columns(spark: SparkSession, tmp_path: Path):
    described = descriptor_pb2.FileDescriptorSet()
    events_pb2.DESCRIPTOR.CopyToProto(described.file.add())
    (tmp_path / "events.binpb").write_bytes(described.SerializeToString())
    options = {"decode": "protobuf", "descriptor": str(tmp_path / "events.binpb")}
    batch = events_pb2.EventBatch(
        namespace="a", sizes=[1, 2], timestamps_us=[5], headers=[events_pb2.Headers(values={"h": "v"})],
        payload=b"xyz", offset=1 << 63,
    )  # fmt: skip
    publish(tmp_path / "data", [("n/0", batch.SerializeToString()), ("n/0", b"\xff")], queues=1)
    with pytest.raises(PySparkException) as caught:
        read(spark, tmp_path / "data", message="headrace.v1.EventBatch", **options).collect()
    told(caught, "queue 0, offset 1, index 0: the payload cannot be decoded (it is not a headrace.v1.EventBatch: ")
    first, second = read(
        spark, tmp_path / "data", message="headrace.v1.EventBatch", decodeErrors="null", **options
    ).collect()
    assert second.value is None
    assert (first.value.namespace, first.value.sizes, first.value.timestamps_us) == ("a", [1, 2], [5])
    assert (first.value.headers[0]["values"], bytes(first.value.payload)) == ({"h": "v"}, b"xyz")
    assert int(first.value.offset) == 1 << 63


# ---- streaming -------------------------------------------------------------------------------------------------------


def run_available(frame: DataFrame, folder: Path) -> list[int]:
    """Write the available events to Parquet, and return the number of rows of each micro-batch."""
    query = (
        frame.writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def stream(spark: SparkSession, data: Path, **options: Any) -> DataFrame:
    return spark.readStream.format("headrace").option("data", str(data)).options(**options).load()


def written(spark: SparkSession, folder: Path) -> list[int]:
    return sorted(int(bytes(row.payload)) for row in spark.read.parquet(str(folder / "out")).collect())


def test_a_query_goes_on_where_it_was(spark: SparkSession, tmp_path: Path):
    publish(tmp_path / "data", numbered(50), queues=3)
    assert sum(run_available(stream(spark, tmp_path / "data"), tmp_path)) == 50
    publish(tmp_path / "data", [(stream, b"%d" % (50 + n)) for n, (stream, _) in enumerate(numbered(10))], queues=3)
    assert run_available(stream(spark, tmp_path / "data"), tmp_path) == [10]
    assert written(spark, tmp_path) == list(range(60))


def test_micro_batches_are_bounded_in_events(spark: SparkSession, tmp_path: Path):
    publish(tmp_path / "data", numbered(100, streams=20), queues=3)
    sizes = run_available(stream(spark, tmp_path / "data", maxEventsPerTrigger="30"), tmp_path)
    assert sizes == [30, 30, 30, 10]
    assert written(spark, tmp_path) == list(range(100))


# slow: as in events; the plan has tests without Spark
@pytest.mark.slow
def test_micro_batches_are_bounded_in_bytes(spark: SparkSession, tmp_path: Path):
    publish(tmp_path / "data", numbered(100, streams=1), queues=1)
    sizes = run_available(stream(spark, tmp_path / "data", maxBytesPerTrigger="1000"), tmp_path)
    assert len(sizes) == 3
    assert written(spark, tmp_path) == list(range(100))


@pytest.mark.parametrize(
    "trigger", [{"availableNow": True}, pytest.param({"processingTime": "0 seconds"}, marks=pytest.mark.slow)]
)
def test_progress_has_the_latest_offset_and_so_the_lag(spark: SparkSession, tmp_path: Path, trigger: dict[str, Any]):
    publish(tmp_path / "data", numbered(10, streams=1), queues=1)
    frame = stream(spark, tmp_path / "data", maxEventsPerTrigger="4")
    query = frame.writeStream.format("noop").trigger(**trigger).start()
    if "availableNow" not in trigger:
        query.processAllAvailable()
        query.stop()
    query.awaitTermination()
    read = [progress for progress in query.recentProgress if progress["numInputRows"]]
    assert [json.loads(progress["sources"][0]["latestOffset"])["0"] for progress in read] == [10, 10, 10]
    assert [lag(progress) for progress in read] == [6, 2, 0]


def test_a_table_keeps_the_options_it_was_created_with(spark: SparkSession, tmp_path: Path):
    data = tmp_path / "it's"
    publish(data, numbered(20))
    create = "CREATE TABLE {0} USING headrace OPTIONS (data '{1}', namespace 'n', columns 'key,payload'{2})"
    escaped = str(data).replace("'", "\\'")
    with pytest.raises(PySparkException) as caught:
        spark.sql(create.format("refused", escaped, ", token 'hr_x'"))
    told(caught, "option 'token': all users of the table could read it")
    with pytest.raises(PySparkException) as caught:
        spark.sql(create.format("refused", escaped, ", nothing 'x'"))
    told(caught, "option 'nothing' is unknown")
    spark.sql(create.format("kept", escaped, ""))
    try:
        assert spark.sql("SELECT count(*) AS n FROM kept").collect()[0].n == 20
        assert spark.sql("SELECT count(*) AS n FROM kept WITH (key '1')").collect()[0].n == 4
        assert run_available(spark.readStream.table("kept"), tmp_path) == [20]
    finally:
        spark.sql("DROP TABLE kept")


def delete_below(data: Path, queue: int, offset: int) -> None:
    """Apply retention at once."""

    async def run() -> None:
        async with Provider.open(data, options={"retain_bytes": 1}) as provider:
            await provider.adapter.apply_retention({queue: offset})

    asyncio.run(run())


def test_offsets_that_are_gone_fail_the_query_unless_it_is_to_go_on(spark: SparkSession, tmp_path: Path):
    data = tmp_path / "data"
    for number in range(4):  # blocks of their own
        publish(data, [("n/0", b"%d" % number)], queues=1)
    assert run_available(stream(spark, data), tmp_path) == [4]
    publish(data, [("n/0", b"4")], queues=1)
    publish(data, [("n/0", b"5")], queues=1)
    publish(data, [("n/0", b"6")], queues=1)
    delete_below(data, 0, 6)
    with pytest.raises(PySparkException) as caught:
        run_available(stream(spark, data), tmp_path)
    told(caught, "queue 0: offsets 4 to 5 are gone, removed by retention; set the option 'failOnDataLoss' to false")
    with pytest.raises(PySparkException) as caught:
        read(spark, data, start='{"0": 4}').collect()
    told(caught, "queue 0: offsets 4 to 5 are gone")
    assert payloads(read(spark, data, start='{"0": 4}', failOnDataLoss="false")) == [b"6"]
    assert sum(run_available(stream(spark, data, failOnDataLoss="false"), tmp_path)) == 1
    assert written(spark, tmp_path) == [0, 1, 2, 3, 6]


def test_a_checkpoint_of_another_provider_or_of_other_streams_is_refused(spark: SparkSession, tmp_path: Path):
    publish(tmp_path / "data", numbered(5), queues=2)
    publish(tmp_path / "more", numbered(50), queues=2)
    publish(tmp_path / "other", numbered(5), queues=3)
    assert run_available(stream(spark, tmp_path / "data"), tmp_path) == [5]
    with pytest.raises(PySparkException) as caught:
        run_available(stream(spark, tmp_path / "other"), tmp_path)
    told(caught, "the query's checkpoint knows queues 0, 1, and the provider has 3")
    with pytest.raises(PySparkException) as caught:
        run_available(stream(spark, tmp_path / "more"), tmp_path)
    told(caught, "the query's checkpoint is of another provider, or of one that was deleted and made anew")
    with pytest.raises(PySparkException) as caught:
        run_available(stream(spark, tmp_path / "data", namespace="n"), tmp_path)
    told(caught, "the query's checkpoint is of the streams */*, and 'namespace' and 'key' select n/*")
    assert run_available(stream(spark, tmp_path / "more", failOnDataLoss="false"), tmp_path) == [50]


def test_end_is_not_for_streaming(spark: SparkSession, tmp_path: Path):
    publish(tmp_path / "data", numbered(5))
    with pytest.raises(PySparkException) as caught:
        run_available(stream(spark, tmp_path / "data", end="earliest"), tmp_path)
    told(caught, "options 'end', 'endingOffsets' and 'endingTimestamp' are for spark.read")
