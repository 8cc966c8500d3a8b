"""`headrace pipeline` as a real process: one clear line if something is wrong, and quiet if nothing is."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.servers import java_home
from headrace import Provider, StreamId
from tests.cli.commandline import ENVIRONMENT, SCRIPT, Headrace, Ran

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]
Run = Callable[..., Ran]


def publish(data: Path, count: int) -> None:
    async def run() -> None:
        async with Provider.open(data, queues=2) as provider:
            for stream in (StreamId("a/b", "one"), StreamId("n", "two")):
                await provider.publish(stream, [b"%d" % number for number in range(count)])

    asyncio.run(run())


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start `headrace pipeline` in `tmp_path`, with a JVM that starts quickly. What is left at the end is killed."""
    environment = ENVIRONMENT | {
        "JAVA_HOME": str(java_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": "--driver-java-options -XX:TieredStopAtLevel=1 pyspark-shell",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object, **more: str) -> subprocess.Popen[bytes]:
        command = [SCRIPT, "pipeline", *map(str, arguments)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment | more, stdout=pipe, stderr=pipe, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def pipeline(begin: Callable[..., "subprocess.Popen[bytes]"]) -> Run:
    """Run `headrace pipeline` to its end."""

    def run(*arguments: object, **environment: str) -> Ran:
        process = begin(*arguments, **environment)
        out, err = process.communicate(timeout=300)
        return Ran(process.returncode, out.decode(), err.decode())

    return run


def test_the_jobs_are_listed_without_spark(headrace: Headrace):
    out = headrace("pipeline", "--help").out
    listed = [line.split()[0] for line in out.partition("Jobs:\n")[2].splitlines()]
    assert listed == ["archive", "replay", "rollup", "audit", "states"]


def test_spark_that_is_missing_is_told(pipeline: Run, tmp_path: Path):
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError('No module named pyspark', name='pyspark')")
    said = pipeline("archive", "kept", "--data", "data", PYTHONPATH=str(tmp_path)).refused(1)
    assert said == "headrace pipeline needs Spark, and pyspark is missing: install headrace[spark]"


def test_java_that_is_missing_is_told(pipeline: Run, tmp_path: Path):
    publish(tmp_path / "data", 1)
    said = pipeline("archive", "kept", "--data", "data", JAVA_HOME=str(tmp_path)).refused(1)
    assert said.startswith(f"JAVA_HOME={tmp_path} has no bin/java that runs: install Java 17 or newer")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["archive"], "Missing argument 'DIR'"),
        (["archive", "kept"], "Missing option '--data' or '--server'"),
        (["archive", "kept", "--data", "d", "--streams", "nothing"], "'nothing' selects no stream"),
        (["replay", "--data", "d"], "give one of --archive, --from-data and --from-server"),
        (["replay", "--archive", "kept", "--data", "d", "--since", "noon"], "'noon' is not a time"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments: list[str], reason: str, headrace: Headrace):
    assert reason in headrace("pipeline", *arguments).refused(2)


@pytest.mark.slow
def test_streams_are_archived_and_replayed(pipeline: Run, tmp_path: Path):
    publish(tmp_path / "data", 500)
    done = pipeline("archive", "kept", "--data", "data", "--json")
    assert done.err == ""
    assert (done.json["events"], done.json["total"], done.json["gaps"]) == (1000, 1000, [])
    again = pipeline("archive", "kept", "--data", "data")
    assert (again.out, again.err) == ("archived 0 events in 0 files, 1,000 in all\n", "")
    replayed = pipeline("replay", "--archive", "kept", "--data", "other", "--streams", "n/*", "--json")
    assert (replayed.json["events"], replayed.err) == (500, "")


@pytest.mark.slow
def test_an_error_in_a_process_of_spark_is_one_line(pipeline: Run, tmp_path: Path):
    publish(tmp_path / "data", 5)
    log = tmp_path / "spark.log"
    said = pipeline("archive", "kept", "--data", "data", "--streams", "nowhere/*", "--spark-log", log).refused(1)
    assert said == "option 'namespace': no event was ever published to 'nowhere'; there are: a/b, n"
    assert "Traceback" in log.read_text() or log.stat().st_size > 0


@pytest.mark.slow
def test_an_error_of_java_is_one_line(pipeline: Run, tmp_path: Path):
    publish(tmp_path / "data", 1)
    said = pipeline("archive", "kept", "--data", "data", "--master", "nowhere").refused(1)
    assert said.startswith("Spark failed: Could not parse Master URL: 'nowhere'")
    assert said.endswith(": --spark-log FILE keeps its output")


@pytest.mark.slow
def test_interrupted_job_continues(begin: Callable[..., "subprocess.Popen[bytes]"], pipeline: Run, tmp_path: Path):
    publish(tmp_path / "data", 50_000)
    runs: set[Path] = set()
    for number in (signal.SIGINT, signal.SIGTERM):
        process = begin("archive", "kept", "--data", "data")
        while process.poll() is None and not set((tmp_path / "kept").glob("_headrace/run-*")) - runs:
            time.sleep(0.01)
        runs |= set((tmp_path / "kept").glob("_headrace/run-*"))
        process.send_signal(number)
        out, err = process.communicate(timeout=100)
        assert (process.returncode, out, err) == (130, b"", b"headrace: interrupted\n")
    done = pipeline("archive", "kept", "--data", "data", "--json").json
    assert (done["events"], done["total"]) == (100_000, 100_000)
    assert json.loads((tmp_path / "kept/_headrace/state.json").read_bytes())["run"] == 1
    assert not list((tmp_path / "kept").glob("_headrace/run-*"))
