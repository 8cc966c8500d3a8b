"""The examples for Spark, as processes, on flights: plain Python finds the same."""

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyspark
import pytest

from benchmarks.servers import java_home
from headrace import Event, Provider, Start, StreamId
from headrace.cli.demo.flights import Flights, load_flights
from tests.cli.flights_file import write_flights

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
EVENTS = 2_000

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Flights:
    return load_flights(write_flights(tmp_path_factory.mktemp("flights") / "flights.csv", EVENTS))


@pytest.fixture(scope="module")
def data(flights: Flights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the demo publishes them."""
    path = tmp_path_factory.mktemp("data") / "d"
    columns = zip(flights.keys, flights.payloads, flights.departures_us, strict=True)
    events = [(StreamId("flights", key), Event(payload, timestamp_us=time)) for key, payload, time in columns]

    async def run() -> None:
        async with Provider.open(path, queues=4) as provider:
            await provider.publish_many(events)

    asyncio.run(run())
    return path


def run(*command: str | Path) -> str:
    left_out = ("PYSPARK_SUBMIT_ARGS", "PYSPARK_PYTHON", "SPARK_REMOTE", "SPARK_HOME", "SPARK_CONF_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"JAVA_HOME": str(java_home()), "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(flights: Flights) -> list[dict[str, Any]]:
    return [json.loads(payload) for payload in flights.payloads]


@pytest.mark.parametrize("program", [(sys.executable,), (SUBMIT, "--master", "local[2]")], ids=["python", "submit"])
def test_delays_by_carrier_and_hour_are_those_of_the_file(program: Sequence[str], flights: Flights, data: Path):
    expected: dict[tuple[str, int], list[int | None]] = defaultdict(list)
    for flight in documents(flights):
        expected[flight["carrier"], flight["hour"]].append(flight["dep_delay"])
    header, *lines = run(*program, EXAMPLES / "spark_delays.py", data).splitlines()
    assert header == "carrier,hour,scheduled,departed,minutes_late"
    assert [tuple(line.split(",")[:2]) for line in lines] == [(c, str(h)) for c, h in sorted(expected)]
    for line in lines:
        carrier, hour, scheduled, departed, late = line.split(",")
        of_all = expected[carrier, int(hour)]
        known = [delay for delay in of_all if delay is not None]
        assert (int(scheduled), int(departed)) == (len(of_all), len(known))
        assert float(late) == pytest.approx(sum(known) / len(known), abs=0.051)


def test_each_late_flight_is_once_in_the_stream_of_its_carrier(flights: Flights, data: Path, tmp_path: Path):
    late = [flight for flight in documents(flights) if (flight["dep_delay"] or 0) >= 60]
    expected = sorted((flight["carrier"], flight["flight"], flight["dep_delay"]) for flight in late)
    for attempt in range(2):  # the second finds nothing new
        run(sys.executable, EXAMPLES / "spark_late_flights.py", data, tmp_path / "checkpoint")
        found = asyncio.run(published(data, f"check-{attempt}"))
        assert sorted((key, flight["flight"], flight["dep_delay"]) for key, flight in found) == expected


async def published(data: Path, name: str) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []

    async def take(event: Event) -> None:
        assert event.stream is not None
        found.append((event.stream.key, json.loads(event.payload)))

    async with Provider.open(data) as provider:
        subscription = await provider.subscribe(name, "late-flights/*", take, start=Start.earliest())
        await subscription.caught_up()
    return found
