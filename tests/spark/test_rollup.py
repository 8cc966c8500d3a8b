"""`headrace pipeline rollup`: each window once, with what its events say, whatever is late, repeated or killed."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row, SparkSession

from headrace import Event, InvalidArgument
from headrace.pipeline.jobs import rollup as job
from headrace.pipeline.jobs.rollup import COLUMNS, follow, rollup
from headrace.streams.field_limits import MAX_TIME_US, MIN_TIME_US
from tests.cli.commandline import SCRIPT
from tests.spark.test_source import publish

MINUTE_US = 60_000_000
BEGIN_US = 1_700_000_040_000_000  # a full minute
UTC_BEGIN = datetime(2023, 11, 14, 22, 14)  # noqa: DTZ001 (Spark gives times of the session's zone, which is UTC)


def at(minutes: float, stream: str = "a/1", size: int = 10) -> tuple[str, Event]:
    return stream, Event(b"x" * size, timestamp_us=BEGIN_US + int(minutes * MINUTE_US))


def run(spark: SparkSession, data: Path, to: Path | None, **options: Any) -> job.RollupResult:
    return follow(rollup(spark, to=to, every=None, data=str(data), **options), lambda _done, _total: None)


def written(spark: SparkSession, to: Path) -> list[Row]:
    if not any(to.glob("batch=*")):
        return []
    return spark.read.parquet(str(to)).orderBy("window_start", "by", "namespace", "key").collect()


def minutes(rows: Iterable[Row]) -> list[tuple[float, str, str | None, int]]:
    return [((row.window_start - UTC_BEGIN) / timedelta(minutes=1), row.by, row.key, row.events) for row in rows]


def test_windows_have_counts_rates_and_latencies_of_streams_and_namespaces(spark: SparkSession, tmp_path: Path):
    data, to = tmp_path / "data", tmp_path / "to"
    items = [at(n / 60, f"a/{n % 2}", size=n) for n in range(60)]
    publish(data, [*items, at(10)])
    assert run(spark, data, to).events == 61
    rows = written(spark, to)
    assert minutes(rows) == [(0, "namespace", None, 60), (0, "stream", "0", 30), (0, "stream", "1", 30)]
    whole, even, odd = rows
    assert (whole.bytes, even.bytes, odd.bytes) == (sum(range(60)), sum(range(0, 60, 2)), sum(range(1, 60, 2)))
    assert (whole.events_per_s, odd.events_per_s, odd.bytes_per_s) == (1.0, 0.5, 15.0)
    assert odd.latency_p50_ms <= odd.latency_p95_ms <= odd.latency_p99_ms
    # The newest of 30 events, one every two seconds, was stored 58 s sooner after its time than the oldest.
    assert odd.latency_p99_ms - odd.latency_p50_ms == pytest.approx(29_000, abs=2_500)
    assert odd.lag_ms >= even.lag_ms - 1001
    assert spark.read.parquet(str(to)).columns == [*COLUMNS, "batch"]


def test_a_timestamp_at_the_end_of_the_calendar_does_not_end_the_query(spark: SparkSession, tmp_path: Path):
    data, to = tmp_path / "data", tmp_path / "to"
    publish(data, [at(0), *(("a/1", Event(b"", timestamp_us=time_us)) for time_us in (MIN_TIME_US, MAX_TIME_US))])
    assert run(spark, data, to).events == 3
    assert minutes(written(spark, to)) == [(0, "namespace", None, 1), (0, "stream", "1", 1)]


def test_late_events_count_while_their_window_is_open_and_are_told_of_after(spark: SparkSession, tmp_path: Path):
    data, to = tmp_path / "data", tmp_path / "to"
    chosen = {"by": "stream", "watermark": timedelta(minutes=2)}
    publish(data, [at(0.1), at(2.5)])
    assert run(spark, data, to, **chosen) == job.RollupResult(2, 0)
    assert written(spark, to) == []  # 2.5 less 2 is within the first minute
    publish(data, [at(0.9), at(3.1)])  # late, and in time
    assert run(spark, data, to, **chosen) == job.RollupResult(2, 0)
    assert minutes(written(spark, to)) == [(0, "stream", "1", 2)]
    publish(data, [at(0.5), at(6)])  # too late
    assert run(spark, data, to, **chosen) == job.RollupResult(2, 1)
    assert minutes(written(spark, to)) == [(0, "stream", "1", 2), (2, "stream", "1", 1), (3, "stream", "1", 1)]


def test_events_of_a_rollup_are_in_streams_and_not_read_by_it(spark: SparkSession, tmp_path: Path):
    data, checkpoint = tmp_path / "data", tmp_path / "checkpoint"
    publish(data, [at(0, "a b/1/2"), at(9, "a b/1/2")])
    for _ in range(3):  # the first run's events are stored when the second run reads
        run(spark, data, None, to_namespace="sums", checkpoint=checkpoint)
    found = spark.read.format("headrace").options(data=str(data), namespace="sums").load().orderBy("key").collect()
    assert [row.key for row in found] == ["a b", "a b/1/2"]
    of_stream = json.loads(found[1].payload)
    assert set(of_stream) == set(COLUMNS)
    assert (of_stream["key"], of_stream["events"], of_stream["by"]) == ("1/2", 1, "stream")
    assert of_stream["window_end"] == "2023-11-14T22:15:00.000Z"
    assert {row.timestamp for row in found} == {UTC_BEGIN + timedelta(minutes=1)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"to_namespace": "a", "namespace": "a"}, "namespace 'a' is the one that is read"),
        ({"to_namespace": "a*"}, "namespace 'a\\*' stands for several"),
        ({"by": "day"}, "by stream, namespace or both, not 'day'"),
        ({"colour": "red"}, "option 'colour' is not for a rollup"),
        ({"window": timedelta(0)}, "give 1 millisecond or more"),
        ({"start": "soon"}, "option 'start' is earliest"),
    ],
)
def test_impossible_arguments_are_refused(spark: SparkSession, tmp_path: Path, options: dict[str, Any], text: str):
    with pytest.raises(InvalidArgument, match=text):
        rollup(spark, to=tmp_path / "to", data=str(tmp_path), **options)
    assert not (tmp_path / "to").exists()


def test_a_checkpoint_goes_with_one_rollup_and_its_directory(spark: SparkSession, tmp_path: Path):
    data, to = tmp_path / "data", tmp_path / "to"
    publish(data, [at(0), at(9)])
    run(spark, data, to)
    with pytest.raises(InvalidArgument, match="its rollup has window_ms 60000, not 1000"):
        run(spark, data, to, window=timedelta(seconds=1))
    with pytest.raises(InvalidArgument, match="has the output of a rollup with another checkpoint than"):
        run(spark, data, to, checkpoint=tmp_path / "other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidArgument, match="not empty, and no rollup's"):
        run(spark, data, tmp_path / "to2", checkpoint=tmp_path / "full")


KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.pipeline.jobs import rollup as job
from headrace.pipeline.session import session

data, to, where, batch = sys.argv[1:]
write, publish = job._Job._write, job.publish_batch

def kill(*_):
    os.killpg(0, signal.SIGKILL)

def killed_write(self, frame, number):
    if number == int(batch) and where == "before":
        kill()
    write(self, frame, number)
    if number == int(batch) and where == "after":
        kill()

def killed_publish(frame, number, **options):
    if number == int(batch) and where == "between":
        kill()
    publish(frame, number, **options)

job._Job._write, job.publish_batch = killed_write, killed_publish
spark = session("killed", "local[2]")
options = {"data": data, "maxEventsPerTrigger": 100}
job.follow(job.rollup(spark, to=to, to_namespace="sums", every=None, **options), lambda *_: None)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rollup_that_is_killed_and_restarted_gives_each_window_once(spark: SparkSession, tmp_path: Path):
    data, to = tmp_path / "data", tmp_path / "to"
    publish(data, [at(n / 20, f"a/{n % 3}") for n in range(600)], queues=1)
    for where, batch in (("between", 2), ("after", 3)):
        command = [sys.executable, "-c", KILLED, str(data), str(to), where, str(batch)]
        done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert run(spark, data, to, to_namespace="sums", maxEventsPerTrigger=100).events > 0
    expected = [(n, "namespace", None, 20) for n in range(28)]
    assert [row for row in minutes(written(spark, to)) if row[1] == "namespace"] == expected
    payload = "CAST(payload AS STRING)"
    frame = spark.read.format("headrace").options(data=str(data), namespace="sums", key="a").load()
    ends = [json.loads(row[0])["window_end"] for row in frame.selectExpr(payload).collect()]
    assert len(ends) == len(set(ends)) == 28
    assert sum(pq.read_metadata(file).num_rows for file in to.glob("batch=*/*.parquet")) == 4 * 28


@pytest.mark.slow
def test_the_command_reports_its_result(tmp_path: Path, spark_environment: None):
    data, to = tmp_path / "data", tmp_path / "to"
    publish(data, [at(0), at(9)])
    program = [SCRIPT, "pipeline", "rollup"]
    arguments = ["--data", str(data), "--to", str(to), "--streams", "a/*", "--window", "30s", "--once", "--json"]
    command = [*program, *arguments, "--master", "local[2]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"events": 2, "late": 0}
    (file,) = to.glob("batch=*/*.parquet")
    assert pq.read_metadata(file).num_rows == 2
