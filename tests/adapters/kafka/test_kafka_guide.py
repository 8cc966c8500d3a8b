"""docs/kafka.md: its program runs as it is, on a broker."""

from pathlib import Path

import pytest

from benchmarks.kafka_servers import KafkaServer
from tests.documents.reader import Follower, code_blocks


@pytest.mark.timeout(300)
def test_the_program_handles_its_event(kafka_server: KafkaServer, tmp_path: Path) -> None:
    program = code_blocks("docs/kafka.md")[0]
    with Follower(tmp_path, {"localhost:9092": kafka_server.address}) as follower:
        assert follower.follow(program) == "orders/42 b'paid'\n"
