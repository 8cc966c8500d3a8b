"""Clients that log in by SASL, and passwords, which no output has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kafka_servers import KafkaServer
from headrace.streams.errors import StorageError
from tests.adapters.kafka.opening import QUICK, batch, new_topic, opened, received
from tests.cli.commandline import ENVIRONMENT

PASSWORD = "correct-horse-battery"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with KafkaServer(users={"reader": PASSWORD}) as server:
        yield server


def login(password: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "reader",
        "sasl.password": password,
    }


async def test_events_flow_for_a_user_with_a_password(server: KafkaServer) -> None:
    limits = QUICK._replace(request_s=10.0)
    async with opened(server.address, new_topic(), limits=limits, kafka=login(PASSWORD)) as adapter:
        await adapter.enqueue([(0, batch("x"))])
        assert await received(await adapter.open_receiver(0), 1) == ["x"]
        assert PASSWORD not in json.dumps(adapter.location)


async def test_wrong_password_is_an_error_within_the_time_of_a_request(server: KafkaServer) -> None:
    with pytest.raises(StorageError) as refused:
        async with opened(server.address, new_topic(), kafka=login("wrong-password-7")):
            pass
    assert "wrong-password-7" not in str(refused.value)


def test_no_output_has_a_password(server: KafkaServer, tmp_path: Path) -> None:
    """Also if everything is logged, and after the broker has ended."""
    topic = new_topic()
    options = {"bootstrap": server.address, "topic": topic, "kafka": login(PASSWORD)}
    program = f"""
import asyncio, logging
from headrace import Provider

logging.basicConfig(level=logging.DEBUG)

async def main():
    options = {options!r}
    async with Provider.open("data", adapter="kafka", queues=1, options=options) as provider:
        await provider.stream("a", "b").publish(b"x")
        print(provider.adapter.location)
    options["kafka"]["sasl.password"] = "{PASSWORD}-wrong"
    try:
        async with Provider.open("data", options=options):
            pass
    except Exception as error:
        print(error, repr(error))

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert topic in done.stdout  # the location, and the refusal
    assert "DEBUG" in done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    stored = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert PASSWORD.encode() not in stored
