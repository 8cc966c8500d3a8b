"""Brokers that have lost the last records of a partition: what is published after that is delivered."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from benchmarks.kafka_servers import KafkaServer
from headrace import Event, Provider, StorageError, StreamId
from tests.adapters.kafka.opening import new_topic

pytestmark = [pytest.mark.slow, pytest.mark.long]  # starts a broker, twice

STREAM = StreamId("orders", "1")
KEPT, READ, NEW = 5, 15, 4
_BATCH_HEADER = struct.Struct(">qi")
"""The offset of the first record of a batch of Kafka, and the number of bytes that follow."""


@pytest.fixture
def server() -> Iterator[KafkaServer]:
    """A broker that may be restarted."""
    with KafkaServer() as server:
        yield server


def lose_the_end(partition: Path) -> None:
    """Cut the file of a partition before the offset KEPT. The broker makes the other files again after a kill."""
    log = partition / "00000000000000000000.log"
    records, at = log.read_bytes(), 0
    while _BATCH_HEADER.unpack_from(records, at)[0] < KEPT:
        at += _BATCH_HEADER.size + _BATCH_HEADER.unpack_from(records, at)[1]
    log.write_bytes(records[:at])


async def test_what_is_published_after_the_loss_is_delivered(
    server: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic, got = new_topic(), list[bytes]()

    def provider() -> AbstractAsyncContextManager[Provider]:
        options = {"bootstrap": server.address, "topic": topic}
        return Provider.open(tmp_path / "headrace", adapter="kafka", queues=1, options=options)

    async def handle(event: Event) -> None:
        got.append(event.payload)

    async with provider() as opened:
        reading = await opened.subscribe("all", "orders/*", handle)
        for number in range(READ):
            await opened.publish(STREAM, b"%d" % number)
        await reading.caught_up()
        await asyncio.to_thread(server.kill)
        lose_the_end(server.directory / "data" / f"{topic}-0")
        await asyncio.to_thread(server.start)
        while "has lost its end" not in caplog.text:  # noqa: ASYNC110 (faults do not notify)
            await asyncio.sleep(0.05)
        # The client numbers its records in each partition, and the broker has forgotten the last numbers.
        with pytest.raises(StorageError, match="publish them again"):
            await opened.publish(STREAM, b"new 0")
        for number in range(NEW):
            await opened.publish(STREAM, b"new %d" % number)
    async with provider() as opened:
        reading = await opened.subscribe("all", "orders/*", handle)
        await reading.caught_up()
        gaps = await opened.gaps("all")
    assert got[READ:] == [b"new %d" % number for number in range(NEW)]
    assert {(gap.low.offset, gap.high.offset) for gap in gaps} == {(KEPT, READ)}
