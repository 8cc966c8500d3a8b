"""The queues of a provider on Kafka, read from the partitions of its topic in this process.

Each reader is a consumer of its own, in no group. Nothing is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ..adapters.kafka.client import KafkaClients, KafkaRecord, headers_of
from ..adapters.kafka.formats import PackedFormat, RecordFormat
from ..adapters.kafka.limits import KafkaLimits
from ..adapters.kafka.options import KafkaOptions, with_location
from ..adapters.kafka.partitioners import PartitionMapper
from ..adapters.kafka.raw import RawFormat
from ..adapters.kafka.reading import read_range
from ..adapters.kafka.secrets import ClientSettings
from ..adapters.kafka.topics import KafkaTopics
from ..adapters.receiving import Bounds
from ..adapters.registry import read_options
from ..balancer import StreamQueueMapper
from ..store.control_store import ControlStore
from ..store.datadir import DataDirectory
from ..streams.errors import InvalidArgument, NotFound, OffsetsGone
from ..streams.events import EventBatch
from ..streams.identity import StreamId
from ..streams.subscriptions import Selector
from .access import BatchChunk, QueueAccess, RetainedRange

log = logging.getLogger("headrace.pipeline")

ADAPTER = "kafka"
LIMITS = KafkaLimits(request_s=30.0)


def kafka_location(directory: DataDirectory, provider: str) -> tuple[int, Mapping[str, Any]] | None:
    """Return the number of queues and the location of a provider on Kafka, by the control store of a data directory.
    None: there is no such provider."""

    async def find() -> tuple[int, Mapping[str, Any]] | None:
        store = await ControlStore.open(directory.control_db, existing=True)
        try:
            found = [record for record in await store.providers() if record.name == provider]
        finally:
            await store.aclose()
        return (found[0].queues, found[0].options) if found and found[0].adapter == ADAPTER else None

    return asyncio.run(find()) if Path(directory.control_db).exists() else None


class KafkaAccess(QueueAccess):
    """The topic of a provider. It does not survive a fork: open it in the process that uses it."""

    dense = False

    def __init__(self, provider: str, queues: int, location: Mapping[str, Any]) -> None:
        """Raise NotFound if the topic does not exist, StorageError if the brokers do not answer, InvalidArgument if a
        secret cannot be read."""
        found, self._topic_id = with_location(provider, {}, location)
        options = read_options(ADAPTER, KafkaOptions, found)
        assert options.topic is not None  # a location has it
        self.queues = queues
        self._topic = options.topic
        self._clients = KafkaClients(options, ClientSettings(options.kafka))
        self._topics = KafkaTopics(self._clients, self._clients.admin(), LIMITS)
        self._mapper: PartitionMapper | None = None
        self._format: RecordFormat = PackedFormat(0)
        if options.format == "raw":
            ring = StreamQueueMapper(queues).queue_of
            self._mapper = PartitionMapper(options.partitioner, queues, ring)
            self._format = RawFormat(options.namespace or self._topic, self._mapper, 0)
        self.identity = int.from_bytes(blake2b(self._topic_id.encode(), digest_size=7).digest(), "big")
        if not self.is_current():
            raise NotFound(f"provider {provider!r}: its topic {self._topic!r} was deleted, and perhaps created again")
        self._clients.fit(int(asyncio.run(self._topics.settings(self._topic)).get("max.message.bytes", 1 << 20)))

    def is_current(self) -> bool:
        facts = asyncio.run(self._topics.describe(self._topic))
        return facts is not None and facts.topic_id == self._topic_id

    def queues_with(self, stream: StreamId) -> Sequence[int]:
        return super().queues_with(stream) if self._mapper is None else self._mapper.queues_with(stream)

    def states(self) -> Sequence[RetainedRange]:
        bounds = asyncio.run(self._topics.bounds(self._topic, range(self.queues)))
        return [self._state(bounds[queue]) for queue in range(self.queues)]

    def _state(self, bounds: Bounds) -> RetainedRange:
        """Return the range. A raw record is one event; of packed ones, the number is not known."""
        return RetainedRange(*bounds, events=None if self._mapper is None else bounds.next - bounds.first)

    def offsets_at(self, time_us: int) -> Sequence[int]:
        async def find() -> Sequence[int]:
            bounds = await self._topics.bounds(self._topic, range(self.queues))
            time_ms = max(-(-time_us // 1000), 0)
            found = [await self._topics.offset_at(self._topic, queue, time_ms) for queue in bounds]
            pairs = zip(found, bounds.values(), strict=True)
            return [there.next if at is None else min(max(at, there.first), there.next) for at, there in pairs]

        return asyncio.run(find())

    def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        """See QueueAccess. Reads the range: nothing else knows how many events a record has, or its size."""
        if max_bytes is None and (max_events is None or (self._mapper is not None and end - start <= max_events)):
            return end
        events = nbytes = 0
        for chunk in self.read(queue, start, end, Selector("*/*")):
            sizes = chunk.ends - chunk.starts
            for count, size, offset in zip(chunk.counts.tolist(), sizes.tolist(), chunk.offsets.tolist(), strict=True):
                too_many = max_events is not None and events + count > max_events
                if events and (too_many or (max_bytes is not None and nbytes + size > max_bytes)):
                    return offset
                events, nbytes = events + count, nbytes + size
        return end

    def read(self, queue: int, start: int, end: int, selector: Selector) -> Iterator[BatchChunk]:
        """See QueueAccess. Records that are no events are left out, with a warning."""
        first = asyncio.run(self._topics.bounds(self._topic, [queue]))[queue].first
        if start < first and start < end:
            raise OffsetsGone(queue, start, first)
        for group in read_range(self._clients, self._topic, queue, start, end, timeout_s=LIMITS.request_s):
            found = [(batch, record) for record in group if (batch := self._batch(queue, record)) is not None]
            if found:
                yield _chunk(found)

    def _batch(self, queue: int, record: KafkaRecord) -> EventBatch | None:
        try:
            batch = self._format.batch(record, headers_of(record))
        except InvalidArgument as error:
            batch = f"the record is not an event: {error}"
        if isinstance(batch, EventBatch):
            return batch
        log.warning("queue %d, offset %d: %s; it is left out", queue, record.offset(), batch)
        return None

    def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        return ()

    def close(self) -> None:
        """The clients end with the last reference to them."""


def _chunk(found: Sequence[tuple[EventBatch, KafkaRecord]]) -> BatchChunk:
    encoded = [batch.encoded for batch, _ in found]
    ends = np.array(list(accumulate(map(len, encoded))), np.int64)
    return BatchChunk(
        b"".join(encoded),
        ends - np.array([len(each) for each in encoded], np.int64),
        ends,
        np.array([len(batch.stream.prefix) for batch, _ in found], np.int64),
        np.array([batch.count for batch, _ in found], np.int64),
        np.array([batch.offset for batch, _ in found], np.int64),
        np.array([record.timestamp()[1] * 1000 for _, record in found], np.int64),
    )
