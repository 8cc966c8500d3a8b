"""The example of a raw topic of Kafka, as a process, with fewer records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kafka_servers import KafkaServer
from tests.servers import kafka_server

__all__ = ("kafka_server",)

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "raw_topic.py"
RECORDS = 10_000


@pytest.mark.long
def test_existing_topic_is_consumed_in_order_with_its_poison_as_a_dead_letter(
    kafka_server: KafkaServer, tmp_path: Path
) -> None:
    command = [sys.executable, EXAMPLE, kafka_server.address, "--records", str(RECORDS)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    total = sum(number % 97 for number in range(RECORDS) if number != RECORDS // 2)
    printed = ran.stdout.splitlines()
    assert printed[:2] == [f"1000 customers, sum {total}", "dead letter: b'{poison' after 3 attempts"]
    assert len(printed) == 3
