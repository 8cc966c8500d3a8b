"""Archives: every event once, whatever is killed when, in files that any reader of Parquet understands."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from headrace import Event, Provider, StreamId
from headrace.pipeline import ArchiveResult, archive, read_archive
from headrace.pipeline.jobs.files import lock_for_reading
from headrace.streams.errors import Busy, DataDirectoryError, InvalidArgument, NotFound, OffsetsGone
from headrace.streams.field_limits import MAX_TIME_US, MIN_TIME_US

DAY_US = 86_400_000_000
NOON_US = 1_763_726_400_000_000  # 2025-11-21T12:00Z
NAMESPACES = ("flights", "a/b c=%", "007", "", "Zürich 日本", "__HIVE_DEFAULT_PARTITION__", ".", "{x}*?[y]\\")


def publish(data: Path, first: int, count: int, namespaces: Sequence[str] = NAMESPACES, **options: Any) -> None:
    """Numbered events over some namespaces, keys and three days, in batches of three."""

    async def run() -> None:
        async with Provider.open(data, queues=2, **options) as provider:
            for number in range(first, first + count, 3):
                stream = StreamId(namespaces[number // 3 % len(namespaces)], f"k{number % 5}")
                events = [event(each) for each in range(number, min(number + 3, first + count))]
                await provider.publish(stream, events)

    asyncio.run(run())


def event(number: int) -> Event:
    time_us = NOON_US + number % 3 * DAY_US + number
    if number % 7:
        return Event(b"%d" % number, timestamp_us=time_us)
    return Event(b"%d" % number, headers={"n": str(number)}, id=f"e{number}", timestamp_us=time_us)


def remove_all_but(data: Path, batches: int) -> None:
    """Apply retention to each queue at once, in a separate process, as a silo does."""
    program = f"""
import asyncio
from headrace import Provider

async def run():
    async with Provider.open({str(data)!r}, options={{"retain_bytes": 1}}) as provider:
        bounds = [await provider.adapter.bounds(queue) for queue in range(provider.queues)]
        await provider.adapter.apply_retention({{queue: one.next - {batches} for queue, one in enumerate(bounds)}})

asyncio.run(run())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def log(spark: SparkSession, data: Path) -> DataFrame:
    return spark.read.format("headrace").option("data", str(data)).load()


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    found = frame.drop("date").collect()
    return sorted((tuple(row) for row in found), key=lambda row: (row[6], row[7], row[8]))


