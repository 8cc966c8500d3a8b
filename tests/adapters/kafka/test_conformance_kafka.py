"""The conformance suite over a real broker of Kafka, for packed and for raw topics."""

from __future__ import annotations

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
from headrace.adapters.conformance.harness import check_receipt, contents, soon, take
from headrace.streams.events import MAX_EVENT_BYTES, Event, EventBatch
from headrace.streams.identity import StreamId


class TestKafka(ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable, ConformsToIdempotent):
    @pytest.fixture(autouse=True)
    def server(self, kafka_server: KafkaServer) -> None:
        self.bootstrap = kafka_server.address

    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        topic = "conformance" + ".".join(directory.parts[-2:])
        return await open_adapter("kafka", context, {"bootstrap": self.bootstrap, "topic": topic})


@pytest.mark.slow
class TestRawKafka(ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable, ConformsToIdempotent):
    """Each event is a record, and is received as a batch of one event."""

    batch_events = 1

    @pytest.fixture(autouse=True)
    def server(self, kafka_server: KafkaServer) -> None:
        self.bootstrap = kafka_server.address

    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        options = {"bootstrap": self.bootstrap, "topic": "raw" + ".".join(directory.parts[-2:])}
        return await open_adapter("kafka", context, options | {"format": "raw", "namespace": "conformance"})

    async def test_enqueued_batches_are_received_unchanged(self, tmp_path: Path) -> None:
        """Each event comes in a batch of its own. The receipt has the position of the first one."""
        keys = ["", "a/b", "ключ\n\x00", "k" * 1024]
        rich = [
            Event(b"one", headers={"type": "größer", "": "empty"}, id="id-1", timestamp_us=1_700_000_000_000_001),
            Event(b"", id="id-2", timestamp_us=-5),
            Event(bytes(range(256)), headers={"k": ""}),
            *(Event(str(number).encode()) for number in range(3000)),
        ]
        batches = [EventBatch.of(StreamId("conformance", key), [b"x"]) for key in keys]
        batches.append(EventBatch.of(StreamId("conformance", "rich"), rich))
        async with self.adapter(tmp_path) as adapter:
            receipts = await soon(adapter.enqueue([(0, batch) for batch in batches]))
            received = await take(await adapter.open_receiver(0), len(keys) + len(rich))
        assert [contents(batch) for batch in received[: len(keys)]] == [contents(batch) for batch in batches[:-1]]
        assert [content for batch in received[len(keys) :] for content in contents(batch)[1:]] == list(
            contents(batches[-1])[1:]
        )
        for receipt, batch in zip(receipts, received, strict=False):
            check_receipt(adapter, receipt, batch)
            assert not receipt.duplicate

    async def test_a_very_large_batch_is_stored_whole_or_refused_whole(self, tmp_path: Path) -> None:
        large = EventBatch.of(StreamId("conformance", "large"), [bytes(MAX_EVENT_BYTES)] * 24)
        async with self.adapter(tmp_path) as adapter:
            await soon(adapter.enqueue([(0, large)]))
            received = await take(await adapter.open_receiver(0), 24)
        assert [payload for batch in received for payload in batch.payloads()] == large.payloads()
