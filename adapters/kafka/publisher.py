"""Sends records to Kafka: `send` runs on the event loop, one thread polls, and answers come back in groups.

A write names its topic by name only. If a topic is deleted and created again, librdkafka sends the records that wait,
and new ones, to the new topic, and reports them as stored. So a doubtful record is passed on as stored only after a
check that the topic has the id with which it was opened. The check begins after the client has reported the record: an
id is never used again, so the topic was the same one when the record was stored. A record is doubtful if

- it waited for longer than `doubt_s`, as records do when a broker answers that it does not know the topic, or
- its offset is not above those of the records that were stored before it was sent: a new topic begins at offset 0.

Any other record is in the topic that was opened, unless the new one already had more records than the old one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from ...streams.background import BackgroundTasks
from ...streams.errors import Closed, HeadraceError, QueueFull, StorageError
from .client import KafkaClients
from .limits import KafkaLimits

log = logging.getLogger("headrace.adapters.kafka")
POLL_S = 0.2
CHECK_PAUSE_S = 0.02
"""Pause between two checks of the topic: each is for all records that were confirmed before it."""
_UNKNOWN_END = 1 << 63
"""The end of a partition in which no record is known: above each offset."""
_PURGED = (
    KafkaError._PURGE_QUEUE,  # noqa: SLF001 (its name)
    KafkaError._PURGE_INFLIGHT,  # noqa: SLF001 (its name)
)

Headers = list[tuple[str, bytes]] | None


class OutgoingRecord(NamedTuple):
    """A record to be stored in a partition."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers = None

    @property
    def nbytes(self) -> int:
        return len(self.value or b"") + len(self.key or b"")


