"""How far limits reach: found by reading, and by the log from headers and columns, it is the same."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import CorruptRecord, EventBatch, StreamId
from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.range_ends import OffsetRange, RangeLimits, end_by_reading
from headrace.streams.errors import OffsetsGone

EndWithin = Callable[[int, int, int | None, int | None], Awaitable[int]]


async def log(directory: Path, **options: Any) -> QueueAdapter:
    return await open_adapter("log", AdapterContext(provider="p", queues=1, directory=directory), options)


def ways(adapter: QueueAdapter) -> tuple[EndWithin, EndWithin]:
    async def own(start: int, end: int, events: int | None, nbytes: int | None) -> int:
        return await adapter.end_within(0, start, end, events, nbytes)

    async def by_reading(start: int, end: int, events: int | None, nbytes: int | None) -> int:
        return await end_by_reading(adapter, OffsetRange(0, start, end), RangeLimits(events, nbytes))

    return own, by_reading


def batch_of(key: str, events: int, nbytes: int = 1) -> EventBatch:
    return EventBatch.of(StreamId("n", key), [bytes(nbytes)] * events)


@pytest.mark.long
async def test_the_log_reaches_as_far_as_reading_it_does(tmp_path: Path):
    chance = random.Random(5)
    adapter = await log(tmp_path)
    for _ in range(30):
        sizes = [(chance.randint(1, 9), chance.choice((0, 100, 40_000))) for _ in range(chance.randint(1, 12))]
        await adapter.enqueue([(0, batch_of("k", *size)) for size in sizes])
    end = (await adapter.bounds(0)).next
    nbytes = (await adapter.statistics(0)).bytes or 0
    own, by_reading = ways(adapter)
    for _ in range(300):
        start, stop = sorted(chance.sample(range(end + 1), 2))
        limits = chance.choice((None, chance.randint(0, 900))), chance.choice((None, chance.randint(0, nbytes)))
        assert await own(start, stop, *limits) == await by_reading(start, stop, *limits), (start, stop, limits)
    await adapter.aclose()


async def test_range_does_not_reach_over_removed_offsets(tmp_path: Path):
    adapter = await log(tmp_path, retain_bytes=1)
    for _ in range(4):
        await adapter.enqueue([(0, batch_of("k", 1))])
    await adapter.apply_retention({})
    first = (await adapter.bounds(0)).first
    for end_within in ways(adapter):
        with pytest.raises(OffsetsGone) as caught:
            await end_within(0, 4, 1, None)
        assert (caught.value.queue, caught.value.start, caught.value.first) == (0, 0, first)
        assert await end_within(first, 4, 1, None) == min(first + 1, 4)
    await adapter.aclose()


async def test_damage_is_told_where_it_is_first_and_reached_up_to_where_it_is_not(tmp_path: Path):
    adapter = await log(tmp_path)
    for _ in range(3):
        await adapter.enqueue([(0, batch_of("k", 1))])
    await asyncio.to_thread(spoil, adapter, 1)
    for end_within in ways(adapter):
        assert await end_within(0, 3, 9, None) == 1
        with pytest.raises(CorruptRecord):
            await end_within(1, 3, 9, None)
        assert await end_within(2, 3, 9, None) == 3
    await adapter.aclose()


def spoil(adapter: Any, first: int) -> None:
    """The header of a block, so that it is seen without reading the rest."""
    with adapter._environment.writing() as changes:
        record = b"XXXX" + bytes(changes.record(0, first))[4:]
        changes.delete(0, first)
        changes._txn.put(first.to_bytes(8, "big"), record, db=changes._databases.blocks[0])


async def test_streams_that_do_not_count_take_nothing_of_the_limits(tmp_path: Path):
    adapter = await log(tmp_path)
    await adapter.enqueue([(0, batch_of(key, 2)) for key in "abababab"])
    span = OffsetRange(0, 0, 8)

    async def end_within(events: int, read_bytes: int | None = None) -> int:
        return await end_by_reading(
            adapter, span, RangeLimits(events, None), counted=lambda stream: stream.key == "b", read_bytes=read_bytes
        )

    assert [await end_within(events) for events in (0, 1, 2, 3, 4, 8)] == [1, 1, 3, 3, 5, 8]
    assert await end_within(8, read_bytes=1) == 8  # all that was read at once
    await adapter.aclose()
