"""Reads one queue of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...streams.errors import Closed
from ...streams.events import EventBatch
from ..group_commit import StoredBatches
from ..receiving import RETENTION, Accept, Gap, QueueReceiver, Received
from .blocks import (
    Block,
    BlockPlace,
    DamagedBlockError,
    ReadBudget,
    StreamTable,
    check_block,
    read_header,
    skipped_reason,
)
from .environment import LogEnvironment
from .limits import LOG_LIMITS, LogLimits
from .transactions import LogSnapshot

FRESH_BATCHES = 256
"""Up to this number of batches at the end of a queue are read on the event loop: see `LogLimits.fresh_bytes`."""


class QueueReader:
    """Reads one queue. Its methods block. Not safe for concurrent use."""

    def __init__(
        self, environment: LogEnvironment, queue: int, streams: StreamTable, limits: LogLimits = LOG_LIMITS
    ) -> None:
        self._limits = limits
        self._environment = environment
        self._queue = queue
        self._streams = streams
        self._checked = -1
        self._end_checked = False

    def read_fresh(self, position: int, budget: ReadBudget) -> Received | None:
        """Read on the event loop if that is cheap: at the queue's end, or if few batches are left.

        Return all or the first of the batches that `read` would return. Return None if `read` must be used.
        """
        with self._environment.reading() as snapshot:
            end = snapshot.tail(self._queue).next
            if position >= end:
                self._check_end(snapshot)
                return Received((), position)
            first = snapshot.block_holding(self._queue, position) if end - position <= FRESH_BATCHES else None
            if first is None:
                return None
            if self._skipped(snapshot, first, position) is not None:
                return None
            fresh_bytes = self._limits.fresh_bytes
            small = budget._replace(nbytes=min(budget.nbytes, fresh_bytes))
            batches = self._collect(snapshot, first, position, end, small, largest=fresh_bytes)
        return Received(batches, batches[-1].offset + 1) if batches else None

    def read(self, position: int, budget: ReadBudget) -> Received:
        """Return the batches from `position` on, or a gap, or nothing at the end of the queue.

        Raises CorruptRecord if the block at `position` is damaged. All batches before it are returned first.
        """
        with self._environment.reading() as snapshot:
            end = snapshot.tail(self._queue).next
            if position >= end:
                self._check_end(snapshot)
                return Received((), position)
            first = snapshot.block_holding(self._queue, position)
            if first is None:
                gap = _gap(snapshot, self._queue, position, end)
                return Received((), gap.high, gap)
            if (gap := self._skipped(snapshot, first, position)) is not None:
                return Received((), gap.high, gap)
            batches = self._collect(snapshot, first, position, end, budget)
        return Received(batches, batches[-1].offset + 1)

    def _check_end(self, snapshot: LogSnapshot) -> None:
        """Raise CorruptRecord if records are stored behind the queue's end: it has no checksum. Checked once."""
        if not self._end_checked:
            snapshot.end(self._queue)
            self._end_checked = True

    def _collect(
        self,
        snapshot: LogSnapshot,
        first: int,
        position: int,
        end: int,
        budget: ReadBudget,
        *,
        largest: int | None = None,
    ) -> list[EventBatch]:
        """Return batches from `position` on, up to the first block of more than `largest` bytes."""
        batches: list[EventBatch] = []
        while position < end and budget.events > 0 and budget.nbytes > 0:
            if largest is not None and snapshot.size(self._queue, first) > largest:
                break
            try:
                block = self._open(snapshot, first, position)
            except DamagedBlockError as damage:
                if batches:  # return them first; the next read begins at this block, which is damaged or skipped
                    break
                after = snapshot.block_after(self._queue, max(first, position))
                raise snapshot.corrupt(self._queue, position, damage, after) from None
            found = block.batches(position - first, budget, self._streams)
            batches += found
            budget = budget.minus(found)
            position = first = first + block.header.batches
        return batches

    def _skipped(self, snapshot: LogSnapshot, first: int, position: int) -> Gap | None:
        """Return the gap from `position` on if the block that begins at `first` was skipped, else None."""
        try:
            record = snapshot.record(self._queue, first)
        except DamagedBlockError:
            return None  # `_open` raises the error
        return skipped_gap(record, BlockPlace(self._queue, first), position)

    def _open(self, snapshot: LogSnapshot, first: int, position: int) -> Block:
        """Return the block at `first`. Its checksum is verified by the first of several reads only.

        Raises DamagedBlockError if it is damaged, or if it does not hold `position`: then the right block is missing,
        or a damaged page of LMDB led to a wrong one.
        """
        block = Block(snapshot.record(self._queue, first), BlockPlace(self._queue, first), check=first != self._checked)
        if not first <= position < first + block.header.batches:
            raise DamagedBlockError("it is missing")
        self._checked = first
        return block