class PendingRecords:
    """The records of one call. Its answer has their offsets, or the first error."""

    def __init__(
        self, partitions: Sequence[int], nbytes: int, ends: Mapping[int, int], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`partitions`: that of each record. `ends`: the known ends of partitions."""
        self.answer: asyncio.Future[Sequence[int]] = loop.create_future()
        self.nbytes = nbytes
        self.partitions = partitions
        self.records = len(partitions)
        self.offsets = [-1] * self.records
        self.error: KafkaError | None = None
        self.sent_at = loop.time()
        self.is_below_end = False
        """Whether a record has an offset that its partition had already given away when it was sent."""
        self._lowest = [ends.get(partition, _UNKNOWN_END) for partition in partitions]
        self._outcomes = count(1)  # `next` of it is atomic: several threads note outcomes

    def note(self, index: int, error: KafkaError | None, offset: int) -> bool:
        """Note the outcome of a record, in any thread. Return whether it is the last one."""
        if error is None:
            self.offsets[index] = offset
            if offset < self._lowest[index]:
                self.is_below_end = True
        else:
            self.error = self.error or error
        return next(self._outcomes) == self.records


class RecordPublisher:
    """Stores records in one topic, in the order of the calls. Belongs to the event loop that made it.

    A record that is not stored within the publish timeout fails. It may be stored nevertheless.
    """

    def __init__(
        self,
        topic: str,
        clients: KafkaClients,
        limits: KafkaLimits,
        *,
        check: Callable[[], Awaitable[None]] | None = None,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        """`check` raises StorageError if the topic is not the one that was opened, or if that is not known. None: any
        topic of this name will do. `ends` are the ends of partitions at present.

        Raises InvalidArgument for wrong settings of the client.
        """
        self._topic = topic
        self._check = check
        self._ends = {partition: end for partition, end in (ends or {}).items() if end}
        """Offsets above those of all records that are known to be stored, by partition."""
        self._unconfirmed: list[PendingRecords] = []
        """Calls whose records are stored, in this topic or in another one of its name."""
        self._checking = BackgroundTasks()
        self._fault: StorageError | None = None
        self._clients = clients
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._settled: deque[PendingRecords] = deque()
        self._scheduled = False
        self._pending: set[PendingRecords] = set()
        self._pending_bytes = 0
        self._pending_records = 0
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._producer: Any = None
        self._begin()

    def _begin(self) -> None:
        """Make a producer, and the thread that polls it."""
        producer = self._producer = self._clients.producer()
        thread = threading.Thread(target=self._poll, args=(producer,), name="headrace kafka publisher", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def send(self, records: Sequence[OutgoingRecord]) -> asyncio.Future[Sequence[int]]:
        """Store records. The result has their offsets.

        Raises QueueFull at once, before anything is stored, if too much is pending. The result raises
        StorageError: then each of the records may be stored or not.
        """
        if self._closing:
            raise Closed("the kafka adapter is closed")
        nbytes = sum(len(value or b"") + len(key or b"") for _, key, value, _ in records)
        self._check_space(len(records), nbytes)
        call = PendingRecords([record.partition for record in records], nbytes, self._ends, self._loop)
        if not records:
            call.answer.set_result([])
            return call.answer
        self._pending.add(call)
        self._pending_bytes += nbytes
        self._pending_records += len(records)
        for index, record in enumerate(records):
            self._produce(record, call, index)
        return call.answer

    def abandon(self, fault: HeadraceError) -> None:
        """Do not send the records that wait, because the topic is gone: another one of its name must not store them.
        Their calls fail with this reason, and may nevertheless be stored."""
        self._fault = StorageError(f"events were not confirmed: {fault}")
        self._producer.purge(blocking=False)

    def _check_space(self, records: int, nbytes: int) -> None:
        limits = self._limits
        if not self._pending_records:
            return
        if self._pending_bytes + nbytes > limits.pending_bytes or (
            self._pending_records + records > limits.pending_records
        ):
            raise QueueFull(
                f"{self._pending_records:,} records with {self._pending_bytes:,} bytes wait for Kafka: publish again "
                "when some of them are stored"
            )

    def _produce(self, record: OutgoingRecord, call: PendingRecords, index: int) -> None:
        done = partial(self._on_delivery, call, index)
        try:
            try:
                self._hand_over(record, done)
            except KafkaException as error:
                if error.args[0].code() != KafkaError._FATAL:  # noqa: SLF001 (its name)
                    raise
                log.error("the producer of topic %r failed, and is replaced: %s", self._topic, error.args[0].str())  # noqa: TRY400
                self._begin()
                self._hand_over(record, done)
        except KafkaException as error:
            self._on_delivery(call, index, error.args[0])
        except BufferError:  # a call of more than the client holds: `send` accepts any call if nothing is pending
            self._on_delivery(call, index, KafkaError(KafkaError._QUEUE_FULL))  # noqa: SLF001 (its name)

    def _hand_over(self, record: OutgoingRecord, done: Callable[..., None]) -> None:
        partition, key, value, headers = record
        if headers:
            self._producer.produce(self._topic, value, key, partition, done, headers=headers)
        else:
            self._producer.produce(self._topic, value, key, partition, done)

    # ---- in the polling thread -------------------------------------------------------------------------------------

    def _poll(self, producer: Any) -> None:
        while not self._closing and producer is self._producer:
            self._has_polled(partial(producer.poll, POLL_S))
        flush = partial(producer.flush, self._clients.options.publish_timeout_s + 1)
        if not self._has_polled(flush):
            self._has_polled(flush)

    def _has_polled(self, poll: Callable[[], object]) -> bool:
        """Poll. Return False if the client raises its fatal error, which it does once: it has not reported all records
        then. The next record gets a new producer."""
        try:
            poll()
        except KafkaException as error:
            log.error("the producer of topic %r has failed: %s", self._topic, error.args[0].str())  # noqa: TRY400
            return False
        return True

    def _on_delivery(self, call: PendingRecords, index: int, error: KafkaError | None, message: Any = None) -> None:
        offset = None if message is None else message.offset()
        if error is None and offset is None:  # a broker that has the record from an earlier try, and forgot its offset
            error = KafkaError(KafkaError.DUPLICATE_SEQUENCE_NUMBER)
        if not call.note(index, error, -1 if offset is None else offset):
            return
        self._settled.append(call)
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._settle)
            except RuntimeError:  # the loop is closed
                pass

    # ---- on the event loop -----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._scheduled = False
        while self._settled:
            call = self._settled.popleft()
            self._pending.discard(call)
            self._pending_bytes -= call.nbytes
            self._pending_records -= call.records
            if call.error is None and self._check is not None and self._is_doubtful(call):
                self._unconfirmed.append(call)
                if not self._checking:
                    self._checking.start(self._confirm(self._check), f"headrace kafka check of {self._topic}")
            else:
                self._answer(call)

    def _is_doubtful(self, call: PendingRecords) -> bool:
        return call.is_below_end or self._loop.time() - call.sent_at > self._limits.doubt_s

    async def _confirm(self, check: Callable[[], Awaitable[None]]) -> None:
        """Answer the calls that are doubtful, also those that come meanwhile."""
        while self._unconfirmed:
            calls, self._unconfirmed = self._unconfirmed, []
            try:
                await check()
            except HeadraceError as error:
                for call in calls:
                    self._answer(call, StorageError(f"it is not known whether events are stored: {error}"))
            else:
                for call in calls:
                    if call.is_below_end:  # the end was not known, or the brokers have lost it
                        self._ends.update((partition, 0) for partition in call.partitions)
                    self._answer(call)
            await asyncio.sleep(CHECK_PAUSE_S if self._unconfirmed else 0)

    def _answer(self, call: PendingRecords, failure: HeadraceError | None = None) -> None:
        if call.error is not None:
            failure = self._failure(call.error)
        elif failure is None:
            ends = self._ends
            for partition, offset in zip(call.partitions, call.offsets, strict=True):
                if offset >= ends.get(partition, 0):
                    ends[partition] = offset + 1
        if call.answer.done():
            return
        if failure is None:
            call.answer.set_result(call.offsets)
        else:
            call.answer.set_exception(failure)

    def _failure(self, error: KafkaError) -> HeadraceError:
        if error.code() in _PURGED and self._fault is not None:
            return self._fault.copy()
        failure = self._clients.failure(f"events were not confirmed by topic {self._topic!r}", error)
        return StorageError(f"{failure}: they may or may not be stored, publish them again")

    async def aclose(self) -> None:
        """Wait until every record is stored or has failed. Idempotent."""
        self._closing = True
        for thread in self._threads:
            await self._loop.run_in_executor(None, thread.join)
        self._settle()
        await self._checking.join()
        for call in list(self._pending):
            if not call.answer.done():
                call.answer.set_exception(Closed("the kafka adapter was closed before these events were confirmed"))
                call.answer.exception()  # nothing may await it any more
        self._pending.clear()
