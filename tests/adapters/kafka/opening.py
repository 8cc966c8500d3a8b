"""Opens queues on the shared broker, and writes records as other programs do."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewPartitions, NewTopic

from headrace.adapters import AdapterContext, QueueReceiver, Received
from headrace.adapters.kafka import KafkaAdapter, KafkaLimits, open_adapter
from headrace.streams.events import EventBatch
from headrace.streams.identity import StreamId

_numbers = itertools.count()
ANY = 1 << 30
QUICK = KafkaLimits(request_s=2.0, watch_s=0.2, commit_s=0.05)


def new_topic() -> str:
    return f"topic{next(_numbers)}"


@asynccontextmanager
async def opened(
    address: str, topic: str, *, queues: int = 1, limits: KafkaLimits = QUICK, **options: Any
) -> AsyncGenerator[KafkaAdapter]:
    """Open queues. Keyword arguments are options of the adapter, or `location` and `provider` of its context."""
    context = AdapterContext(
        provider=options.pop("provider", "tests"), queues=queues, location=options.pop("location", {})
    )
    adapter = await open_adapter(context, {"bootstrap": address, "topic": topic, **options}, limits)
    try:
        yield adapter
    finally:
        await adapter.aclose()


def batch(text: str, key: str = "s") -> EventBatch:
    return EventBatch.of(StreamId("tests", key), [text.encode()])


def texts(batches: Sequence[EventBatch]) -> list[str]:
    return [payload.decode() for each in batches for payload in each.payloads()]


async def received(receiver: QueueReceiver, count: int) -> list[str]:
    """Return the payloads of the next batches, at least this many. There must be no gap before."""
    found: list[str] = []
    while len(found) < count:
        result: Received = await receiver.receive(ANY, ANY)
        assert result.gap is None
        found += texts(result.batches)
    return found


class ForeignProgram:
    """Another program that uses the broker."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.admin = cast(Any, AdminClient({"bootstrap.servers": address, "log_level": 0}))

    def make_topic(self, topic: str, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        (made,) = self.admin.create_topics([NewTopic(topic, partitions, 1, config=dict(settings or {}))]).values()
        made.result(30)
        self._wait_until_led(topic, partitions)

    def _wait_until_led(self, topic: str, partitions: int) -> None:
        """Wait until each partition answers: a broker learns of a new topic after the controller has made it."""
        asked = {TopicPartition(topic, each): OffsetSpec.latest() for each in range(partitions)}
        deadline = time.monotonic() + 30
        while any(one.exception() for one in self.admin.list_offsets(asked, request_timeout=5).values()):
            assert time.monotonic() < deadline, f"{topic} has no leader"
            time.sleep(0.01)

    def add_partitions(self, topic: str, partitions: int) -> None:
        (added,) = self.admin.create_partitions([NewPartitions(topic, partitions)]).values()
        added.result(30)

    def set_topic(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        (done,) = self.admin.incremental_alter_configs([resource]).values()
        done.result(30)

    def setting(self, topic: str, name: str) -> str:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        (asked,) = self.admin.describe_configs([resource]).values()
        return asked.result(30)[name].value

    def delete_topic(self, topic: str) -> None:
        (deleted,) = self.admin.delete_topics([topic]).values()
        deleted.result(30)

    def write(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        transaction: str = "",
        aborted: bool = False,
        time_ms: int = 0,
    ) -> None:
        """Write records to partition 0. With `transaction`, in one transaction that is committed, or aborted. `time_ms`
        is their time; 0: now."""
        settings = {"transactional.id": transaction} if transaction else {}
        producer = cast(Any, Producer({"bootstrap.servers": self._address, "log_level": 0, **settings}))
        if transaction:
            producer.init_transactions(30)
            producer.begin_transaction()
        for value in values:
            producer.produce(
                topic, key=key, value=value, partition=0, headers=dict(headers or {}) or None, timestamp=time_ms
            )
        if aborted:
            assert not producer.flush(30)
            producer.abort_transaction(30)
        elif transaction:
            producer.commit_transaction(30)
        assert not producer.flush(30)
