"""Reading one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...streams.errors import Closed, CorruptRecord
from ...streams.events import EventBatch
from ..seam import Gap, QueueReceiver, Received
from .blocks import Block, DamagedBlockError, StreamTable
from .environment import LogEnvironment
from .transactions import Snapshot

RETENTION = "removed by retention"


class QueueReader:
    """Reads blocks of one queue. Blocking; for one thread at a time."""

    def __init__(self, environment: LogEnvironment, queue: int, streams: StreamTable) -> None:
        self._environment = environment
        self._queue = queue
        self._streams = streams
        self._checked = -1

    def read(self, position: int, max_events: int, max_bytes: int) -> Received:
        """What is stored from `position` on, up to the limits; nothing where it is the end.

        Raises CorruptRecord for a damaged block once everything before it has been returned.
        """
        with self._environment.reading() as snapshot:
            end = snapshot.tail(self._queue).next
            if position >= end:
                return Received((), position)
            gap = None
            first = snapshot.block_holding(self._queue, position)
            if first is None:
                retained = snapshot.first(self._queue)
                first = end if retained is None else retained
                gap = _gap(snapshot, self._queue, position, first)
                position = first
            batches = self._collect(snapshot, first, position, end, max_events, max_bytes, started=gap is not None)
        return Received(batches, batches[-1].offset + 1 if batches else position, gap)

    def _collect(
        self, snapshot: Snapshot, first: int, position: int, end: int, max_events: int, max_bytes: int, *, started: bool
    ) -> list[EventBatch]:
        batches: list[EventBatch] = []
        while position < end and max_events > 0 and max_bytes > 0:
            try:
                block = self._open(snapshot, first)
            except CorruptRecord:
                if batches or started:
                    break
                raise
            found = block.batches(first, position - first, max_events, max_bytes, self._streams)
            batches += found
            max_events -= sum(batch.count for batch in found)
            max_bytes -= sum(len(batch.encoded) for batch in found)
            first += block.header.batches
            position = first
        return batches

    def _open(self, snapshot: Snapshot, first: int) -> Block:
        record = snapshot.record(self._queue, first)
        try:
            block = Block(record, check=first != self._checked)
        except DamagedBlockError as damage:
            raise CorruptRecord(self._queue, first, str(damage)) from None
        self._checked = first
        return block


def _gap(snapshot: Snapshot, queue: int, low: int, high: int) -> Gap:
    reasons = [gap.reason for gap in snapshot.gaps(queue) if gap.low < high and gap.high > low]
    return Gap(low, high, reasons[-1] if reasons else RETENTION)


class LogReceiver(QueueReceiver):
    """A position in one queue. `run` runs a blocking read in a thread."""

    def __init__(
        self,
        reader: QueueReader,
        position: int,
        rung: asyncio.Event,
        run: Callable[[Callable[[], Received]], Awaitable[Received]],
        acknowledge: Callable[[int], None],
        closed: Callable[[LogReceiver], None],
    ) -> None:
        self._reader = reader
        self._position = position
        self._rung = rung
        self._run = run
        self._acknowledge = acknowledge
        self._on_close = closed
        self._closed = False

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        while not self._closed:
            # Clear, then look: whoever commits after the look rings.
            self._rung.clear()
            received = await self._run(lambda: self._reader.read(self._position, max(max_events, 1), max(max_bytes, 1)))
            if received.batches or received.gap:
                self._position = received.next_offset
                return received
            await self._rung.wait()
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
