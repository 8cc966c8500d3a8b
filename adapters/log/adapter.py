"""The adapter `log`: durable queues in one directory, for all processes of one machine. See docs/log.md."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ...streams.background import BackgroundTasks
from ...streams.errors import Closed, CorruptRecord, DataDirectoryError, InvalidArgument, PayloadTooLarge
from ...streams.events import EventBatch
from ...streams.private_files import make_directory
from ..range_ends import RangeLimits
from ..receiving import Bounds
from ..registry import read_options
from ..seam import AdapterContext, Backlog, Capabilities, ProducerSequence, QueueAdapter, QueueStatistics, Receipt
from .allocator import prefer_reuse
from .backlog import backlog
from .blocks import StreamTable
from .committer import Growth, LogCommitter
from .damage import DamagedRange, find_damage, skip_damage, skipped_ranges
from .doorbell import Doorbell, DoorbellRinger
from .environment import MAX_QUEUES, LogEnvironment, acquire, check_process, release
from .group import CommitRequest
from .limits import LOG_LIMITS, LogLimits
from .options import LogOptions
from .range_ends import end_within
from .receiver import LogReceiver, QueueReader
from .retention import expire_producers, trim
from .timesearch import offset_at
from .transactions import LogSnapshot, StoredGap

MAX_BATCH_BYTES = 16 << 20
"""Limit of an encoded batch, in bytes."""

_READ_THREADS = 4

_T = TypeVar("_T")


async def open_adapter(
    context: AdapterContext, options: Mapping[str, Any], limits: LogLimits = LOG_LIMITS
) -> LogAdapter:
    """Open the log in `context.directory`, or make it. Several handles, in one or many processes, may be open at once.

    Raises InvalidArgument for wrong options, and for a number of queues that differs from that of the directory;
    DataDirectoryError if the directory is foreign, damaged or not accessible.
    """
    chosen = read_options("log", LogOptions, options)
    if context.directory is None:
        raise InvalidArgument(f"provider {context.provider!r}: the adapter 'log' needs a directory to keep its data in")
    if not 0 < context.queues <= MAX_QUEUES:
        raise InvalidArgument(f"a log has 1 to {MAX_QUEUES:,} queues, not {context.queues}")
    prefer_reuse()
    wake = context.directory / "wake"
    environment = await asyncio.to_thread(_open, context, chosen, wake)
    return LogAdapter(environment, wake, limits)


def _open(context: AdapterContext, options: LogOptions, wake: Path) -> LogEnvironment:
    assert context.directory is not None
    create = not context.used_before
    environment = acquire(context.directory / "log", options, context.provider, context.queues, create=create)
    try:
        make_directory(wake)
    except OSError as error:
        release(environment)
        raise DataDirectoryError(f"{wake} cannot be made: {error.strerror}") from None
    return environment


class LogAdapter(QueueAdapter):
    """Durable queues in LMDB. Belongs to the event loop that opened it."""

    capabilities = Capabilities(rewindable=True, durable=True, idempotent=True, shared_calls=True)

    def __init__(self, environment: LogEnvironment, wake: Path, limits: LogLimits = LOG_LIMITS) -> None:
        self._limits = limits
        self._environment = environment
        self.identity = str(environment.created_us)
        self._queues = environment.queues
        self._loop = asyncio.get_running_loop()
        self._doorbell = Doorbell(wake, limits)
        self._ringer = DoorbellRinger(wake, self._doorbell.name)
        self._committer = LogCommitter(environment, self._ringer.ring, self._offer, limits)
        self.durations = {"commit": self._committer.commits, "sync": self._committer.syncs}
        self._threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="headrace-log-read")
        self._streams = StreamTable()
        self._receivers: dict[int, set[LogReceiver]] = {}
        """By queue."""
        self._expired_to = b""
        self._background = BackgroundTasks()
        self._closing: asyncio.Task[None] | None = None

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """See QueueAdapter. Never blocks and never raises QueueFull: calls that are not stored yet are kept in memory.
        A call whose caller was cancelled may still be stored."""
        self._check_usable()
        batches = tuple(batches)
        nbytes = 0
        for queue, batch in batches:
            size = len(batch.encoded)
            if size > MAX_BATCH_BYTES:
                raise PayloadTooLarge(f"a batch for {batch.stream}", size, MAX_BATCH_BYTES)
            if not 0 <= queue < self._queues:
                raise self._no_such_queue(queue)
            if not batch.encoded.startswith(batch.stream.prefix):
                _check_encoding(batch)
            nbytes += size
        answer = self._loop.create_future()
        self._committer.submit(CommitRequest(batches, nbytes, answer, sequence))
        return answer

    async def open_receiver(self, queue: int, start: int | None = None) -> LogReceiver:
        noted = self._environment.acknowledgements.noted(queue)
        tail = await self._read_snapshot(lambda snapshot: snapshot.tail(queue), queue)
        position = max(tail.acknowledged, min(noted, tail.next)) if start is None else start
        if not 0 <= position <= tail.next:
            raise InvalidArgument(f"queue {queue} ends at offset {tail.next}: it cannot be read from {position}")
        grown = await self._doorbell.listen(queue)

        def forget(receiver: LogReceiver) -> None:
            self._receivers[queue].discard(receiver)
            self._doorbell.forget(queue, grown)

        reader = QueueReader(self._environment, queue, self._streams, self._limits)
        receiver = LogReceiver(
            reader,
            position,
            grown=grown,
            run=self._run,
            acknowledge=lambda offset: self._environment.acknowledgements.note(queue, offset),
            on_close=forget,
        )
        self._receivers.setdefault(queue, set()).add(receiver)
        return receiver

    async def bounds(self, queue: int) -> Bounds:
        return await self._read_snapshot(lambda snapshot: _bounds(snapshot, queue), queue)

    async def resume_at(self, queue: int, offset: int) -> int:
        """See QueueAdapter. Raises CorruptRecord if records are stored behind the queue's end: then the end is damaged,
        and nothing was lost."""
        return await self._read_snapshot(lambda snapshot: min(offset, snapshot.end(queue)), queue)

    async def statistics(self, queue: int) -> QueueStatistics:
        def read(snapshot: LogSnapshot) -> QueueStatistics:
            tail = snapshot.tail(queue)
            return QueueStatistics(_bounds(snapshot, queue), tail.events, tail.nbytes)

        return await self._read_snapshot(read, queue)

    async def offset_at(self, queue: int, time_us: int) -> int:
        return await self._read_snapshot(lambda snapshot: offset_at(snapshot, queue, time_us), queue)

    async def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        limits = RangeLimits(max_events, max_bytes)
        return await self._read_snapshot(lambda snapshot: end_within(snapshot, queue, start, end, limits), queue)

    async def backlog(self, queue: int, offset: int) -> Backlog:
        return await self._read_snapshot(lambda snapshot: backlog(snapshot, queue, offset, self._limits), queue)

    async def last_sequence(self, producer: str) -> int:
        row = await self._read_snapshot(lambda snapshot: snapshot.producer(producer.encode()))
        return row.number if row else 0

    async def gaps(self, queue: int) -> list[StoredGap]:
        """Return the unfinished ranges that retention deleted from a queue, oldest first."""
        return await self._read_snapshot(lambda snapshot: list(snapshot.gaps(queue)), queue)

    async def skipped(self, queue: int, start: int, end: int) -> Sequence[tuple[int, int]]:
        return await self._read_snapshot(lambda snapshot: skipped_ranges(snapshot, queue, start, end), queue)

    async def skip_damage(self, queue: int) -> list[DamagedRange]:
        """Read a whole queue, and mark its damaged ranges as skipped: readers get a gap there, and continue. Return the
        ranges."""
        self._check_queue(queue)
        damages = await self._run(lambda: find_damage(self._environment, queue))
        return await self._run(lambda: skip_damage(self._environment, queue, damages))

    async def apply_retention(self, watermarks: Mapping[int, int]) -> None:
        """See QueueAdapter. Deletes in short transactions, so that publishers can commit between them. Raises
        CorruptRecord for the first damaged queue when the others are done."""
        await self._run(self._environment.forget_dead_readers)
        damage: CorruptRecord | None = None
        for queue in range(self._queues):
            try:
                while await self._run(lambda queue=queue: trim(self._environment, queue, watermarks.get(queue))):
                    pass
            except CorruptRecord as error:
                damage = damage or error
        self._expired_to = await self._run(lambda: expire_producers(self._environment, self._expired_to))
        if damage is not None:
            raise damage

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = self._background.hold(self._close(), "headrace log close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for receiver in [receiver for receivers in self._receivers.values() for receiver in receivers]:
            await receiver.aclose()
        await self._committer.aclose()
        await self._doorbell.aclose()
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        self._threads.shutdown()
        self._ringer.close()
        release(self._environment)

    def _offer(self, grown: Growth) -> None:
        for queue, stored in grown.items():
            for receiver in list(self._receivers.get(queue, ())):
                receiver.offer(stored)

    async def _read_snapshot(self, read: Callable[[LogSnapshot], _T], queue: int = 0) -> _T:
        self._check_queue(queue)

        def read_in_transaction() -> _T:
            with self._environment.reading() as snapshot:
                return read(snapshot)

        return await self._run(read_in_transaction)

    async def _run(self, work: Callable[[], _T]) -> _T:
        self._check_usable()
        return await self._loop.run_in_executor(self._threads, work)

    def _check_usable(self) -> None:
        if self._closing is not None:
            raise Closed(f"the log '{self._environment.path}' is closed")
        if self._environment.inherited:
            check_process(self._environment)

    def _check_queue(self, queue: int) -> None:
        if not 0 <= queue < self._queues:
            raise self._no_such_queue(queue)

    def _no_such_queue(self, queue: int) -> InvalidArgument:
        return InvalidArgument(f"there is no queue {queue}: this provider has queues 0 to {self._queues - 1}")


def _bounds(snapshot: LogSnapshot, queue: int) -> Bounds:
    return Bounds(snapshot.beginning(queue), snapshot.tail(queue).next)


def _check_encoding(batch: EventBatch) -> None:
    """Check a batch that does not begin with the name of its stream. Readers must parse it, so it has to be valid."""
    if EventBatch.decode(batch.encoded).stream != batch.stream:
        raise InvalidArgument(f"a batch for {batch.stream} names another stream in its encoding")
