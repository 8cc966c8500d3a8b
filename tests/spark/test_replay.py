"""Replays: events are published again in order and exactly once, even if any process is killed at any time."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace import Event, Provider, StreamId
from headrace.pipeline import archive, replay
from headrace.streams.errors import DefinitionConflict, InvalidArgument, NotFound

START = datetime(2026, 11, 21, 10, tzinfo=UTC)
Streams = Mapping[tuple[str, str], list[tuple[Any, ...]]]


def publish(data: Path, first: int, count: int, queues: int = 2) -> None:
    """Publish numbered events of six streams in two namespaces, one a millisecond; the time of every tenth is late."""

    async def run() -> None:
        async with Provider.open(data, queues=queues) as provider:
            for number in range(first, first + count, 4):
                stream = StreamId(("a/b", "n")[number % 8 // 4], f"k{number % 3}")
                await provider.publish(stream, [event(each) for each in range(number, number + 4)])

    asyncio.run(run())


def event(number: int) -> Event:
    late = 50 if number % 10 == 9 else 0  # behind the others of its stream
    time_us = int(START.timestamp() * 1_000_000) + (number - late) * 1_000
    if number % 7:
        return Event(b"%d" % number, timestamp_us=time_us)
    return Event(b"%d" % number, headers={"n": str(number)}, id=f"e{number}", timestamp_us=time_us)


def streams(spark: SparkSession, data: Path) -> Streams:
    """The events of each stream, in its order."""
    rows = spark.read.format("headrace").option("data", str(data)).load().collect()
    found: dict[tuple[str, str], list[tuple[Any, ...]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.queue, row.offset, row["index"])):
        found[row.namespace, row.key].append((bytes(row.payload), row.headers, row.id, row.timestamp))
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    publish(tmp_path / "other", 0, 0, queues=3)
    return tmp_path / "other"


def test_the_replay_of_an_archive_is_the_original_stream_by_stream(
    spark: SparkSession, data: Path, other: Path, tmp_path: Path
):
    for turn in range(2):
        publish(data, turn * 1200, 1200)
        archive(spark, tmp_path / "kept", data=data)
    told: list[tuple[int, int]] = []
    done = replay(spark, tmp_path / "kept", data=other, events_per_step=800, progress=lambda *n: told.append(n))
    assert (done.events, done.total) == (2400, 2400)
    assert len(told) > 2
    assert told[0] == (0, 2400)
    assert told[-1] == (2400, 2400)
    assert streams(spark, other) == streams(spark, data)
    assert not list((other / "staging").rglob("*.json"))


def test_a_part_of_a_log_goes_to_another_namespace(spark: SparkSession, data: Path):
    publish(data, 0, 400)
    before = streams(spark, data)
    since, until = START + timedelta(milliseconds=100), START + timedelta(milliseconds=300)
    done = replay(spark, {"data": data}, streams="a%2Fb/k?", since=since, until=until, to_namespace="copy", data=data)
    after = streams(spark, data)
    for key in ("k0", "k1", "k2"):
        chosen = [each for each in before["a/b", key] if since <= each[3].replace(tzinfo=UTC) < until]
        assert after["copy", key] == chosen
        assert chosen
    assert done.events == sum(len(each) for (namespace, _), each in after.items() if namespace == "copy")
    assert {name: each for name, each in after.items() if name[0] != "copy"} == before


# slow: a whole archive and a part of a log are replayed above
@pytest.mark.slow
def test_a_part_of_an_archive_is_chosen_as_of_a_log(spark: SparkSession, data: Path, other: Path, tmp_path: Path):
    publish(data, 0, 400)
    archive(spark, tmp_path / "kept", data=data)
    since = START + timedelta(milliseconds=111)
    of_archive = replay(spark, tmp_path / "kept", data=other, to_namespace="archive", streams="*b/k1", since=since)
    of_log = replay(spark, {"data": data}, data=other, to_namespace="log", streams="*b/k1", since=since)
    assert of_archive.events == of_log.events > 0
    found = streams(spark, other)
    assert found["archive", "k1"] == found["log", "k1"]


class Killed(BaseException):
    pass


def test_a_replay_that_is_killed_goes_on_where_it_was(spark: SparkSession, data: Path, other: Path):
    publish(data, 0, 1200)

    def kill(done: int, _total: int) -> None:
        if done:
            raise Killed

    with pytest.raises(Killed):
        replay(spark, {"data": data}, data=other, events_per_step=400, progress=kill)
    publish(data, 1200, 400)  # comes too late for it
    (plan,) = (other / "staging").rglob("replay-*.json")
    content = json.loads(plan.read_bytes())
    plan.write_text(json.dumps(content | {"done": 0}))  # killed before it could note that the step was published
    done = replay(spark, {"data": data}, data=other)
    assert done.total == 1200
    original = streams(spark, data)
    for name, found in streams(spark, other).items():
        assert found == [each for each in original[name] if int(each[0]) < 1200]


def test_with_a_name_a_replay_is_done_once_for_ever(spark: SparkSession, data: Path, other: Path):
    publish(data, 0, 40)
    assert replay(spark, {"data": data}, data=other, name="restore") == ("restore", 40, 40)
    assert replay(spark, {"data": data}, data=other, name="restore") == ("restore", 0, 40)
    with pytest.raises(DefinitionConflict, match="replay 'restore' is another one"):
        replay(spark, {"data": data}, data=other, name="restore", streams="n/*")
    assert replay(spark, {"data": data}, data=other).events == 40
    assert sum(map(len, streams(spark, other).values())) == 80


# Both take 1.6 s, minus the time of one chunk.
# slow: the pace itself has tests without Spark
@pytest.mark.slow
@pytest.mark.parametrize(("rate", "speed"), [(500, None), (None, 0.5)])
def test_at_a_chosen_speed_all_comes_in_order_once_and_not_sooner(
    spark: SparkSession, data: Path, other: Path, rate: float | None, speed: float | None
):
    publish(data, 0, 800)
    assert replay(spark, {"data": data}, data=other, rate=rate, speed=speed).events == 800
    assert streams(spark, other) == streams(spark, data)
    rows = spark.read.format("headrace").option("data", str(other)).option("columns", "stored").load().collect()
    assert max(row.stored for row in rows) - min(row.stored for row in rows) >= timedelta(seconds=0.8)


def test_at_a_chosen_speed_it_goes_on_where_it_was(
    spark: SparkSession, data: Path, other: Path, monkeypatch: pytest.MonkeyPatch
):
    publish(data, 0, 800)
    monkeypatch.setattr("headrace.pipeline.jobs.pacing.NOTE_S", 0.0)
    noted: list[int] = []

    def kill(done: int, _total: int) -> None:
        noted.append(done)
        if done > 300:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        replay(spark, {"data": data}, data=other, rate=2_000, progress=kill)
    published = sum(map(len, streams(spark, other).values()))
    assert 300 < published < 800
    (plan,) = (other / "staging").rglob("replay-*.json")
    content = json.loads(plan.read_bytes())
    plan.write_text(json.dumps(content | {"noted": None}))  # killed before it could note anything
    done = replay(spark, {"data": data}, data=other, rate=100_000)
    assert done == (content["app"], 800 - published, 800)
    assert streams(spark, other) == streams(spark, data)


def test_impossible_replay_is_refused(spark: SparkSession, data: Path, tmp_path: Path):
    publish(data, 0, 4)
    with pytest.raises(InvalidArgument, match="into itself needs another namespace: give --to-namespace"):
        replay(spark, {"data": data}, data=data)
    with pytest.raises(InvalidArgument, match="not both"):
        replay(spark, {"data": data}, data=tmp_path / "new", speed=1, rate=1)
    with pytest.raises(InvalidArgument, match="numbers above 0"):
        replay(spark, {"data": data}, data=tmp_path / "new", speed=0)
    with pytest.raises(InvalidArgument, match="'staging' is missing"):
        replay(spark, {"data": data}, server="localhost:1")
    with pytest.raises(NotFound, match="there is none"):
        replay(spark, tmp_path / "nothing", data=tmp_path / "new")
    assert not (tmp_path / "new").exists()
