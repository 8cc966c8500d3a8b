"""The adapter `kafka`: queues on Apache Kafka, for silos on any number of machines. See docs/kafka.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import accumulate
from typing import Any

from confluent_kafka import TopicPartition

from ...streams.background import BackgroundTasks
from ...streams.errors import Closed, InvalidArgument
from ...streams.events import EventBatch
from ...streams.identity import SequenceToken
from ..receiving import Bounds
from ..registry import read_options
from ..seam import AdapterContext, Backlog, Capabilities, ProducerSequence, QueueAdapter, QueueStatistics, Receipt
from .acknowledgements import KafkaAcknowledgements, ProgressGroups
from .client import KafkaClients
from .fetching import FetchedGroup, PartitionFetcher
from .formats import PackedFormat, RecordFormat
from .idempotent_calls import IdempotentCalls
from .ledger import partition_tag
from .ledgers import KafkaLedgers
from .limits import KAFKA_LIMITS, KafkaLimits
from .options import KafkaOptions, with_location
from .partitioners import PartitionMapper
from .publisher import OutgoingRecord, RecordPublisher
from .raw import RawFormat
from .receiver import KafkaReceiver, ReceiverQueue
from .record_times import RecordTimes
from .secrets import ClientSettings
from .topic_setup import open_topic
from .topics import KafkaTopics, TopicFacts
from .watch import TopicWatch

RECORD_OVERHEAD_BYTES = 4096
"""A batch may be smaller than the largest record by this, in bytes: the record has a key and headers, too."""
ATTRIBUTES_BYTES = 512
"""Bytes of a record apart from its key, value, and headers of the event: those of Kafka, also for the group that it is
stored in, and those of the header of an idempotent call. At most about 300."""


async def open_adapter(
    context: AdapterContext, options: Mapping[str, Any], limits: KafkaLimits = KAFKA_LIMITS
) -> KafkaAdapter:
    """Open the queues of a provider on Kafka. Create the topic if it does not exist.

    Raises InvalidArgument for wrong options, and for a topic whose settings could lose events, with the command that
    mends it; NotFound if there is no topic and `create` is false; StorageError if the brokers do not answer.
    """
    located, topic_id = with_location(context.provider, options, context.location)
    chosen = read_options("kafka", KafkaOptions, located)
    settings = await asyncio.to_thread(ClientSettings, chosen.kafka)
    clients = KafkaClients(chosen, settings)
    topics = KafkaTopics(clients, await asyncio.to_thread(clients.admin), limits)
    topic = chosen.topic or f"headrace.{context.provider}"
    given_age_s = options.get("retain_age_s")
    facts = await open_topic(topic, context, chosen, topics, topic_id=topic_id, given_age_s=given_age_s)
    adapter = KafkaAdapter(context, chosen, limits, topic=topic, facts=facts, clients=clients, topics=topics)
    try:
        await adapter.open()
    except BaseException:
        await adapter.aclose()
        raise
    return adapter


class KafkaAdapter(QueueAdapter):
    """Queues in the partitions of one topic. Belongs to the event loop that opened it."""

    capabilities = Capabilities(
        rewindable=True, durable=True, idempotent=True, shows_progress=True, time_resolution_us=1000
    )

    def __init__(
        self,
        context: AdapterContext,
        options: KafkaOptions,
        limits: KafkaLimits,
        *,
        topic: str,
        facts: TopicFacts,
        clients: KafkaClients,
        topics: KafkaTopics,
    ) -> None:
        self._provider = context.provider
        self._queues = context.queues
        self._options = options
        self._topic = topic
        self._clients = clients
        self._topics = topics
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        if options.format == "raw":
            self.mapper = PartitionMapper(options.partitioner, context.queues, context.queue_of)
        self.identity = facts.topic_id
        self.location = options.location(topic, facts.topic_id)
        self.other_queues = (
            f"choose another topic than {topic!r} with the option topic, or delete it and {topic}.producers; if other "
            "programs write to it, set format = 'raw'"
        )
        self._watch = TopicWatch(
            topic, facts, topics, limits, self._wake, queues=context.queues, is_shared=options.format == "raw"
        )
        tags = [partition_tag(facts.topic_id, queue) for queue in range(context.queues)]
        self._ledgers = KafkaLedgers(topic, tags, clients, topics, limits)
        self._publisher: RecordPublisher | None = None
        self._idempotent_calls = IdempotentCalls(self._ledgers, self._send)
        self._acknowledgements = KafkaAcknowledgements(f"headrace.{context.provider}", topic, clients, limits)
        self._progress = ProgressGroups(context.provider, topic, clients, limits)
        self._format: RecordFormat = PackedFormat(0)
        self._background = BackgroundTasks()
        self._calls = BackgroundTasks()
        """Idempotent calls that have begun."""
        self._close_task = BackgroundTasks()
        self._receivers: set[KafkaReceiver] = set()
        self._times = RecordTimes(topic, clients, limits.request_s)
        self._events_read = self._batches_read = 0
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the ledgers of producers. Raises StorageError."""
        largest = int((await self._topics.settings(self._topic)).get("max.message.bytes", 1 << 20))
        self._clients.fit(largest)
        bounds = await self._topics.bounds(self._topic, range(self._queues))
        ends = {queue: end for queue, (_, end) in bounds.items()}
        self._publisher = RecordPublisher(self._topic, self._clients, self._limits, check=self._watch.check, ends=ends)
        if isinstance(self.mapper, PartitionMapper):
            self._format = RawFormat(self._options.namespace or self._topic, self.mapper, largest - ATTRIBUTES_BYTES)
        else:
            self._format = PackedFormat(largest - RECORD_OVERHEAD_BYTES)
        await self._ledgers.open(bounds, from_end=self._options.format == "raw")
        self._background.start(self._watch.run(), f"headrace kafka topic {self._topic}")
        self._background.start(self._ledgers.keep_epochs(), f"headrace kafka epochs of {self._topic}")

    # ---- publishing ------------------------------------------------------------------------------------------------

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """See QueueAdapter. If a call with a `sequence` fails, a part of it may be stored: send it again to complete
        it.

        Raises StorageError after `publish_timeout_s`: then the events may be stored.
        """
        self._check_open()
        self._check_usable()
        placed = [self._format.records(self._check_queue(queue), batch) for queue, batch in batches]
        records = [record for of_batch in placed for record in of_batch]
        if sequence is None:
            return _receipts(self._send(records), placed)
        # A call that has begun is completed, even if the caller is cancelled.
        storing = self._idempotent_calls.store_once(sequence, records)
        answer = asyncio.shield(self._calls.hold(storing, f"headrace publish of {sequence.producer}"))
        return answer if len(records) == len(placed) else _of_batches(answer, placed)

    def _send(self, records: Sequence[OutgoingRecord]) -> asyncio.Future[Sequence[int]]:
        assert self._publisher is not None  # `open` made it
        self._check_usable()  # a call in the background may have waited
        return self._publisher.send(records)

    async def last_sequence(self, producer: str) -> int:
        self._check_open()
        return await self._idempotent_calls.last(producer)

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def open_receiver(self, queue: int, start: int | None = None) -> KafkaReceiver:
        first, end = await self.bounds(queue)
        position = min(max(await self._acknowledgements.of(queue), first), end) if start is None else start
        if not 0 <= position <= end:
            raise InvalidArgument(f"queue {queue} ends at offset {end}: it cannot be read from {position}")
        await self._watch.check()
        await self._ledgers.scan_to(queue, first, max(position, first))
        self._check_open()
        await self._ledgers.refresh()
        receiver = KafkaReceiver(self._queue_of_receiver(queue), position, first, self._receivers.discard)
        self._receivers.add(receiver)
        return receiver

    def _queue_of_receiver(self, queue: int) -> ReceiverQueue:
        def note(group: FetchedGroup) -> Sequence[int]:
            return self._note(queue, group)

        def acknowledge(offset: int) -> None:
            self._acknowledgements.note(queue, offset)

        def fetch(position: int, deliver: Callable[[FetchedGroup], None]) -> PartitionFetcher:
            limits = self._limits
            partition = TopicPartition(self._topic, queue, position)
            if (epoch := self._ledgers.epoch_before(queue, position)) is not None:  # lets the client see truncation
                partition = TopicPartition(self._topic, queue, position, leader_epoch=epoch)
            return PartitionFetcher(
                self._clients,
                partition,
                self._format,
                deliver,
                partition_tag=self._ledgers.partition_tags[queue],
                max_waiting_bytes=limits.waiting_bytes,
                pause_s=limits.pause_s,
            )

        return ReceiverQueue(
            number=queue,
            fetch=fetch,
            note=note,
            bounds=lambda: self.bounds(queue),
            check=self._watch.check,
            fault=lambda: self._watch.fault,
            failure=self._clients.failure,
            acknowledge=acknowledge,
        )

    def _note(self, queue: int, group: FetchedGroup) -> Sequence[int]:
        duplicates = self._ledgers.observe(queue, group.calls)
        self._ledgers.note_epochs(queue, group.epochs)
        self._ledgers.note_read(queue, group.end, len(group.batches) + len(group.unreadable), group.nbytes)
        self._events_read += sum(map(len, group.batches))
        self._batches_read += len(group.batches)
        return duplicates

    def _wake(self) -> None:
        """Wake the receivers, because the state of the topic has changed."""
        if self._publisher is not None and self._watch.is_unusable and (fault := self._watch.fault) is not None:
            self._publisher.abandon(fault)
        for receiver in self._receivers:
            receiver.wake()

    async def bounds(self, queue: int) -> Bounds:
        """See QueueAdapter. Raises StorageError if the topic is known to be another one than was opened."""
        self._check_open()
        self._check_usable()
        return (await self._topics.bounds(self._topic, [self._check_queue(queue)]))[queue]

    async def due_end(self, queue: int) -> int:
        """See QueueAdapter. The end is that of the topic that was opened: its id was read after the end."""
        end = (await self.bounds(queue)).next
        await self._watch.check()
        return end

    async def resume_at(self, queue: int, offset: int) -> int:
        """See QueueAdapter. A reader steps back only in the topic that was opened."""
        end = (await self.bounds(queue)).next
        if end < offset:
            await self._watch.check()
        return min(offset, end)

    async def statistics(self, queue: int) -> QueueStatistics:
        return QueueStatistics(await self.bounds(queue))

    async def offset_at(self, queue: int, time_us: int) -> int:
        """See QueueAdapter. Kafka's times are whole milliseconds: a time within a millisecond is rounded up."""
        bounds = await self.bounds(queue)
        time_ms = min(-(-time_us // 1000), (1 << 62) // 1000)
        found = await self._topics.offset_at(self._topic, queue, max(time_ms, 0))
        return bounds.next if found is None else min(max(found, bounds.first), bounds.next)

    async def backlog(self, queue: int, offset: int) -> Backlog:
        """See QueueAdapter. Offsets may have holes, so the number of batches is an upper bound. Events are estimated
        from the batches that this process has read."""
        first, end = await self.bounds(queue)
        start = max(offset, first)
        batches = max(end - start, 0)
        if not batches:
            return Backlog(0, 0)
        since_us = await self._times.stored_us(queue, start, end)
        if since_us is None:
            return Backlog(0, 0)  # only transaction markers are left
        events = round(batches * self._events_read / self._batches_read) if self._batches_read else None
        return Backlog(batches, events, estimated=events is not None, since_us=since_us)

    async def show_progress(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        self._check_open()
        await self._progress.show(positions)

    async def apply_retention(self, watermarks: Mapping[int, int]) -> None:
        """See QueueAdapter. With `retain_unfinished`, deletes finished records that are older than `retain_age_s`."""
        self._check_open()
        age_s = self._options.retain_age_s
        if age_s is None or not self._options.keeps_unfinished:
            return
        old_us = int((time.time() - age_s) * 1e6)
        bounds = await self._topics.bounds(self._topic, range(self._queues))
        below: dict[int, int] = {}
        for queue, (first, end) in bounds.items():
            offset = min(await self.offset_at(queue, old_us), watermarks.get(queue, end))
            if offset > first:
                below[queue] = offset
        if below:
            await self._topics.delete_below(self._topic, below)

    async def snapshots_stored(self) -> None:
        """Wait until the snapshots of the ledgers of producers that were begun are stored."""
        await self._ledgers.saved()

    # ---- closing ---------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = self._close_task.hold(self._close(), "headrace kafka close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with AsyncExitStack() as steps:  # the last one first; an error of one keeps none from running
            steps.push_async_callback(self._ledgers.aclose)
            steps.push_async_callback(self._times.aclose)
            steps.push_async_callback(self._acknowledgements.aclose)
            if self._publisher is not None:
                steps.push_async_callback(self._publisher.aclose)
            steps.push_async_callback(self._calls.join)
            for receiver in self._receivers:
                steps.push_async_callback(receiver.aclose)
            steps.push_async_callback(self._background.aclose)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise Closed(f"provider {self._provider!r}: the kafka adapter is closed")

    def _check_usable(self) -> None:
        if self._watch.is_unusable and (fault := self._watch.fault) is not None:
            raise fault.copy()

    def _check_queue(self, queue: int) -> int:
        if not 0 <= queue < self._queues:
            raise InvalidArgument(f"there is no queue {queue}: this provider has queues 0 to {self._queues - 1}")
        return queue


async def _receipts(offsets: Awaitable[Sequence[int]], placed: Sequence[Sequence[OutgoingRecord]]) -> Sequence[Receipt]:
    """Return a receipt for each batch: that of its first record."""
    found = await offsets
    firsts = accumulate(map(len, placed), initial=0)
    return [Receipt(SequenceToken(found[first])) for first, _ in zip(firsts, placed, strict=False)]


async def _of_batches(
    answer: Awaitable[Sequence[Receipt]], placed: Sequence[Sequence[OutgoingRecord]]
) -> Sequence[Receipt]:
    """Return a receipt for each batch: that of its first record. It is a duplicate if all of its records are."""
    receipts = iter(await answer)
    found: list[Receipt] = []
    for records in placed:
        mine = [next(receipts) for _ in records]
        found.append(Receipt(mine[0].token, duplicate=all(each.duplicate for each in mine)))
    return found
