"""The conformance suite over a real broker of Kafka."""

from pathlib import Path

import pytest

from benchmarks.kafka_servers import KafkaServer
from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.conformance import (
    ConformsToDurable,
    ConformsToIdempotent,
    ConformsToQueueAdapter,
    ConformsToRewindable,
)


class TestKafka(ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable, ConformsToIdempotent):
    @pytest.fixture(autouse=True)
    def server(self, kafka_server: KafkaServer) -> None:
        self.bootstrap = kafka_server.address

    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        topic = "conformance" + ".".join(directory.parts[-2:])
        return await open_adapter("kafka", context, {"bootstrap": self.bootstrap, "topic": topic})
