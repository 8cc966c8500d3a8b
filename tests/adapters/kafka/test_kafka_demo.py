"""`headrace demo` and `headrace queues` over Kafka."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kafka_servers import KafkaServer
from tests.cli.commandline import ENVIRONMENT, SCRIPT
from tests.cli.flights_file import write_flights

EVENTS = 2000


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def document(directory: Path, *arguments: str) -> Any:
    done = run(directory, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_the_flights_go_over_kafka_and_a_second_run_starts_over(kafka_server: KafkaServer, tmp_path: Path) -> None:
    write_flights(tmp_path / "flights.csv", EVENTS)
    demo = ["demo", "--flights", "flights.csv", "--data", "d"]
    on_kafka = [*demo, "--adapter", "kafka", "--bootstrap", kafka_server.address]
    for _ in range(2):
        found = document(tmp_path, *on_kafka)
        assert (found["ok"], found["events"]) == (True, EVENTS)
    queues = document(tmp_path, "queues", "--data", "d", "--provider", "default")
    assert [queue["lag_batches"] for queue in queues] == [0] * len(queues)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--adapter", "kafka"], "add --bootstrap HOST:PORT"),
        (["--bootstrap", "localhost:9092"], "add --adapter kafka"),
        (["--adapter", "kafka", "--bootstrap", "localhost:9092", "--durability", "commit"], "a setting of the log"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(tmp_path: Path, arguments: list[str], problem: str) -> None:
    done = run(tmp_path, "demo", *arguments)
    assert done.returncode == 2
    assert problem in done.stderr
