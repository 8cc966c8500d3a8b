"""Look for the last event of a stream in its queue."""

from __future__ import annotations

from ..adapters import Bounds, QueueAdapter
from ..streams.background import BackgroundTasks
from ..streams.errors import CorruptRecord
from ..streams.identity import StreamId
from .why import StreamFacts

PIECE_EVENTS, PIECE_BYTES = 10_000, 1 << 20
FIRST_WINDOW = 1 << 12
"""Offsets that are read together at the end of the queue. Each window before it is four times as large: a queue may
leave out billions of offsets."""


class LastEventSearch:
    """Looks for the last batch of a stream in a queue, from the end backwards.

    After a cancellation, the fields keep the results so far.
    """

    def __init__(self, adapter: QueueAdapter, queue: int, stream: StreamId, closing: BackgroundTasks) -> None:
        """`closing` gets the tasks that close the receivers."""
        self._closing = closing
        self._adapter = adapter
        self._queue = queue
        self._stream = stream
        self.end: int | None = None
        """The end of the queue."""
        self.found = StreamFacts()
        self.damages: list[CorruptRecord] = []
        """The damaged records that were met."""

    async def run(self, position: int | None) -> None:
        """Search for the last batch; then, from `position` on, for damaged records before it.

        If the adapter cannot rewind, only find the end. If it is not ordered either, find nothing: servers that are
        away may have batches that are not finished.
        """
        capabilities = self._adapter.capabilities
        if not capabilities.rewindable and not capabilities.ordered:
            return
        bounds = await self._adapter.bounds(self._queue)
        self.end = bounds.next
        self.found = StreamFacts(searched_from=bounds.next)
        if capabilities.rewindable:
            await self._search_backwards(bounds, bounds.first if position is None else max(bounds.first, position))

    async def _search_backwards(self, bounds: Bounds, position: int) -> None:
        stop, window = bounds.next, FIRST_WINDOW
        while stop > bounds.first:
            # A window ends at the position: below it, only the last batch matters.
            start = max(position if stop > position else bounds.first, stop - window)
            await self._search(start, stop)
            if not self.damages:
                self.found = StreamFacts(last=self.found.last, searched_from=start)
            if self.found.last is not None:
                await self._search(position, start)
                return
            stop, window = start, 4 * window
        if not self.damages:
            self.found = StreamFacts(last=-1, searched_from=bounds.first)

    async def _search(self, start: int, stop: int) -> None:
        """Read a range. Record its damaged records, and go on after each."""
        at: int | None = start
        while at is not None and at < stop:
            try:
                await self._read(at, stop)
                return
            except CorruptRecord as damage:
                self.damages.append(damage)
                at = damage.next_offset

    async def _read(self, start: int, stop: int) -> None:
        receiver = await self._adapter.open_receiver(self._queue, start)
        try:
            while start < stop:
                received = await receiver.receive(PIECE_EVENTS, PIECE_BYTES)
                if received.next_offset <= start:
                    return
                start = received.next_offset
                for batch in received.batches:
                    if batch.stream == self._stream and batch.offset < stop:
                        last = max(batch.offset, -1 if self.found.last is None else self.found.last)
                        self.found = StreamFacts(last=last, searched_from=self.found.searched_from)
        finally:
            # Do not wait: the search has little time, and a receiver of Kafka takes up to 0.2 s to close.
            self._closing.start(receiver.aclose(), f"headrace close search of queue {self._queue}")
