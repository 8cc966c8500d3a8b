"""Publish events into the queues of a provider."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from ..adapters import ProducerSequence, Receipt
from ..streams import tracing
from ..streams.codecs import Codecs, Publishable
from ..streams.errors import InvalidArgument
from ..streams.events import Event, EventBatch
from ..streams.identity import SequenceToken, StreamId
from ..streams.layout import NOT_RECORDED
from ..streams.publishing import (
    PendingPublishes,
    check_producer,
    check_schedules,
    check_sequence,
    check_stream,
    encoded,
    grouped,
    listed,
    scheduled,
)
from ..streams.stream import Stream
from .opening import ProviderParts
from .queue_positions import QueuePositions
from .shared_calls import MIN_PUBLISHES, SharedCalls


class EventPublisher(QueuePositions):
    """The part of a provider that publishes."""

    def __init__(self, parts: ProviderParts) -> None:
        super().__init__(parts)
        self.published_events = 0  # without those of cancelled callers, which may be stored all the same
        self.published_bytes = 0
        # Without the option, the decorator only publishes events that were delayed before.
        decorated = parts.delays is not None and parts.options.delays is None
        self._can_delay = parts.adapter.capabilities.delay and not decorated
        self.publishing = PendingPublishes()
        self.codecs = Codecs(parts.options.codec)
        shares = parts.adapter.capabilities.shared_calls
        self._shared = SharedCalls(parts.adapter.enqueue, self.publishing) if shares else None

    def stream(self, namespace: str | StreamId, key: str | None = None) -> Stream:
        """A handle on a stream, by namespace and key or by id."""
        if isinstance(namespace, StreamId):
            return Stream(namespace, self)
        if key is None:
            raise InvalidArgument("a stream has a namespace and a key: provider.stream('orders', '42')")
        return Stream(StreamId(namespace, key), self)

    async def publish(
        self,
        stream: StreamId,
        events: Publishable | Iterable[Publishable],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken:
        """Publish to one stream: see `Stream.publish`."""
        if type(stream) is not StreamId:  # asked here too, because it saves a call for each event
            check_stream(stream)
        trace = b""
        if tracing.active is not None:
            if tracing.active.records():
                given = scheduled(listed(stream, events, self.codecs), delay, priority)
                with tracing.active.publishing(self.name, stream, len(given)) as trace:
                    return await self._publish(stream, given, trace)
            trace = NOT_RECORDED
        # The fast path of the most common call: one payload, which shares a call if other publishes are under way.
        payload = events if type(events) is bytes and delay is None and priority is None else None
        shared = self._shared
        if (
            payload is not None
            and shared is not None
            and (shared.waiting or self.publishing.under_way >= MIN_PUBLISHES)
        ):
            try:
                batch = EventBatch.of_payload(stream, payload, trace)
                token = (await shared.add(self.queue_of(stream), batch)).token
            except Exception as error:
                self.publishing.note_error(error)
                raise
            self.published_events += 1
            self.published_bytes += len(batch.encoded)
            assert token is not None  # only duplicates of an idempotent producer have none
            return token
        number = self.publishing.begin()
        try:
            if payload is not None:
                batches = [(self.queue_of(stream), EventBatch.of_payload(stream, payload, trace))]
            else:
                queue = self.queue_of(stream)
                given = scheduled(listed(stream, events, self.codecs), delay, priority)
                batches = [(queue, batch) for batch in self._encode(stream, given, trace)]
                self._flush_shared()
            token = (await self.adapter.enqueue(batches))[0].token
            self._count(batches)
        except Exception as error:
            self.publishing.note_error(error)
            raise
        finally:
            self.publishing.end(number)
        assert token is not None  # only duplicates of an idempotent producer have none
        return token

    async def _publish(self, stream: StreamId, events: list[bytes | Event], trace: bytes) -> SequenceToken:
        batches = [(self.queue_of(stream), batch) for batch in self._encode(stream, events, trace)]
        token = (await self._enqueue(batches))[0].token
        assert token is not None  # only duplicates of an idempotent producer have none
        return token

    async def publish_many(
        self, items: Iterable[tuple[StreamId, Publishable]], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        """Publish to several streams at once, in order within each. One receipt per stored batch.

        With `sequence`, a retry stores nothing twice; one call is then all or nothing.
        """
        if sequence is not None:
            check_sequence(sequence)
            check_producer(sequence.producer)
        by_stream = grouped(items, self.codecs)
        if tracing.active is None or not tracing.active.records():
            trace = b"" if tracing.active is None else NOT_RECORDED
            return await self._publish_grouped(by_stream, sequence, trace)
        with tracing.active.publishing(self.name, None, sum(map(len, by_stream.values()))) as trace:
            return await self._publish_grouped(by_stream, sequence, trace)

    async def _publish_grouped(
        self, by_stream: Mapping[StreamId, list[bytes | Event]], sequence: ProducerSequence | None, trace: bytes
    ) -> Sequence[Receipt]:
        batches = [
            (self.queue_of(stream), batch)
            for stream, events in by_stream.items()
            for batch in self._encode(stream, events, trace)
        ]
        return await self._enqueue(batches, sequence)

    async def _enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        self._flush_shared()
        number = self.publishing.begin()
        try:
            receipts = await self.adapter.enqueue(batches, sequence=sequence)
        except Exception as error:
            self.publishing.note_error(error)
            raise
        finally:
            self.publishing.end(number)
        if not (receipts and receipts[0].duplicate):
            self._count(batches)
        return receipts

    async def last_sequence(self, producer: str) -> int:
        """The highest number stored for a producer of `publish_many` with sequences; 0 if there is none."""
        return await self.adapter.last_sequence(check_producer(producer, "producer"))

    async def flush(self) -> None:
        """Return when all events published before are stored or have failed. The publishing callers get the errors.

        It does not wait for publishes whose caller was cancelled, except those that share a call: their events may be
        stored later, or not at all.
        """
        self._flush_shared()
        await self.publishing.flush()

    def publish_encoded(
        self, batches: Sequence[EventBatch], *, sequence: ProducerSequence | None = None
    ) -> asyncio.Future[Sequence[Receipt]]:
        """Store batches that the caller encoded and checked.

        Batches are stored in the order of the calls, also without awaiting in between. Otherwise as `publish_many`.
        """
        self._check_schedules(batches)
        placed = [(self.queue_of(batch.stream), batch) for batch in batches]
        self._flush_shared()
        number = self.publishing.begin()
        try:
            answer = asyncio.ensure_future(self.adapter.enqueue(placed, sequence=sequence))
        except Exception as error:  # an adapter may refuse at once
            self.publishing.note_error(error)
            self.publishing.end(number)
            raise
        answer.add_done_callback(partial(self._note_answer, number, placed))
        return answer

    def _flush_shared(self) -> None:
        """Store the events that wait for the end of the turn, so that the next ones come after them."""
        if self._shared is not None:
            self._shared.flush()

    def _note_answer(
        self, number: int, placed: Sequence[tuple[int, EventBatch]], answer: asyncio.Future[Sequence[Receipt]]
    ) -> None:
        self.publishing.end(number)
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            self.publishing.note_error(error)
            return
        if not any(receipt.duplicate for receipt in answer.result()):
            self._count(placed)

    def _encode(self, stream: StreamId, events: list[bytes | Event], trace: bytes = b"") -> list[EventBatch]:
        batches = encoded(stream, events, trace)
        self._check_schedules(batches)
        return batches

    def _check_schedules(self, batches: Sequence[EventBatch]) -> None:
        priorities = self.adapter.capabilities.priority
        if not (self._can_delay and priorities):
            check_schedules(batches, self.name, delay=self._can_delay, priority=priorities)

    def _count(self, batches: Sequence[tuple[int, EventBatch]]) -> None:
        for _, batch in batches:
            self.published_events += batch.count
            self.published_bytes += len(batch.encoded)
