"""What librdkafka logs, as users see it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kafka_servers import KafkaServer
from headrace.adapters.kafka.client_log import ClientLog
from tests.adapters.kafka.opening import batch, new_topic, opened
from tests.cli.commandline import ENVIRONMENT

REFUSED = (
    "[thrd:127.0.0.1:60137/{of}]: 127.0.0.1:60137/{of}: Connect to ipv4#127.0.0.1:60137 failed: Connection refused "
    "(after 0ms in state CONNECT)"
)
FORMAT = "%s [%s] %s"


@pytest.fixture
def client_log() -> ClientLog:
    return ClientLog(logging.getLogger("tests.kafka"), lambda text: text.replace("hunter-2", "***"))


@pytest.fixture
def own_broker() -> Iterator[KafkaServer]:
    with KafkaServer() as broker:
        yield broker


def test_failed_connections_to_a_broker_are_one_line(client_log: ClientLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(900):
        text = REFUSED.format(of="bootstrap" if number % 2 else "1")
        client_log.log(logging.WARNING, FORMAT, "FAIL", f"headrace#consumer-{number}", text)
    client_log.log(logging.WARNING, FORMAT, "FAIL", "headrace#consumer-1", REFUSED.replace("60137", "7").format(of="2"))
    first, second = (record.message for record in caplog.records)
    assert first == ("Kafka client: 127.0.0.1:60137/1: Connect to ipv4#127.0.0.1:60137 failed: Connection refused")
    assert "127.0.0.1:7/2" in second


def test_lines_that_were_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 1.0, 29.9, 30.0))
    client_log = ClientLog(logging.getLogger("tests.kafka"), str, lambda: next(times))
    for _ in range(3):
        client_log.log(logging.WARNING, FORMAT, "FAIL", "c", REFUSED.format(of="1"))
    client_log.log(logging.WARNING, FORMAT, "FAIL", "c", REFUSED.format(of="1"))
    assert caplog.records[-1].message.endswith("refused; 2 lines like this were left out")


def test_secrets_are_masked(client_log: ClientLog, caplog: pytest.LogCaptureFixture) -> None:
    client_log.log(logging.WARNING, FORMAT, "SASL", "c", "the password hunter-2 is wrong")
    assert caplog.records[0].message == "Kafka client: the password *** is wrong"


def test_broker_that_has_just_started_is_no_warning(client_log: ClientLog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    text = "[thrd:main]: Failed to acquire idempotence PID from broker 127.0.0.1:7/1: Broker: Coordinator load in "
    client_log.log(logging.WARNING, FORMAT, "GETPID", "c", f"{text}progress: retrying")
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


@pytest.mark.slow
async def test_outage_is_a_few_lines_that_say_when_queues_are_read_again(
    own_broker: KafkaServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(own_broker.address, new_topic(), queues=4) as adapter:
        receivers = [await adapter.open_receiver(queue) for queue in range(4)]
        waiting = [asyncio.ensure_future(receiver.receive(1, 1)) for receiver in receivers]
        await asyncio.to_thread(own_broker.stop)
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.to_thread(own_broker.start)
        async with asyncio.timeout(30):
            while "can be read and written again" not in caplog.text:  # noqa: ASYNC110 (the watch logs it)
                await asyncio.sleep(0.1)
    assert "cannot be read and written" in caplog.text
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) < 12


@pytest.mark.slow
def test_first_publish_prints_nothing(own_broker: KafkaServer, tmp_path: Path) -> None:
    program = f"""
import asyncio
from headrace import Provider

async def main():
    options = {{"bootstrap": {own_broker.address!r}}}
    async with Provider.open("data", adapter="kafka", queues=2, options=options) as provider:
        await provider.stream("a", "b").publish(b"x")

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.long
async def test_offsets_that_cannot_be_committed_are_one_line(
    own_broker: KafkaServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(own_broker.address, new_topic()) as adapter:
        await adapter.enqueue([(0, batch("x"))])
        await asyncio.to_thread(own_broker.stop)
        for _ in range(2):
            await adapter.show_progress({"one": {0: 1}, "two": {0: 1}})
        assert caplog.text.count("is not shown to Kafka") == 1
