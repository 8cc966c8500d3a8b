"""What a consumer acknowledged on connections that are gone, and cannot know to be saved. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..identity import StreamId

Acknowledged = tuple[StreamId, int, int, int, int]
"""Stream, queue, offset, index, count; count 0 is to the end of the batch."""

MAX_REMEMBERED = 200_000
"""Beyond it the oldest are forgotten: those events may be handed out again."""

_END = 1 << 62


class Remembered:
    """Acknowledgements by position. Truthy where there are any."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._streams: dict[StreamId, dict[int, list[Acknowledged]]] = {}
        self._positions: dict[tuple[int, int], int] = {}
        """How many there are by queue and offset."""
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def __len__(self) -> int:
        return self._count

    def add(self, acks: Iterable[Acknowledged]) -> None:
        for ack in acks:
            stream, queue, offset = ack[:3]
            known = self._streams.setdefault(stream, {}).setdefault(offset, [])
            if ack in known:
                continue
            known.append(ack)
            self._positions[queue, offset] = self._positions.get((queue, offset), 0) + 1
            self._count += 1
        while self._count > self._limit:
            self._remove(next(iter(self._streams)))

    def ranges(self, stream: StreamId, offset: int) -> Sequence[tuple[int, int]]:
        """What is known of one batch, as indexes first and last, exclusive."""
        known = self._streams.get(stream, {}).get(offset, ())
        return [(index, index + count if count else _END) for _, _, _, index, count in known]

    def knows(self, queue: int, offset: int) -> bool:
        """Whether anything of this batch is known."""
        return (queue, offset) in self._positions

    def passed(self, stream: StreamId, offset: int) -> list[Acknowledged]:
        """A later batch of the stream came: what was before it is done for the silo, too, and taken out here."""
        known = self._streams.get(stream)
        if known is None:
            return []
        return [ack for before in sorted(known) if before < offset for ack in self._remove(stream, before)]

    def all_passed(self) -> list[Acknowledged]:
        """The silo has nothing left to deliver: all of it is done."""
        return [ack for stream in list(self._streams) for ack in self._remove(stream)]

    def _remove(self, stream: StreamId, offset: int | None = None) -> list[Acknowledged]:
        known = self._streams[stream]
        removed = [ack for one in ([offset] if offset is not None else list(known)) for ack in known.pop(one)]
        if not known:
            del self._streams[stream]
        for ack in removed:
            position = ack[1], ack[2]
            self._positions[position] -= 1
            if not self._positions[position]:
                del self._positions[position]
        self._count -= len(removed)
        return removed
