"""Reads of a log that has changed: deleted, created again, an older copy, damaged. Without Spark."""

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from headrace import Provider, Selector, StreamId
from headrace.pipeline.access import LogAccess
from headrace.pipeline.place import ProviderPlace
from headrace.pipeline.source import BatchReader, HeadraceSource, StreamReader
from headrace.streams.errors import CorruptRecord, DataDirectoryError, InvalidArgument, OffsetsGone

SCHEMA = StructType(
    [StructField("key", StringType()), StructField("payload", BinaryType()), StructField("offset", LongType())]
)
BEYOND = "the query's checkpoint is at offset 5 of queue 0, which ends at 2: the provider was made anew"


def publish(data: Path, *payloads: bytes, namespace: str = "n") -> None:
    """Each in a block of its own."""

    async def run() -> None:
        async with Provider.open(data, queues=1) as provider:
            for payload in payloads:
                await provider.publish(StreamId(namespace, "k"), payload)

    asyncio.run(run())


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """With five batches, which a query has read up to `{"0": 5}`."""
    path = tmp_path / "data"
    publish(path, b"0", b"1", b"2", b"3", b"4")
    yield path
    shutil.rmtree(path)
    with pytest.raises(DataDirectoryError):  # closes the opened directory
        ProviderPlace.of({"data": str(path)}).open()


def made_anew(data: Path) -> None:
    shutil.rmtree(data)
    publish(data, b"new 0", b"new 1")


def source(data: Path, options: Mapping[str, str]) -> HeadraceSource:
    return HeadraceSource({"data": str(data), "columns": "key,payload,offset", **options})


def streaming(data: Path, **options: str) -> StreamReader:
    reader = source(data, options).streamReader(SCHEMA)
    assert isinstance(reader, StreamReader)
    return reader


def batch(data: Path, **options: str) -> list[bytes]:
    reader = source(data, options).reader(SCHEMA)
    assert isinstance(reader, BatchReader)
    return payloads(reader, reader.partitions())


def payloads(reader: BatchReader | StreamReader, parts: Sequence[InputPartition]) -> list[bytes]:
    batches: list[pa.RecordBatch] = [each for part in parts for each in reader.read(part)]
    return [payload for each in batches for payload in each.column("payload").to_pylist()]


def test_a_log_ends_where_it_ends(data: Path):
    access = ProviderPlace.of({"data": str(data)}).open()
    assert isinstance(access, LogAccess)
    with pytest.raises(InvalidArgument, match="queue 0 ends at offset 5: it cannot be read to 6"):
        list(access.read(0, 3, 6, Selector("*/*")))


def test_a_provider_that_was_created_again_is_read(data: Path):
    assert batch(data) == [b"0", b"1", b"2", b"3", b"4"]
    made_anew(data)
    assert batch(data) == [b"new 0", b"new 1"]


def test_a_checkpoint_beyond_the_end_fails_the_query(data: Path):
    made_anew(data)
    reader = streaming(data)
    with pytest.raises(InvalidArgument, match=BEYOND):
        reader.latestOffset({"0": 5}, ReadAllAvailable())
    with pytest.raises(InvalidArgument, match=BEYOND):
        reader.partitions({"0": 1}, {"0": 5})


@pytest.mark.parametrize("limit", ["1", "10"])
def test_a_query_that_continues_reads_a_provider_created_again_once(data: Path, limit: str):
    made_anew(data)
    reader, found, at = streaming(data, failOnDataLoss="false", maxEventsPerTrigger=limit), list[bytes](), {"0": 5}
    while at != (end := reader.latestOffset(at, ReadMaxRows(int(limit)))):
        found += payloads(reader, reader.partitions(at, end))
        at = end
    assert found == [b"new 0", b"new 1"]
    publish(data, b"new 2")
    end = reader.latestOffset(at, ReadMaxRows(int(limit)))
    assert payloads(reader, reader.partitions(at, end)) == [b"new 2"]


def test_a_micro_batch_that_is_repeated_reads_nothing_of_another_log(data: Path):
    made_anew(data)
    reader = streaming(data, failOnDataLoss="false")
    assert payloads(reader, reader.partitions({"0": 1}, {"0": 5})) == []


async def _delete_below(data: Path, offset: int) -> None:
    """Apply retention at once."""
    async with Provider.open(data, options={"retain_bytes": 1}) as provider:
        await provider.adapter.apply_retention({0: offset})


def test_events_removed_during_a_read_are_left_out_and_none_comes_twice(tmp_path: Path):
    sizes = [700_000 + number for number in range(8)]
    publish(tmp_path, *map(bytes, sizes))
    reader = streaming(tmp_path, failOnDataLoss="false")
    (part,) = reader.partitions({"0": 0}, {"0": 8})
    reading = reader.read(part)
    found = [len(payload) for payload in next(reading).column("payload").to_pylist()]
    assert found == sizes[:2]
    asyncio.run(_delete_below(tmp_path, 5))
    found += [len(payload) for each in reading for payload in each.column("payload").to_pylist()]
    assert found == sizes[:2] + sizes[5:]
    with pytest.raises(OffsetsGone, match=r"queue 0: offsets 0 to 4 are gone.*'failOnDataLoss' to false"):
        list(streaming(tmp_path).read(part))


def test_a_start_after_the_end_is_nothing(data: Path):
    assert batch(data, start='{"0": 3}', end='{"0": 2}') == []


def test_one_may_read_around_damage_in_a_namespace_that_is_named(tmp_path: Path):
    publish(tmp_path, b"whatever it is " * 20, b"1")
    file = tmp_path / "providers" / "default" / "log" / "data.mdb"
    content = file.read_bytes()
    assert b"whatever it is " * 20 in content
    file.write_bytes(content.replace(b"whatever it is " * 20, b"whatever it was" * 20))
    assert batch(tmp_path, namespace="n", start='{"0": 1}') == [b"1"]
    with pytest.raises(CorruptRecord, match="queue 0, offset 0"):
        batch(tmp_path, namespace="n")


def test_a_micro_batch_waits_for_events_but_not_for_ever(data: Path):
    reader = streaming(data, minEventsPerTrigger="6", maxTriggerDelay="1h")
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    publish(data, b"5")
    assert reader.latestOffset(start, ReadAllAvailable())["0"] == 6
    assert (
        streaming(data, minEventsPerTrigger="7", maxTriggerDelay="0s").latestOffset(start, ReadAllAvailable())["0"] == 6
    )
    reader = streaming(data, minEventsPerTrigger="7")
    reader.prepareForTriggerAvailableNow()
    assert reader.latestOffset(start, ReadAllAvailable())["0"] == 6
