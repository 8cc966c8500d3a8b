"""The times at which records were stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import pytest

from benchmarks.kafka_servers import KafkaServer
from headrace.adapters.kafka.client import KafkaClients, PartitionConsumer
from headrace.adapters.kafka.options import KafkaOptions
from headrace.adapters.kafka.record_times import RecordTimes
from headrace.adapters.kafka.secrets import ClientSettings
from headrace.silo.services.describing import ANSWER_S
from headrace.streams.errors import HeadraceError, StorageError
from tests.adapters.kafka.opening import ForeignProgram, new_topic

DAY_MS = 86_400_000


class CountingClients(KafkaClients):
    consumers = 0

    def consumer(self, group: str = "headrace", more: Mapping[str, Any] | None = None) -> PartitionConsumer:
        self.consumers += 1
        return super().consumer(group, more)


async def test_one_consumer_looks_up_all_times_and_an_error_does_not_end_it(kafka_server: KafkaServer) -> None:
    """A consumer for each time took so long in a silo under load that the lag was not known."""
    topic, foreign = new_topic(), ForeignProgram(kafka_server.address)
    foreign.make_topic(topic, 2, {"message.timestamp.type": "CreateTime", "retention.ms": "-1"})
    for day in range(1, 4):
        foreign.write(topic, [b"x" * 1000], time_ms=day * DAY_MS)
    clients = CountingClients(KafkaOptions(bootstrap=kafka_server.address), ClientSettings({}))
    async with aclosing(RecordTimes(topic, clients, 2.0)) as times:
        for offset in (2, 0, 1, 0):
            assert await times.stored_us(0, offset, 3) == (offset + 1) * DAY_MS * 1000
        assert await times.stored_us(1, 0, 0) is None
        assert clients.consumers == 1
        with pytest.raises(StorageError, match=f"partition 1 of topic '{topic}' cannot be read from offset 5"):
            await times.stored_us(1, 5, 9)
        assert await times.stored_us(0, 1, 4) == 2 * DAY_MS * 1000


async def test_a_partition_that_does_not_answer_makes_no_other_one_wait(kafka_server: KafkaServer) -> None:
    topic, foreign = new_topic(), ForeignProgram(kafka_server.address)
    foreign.make_topic(topic, 2, {"message.timestamp.type": "CreateTime", "retention.ms": "-1"})
    foreign.write(topic, [b"x"], time_ms=DAY_MS)
    clients = KafkaClients(KafkaOptions(bootstrap=kafka_server.address), ClientSettings({}))
    async with aclosing(RecordTimes(topic, clients, 4.0)) as times:
        stuck = asyncio.create_task(times.stored_us(1, 0, 9))  # it ends before, so the lookup waits
        await asyncio.sleep(0.1)
        began = time.monotonic()
        assert await times.stored_us(0, 0, 1) == DAY_MS * 1000
        assert time.monotonic() - began < ANSWER_S
        await asyncio.gather(stuck, return_exceptions=True)


def nowhere() -> KafkaClients:
    return KafkaClients(KafkaOptions(bootstrap="127.0.0.1:1"), ClientSettings({}))


async def test_closing_does_not_wait_for_lookups_that_have_not_begun() -> None:
    times = RecordTimes("t", nowhere(), 0.5)
    lookups = [asyncio.create_task(times.stored_us(queue, 0, 9)) for queue in range(8)]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await times.aclose()
    took = time.monotonic() - began
    await asyncio.gather(*lookups, return_exceptions=True)
    assert took < 1.5


async def test_a_lookup_after_closing_raises_an_error_of_headrace() -> None:
    times = RecordTimes("t", nowhere(), 0.5)
    await times.aclose()
    with pytest.raises(HeadraceError):
        await times.stored_us(0, 0, 9)
