"""Look for the last event of a stream in its queue."""

from __future__ import annotations

from ..adapters import Bounds, QueueAdapter
from ..streams.errors import CorruptRecord
from ..streams.identity import StreamId
from .why import StreamFacts

PIECE_EVENTS, PIECE_BYTES = 10_000, 1 << 20
FIRST_WINDOW, LARGEST_WINDOW = 1 << 12, 1 << 20
"""Offsets that are read together, from the end backwards. Each window is four times the one before."""


class LastEvent:
    """Looks for the last batch of a stream in a queue, from the end backwards."""

    def __init__(self, adapter: QueueAdapter, queue: int, stream: StreamId) -> None:
        self._adapter = adapter
        self._queue = queue
        self._stream = stream
        self.found = StreamFacts()
        """What is known; it grows while `run` runs."""

    async def run(self, bounds: Bounds, position: int | None) -> None:
        """Search until the stream's last batch is found. Raises CorruptRecord at damage from the position on."""
        first, end = bounds
        needed = first if position is None else max(first, position)
        stop, window, is_whole = end, FIRST_WINDOW, True
        self.found = StreamFacts(none_from=end)
        while stop > first:
            lowest = needed if stop > needed else first
            start = max(lowest, stop - window)
            last, damage = await self._search(start, stop)
            if damage is not None and stop > needed:
                raise damage
            while damage is not None and damage.next_offset is not None and damage.next_offset < stop:
                is_whole = False
                later, damage = await self._search(damage.next_offset, stop)
                last = max(last, later)
            is_whole = is_whole and damage is None
            if last >= 0:
                self.found = StreamFacts(last=last)
                return
            if is_whole:
                self.found = StreamFacts(none_from=start)
            stop, window = start, min(4 * window, LARGEST_WINDOW)
        if is_whole:
            self.found = StreamFacts(last=-1)

    async def _search(self, start: int, end: int) -> tuple[int, CorruptRecord | None]:
        """Offset of the last batch of the stream in a range, -1 without one; and the damage that ended the search."""
        found = -1
        if start >= end:
            return found, None
        receiver = await self._adapter.open_receiver(self._queue, start)
        try:
            while start < end:
                received = await receiver.receive(PIECE_EVENTS, PIECE_BYTES)
                if received.next_offset <= start:
                    break
                start = received.next_offset
                for batch in received.batches:
                    if batch.stream == self._stream and batch.offset < end:
                        found = batch.offset
        except CorruptRecord as damage:
            return found, damage
        finally:
            await receiver.aclose()
        return found, None
