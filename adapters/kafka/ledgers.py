"""Keeps the ledgers of all queues: reads them from the log, and stores snapshots so that little has to be read again.

Snapshots are in a compacted topic of their own, `TOPIC.producers`, which has one row for each queue. It also has a row
for each producer whose last call had no batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import msgspec

from ...streams.background import BackgroundTasks
from ...streams.errors import HeadraceError, InvalidArgument
from ...streams.publishing import ProducerSequence
from ..receiving import Bounds
from .client import KafkaClients, KafkaRecord, headers_of
from .epochs import EpochRange, ReadEpochs
from .ledger import CallPart, LedgerSnapshot, ProducerState, QueueLedger, StoredCall, call_part, producer_state
from .limits import KafkaLimits
from .publisher import OutgoingRecord, RecordPublisher
from .reading import read_in_thread, read_range
from .topics import KafkaTopics

log = logging.getLogger("headrace.adapters.kafka")

SNAPSHOT_BYTES_PER_RECORD = 100
SNAPSHOT_SHARE = 4
"""A snapshot is written only after records that are at least so many times as large, or after one record for each
`SNAPSHOT_BYTES_PER_RECORD` of its bytes."""

_SAVING = "headrace kafka snapshots"
"""Name of the task that stores snapshots."""
_QUEUE, _PRODUCER, _BEGIN, _EPOCH = b"queue/", b"producer/", b"begin/", b"epoch/"


def ledger_topic(topic: str) -> str:
    return f"{topic}.producers"


def ledger_settings() -> Mapping[str, str]:
    """Return the settings of the topic that has the snapshots."""
    return {
        "cleanup.policy": "compact",
        "max.message.bytes": str(16 << 20),
        "segment.bytes": str(16 << 20),
        "unclean.leader.election.enable": "false",
    }


class _UnsavedCounts:
    """The records and bytes of a queue that were observed since its last snapshot."""

    def __init__(self) -> None:
        self.records = 0
        self.nbytes = 0


class KafkaLedgers:
    """The ledgers of a topic's queues. Belongs to one event loop."""

    def __init__(
        self,
        topic: str,
        partition_tags: Sequence[bytes],
        clients: KafkaClients,
        topics: KafkaTopics,
        limits: KafkaLimits,
    ) -> None:
        """`partition_tags`: those of the queues, see `partition_tag`."""
        queues = len(partition_tags)
        self.partition_tags = partition_tags
        self._topic = topic
        self._clients = clients
        self._topics = topics
        self._limits = limits
        self._queues = [QueueLedger() for _ in range(queues)]
        self._unsaved_counts = [_UnsavedCounts() for _ in range(queues)]
        self._due: set[int] = set()
        """Queues whose snapshot is to be stored in the next turn."""
        self._stored_bytes = [0] * queues
        """Bytes of the last snapshot of each queue."""
        self._epochs = [ReadEpochs() for _ in range(queues)]
        self._locks = [asyncio.Lock() for _ in range(queues)]
        self._first_offsets: dict[int, int] = {}
        """The offset at which headrace began to publish, by queue, if there were records of other programs before."""
        self._empty_calls: dict[str, StoredCall] = {}
        """Last calls without batches, by producer."""
        self._rows_read = 0
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="headrace-kafka-read")
        self._publisher: RecordPublisher | None = None
        self._background = BackgroundTasks()
        self._next_scan: asyncio.Task[None] | None = None
        self._scanning: asyncio.Task[None] | None = None

    async def open(self, bounds: Mapping[int, Bounds], *, from_end: bool) -> None:
        """Read the snapshots. A queue without one begins at its end if `from_end`, else at its beginning.

        The end is stored. If several processes open the topic for the first time, the lowest of their ends counts: each
        process stores its end, then reads all of them.
        """
        await self._read_rows()
        unknown = [queue for queue in bounds if from_end and queue not in self._first_offsets]
        if unknown:
            rows = [(_BEGIN + str(queue).encode(), str(bounds[queue].next).encode()) for queue in unknown]
            await self._row_publisher().send([OutgoingRecord(0, key, value) for key, value in rows])
            await self._read_rows()
        for queue, (first, _) in bounds.items():
            self._queues[queue].advance(max(first, self._first_offsets.get(queue, 0)))

    async def _read_rows(self) -> None:
        topic = ledger_topic(self._topic)
        (first, end) = (await self._topics.bounds(topic, [0]))[0]
        start = max(first, self._rows_read)
        if start >= end:
            return
        timeout_s = self._limits.request_s
        groups = read_range(self._clients, topic, 0, start, end, timeout_s=timeout_s)
        async with aclosing(read_in_thread(self._threads, groups, lambda group: group)) as found:
            async for group in found:
                for record in group:
                    self._read_row(record)
        self._rows_read = end

    def _read_row(self, record: KafkaRecord) -> None:
        key, value = record.key() or b"", record.value()
        if value is None:
            return
        try:
            if key.startswith(_QUEUE):
                queue = int(key.removeprefix(_QUEUE))
                if queue < len(self._queues):
                    self._queues[queue].adopt(msgspec.msgpack.decode(value, type=LedgerSnapshot))
            elif key.startswith(_EPOCH):
                queue, epoch = map(int, key.removeprefix(_EPOCH).split(b"/"))
                if queue < len(self._epochs):
                    self._epochs[queue].adopt(EpochRange(epoch, *map(int, value.split())))
            elif key.startswith(_BEGIN):
                queue = int(key.removeprefix(_BEGIN))
                self._first_offsets[queue] = min(int(value), self._first_offsets.get(queue, int(value)))
            elif key.startswith(_PRODUCER):
                call = msgspec.msgpack.decode(value, type=StoredCall)
                call.time_ms = record.timestamp()[1]
                self._empty_calls[key.removeprefix(_PRODUCER).decode()] = call
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("topic %r has a row that cannot be read (%s): it is left out", ledger_topic(self._topic), error)

    # ---- reading the log -------------------------------------------------------------------------------------------

    async def scan(self) -> None:
        """Read all queues up to their ends. Concurrent callers share one scan that begins after their calls."""
        if self._next_scan is None:
            self._next_scan = self._background.hold(self._scan_after(self._scanning), "headrace kafka ledgers")
        await asyncio.shield(self._next_scan)

    async def _scan_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._scanning, self._next_scan = self._next_scan, None
        await self._read_rows()
        bounds = await self._topics.bounds(self._topic, range(len(self._queues)))
        await asyncio.gather(*(self._scan_queue(queue, *found) for queue, found in bounds.items()))

    async def scan_to(self, queue: int, first: int, end: int) -> None:
        """Read a queue up to offset `end`, if its ledger is not there yet. `first` is the first retained offset."""
        if self._queues[queue].position < end:
            await self._scan_queue(queue, first, end)

    async def _scan_queue(self, queue: int, first: int, end: int) -> None:
        async with self._locks[queue]:
            ledger = self._queues[queue]
            ledger.advance(min(first, end))
            if ledger.position >= end:
                return
            groups = read_range(
                self._clients, self._topic, queue, ledger.position, end, timeout_s=self._limits.request_s
            )

            def digest(group: Sequence[KafkaRecord]) -> tuple[list[tuple[int, CallPart, int]], int, int, int]:
                parts = [
                    (record.offset(), part, record.timestamp()[1])
                    for record in group
                    if (part := _part_of(record, self.partition_tags[queue])) is not None
                ]
                return parts, group[-1].offset() + 1, len(group), sum(len(each.value() or b"") for each in group)

            async with aclosing(read_in_thread(self._threads, groups, digest)) as found:
                async for parts, at, records, nbytes in found:
                    for offset, part, time_ms in parts:
                        ledger.observe(offset, part, time_ms)
                    ledger.advance(at)
                    self._count(queue, records, nbytes)
            ledger.advance(end)

    def observe(self, queue: int, calls: Iterable[tuple[int, CallPart, int]]) -> list[int]:
        """Note the records of calls that a receiver has read: offset, part, and time in milliseconds. All such records
        below the first one must have been noted. Return the offsets of the late duplicates."""
        ledger = self._queues[queue]
        return [offset for offset, part, time_ms in calls if not ledger.observe(offset, part, time_ms)]

    def note_read(self, queue: int, position: int, records: int, nbytes: int) -> None:
        """Note that a receiver has read the queue up to `position`."""
        self._queues[queue].advance(position)
        self._count(queue, records, nbytes)

    # ---- leader epochs ---------------------------------------------------------------------------------------------

    def note_epochs(self, queue: int, ranges: Iterable[EpochRange]) -> None:
        """Note the epochs of records that a receiver has read."""
        self._epochs[queue].note(ranges)

    def epoch_before(self, queue: int, position: int) -> int | None:
        """Return the epoch in which the record before this position was read, also by another process until the last
        `refresh`. None: not known."""
        return self._epochs[queue].epoch_before(position)

    async def refresh(self) -> None:
        """Read the rows that other processes have stored."""
        await self._read_rows()

    async def keep_epochs(self) -> None:
        """Store the epochs from time to time. Does not end."""
        while True:
            await asyncio.sleep(self._limits.epochs_s)
            await self._store_epochs()

    async def _store_epochs(self) -> None:
        """Store the epochs that were read. After a failure, the next call stores them."""
        taken = [epochs.take_unsaved() for epochs in self._epochs]
        rows = [
            OutgoingRecord(0, _EPOCH + b"%d/%d" % (queue, each.epoch), b"%d %d" % (each.low, each.high))
            for queue, ranges in enumerate(taken)
            for each in ranges
        ]
        if not rows:
            return
        stored = False
        try:
            await self._row_publisher().send(rows)
            stored = True
        except HeadraceError as error:
            log.info("the leader epochs of topic %r were not stored, trying again: %s", self._topic, error)
        finally:
            if not stored:
                for epochs, ranges in zip(self._epochs, taken, strict=True):
                    epochs.put_back(ranges)

    # ---- producers -------------------------------------------------------------------------------------------------

    async def state(self, producer: str) -> ProducerState:
        """Return the stored parts of a producer's last call, after reading the log to its end. Raises StorageError."""
        await self.scan()
        calls = [call for ledger in self._queues if (call := ledger.stored(producer)) is not None]
        if (empty := self._empty_calls.get(producer)) is not None:
            calls.append(empty)
        return producer_state(calls)

    async def store_empty(self, sequence: ProducerSequence) -> None:
        """Store a call that has no batches."""
        call = StoredCall(sequence.number, sequence.previous, 0, {}, int(time.time() * 1000))
        value = msgspec.msgpack.encode(call)
        await self._row_publisher().send([OutgoingRecord(0, _PRODUCER + sequence.producer.encode(), value)])
        self._empty_calls[sequence.producer] = call

    def _row_publisher(self) -> RecordPublisher:
        if self._publisher is None:
            self._publisher = RecordPublisher(ledger_topic(self._topic), self._clients, self._limits)
        return self._publisher

    # ---- snapshots -------------------------------------------------------------------------------------------------

    def _count(self, queue: int, records: int, nbytes: int) -> None:
        unsaved = self._unsaved_counts[queue]
        unsaved.records += records
        unsaved.nbytes += nbytes
        # A large snapshot is stored less often.
        stored_bytes = self._stored_bytes[queue]
        enough_records = max(self._limits.snapshot_records, stored_bytes // SNAPSHOT_BYTES_PER_RECORD)
        enough_bytes = max(self._limits.snapshot_bytes, SNAPSHOT_SHARE * stored_bytes)
        if unsaved.records >= enough_records or unsaved.nbytes >= enough_bytes:
            self._unsaved_counts[queue] = _UnsavedCounts()
            self._due.add(queue)
            if _SAVING not in self._background:
                self._background.start(self._save_due(), _SAVING)

    async def _save_due(self) -> None:
        """Store the ledgers of the queues that are due, in turns. Each turn makes one client for all of them: a client
        has six threads, and the queues may be read faster than clients end."""
        while self._due:
            queues, self._due = sorted(self._due), set()
            await self._save(queues)
            if self._due:
                await asyncio.sleep(self._limits.snapshot_pause_s)

    async def _save(self, queues: Sequence[int]) -> None:
        """Store the ledgers of queues. After a failure, more of the log has to be read the next time."""
        oldest_ms = int((time.time() - self._limits.producers_kept_s) * 1000)
        try:
            bounds = await self._topics.bounds(self._topic, queues)
            await self._read_rows()  # another process may have stored a later call of a producer that seems to be old
            for queue in queues:
                encoded = self._snapshot(queue, oldest_ms, bounds[queue].first)
                self._stored_bytes[queue] = len(encoded)
                await self._row_publisher().send([OutgoingRecord(0, _QUEUE + str(queue).encode(), encoded)])
            old = [name for name, call in self._empty_calls.items() if call.time_ms < oldest_ms]
            for producer in old:
                del self._empty_calls[producer]
            await self._row_publisher().send([OutgoingRecord(0, _PRODUCER + each.encode(), None) for each in old])
        except HeadraceError as error:
            log.info("the ledgers of queues %s of topic %r were not stored: %s", queues, self._topic, error)

    def _snapshot(self, queue: int, oldest_ms: int, first: int) -> bytes:
        """Return the encoded ledger of a queue. If it is too large, forget the producers with the oldest calls."""
        ledger = self._queues[queue]
        while len(encoded := msgspec.msgpack.encode(ledger.snapshot(oldest_ms, first))) > self._limits.ledger_bytes:
            forgotten = ledger.forget_oldest_half()
            log.warning(
                "queue %d of topic %r: its ledger of producers is full (%d bytes), so %d of them are forgotten",
                queue, self._topic, len(encoded), forgotten,
            )  # fmt: skip
            if not forgotten:
                break
        return encoded

    async def saved(self) -> None:
        """Wait until the snapshots that were begun are stored."""
        await self._background.join()

    async def aclose(self) -> None:
        await self._background.aclose()
        await self._store_epochs()
        if self._publisher is not None:
            await self._publisher.aclose()
        await asyncio.to_thread(self._threads.shutdown)


def _part_of(record: KafkaRecord, tag: bytes) -> CallPart | None:
    """Return the part of a call that is in a record; None for a record whose headers cannot be read."""
    try:
        return call_part(headers_of(record), tag)
    except InvalidArgument:
        return None
