"""The times at which records were stored."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import pytest

from benchmarks.kafka_servers import KafkaServer
from headrace.adapters.kafka.client import KafkaClients, PartitionConsumer
from headrace.adapters.kafka.options import KafkaOptions
from headrace.adapters.kafka.record_times import RecordTimes
from headrace.adapters.kafka.secrets import ClientSettings
from headrace.streams.errors import StorageError
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