def files(archived: Path) -> list[Path]:
    return sorted(archived.glob("namespace=*/date=*/*"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


class Killed(BaseException):
    pass


class KillAt:
    """Ends a run at a step; if the step comes several times, at the second."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._taken = 0

    def __call__(self, step: str) -> None:
        self._taken += step == self._step
        if self._taken == 2 or (self._taken and step in ("intent", "directories", "state", "done")):
            raise Killed(step)


def test_an_archive_has_every_event_once_and_all_columns(spark: SparkSession, data: Path, kept: Path):
    publish(data, 0, 3000)
    done = archive(spark, kept, data=data)
    assert (done.events, done.total, done.gaps) == (3000, 3000, ())
    assert rows(read_archive(spark, kept)) == rows(log(spark, data))
    days = {row.date for row in read_archive(spark, kept).select("date").distinct().collect()}
    assert days == {date(2025, 11, day) for day in (21, 22, 23)}


def test_an_event_may_have_any_timestamp(spark: SparkSession, data: Path, kept: Path):
    times = [MIN_TIME_US, -1, 0, 1, MAX_TIME_US]

    async def run() -> None:
        async with Provider.open(data) as provider:
            await provider.publish(StreamId("n", "k"), [Event(b"", timestamp_us=time_us) for time_us in times])

    asyncio.run(run())
    archive(spark, kept, data=str(data))
    found = (
        read_archive(spark, kept).selectExpr("unix_micros(timestamp) AS us", "CAST(date AS STRING) AS date").collect()
    )
    assert sorted(row.us for row in found) == times
    assert {row.us: row.date for row in found if -2 < row.us < 1} == {-1: "1969-12-31", 0: "1970-01-01"}


def test_any_reader_of_parquet_reads_an_archive(spark: SparkSession, data: Path, kept: Path):
    publish(data, 0, 300, ["flights", "a/b c=%", "Zürich 日本"])
    archive(spark, kept, data=data)
    partitioning = ds.partitioning(pa.schema([("namespace", pa.string()), ("date", pa.date32())]), flavor="hive")
    table = pq.read_table(kept, partitioning=partitioning)
    assert Counter(table.column("namespace").to_pylist()) == {"flights": 102, "a/b c=%": 99, "Zürich 日本": 99}
    assert table.schema.field("timestamp").type == pa.timestamp("us", "UTC")
    for each in table.select(["date", "timestamp"]).to_pylist():
        assert each["timestamp"].date() == each["date"]
    by_spark = spark.read.parquet(f"file://{kept}")
    assert by_spark.count() == 300


def test_events_are_in_order_within_each_file(spark: SparkSession, data: Path, kept: Path):
    publish(data, 0, 600, ["flights"])
    archive(spark, kept, data=data)
    for file in files(kept):
        places = pq.ParquetFile(file).read(["queue", "offset", "index"]).to_pylist()
        assert places == sorted(places, key=lambda place: tuple(place.values()))


def test_each_run_adds_new_events(spark: SparkSession, data: Path, kept: Path):
    publish(data, 0, 500)
    assert archive(spark, kept, data=data, compact=False).events == 500
    before = files(kept)
    assert archive(spark, kept, data=data, compact=False) == ArchiveResult(0, 0, 0, (), 500)
    assert files(kept) == before
    publish(data, 500, 200)
    assert archive(spark, kept, data=data, compact=False).total == 700
    assert set(before) < set(files(kept))
    assert rows(read_archive(spark, kept)) == rows(log(spark, data))


def test_a_run_goes_in_steps(spark: SparkSession, data: Path, kept: Path):
    publish(data, 0, 900, ["flights"])
    told: list[tuple[int, int]] = []
    archive(spark, kept, data=data, events_per_step=300, progress=lambda *numbers: told.append(numbers))
    assert [done for done, _ in told][:: len(told) - 1] == [0, 900]
    assert len(told) > 3
    assert {total for _, total in told} == {900}
    assert json.loads((kept / "_headrace/state.json").read_bytes())["run"] == len(told) - 1


def test_small_files_are_put_together(spark: SparkSession, data: Path, kept: Path):
    for turn in range(3):
        publish(data, turn * 300, 300, ["flights", "", "007"])
        archive(spark, kept, data=data, compact=False)
    assert len(files(kept)) == 27
    assert archive(spark, kept, data=data, small_files=3).compacted == 27
    assert len(files(kept)) == 9
    assert rows(read_archive(spark, kept)) == rows(log(spark, data))
    assert archive(spark, kept, data=data, small_files=3).compacted == 0
    assert not list(kept.glob("_headrace/run-*"))


@pytest.mark.slow
def test_no_file_is_removed_while_a_reader_is_open(spark: SparkSession, data: Path, kept: Path):
    for turn in range(2):
        publish(data, turn * 30, 30, ["flights"])
        archive(spark, kept, data=data, compact=False)
    before = files(kept)
    with lock_for_reading(kept):
        assert archive(spark, kept, data=data, small_files=2).compacted == 0
    assert files(kept) == before
    assert archive(spark, kept, data=data, small_files=2).compacted == len(before)


@pytest.mark.slow
def test_a_second_run_at_once_is_refused(spark: SparkSession, data: Path, kept: Path):
    publish(data, 0, 30)

    def another(_step: str) -> None:
        with pytest.raises(Busy, match="is written by another process"):
            archive(spark, kept, data=data)

    archive(spark, kept, data=data, on_step=another)


ADDING, COMPACTING = ("sync", "intent", "move", "directories", "state", "done"), ("intent", "move", "remove", "done")


# Without Spark, `tests/pipeline/jobs/test_archive_files.py` kills at every step.
@pytest.mark.parametrize(
    ("compacting", "steps"),
    [
        (False, ("state",)),
        pytest.param(True, ("remove",), marks=pytest.mark.slow),
        pytest.param(False, ADDING, marks=pytest.mark.slow),
        pytest.param(True, COMPACTING, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_is_gone_on_with(
    spark: SparkSession, data: Path, kept: Path, compacting: bool, steps: Sequence[str]
):
    publish(data, 0, 60, ["flights", "a/b"])
    archive(spark, kept, data=data, compact=False)
    before = rows(log(spark, data))
    publish(data, 60, 60, ["flights", "a/b"])
    if compacting:
        archive(spark, kept, data=data, compact=False)
    expected = rows(log(spark, data))
    for step in steps:
        copy = kept.with_name(f"at-{step}")
        shutil.copytree(kept, copy)
        with pytest.raises(Killed):
            archive(spark, copy, data=data, small_files=2, compact=compacting, on_step=KillAt(step))
        assert rows(read_archive(spark, copy)) in (before, expected)
        assert archive(spark, copy, data=data, compact=False).total == 120
        assert rows(read_archive(spark, copy)) == expected
        assert not list(copy.glob("_headrace/run-*"))


@pytest.mark.slow
def test_a_process_that_is_killed_loses_and_repeats_nothing(
    spark: SparkSession, spark_environment: None, data: Path, kept: Path
):
    publish(data, 0, 3000, ["flights", "a/b"])
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(data), str(kept)], start_new_session=True)
    try:
        assert process.wait(300) == -signal.SIGKILL
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its JVM
    state = json.loads((kept / "_headrace/state.json").read_bytes())
    assert 0 < state["events"] < 3000
    assert (kept / "_headrace/intent.json").exists()
    done = archive(spark, kept, data=data)
    assert (done.total, rows(read_archive(spark, kept))) == (3000, rows(log(spark, data)))


KILLED = """
import os, signal, sys
from headrace.pipeline import archive
from headrace.pipeline.session import session

moves = 0
def kill(step):
    global moves
    moves += step == "move"
    if moves > 9:
        os.kill(os.getpid(), signal.SIGKILL)

os.environ["PYSPARK_SUBMIT_ARGS"] = "--driver-java-options -XX:TieredStopAtLevel=1 pyspark-shell"
archive(session("killed", "local[1]"), sys.argv[2], data=sys.argv[1], events_per_step=1500, on_step=kill)
"""


def test_another_provider_is_refused(spark: SparkSession, data: Path, kept: Path, tmp_path: Path):
    publish(data, 0, 30)
    publish(tmp_path / "other", 0, 30)
    archive(spark, kept, data=data)
    with pytest.raises(InvalidArgument, match="name another directory"):
        archive(spark, kept, data=tmp_path / "other")
    with pytest.raises(InvalidArgument, match=r"it is of .* streams \*/\*, not of .* streams flights/\*: name another"):
        archive(spark, kept, data=data, namespace="flights")
    state = kept / "_headrace/state.json"
    state.write_text(state.read_text().replace(str(data), str(data.with_name("anew"))))
    publish(data.with_name("anew"), 0, 3)
    with pytest.raises(DataDirectoryError, match="the provider was made anew"):
        archive(spark, kept, data=data.with_name("anew"))


def test_directory_without_an_archive_is_refused(spark: SparkSession, data: Path, tmp_path: Path):
    publish(data, 0, 3)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter").touch()
    with pytest.raises(DataDirectoryError, match="has 'letter' and no _headrace"):
        archive(spark, tmp_path / "mine", data=data)
    with pytest.raises(InvalidArgument, match=r"takes one of .* for a pattern"):
        archive(spark, tmp_path / "a*b", data=data)
    with pytest.raises(InvalidArgument, match="option 'start' is not for an archive"):
        archive(spark, tmp_path / "new", data=data, start="latest")
    with pytest.raises(NotFound, match="there is none"):
        read_archive(spark, tmp_path / "new")


def test_a_name_that_no_directory_can_have_is_refused(spark: SparkSession, data: Path, kept: Path):
    publish(data, 0, 3, ["x" * 300])
    with pytest.raises(InvalidArgument, match=r"namespace 'x+…' is too long .* leave it out"):
        archive(spark, kept, data=data)
    publish(data, 3, 3, ["fine"])
    assert archive(spark, kept.with_name("some"), data=data, namespace="f*").events == 3


def test_retention_that_was_faster_is_told_or_noted(spark: SparkSession, data: Path, kept: Path):
    publish(data, 0, 300, ["flights"])
    archive(spark, kept, data=data)
    publish(data, 300, 300, ["flights"])
    remove_all_but(data, 10)
    with pytest.raises(OffsetsGone, match=r"queue \d: offsets .* are gone.*--no-fail-on-data-loss"):
        archive(spark, kept, data=data)
    done = archive(spark, kept, data=data, fail_on_data_loss=False)
    assert done.gaps
    lost = sum(3 * (gap.end - gap.start) for gap in done.gaps)
    assert done.total == 600 - lost
    state = json.loads((kept / "_headrace/state.json").read_bytes())
    assert [gap["start"] for gap in state["gaps"]] == [gap.start for gap in done.gaps]
    assert archive(spark, kept, data=data).gaps == ()