def skipped_gap(record: memoryview, place: BlockPlace, position: int) -> Gap | None:
    """Return the gap from `position` on if the record at `place` is a skipped block, else None."""
    try:
        if not read_header(record).skipped:
            return None
        header = check_block(record, place)
    except DamagedBlockError:
        return None  # reading the block raises the error
    return Gap(position, place.first + header.batches, skipped_reason(record), skipped=True)


def _gap(snapshot: LogSnapshot, queue: int, position: int, end: int) -> Gap:
    first = snapshot.first(queue)
    high = end if first is None else first
    noted = [gap for gap in snapshot.gaps(queue) if gap.low < high and gap.high > position]
    here = max((gap for gap in noted if gap.low <= position), key=lambda gap: gap.high, default=None)
    reason = RETENTION if here is None else here.reason
    ends = min((gap.low for gap in noted if gap.low > position and gap.reason != reason), default=high)
    return Gap(position, ends, reason)


class LogReceiver(QueueReceiver):
    """Receives the batches of one queue, from a position on."""

    def __init__(
        self,
        reader: QueueReader,
        position: int,
        *,
        grown: asyncio.Event,
        run: Callable[[Callable[[], Received]], Awaitable[Received]],
        acknowledge: Callable[[int], None],
        on_close: Callable[[LogReceiver], None],
    ) -> None:
        """`grown` is set when the queue may have grown. `run` runs a read in a thread. `on_close` is called once."""
        self._reader = reader
        self._position = position
        self._grown = grown
        self._run = run
        self._acknowledge = acknowledge
        self._on_close = on_close
        self._accept: Accept | None = None
        self._waiting = False
        self._accepted = False
        """Whether batches were accepted since the call began to wait."""
        self._closed = False

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        budget = ReadBudget(max(max_events, 1), max(max_bytes, 1))
        while not self._closed:
            # Clear the event, then read: a commit after the read sets it again.
            self._grown.clear()
            received = self._reader.read_fresh(self._position, budget)
            if received is None:
                received = await self._run(lambda: self._reader.read(self._position, budget))
            elif not received.batches and await self._wait():
                return Received((), self._position)
            if received.batches or received.gap:
                self._position = received.next_offset
                return received
        raise Closed("this receiver is closed")

    async def _wait(self) -> bool:
        """Wait until the queue may have grown. Return whether batches were accepted meanwhile."""
        self._waiting, self._accepted = True, False
        try:
            await self._grown.wait()
        finally:
            self._waiting = False
        return self._accepted

    def offer_to(self, accept: Accept) -> None:
        self._accept = accept

    def offer(self, stored: StoredBatches) -> None:
        """This process has committed batches of the queue: offer them, or else wake up `receive`."""
        follows = self._waiting and self._position == stored.first
        if follows and self._accept is not None and self._accept(stored.copies()):
            self._position = stored.end
            self._accepted = True
        elif self._position < stored.end:
            self._grown.set()

    async def acknowledge(self, offset: int) -> None:
        if self._closed:
            raise Closed("this receiver is closed")
        self._acknowledge(offset)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._grown.set()
            self._on_close(self)
