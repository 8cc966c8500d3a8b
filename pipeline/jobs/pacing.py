"""Publishing events at a chosen speed, each once, from where it stopped.

Events come in one order that is always the same, and are cut into chunks that are always the same. The calls of the
chunks have the numbers 1, 2, … of an idempotent producer, so the provider knows how far it came, exactly.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from ...streams.client.connection import RECONNECT
from ...streams.errors import HeadraceError
from ...streams.publishing import ProducerSequence
from ..columns import HEADERS, TIMESTAMP
from ..grouping import Grouping
from ..publishing import CUTTING, PATIENCE_S, Destination
from ..staging import Chunk, Segment, chunks

NOTE_S = 5.0
"""How often it is noted how far publishing is: what comes after the note is read once more, and not published."""

_T = TypeVar("_T")


class Place(NamedTuple):
    """Where an event is in the order of the replay."""

    due_us: int
    """The latest timestamp of its stream so far, so that a stream's own order is kept."""
    queue: int
    offset: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)


class Timed(NamedTuple):
    """An event as it is to be published."""

    place: Place
    columns: tuple[str, str, bytes, dict[str, str] | None, str | None, int]
    """Namespace, key, payload, headers, id, timestamp in microseconds."""


class Cut(NamedTuple):
    """How the events are cut into chunks: the same as long as a replay lasts."""

    events: int
    tick_us: int
    """Events of different ticks of the original time are in different chunks; 0: they may be together."""


class Pace(NamedTuple):
    """How fast: one of them is given."""

    speed: float | None
    """As a multiple of the original one."""
    rate: float | None
    """Events per second."""

    @property
    def cut(self) -> Cut:
        """A tenth of a second each."""
        if self.rate is not None:
            return Cut(min(max(int(self.rate / 10), 1), 500), 0)
        return Cut(1000, max(int(100_000 * (self.speed or 1)), 1))

    def due_s(self, events: int, original_us: int) -> float:
        """When something is due, in seconds from the start, that has so many events and so much time before it."""
        return events / self.rate if self.rate is not None else original_us / 1_000_000 / (self.speed or 1)


def cut(events: Iterable[Timed], by: Cut) -> Iterator[list[Timed]]:
    """Pure: the same from the start of any chunk on."""
    chunk: list[Timed] = []
    for event in events:
        if chunk and (len(chunk) >= by.events or _tick(event, by) != _tick(chunk[0], by)):
            yield chunk
            chunk = []
        chunk.append(event)
    if chunk:
        yield chunk


def _tick(event: Timed, by: Cut) -> int:
    return event.place.due_us // by.tick_us if by.tick_us else 0


class Noted(NamedTuple):
    """How far it is: so many calls, up to the event at `after`."""

    number: int
    after: Place | None
    events: int


async def publish(
    destination: Destination,
    producer: str,
    events: Iterator[list[Timed]],
    *,
    noted: Noted,
    pace: Pace,
    note: Callable[[Noted], object],
) -> int:
    """Publish the chunks that come after what is `noted`, each when it is due. Returns how many events.

    What had been stored is left out, without waiting. `note` is called from time to time, and at the end, in a thread.
    """
    loop = asyncio.get_running_loop()
    stored = await destination.last_sequence(producer)
    number, published, began, note_at = noted.number, 0, None, loop.time() + NOTE_S
    async for chunk in _in_threads(events):
        calls = list(chunks([_segment(chunk)], CUTTING))
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
        noted = Noted(number, chunk[-1].place, noted.events + len(chunk))
        if loop.time() >= note_at:
            await asyncio.to_thread(note, noted)
            note_at = loop.time() + NOTE_S
    await asyncio.to_thread(note, noted)
    return published


async def _in_threads(items: Iterator[_T]) -> AsyncIterator[_T]:
    """Each is waited for in a thread: the loop goes on."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item


async def _store(destination: Destination, call: Chunk, sequence: ProducerSequence) -> None:
    """Tried again for a while: the number makes that harmless."""
    loop, spread = asyncio.get_running_loop(), random.Random()  # noqa: S311 (spreads attempts)
    until, failures = loop.time() + PATIENCE_S, 0
    while True:
        try:
            await destination.store(call, sequence)
        except HeadraceError as error:
            failures += 1
            if not error.retryable or loop.time() >= until:
                raise
            await asyncio.sleep(RECONNECT.delay(failures, 0, spread) or 0)
        else:
            return


def _segment(chunk: Sequence[Timed]) -> Segment:
    namespaces, keys, payloads, headers, ids, times = zip(*(event.columns for event in chunk), strict=True)
    columns: dict[str, Any] = {
        "namespace": pa.array(namespaces, pa.string()),
        "key": pa.array(keys, pa.string()),
        "payload": pa.array(payloads, pa.binary()),
        "headers": pa.array([None if each is None else list(each.items()) for each in headers], HEADERS),
        "id": pa.array(ids, pa.string()),
        "timestamp": pa.array(times, pa.int64()).cast(TIMESTAMP),
    }
    grouped = Grouping().of(pa.RecordBatch.from_pydict(columns))
    tables = (np.array(column, np.uint32) for column in (grouped.lengths, grouped.counts, grouped.prefixes))
    lengths, counts, prefixes = tables
    return Segment(b"".join(grouped.pieces), lengths, counts, prefixes)
