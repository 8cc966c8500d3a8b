"""Receives the batches of one queue from its partition."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

from confluent_kafka import KafkaError

from ...streams.errors import Closed, HeadraceError, StorageError
from ...streams.events import EventBatch
from ...streams.wording import counted
from ..receiving import RETENTION, Bounds, Gap, LostEndError, QueueReceiver, Received
from .fetching import WAITING_RECORD_BYTES, FetchedGroup, PartitionFetcher, UnreadableRecord, memory_of

log = logging.getLogger("headrace.adapters.kafka")

_POSITION_ERRORS = (
    KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001 (its name)
    KafkaError._LOG_TRUNCATION,  # noqa: SLF001 (its name)
    KafkaError.OFFSET_OUT_OF_RANGE,
)


class _WithoutBatch(NamedTuple):
    """The next part of the queue, up to `end`, has no batch: it is a gap, or there is nothing to deliver."""

    end: int
    gap: Gap | None = None
    memory_bytes: int = 0
    """What the fetcher counts for it."""


class ReceiverQueue(NamedTuple):
    """The functions of the adapter that a receiver needs, for its queue."""

    number: int
    fetch: Callable[[int, Callable[[FetchedGroup], None]], PartitionFetcher]
    """Starts a fetcher at an offset."""
    note: Callable[[FetchedGroup], Sequence[int]]
    """Notes the records of a group in the ledger. Returns the offsets of late duplicates, which are left out."""
    bounds: Callable[[], Awaitable[Bounds]]
    check: Callable[[], Awaitable[None]]
    """Raises StorageError if the topic is not the one that was opened."""
    fault: Callable[[], HeadraceError | None]
    """Returns the reason why the topic cannot be used at present."""
    failure: Callable[[str, KafkaError | Exception], HeadraceError]
    acknowledge: Callable[[int], None]


class KafkaReceiver(QueueReceiver):
    """Receives the batches of one queue, from a position on."""

    def __init__(
        self, queue: ReceiverQueue, position: int, first: int, on_close: Callable[[KafkaReceiver], None]
    ) -> None:
        """`first` is the first retained offset."""
        self._queue = queue
        self._position = position
        self._on_close = on_close
        self._steps: deque[EventBatch | _WithoutBatch] = deque()
        if position < first:
            self._steps.append(_WithoutBatch(first, Gap(position, first, RETENTION)))
        self._unchecked = False
        """Whether the topic must be checked before more is delivered."""
        self._error: KafkaError | Exception | None = None
        self._rejected_position: int | None = None
        """The position that the client rejected last, although the partition has it. None: it was accepted since."""
        self._changed = asyncio.Event()
        self._closed = False
        self._fetcher: PartitionFetcher | None = None

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        while True:
            if self._closed:
                raise Closed(f"the receiver of queue {self._queue.number} is closed")
            if (fault := self._queue.fault()) is not None:
                raise fault.copy()
            self._changed.clear()
            if self._steps:
                if self._unchecked:
                    await self._check()
                    continue
                return self._next(max_events, max_bytes)
            if self._error is not None:
                if (gap := await self._recover_from(self._error)) is not None:
                    return gap
            elif self._fetcher is None:
                self._fetcher = self._queue.fetch(self._position, self._arrived)
            await self._changed.wait()

    async def _check(self) -> None:
        """Check the topic. A pause that is noted meanwhile needs a check of its own."""
        self._unchecked = False
        try:
            await self._queue.check()
        except BaseException:
            self._unchecked = True
            raise

    def _next(self, max_events: int, max_bytes: int) -> Received:
        """Return the batches that follow; if there are none, a gap, or a higher position."""
        steps = self._steps
        if not isinstance(first := steps[0], EventBatch):
            steps.popleft()
            self._position = first.end
            self._release(first.memory_bytes)
            return Received((), first.end, first.gap)
        batches: list[EventBatch] = []
        for step in steps:
            if not isinstance(step, EventBatch):
                break
            batches.append(step)
            max_events -= step.count
            max_bytes -= len(step.encoded)
            if max_events <= 0 or max_bytes <= 0:
                break
        for _ in batches:
            steps.popleft()
        self._position = batches[-1].offset + 1
        self._pass_offsets_without_records()
        self._release(memory_of(batches))
        return Received(batches, self._position)

    def _pass_offsets_without_records(self) -> None:
        if self._steps and isinstance(step := self._steps[0], _WithoutBatch) and step.gap is None:
            self._steps.popleft()
            self._position = step.end

    def _release(self, nbytes: int) -> None:
        if self._fetcher is not None:
            self._fetcher.release(nbytes)

    def _arrived(self, group: FetchedGroup) -> None:
        """Add the records of a group that was fetched."""
        self._unchecked = self._unchecked or group.paused
        duplicates = self._queue.note(group)
        if duplicates or group.unreadable:
            self._add_some(group, duplicates)
        else:
            self._steps.extend(group.batches)
        if group.end > self._reached:
            self._steps.append(_WithoutBatch(group.end))
        self._error = group.error
        if group.error is None:
            self._rejected_position = None
        self._changed.set()

    @property
    def _reached(self) -> int:
        """The offset after the last step."""
        if not self._steps:
            return self._position
        last = self._steps[-1]
        return last.offset + 1 if isinstance(last, EventBatch) else last.end

    def _add_some(self, group: FetchedGroup, duplicates: Sequence[int]) -> None:
        """Add the batches of a group without its late duplicates, and its unreadable records as gaps."""
        left_out = set(duplicates)
        skipped: list[UnreadableRecord] = []
        waiting = 0
        for record in merge(group.batches, group.unreadable, key=_offset_of):
            if record.offset in left_out:
                continue
            if isinstance(record, EventBatch):
                self._steps.append(record)
                waiting += memory_of((record,))
            else:
                skipped.append(record)
                end = record.offset + 1
                gap = Gap(record.offset, end, record.reason)
                self._steps.append(_WithoutBatch(end, gap, WAITING_RECORD_BYTES))
                waiting += WAITING_RECORD_BYTES
        self._release(group.memory_bytes - waiting)
        self._log_left_out(skipped, duplicates)

    def _log_left_out(self, skipped: Sequence[UnreadableRecord], duplicates: Sequence[int]) -> None:
        """Log the records of one group that are not delivered: one line for many."""
        if duplicates:
            count, first = counted(len(duplicates), "late duplicate"), duplicates[0]
            log.info("queue %d: %s from offset %d on left out", self._queue.number, count, first)
        if skipped:
            (first, reason), last = skipped[0], skipped[-1].offset
            more = counted(len(skipped) - 1, "more record")
            others = f", and {more} up to offset {last}, too" if len(skipped) > 1 else ""
            log.error("queue %d, offset %d: %s; it is skipped%s", self._queue.number, first, reason, others)

    async def _recover_from(self, error: KafkaError | Exception) -> Received | None:
        """Recover from an error that has ended the fetcher: return a gap, or fetch again. Raises StorageError."""
        await self._end_fetcher()
        failure = self._queue.failure(f"queue {self._queue.number} cannot be read from offset {self._position}", error)
        if not isinstance(error, KafkaError) or error.code() not in _POSITION_ERRORS:
            self._error = None
            raise failure
        await self._queue.check()
        first, end = await self._queue.bounds()
        if first <= self._position <= end and self._rejected_position == self._position:
            # The offset is there, and the client refuses it again: its record is not the one that was read.
            raise StorageError(
                f"queue {self._queue.number}: the brokers truncated it below offset {self._position} and stored other "
                f"events there ({error.str()}): seek its subscriptions to an earlier position"
            )
        if self._position > end:
            raise LostEndError(
                f"queue {self._queue.number} has lost its end: offsets from {end} to {self._position - 1} were "
                "truncated by the brokers: close the silo, and start it again or seek its subscriptions there",
                end=end,
            )
        self._error = None
        if self._position >= first:
            self._rejected_position = self._position
            self._fetcher = self._queue.fetch(self._position, self._arrived)
            return None
        gap = Gap(self._position, first, RETENTION)
        self._position = first
        return Received((), first, gap)

    def wake(self) -> None:
        """Look at the topic again, because its state has changed."""
        self._changed.set()

    async def acknowledge(self, offset: int) -> None:
        if self._closed:
            raise Closed(f"the receiver of queue {self._queue.number} is closed")
        self._queue.acknowledge(offset)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._changed.set()
            self._on_close(self)
            self._steps.clear()
        await self._end_fetcher()

    async def _end_fetcher(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.stop()
            await fetcher.stopped()


_offset_of = attrgetter("offset")
