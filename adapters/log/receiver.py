"""Reading one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...streams.errors import Closed, CorruptRecord
from ...streams.events import EventBatch
from ..seam import Gap, QueueReceiver, Received
from .blocks import Block, DamagedBlockError, StreamTable, Want
from .environment import LogEnvironment
from .transactions import Snapshot

RETENTION = "removed by retention"
FRESH_BATCHES = 256
FRESH_BYTES = 64 << 10
"""What ends a queue, in blocks of no more than this, is read on the loop, about so much at once: it was just written,
so it is in memory, and a thread would have to wait for the interpreter first."""


class QueueReader:
    """Reads one queue. Blocking; for one thread at a time."""

    def __init__(self, environment: LogEnvironment, queue: int, streams: StreamTable) -> None:
        self._environment = environment
        self._queue = queue
        self._streams = streams
        self._checked = -1

    def look(self, position: int, want: Want) -> Received | None:
        """What `read` returns, or the first part of it, where that costs so little that the loop can do it: nothing, or
        the few batches at the queue's end. None where it is more."""
        with self._environment.reading() as snapshot:
            end = snapshot.tail(self._queue).next
            if position >= end:
                return Received((), position)
            first = snapshot.block_holding(self._queue, position) if end - position <= FRESH_BATCHES else None
            if first is None:
                return None
            little = want._replace(nbytes=min(want.nbytes, FRESH_BYTES))
            batches = self._collect(snapshot, first, position, end, little, largest=FRESH_BYTES)
        return Received(batches, batches[-1].offset + 1) if batches else None

    def read(self, position: int, want: Want) -> Received:
        """What is stored from `position` on: batches, or a gap, or nothing at the end of the queue.

        Raises CorruptRecord for a damaged block, once everything before it has been returned.
        """
        with self._environment.reading() as snapshot:
            end = snapshot.tail(self._queue).next
            if position >= end:
                return Received((), position)
            first = snapshot.block_holding(self._queue, position)
            if first is None:
                gap = _gap(snapshot, self._queue, position, end)
                return Received((), gap.high, gap)
            batches = self._collect(snapshot, first, position, end, want)
        return Received(batches, batches[-1].offset + 1)

    def _collect(
        self, snapshot: Snapshot, first: int, position: int, end: int, want: Want, *, largest: int | None = None
    ) -> list[EventBatch]:
        """Batches from `position` on, up to the first block of more than `largest` bytes."""
        batches: list[EventBatch] = []
        while position < end and want.events > 0 and want.nbytes > 0:
            if largest is not None and snapshot.size(self._queue, first) > largest:
                break
            try:
                block = self._open(snapshot, first)
            except DamagedBlockError as damage:
                if batches:
                    break
                after = snapshot.block_after(self._queue, first)
                raise CorruptRecord(self._queue, position, str(damage), after) from None
            found = block.batches(first, position - first, want, self._streams)
            batches += found
            want = want.less(found)
            position = first = first + block.header.batches
        return batches

    def _open(self, snapshot: Snapshot, first: int) -> Block:
        """A block is checked once, however many reads it takes."""
        block = Block(snapshot.record(self._queue, first), check=first != self._checked)
        self._checked = first
        return block


def _gap(snapshot: Snapshot, queue: int, position: int, end: int) -> Gap:
    first = snapshot.first(queue)
    high = end if first is None else first
    reasons = [gap.reason for gap in snapshot.gaps(queue) if gap.low < high and gap.high > position]
    return Gap(position, high, reasons[-1] if reasons else RETENTION)


class LogReceiver(QueueReceiver):
    """A position in one queue."""

    def __init__(
        self,
        reader: QueueReader,
        position: int,
        *,
        rung: asyncio.Event,
        run: Callable[[Callable[[], Received]], Awaitable[Received]],
        acknowledge: Callable[[int], None],
        closed: Callable[[LogReceiver], None],
    ) -> None:
        """`rung` is set when the queue may have grown; `run` runs a read in a thread; `closed` is called once."""
        self._reader = reader
        self._position = position
        self._rung = rung
        self._run = run
        self._acknowledge = acknowledge
        self._on_close = closed
        self._closed = False

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        want = Want(max(max_events, 1), max(max_bytes, 1))
        while not self._closed:
            # Clear, then look: whoever commits after the look rings.
            self._rung.clear()
            received = self._reader.look(self._position, want)
            if received is None:
                received = await self._run(lambda: self._reader.read(self._position, want))
            elif not received.batches:
                await self._rung.wait()
            if received.batches or received.gap:
                self._position = received.next_offset
                return received
        raise Closed("this receiver is closed")

    async def acknowledge(self, offset: int) -> None:
        if self._closed:
            raise Closed("this receiver is closed")
        self._acknowledge(offset)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._rung.set()
            self._on_close(self)
