"""Reading a log's blocks by ranges, while others publish and delete."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace import EventBatch, StreamId
from headrace.adapters.log import LogAdapter, LogScan
from headrace.adapters.log.blocks import Block, BlockPlace, ReadBudget, StreamTable
from headrace.streams.errors import InvalidArgument, NotFound, OffsetsGone

OpenLog = Callable[..., Awaitable[LogAdapter]]
STREAM = StreamId("tests", "scan")


@asynccontextmanager
async def scanning(directory: Path) -> AsyncGenerator[LogScan]:
    scan = await asyncio.to_thread(LogScan, directory)
    yield scan
    scan.close()


async def publish(adapter: LogAdapter, *payloads: bytes) -> None:
    """Each in a block of its own."""
    for payload in payloads:
        await adapter.enqueue([(0, EventBatch.of(STREAM, [payload]))])


def scanned(scan: LogScan, start: int, end: int) -> list[tuple[int, bytes]]:
    """Offset and payload of all batches in the blocks that hold the range."""
    found: list[tuple[int, bytes]] = []
    for read in scan.blocks(0, start, end):
        for at, following in zip(read.blocks, [*read.blocks[1:], None], strict=True):
            record = read.records[at.at : following.at if following else None]
            batches = Block(record, BlockPlace(0, at.first)).batches(0, ReadBudget(1 << 20, 1 << 30), StreamTable())
            found += [(batch.offset, batch.payloads()[0]) for batch in batches]
    return found


async def test_a_range_is_read_as_it_was_stored(open_log: OpenLog, tmp_path: Path):
    adapter = await open_log()
    await publish(adapter, *(b"%d" % number for number in range(10)))
    async with scanning(tmp_path) as scan:
        assert scan.queues == 2
        assert [(first, tail.next, tail.events) for first, tail in scan.tails()] == [(0, 10, 10), (0, 0, 0)]
        assert scanned(scan, 3, 7) == [(number, b"%d" % number) for number in range(3, 7)]
        assert scanned(scan, 7, 7) == []


async def test_many_bytes_are_read_in_pieces(open_log: OpenLog, tmp_path: Path):
    adapter = await open_log()
    await publish(adapter, *(b"%d" % number * 400_000 for number in range(10)))
    async with scanning(tmp_path) as scan:
        assert len(list(scan.blocks(0, 0, 10))) == 4
        assert [payload[:1] for _, payload in scanned(scan, 0, 10)] == [b"%d" % number for number in range(10)]


async def test_scan_of_removed_offsets_names_the_offsets_left(open_log: OpenLog, tmp_path: Path):
    adapter = await open_log(retain_age_s=1e-6)
    await publish(adapter, *(b"%d" % number for number in range(10)))
    async with scanning(tmp_path) as scan:
        reading = scan.blocks(0, 0, 10)
        await adapter.apply_retention({0: 6})
        with pytest.raises(OffsetsGone) as caught:
            next(reading)
        assert (caught.value.start, caught.value.first) == (0, 6)
        with pytest.raises(OffsetsGone):
            scan.end_within(0, 2, 10, 1, None)


def test_a_directory_without_a_log_stays_as_it_is(tmp_path: Path):
    with pytest.raises(NotFound, match="has no log"):
        LogScan(tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_read_only_handle_decides_nothing_for_others_in_the_process(open_log: OpenLog, tmp_path: Path):
    first = await open_log()
    await publish(first, *(b"%d" % number for number in range(10)))
    await first.aclose()
    async with scanning(tmp_path) as scan:
        relaxed = await open_log(durability="relaxed", retain_age_s=1e-6)
        await publish(relaxed, b"10")
        await relaxed.apply_retention({0: 6})
        assert scanned(scan, 9, 11) == [(9, b"9"), (10, b"10")]
        assert (await relaxed.bounds(0)).first == 6
        async with scanning(tmp_path):
            with pytest.raises(InvalidArgument, match="another durability"):
                await open_log()
