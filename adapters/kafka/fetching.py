"""Reads one partition in a thread, and hands over its records in groups."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from ...streams.errors import InvalidArgument
from ...streams.events import EventBatch
from .client import KafkaClients, KafkaRecord, PartitionConsumer, headers_of
from .epochs import EpochRange
from .formats import RecordFormat
from .ledger import CallPart, call_part

log = logging.getLogger("headrace.adapters.kafka")

POLL_S = 0.2
GROUP_RECORDS = 2000
WAITING_RECORD_BYTES = 400
"""Memory of a record that waits, in bytes, apart from its encoded batch: its objects, and perhaps the name of its
stream."""


class UnreadableRecord(NamedTuple):
    """A record that is not a batch of events."""

    offset: int
    reason: str


class FetchedGroup(NamedTuple):
    """Records that were fetched together, decoded. All sequences are in the order of the offsets."""

    batches: Sequence[EventBatch]
    end: int
    """Every record below this offset was delivered, in this group or an earlier one."""
    nbytes: int
    """Bytes of the records' values."""
    paused: bool
    """Whether no record had come for `pause_s` before this group."""
    error: KafkaError | Exception | None = None
    """The error that ended the fetching."""
    unreadable: Sequence[UnreadableRecord] = ()
    calls: Sequence[tuple[int, CallPart, int]] = ()
    """Offset, part and time in milliseconds of each record that belongs to a publisher's call."""
    epochs: Sequence[EpochRange] = ()
    """The leader epochs of the records."""

    @property
    def memory_bytes(self) -> int:
        """The memory of the records while they wait for their receiver."""
        return memory_of(self.batches) + WAITING_RECORD_BYTES * len(self.unreadable)


def memory_of(batches: Sequence[EventBatch]) -> int:
    """Return the memory of batches while they wait for their receiver, in bytes."""
    return sum(map(len, map(_encoded_of, batches))) + WAITING_RECORD_BYTES * len(batches)


_encoded_of = attrgetter("encoded")


class PartitionFetcher:
    """Fetches one partition from an offset on, until `stop` is called or an error ends it.

    It stops fetching while the records that were delivered and not released have more than `max_waiting_bytes`.
    """

    def __init__(
        self,
        clients: KafkaClients,
        start: TopicPartition,
        record_format: RecordFormat,
        deliver: Callable[[FetchedGroup], None],
        *,
        partition_tag: bytes,
        max_waiting_bytes: int,
        pause_s: float,
    ) -> None:
        """`deliver` is called on the event loop that makes the fetcher. `partition_tag`: see the ledger."""
        self._partition_tag = partition_tag
        self._clients = clients
        self._start = start
        self._format = record_format
        self._deliver = deliver
        self._max_waiting_bytes = max_waiting_bytes
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()
        self._delivered_bytes = 0
        self._released_bytes = 0
        self._resume = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, name=f"headrace kafka partition {start.partition}", daemon=True
        )
        self._thread.start()

    def release(self, nbytes: int) -> None:
        """This many bytes of the records that were delivered wait no more: fetch as many again."""
        self._released_bytes += nbytes
        self._resume.set()

    def stop(self) -> None:
        """Stop soon. Nothing is delivered from now on."""
        self._stopped = True
        self._resume.set()

    async def stopped(self) -> None:
        """Wait until the thread has ended."""
        await self._loop.run_in_executor(None, self._thread.join)

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            consumer = self._clients.consumer()
            try:
                consumer.assign([self._start])
                self._fetch(consumer)
            finally:
                consumer.close()
        except KafkaException as error:
            self._hand_over(FetchedGroup((), self._start.offset, 0, False, error.args[0]))
        except Exception as error:
            log.exception("fetching partition %d failed with an unexpected error", self._start.partition)
            self._hand_over(FetchedGroup((), self._start.offset, 0, False, error))

    def _fetch(self, consumer: PartitionConsumer) -> None:
        end, last, has_answered = self._start.offset, time.monotonic(), False
        while not self._stopped:
            if self._delivered_bytes - self._released_bytes > self._max_waiting_bytes:
                self._resume.wait(POLL_S)
                self._resume.clear()
                last = time.monotonic()
                continue
            first = consumer.poll(POLL_S)
            if first is None:
                continue
            now = time.monotonic()
            group = self._decoded((first, *consumer.consume(GROUP_RECORDS, 0)), end, now - last > self._pause_s)
            last = now
            if group.end > end or group.error is not None or not has_answered:
                # Deliver the first answer even if it has no records: it tells the receiver that the offset was
                # accepted.
                has_answered = True
                end = group.end
                self._delivered_bytes += group.memory_bytes
                self._hand_over(group)
            if group.error is not None:
                return

    def _decoded(self, found: Sequence[KafkaRecord], end: int, paused: bool) -> FetchedGroup:
        batches: list[EventBatch] = []
        unreadable: list[UnreadableRecord] = []
        calls: list[tuple[int, CallPart, int]] = []
        epochs: list[EpochRange] = []
        nbytes, known, low, high, failure = 0, None, end, end, None
        decode, tag, add = self._format.batch, self._partition_tag, batches.append
        for record in found:
            error = record.error()
            if error is None:
                offset = record.offset()
                batch: EventBatch | str
                try:
                    headers = headers_of(record)
                    batch = decode(record, headers)
                except InvalidArgument as problem:
                    headers, batch = (), f"the record is not an event: {problem}"
                if isinstance(batch, EventBatch):
                    add(batch)
                else:
                    unreadable.append(UnreadableRecord(offset, batch))
                if headers and (part := call_part(headers, tag)) is not None:
                    calls.append((offset, part, record.timestamp()[1]))
                if (epoch := record.leader_epoch()) != known:
                    _add_epoch(epochs, known, low, high)
                    known, low = epoch, min(end, offset)
                end = high = offset + 1
                nbytes += len(record)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 (its name)
                end = max(end, record.offset())
            else:
                failure = error
                break
        _add_epoch(epochs, known, low, high)
        return FetchedGroup(batches, end, nbytes, paused, failure, unreadable, calls, epochs)

    def _hand_over(self, group: FetchedGroup) -> None:
        if self._stopped:
            return
        try:
            self._loop.call_soon_threadsafe(self._arrived, group)
        except RuntimeError:  # the loop is closed
            self._stopped = True

    def _arrived(self, group: FetchedGroup) -> None:
        if not self._stopped:
            self._deliver(group)


def _add_epoch(epochs: list[EpochRange], epoch: int | None, low: int, high: int) -> None:
    """Add the epoch of the records from offset `low` up to `high`, exclusive. None: it is not known."""
    if epoch is not None:
        epochs.append(EpochRange(epoch, low, high))
