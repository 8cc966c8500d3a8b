"""Publishing events at a chosen speed, each once, also after a stop.

The order of the events and their division into chunks are always the same. The calls of the chunks have the numbers
1, 2, … of an idempotent producer, so the provider knows the exact progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from ...client.transport import reconnect_backoff
from ...streams.errors import HeadraceError
from ...streams.publishing import ProducerSequence
from ..columns import HEADERS, TIMESTAMP
from ..grouping import RowGrouping
from ..publishing import CHUNK_LIMITS, PATIENCE_S, PublishDestination
from ..staging import Chunk, StagedSegment, chunks

NOTE_S = 5.0
"""How often the progress is saved, in seconds. After a stop, the events after the saved progress are read again; those
that are stored are not published again."""

_T = TypeVar("_T")


class EventPosition(NamedTuple):
    """The position of an event in the order of the replay."""

    due_us: int
    """The latest timestamp of its stream up to the event, to keep the order of the stream."""
    queue: int
    offset: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)


class TimedEvent(NamedTuple):
    """An event to publish."""

    place: EventPosition
    columns: tuple[str, str, bytes, dict[str, str] | None, str | None, int]
    """Namespace, key, payload, headers, id, timestamp in microseconds."""


class ReplayChunkLimits(NamedTuple):
    """The limits of a chunk of events. They stay the same for a whole replay."""

    events: int
    tick_us: int
    """Events of different ticks of the original time are in different chunks; 0: they may be together."""


class ReplayPace(NamedTuple):
    """The speed: at most one of both fields is given."""

    speed: float | None
    """Multiple of the original speed."""
    rate: float | None
    """Events per second."""

    @property
    def chunk_limits(self) -> ReplayChunkLimits:
        """Return the limits of chunks of a tenth of a second."""
        if self.rate is not None:
            return ReplayChunkLimits(min(max(int(self.rate / 10), 1), 500), 0)
        return ReplayChunkLimits(1000, max(int(100_000 * (self.speed or 1)), 1))

    def due_s(self, events: int, original_us: int) -> float:
        """Return when an event is due, in seconds from the start: after so many events, or so much original time."""
        return events / self.rate if self.rate is not None else original_us / 1_000_000 / (self.speed or 1)


def cut(events: Iterable[TimedEvent], by: ReplayChunkLimits) -> Iterator[list[TimedEvent]]:
    """Cut events into chunks. Pure: from the start of any chunk on, the rest is cut in the same way."""
    chunk: list[TimedEvent] = []
    for event in events:
        if chunk and (len(chunk) >= by.events or _tick(event, by) != _tick(chunk[0], by)):
            yield chunk
            chunk = []
        chunk.append(event)
    if chunk:
        yield chunk


def _tick(event: TimedEvent, by: ReplayChunkLimits) -> int:
    return event.place.due_us // by.tick_us if by.tick_us else 0


class PacedProgress(NamedTuple):
    """The progress: the number of calls, the last event, and the number of events."""

    number: int
    after: EventPosition | None
    events: int


async def publish(
    destination: PublishDestination,
    producer: str,
    events: Iterator[list[TimedEvent]],
    *,
    noted: PacedProgress,
    pace: ReplayPace,
    note: Callable[[PacedProgress], object],
) -> int:
    """Publish the chunks behind the saved progress `noted`, each when it is due. Return the number of events.

    Stored chunks are skipped without waiting. `note` is called with the progress in a thread, from time to time and at
    the end.
    """
    loop = asyncio.get_running_loop()
    stored = await destination.last_sequence(producer)
    number, published, began, note_at = noted.number, 0, None, loop.time() + NOTE_S
    async for chunk in _in_threads(events):
        calls = list(chunks([_segment(chunk)], CHUNK_LIMITS))
        if number + len(calls) > stored:
            began = began or (loop.time(), chunk[0].place.due_us)
            due_s = began[0] + pace.due_s(published, chunk[0].place.due_us - began[1])
            await asyncio.sleep(max(due_s - loop.time(), 0))
            for call in calls:
                number += 1
                if number > stored:
                    await _store(destination, call, ProducerSequence(producer, number, stored))
                    stored = number
            published += len(chunk)
        else:
            number += len(calls)
        noted = PacedProgress(number, chunk[-1].place, noted.events + len(chunk))
        if loop.time() >= note_at:
            await asyncio.to_thread(note, noted)
            note_at = loop.time() + NOTE_S
    await asyncio.to_thread(note, noted)
    return published


async def _in_threads(items: Iterator[_T]) -> AsyncIterator[_T]:
    """Yield the items. A thread waits for each, so the loop is not blocked."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item


async def _store(destination: PublishDestination, call: Chunk, sequence: ProducerSequence) -> None:
    """Store a chunk. Retry for `PATIENCE_S`: the number prevents storing it twice."""
    loop, backoff = asyncio.get_running_loop(), reconnect_backoff()
    until = loop.time() + PATIENCE_S
    while True:
        try:
            await destination.store(call, sequence)
        except HeadraceError as error:
            if not error.retryable or loop.time() >= until:
                raise
            await asyncio.sleep(backoff.next_s())
        else:
            return


def _segment(chunk: Sequence[TimedEvent]) -> StagedSegment:
    namespaces, keys, payloads, headers, ids, times = zip(*(event.columns for event in chunk), strict=True)
    columns: dict[str, Any] = {
        "namespace": pa.array(namespaces, pa.string()),
        "key": pa.array(keys, pa.string()),
        "payload": pa.array(payloads, pa.binary()),
        "headers": pa.array([None if each is None else list(each.items()) for each in headers], HEADERS),
        "id": pa.array(ids, pa.string()),
        "timestamp": pa.array(times, pa.int64()).cast(TIMESTAMP),
    }
    grouped = RowGrouping().of(pa.RecordBatch.from_pydict(columns))
    tables = (np.array(column, np.uint32) for column in (grouped.lengths, grouped.counts, grouped.prefixes))
    lengths, counts, prefixes = tables
    return StagedSegment(b"".join(grouped.pieces), lengths, counts, prefixes)
