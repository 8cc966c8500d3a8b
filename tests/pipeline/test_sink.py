"""The sink's options and columns, checked before any row is written."""

import pickle
from pathlib import Path

import pytest
from pyspark.sql import types as spark

from headrace import pipeline
from headrace.pipeline.publishing import MAX_BATCH_NUMBER
from headrace.pipeline.sink import batch_writer, stream_writer
from headrace.streams.errors import DataDirectoryError, InvalidArgument

ROW = "namespace string, key string, payload binary"
FULL = "id string, headers map<string,string>, timestamp timestamp, payload string, key string, namespace string"
LATER = (f"{ROW}, delay double, priority int", f"{ROW}, delay interval", f"{ROW}, delay long, priority long")

TYPES: dict[str, spark.DataType] = {
    "string": spark.StringType(),
    "binary": spark.BinaryType(),
    "int": spark.IntegerType(),
    "long": spark.LongType(),
    "double": spark.DoubleType(),
    "interval": spark.DayTimeIntervalType(),
    "timestamp": spark.TimestampType(),
    "timestamp_ntz": spark.TimestampNTZType(),
    "map<string,string>": spark.MapType(spark.StringType(), spark.StringType()),
    "map<string,int>": spark.MapType(spark.StringType(), spark.IntegerType()),
}


def schema(columns: str) -> spark.StructType:
    """From names and types. Spark's own way needs a JVM."""
    fields = [column.split(" ") for column in columns.split(", ")]
    return spark.StructType([spark.StructField(name, TYPES[kind]) for name, kind in fields])


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "d")


@pytest.mark.parametrize("columns", [ROW, FULL, ROW.replace("binary", "string"), *LATER])
def test_columns_of_events_are_taken(data: str, columns: str) -> None:
    for writer in (
        batch_writer({"data": data}, schema(columns), False),
        stream_writer({"data": data}, schema(columns), False),
    ):
        assert isinstance(pickle.loads(pickle.dumps(writer)), type(writer))


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("key string, namespace string", "column 'payload' is missing"),
        ("payload string, namespace string", "column 'key' is missing"),
        ("payload string, key string", "or option 'namespace': give one of them"),
        (f"{ROW}, offset long", "column 'offset' is not a column of events, which have namespace, key, payload, "),
        (f"{ROW}, key string", "column 'key' is there twice"),
        ("key long, payload string, namespace string", "column 'key' is string, not bigint: cast it"),
        ("key string, payload int, namespace string", "column 'payload' is binary or string, not int: cast it"),
        (f"{ROW}, headers string", "column 'headers' is map<string,string>, not string"),
        (f"{ROW}, headers map<string,int>", "column 'headers' is map<string,string>, not map<string,int>"),
        (
            f"{ROW}, delay string",
            "column 'delay' is double or float or int or bigint or interval day to second, not str",
        ),
        (f"{ROW}, priority double", "column 'priority' is int or bigint or smallint or tinyint, not double: cast it"),
        (f"{ROW}, timestamp timestamp_ntz", "column 'timestamp' is timestamp, not timestamp_ntz"),
    ],
)
def test_columns_that_are_none_of_an_event_are_refused(data: str, columns: str, told: str) -> None:
    for make in (batch_writer, stream_writer):
        with pytest.raises(InvalidArgument, match=told) as refused:
            make({"data": data}, schema(columns), False)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"txnAppId": "a"}, "options 'txnAppId' and 'txnVersion' go together"),
        ({"delays": "somewhere"}, 'delays is "store", or left out, not'),
        ({"txnVersion": "1"}, "options 'txnAppId' and 'txnVersion' go together"),
        ({"txnAppId": "", "txnVersion": "1"}, "option 'txnAppId' is empty"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "option 'txnVersion' is a number from 0 to .*, not '-1'"),
        ({"txnAppId": "a", "txnVersion": str(MAX_BATCH_NUMBER + 1)}, "option 'txnVersion' is a number from 0 to"),
        ({"namespace": "n"}, "or option 'namespace': both are there: leave one out"),
        ({"namespace": "n*"}, r"option 'namespace': 'n\*' stands for several"),
        ({"namespace": "%n"}, "option 'namespace': '%n' has a %"),
        ({"namespace": "n" * 1025}, "option 'namespace': a stream's namespace has 1,025 bytes"),
        ({"start": "latest"}, "option 'start' is unknown"),
        ({"staging": "s3://bucket/x"}, "option 'staging': 's3://bucket/x' is on no file system"),
        ({"server": "h:1"}, "option 'data' or 'server': give one of them"),
    ],
)
def test_options_that_say_nothing_sensible_are_refused(data: str, options: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told) as refused:
        batch_writer({"data": data, **options}, schema(ROW), False)
    assert "\n" not in str(refused.value)


def test_names_of_options_are_the_same_in_any_case(data: str) -> None:
    batch_writer({"DATA": data, "txnappid": "a", "TXNVERSION": str(MAX_BATCH_NUMBER)}, schema(ROW), False)


def test_a_query_numbers_its_batches_itself(data: str) -> None:
    with pytest.raises(InvalidArgument, match=r"option 'txnVersion' is for df.write: .* leave it out"):
        stream_writer({"data": data, "txnAppId": "a", "txnVersion": "1"}, schema(ROW), False)


def test_nothing_is_overwritten(data: str) -> None:
    with pytest.raises(InvalidArgument, match=r"mode 'overwrite': .* use mode\('append'\)"):
        batch_writer({"data": data}, schema(ROW), True)
    with pytest.raises(InvalidArgument, match=r"mode 'complete': .* foreachBatch\(headrace.pipeline.publisher"):
        stream_writer({"data": data}, schema(ROW), True)


def test_for_a_server_a_batch_says_where_to_stage(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="option 'staging' is missing: name a directory"):
        batch_writer({"server": "h:1"}, schema(ROW), False)
    batch_writer({"server": "h:1", "staging": str(tmp_path)}, schema(ROW), False)


def test_for_a_server_a_query_stages_in_its_checkpoint_where_that_is_a_directory() -> None:
    stream_writer({"server": "h:1", "checkpointLocation": "file:/tmp/c"}, schema(ROW), False)
    with pytest.raises(InvalidArgument, match=r"the checkpoint 's3a://b/c' is on no file system: .* option 'staging'"):
        stream_writer({"server": "h:1", "checkpointLocation": "s3a://b/c"}, schema(ROW), False)
    with pytest.raises(InvalidArgument, match="option 'staging' is missing"):
        stream_writer({"server": "h:1"}, schema(ROW), False)


def test_a_foreign_directory_stays_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(DataDirectoryError, match="not empty and not made by headrace"):
        batch_writer({"data": str(tmp_path)}, schema(ROW), False)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_publisher_needs_a_name_for_the_query(data: str) -> None:
    with pytest.raises(InvalidArgument, match="option 'txnAppId' is missing"):
        pipeline.publisher(data=data)


def test_for_a_server_the_delays_are_its_own(tmp_path: Path) -> None:
    options = {"server": "localhost:1", "staging": str(tmp_path), "delays": "store"}
    with pytest.raises(InvalidArgument, match="option 'delays' is for 'data'"):
        batch_writer(options, schema(ROW), False)
