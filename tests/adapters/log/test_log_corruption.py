"""Damaged records: noticed, named, and no obstacle to the rest."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import lmdb
import pytest

from headrace import CorruptRecord, DataDirectoryError, EventBatch, StreamId
from headrace.adapters import Bounds
from headrace.adapters.log import LogAdapter
from headrace.adapters.log.rows import TailRow
from headrace.adapters.log.scan import LogScan

OpenLog = Callable[..., Awaitable[LogAdapter]]
STREAM = StreamId("tests", "corruption")


def damage(log: Path, first: int, position: int, byte: int = 0xFF) -> None:
    """Overwrite one byte of a stored block."""
    with lmdb.open(str(log), max_dbs=10, map_size=1 << 30) as environment:
        blocks = environment.open_db(b"queue-00000")
        with environment.begin(write=True, db=blocks) as txn:
            record = bytearray(txn.get(first.to_bytes(8, "big"), b""))
            record[position] ^= byte
            txn.put(first.to_bytes(8, "big"), record)


async def make(open_log: OpenLog) -> None:
    """Blocks of three batches that begin at offsets 0, 3 and 6."""
    adapter = await open_log()
    for number in range(3):
        await adapter.enqueue([(0, EventBatch.of(STREAM, [b"%d" % number]))] * 3)
    await adapter.aclose()


@pytest.mark.parametrize("position", [0, 5, 10, 17, 30, -1])
async def test_a_damaged_block_is_reported_after_the_blocks_before_it(open_log: OpenLog, tmp_path: Path, position: int):
    await make(open_log)
    damage(tmp_path / "log", 3, position)
    adapter = await open_log()
    receiver = await adapter.open_receiver(0, 0)
    assert [batch.offset for batch in (await receiver.receive(100, 100_000)).batches] == [0, 1, 2]
    with pytest.raises(CorruptRecord):
        await receiver.receive(100, 100_000)
    with pytest.raises(CorruptRecord, match="queue 0, offsets 3 to 5: the stored record is damaged") as caught:
        await receiver.receive(100, 100_000)
    assert (caught.value.queue, caught.value.offset, caught.value.next_offset) == (0, 3, 6)
    resumed = await adapter.open_receiver(0, caught.value.next_offset)
    assert [batch.offset for batch in (await resumed.receive(100, 100_000)).batches] == [6, 7, 8]


async def test_a_missing_block_is_named_like_a_damaged_one(open_log: OpenLog, tmp_path: Path) -> None:
    await make(open_log)
    with lmdb.open(str(tmp_path / "log"), max_dbs=10, map_size=1 << 30) as environment:
        blocks = environment.open_db(b"queue-00000")
        with environment.begin(write=True, db=blocks) as txn:
            txn.delete((3).to_bytes(8, "big"))
            txn.put((1 << 60).to_bytes(8, "big"), b"behind the end of the queue")
    adapter = await open_log()
    receiver = await adapter.open_receiver(0, 0)
    assert [batch.offset for batch in (await receiver.receive(100, 100_000)).batches] == [0, 1, 2]
    with pytest.raises(CorruptRecord, match="it is missing") as caught:
        await receiver.receive(100, 100_000)
    assert (caught.value.offset, caught.value.next_offset) == (3, 6)
    resumed = await adapter.open_receiver(0, 6)
    assert [batch.offset for batch in (await resumed.receive(100, 100_000)).batches] == [6, 7, 8]


async def test_a_block_beyond_the_tail_does_not_end_the_damaged_range(open_log: OpenLog, tmp_path: Path) -> None:
    await make(open_log)
    damage(tmp_path / "log", 6, 30)
    with lmdb.open(str(tmp_path / "log"), max_dbs=10, map_size=1 << 30) as environment:
        blocks = environment.open_db(b"queue-00000")
        with environment.begin(write=True, db=blocks) as txn:
            txn.put((1 << 60).to_bytes(8, "big"), b"behind the end of the queue")
    adapter = await open_log()
    receiver = await adapter.open_receiver(0, 6)
    with pytest.raises(CorruptRecord) as caught:
        await receiver.receive(1, 1)
    assert (caught.value.offset, caught.value.next_offset) == (6, 9)


async def test_blocks_that_are_all_behind_the_end_are_named_and_other_queues_are_read(
    open_log: OpenLog, tmp_path: Path
):
    """With durability `relaxed` a power failure may leave the blocks on the disk, and an older end of the queue."""
    adapter = await open_log(durability="relaxed")
    for number in range(3):
        await adapter.enqueue([(queue, EventBatch.of(STREAM, [b"%d" % number])) for queue in (0, 0, 1)])
    await adapter.aclose()
    with lmdb.open(str(tmp_path / "log"), max_dbs=10, map_size=1 << 30) as environment:
        state, blocks = environment.open_db(b"state"), environment.open_db(b"queue-00000")
        with environment.begin(write=True) as txn:
            txn.put(bytes(4), TailRow(next=1).pack(), db=state)
            txn.delete(bytes(8), db=blocks)
    adapter = await open_log(durability="relaxed")
    with pytest.raises(CorruptRecord, match="its oldest block is behind the queue's end") as caught:
        await adapter.bounds(0)
    assert (caught.value.offset, caught.value.next_offset) == (1, 2)
    assert await adapter.bounds(1) == Bounds(0, 3)


@pytest.mark.parametrize("hidden", [2, 5])
async def test_blocks_that_are_missing_at_the_beginning_are_damage(open_log: OpenLog, tmp_path: Path, hidden: int):
    """A flipped bit in a branch page of LMDB hides the blocks below it. It looked as if retention had removed them."""
    adapter = await open_log()
    for number in range(5):
        await adapter.enqueue([(queue, EventBatch.of(STREAM, [b"%d" % number])) for queue in (0, 1)])
    await adapter.aclose()
    with lmdb.open(str(tmp_path / "log"), max_dbs=10, map_size=1 << 30) as environment:
        blocks = environment.open_db(b"queue-00000")
        with environment.begin(write=True, db=blocks) as txn:
            for offset in range(hidden):
                txn.delete(offset.to_bytes(8, "big"))
    adapter = await open_log(retain_bytes=1, retain_unfinished=False)
    assert await adapter.bounds(0) == Bounds(0, 5)
    assert await adapter.offset_at(0, 0) == 0
    with pytest.raises(CorruptRecord, match="its oldest blocks are missing") as caught:
        await (await adapter.open_receiver(0, 0)).receive(1, 1)
    assert (caught.value.offset, caught.value.next_offset) == (0, hidden)
    backlog = await adapter.backlog(0, 0)
    assert (backlog.batches, backlog.events) == (5, 5 - hidden)

    def scan() -> None:
        with LogScan(tmp_path) as opened:
            assert [tail.first for tail in opened.tails()] == [0, 0]
            with pytest.raises(CorruptRecord, match="its oldest blocks are missing"):
                list(opened.blocks(0, 0, 5))

    await asyncio.to_thread(scan)
    if hidden < 5:  # subscriptions that are past the damage go on
        assert len((await (await adapter.open_receiver(0, 4)).receive(1, 1)).batches) == 1
    with pytest.raises(CorruptRecord, match="its oldest blocks are missing"):
        await adapter.apply_retention({})
    assert await adapter.bounds(1) == Bounds(5, 5)
    await adapter.skip_damage(0)
    assert await adapter.bounds(0) == Bounds(0, 5)
    receiver = await adapter.open_receiver(0, 0)
    gap = (await receiver.receive(100, 100_000)).gap
    assert gap is not None
    assert (gap.low, gap.high) == (0, hidden)
    await adapter.apply_retention({})
    assert await adapter.bounds(0) == Bounds(5, 5)


async def test_the_beginning_of_a_queue_made_by_0_1_is_known_once_retention_has_moved_it(
    open_log: OpenLog, tmp_path: Path
):
    adapter = await open_log()
    for number in range(3):
        await adapter.enqueue([(0, EventBatch.of(STREAM, [b"%d" % number]))])
    await adapter.aclose()

    def row(change: Callable[[bytes], bytes] = lambda row: row) -> bytes:
        with lmdb.open(str(tmp_path / "log"), max_dbs=10, map_size=1 << 30) as environment:
            state = environment.open_db(b"state")
            with environment.begin(write=True, db=state) as txn:
                txn.put(bytes(4), change(txn.get(bytes(4), b"")))
                return txn.get(bytes(4), b"")

    assert TailRow.unpack(row(lambda row: row[:40])).first is None
    adapter = await open_log(retain_bytes=1, retain_unfinished=False)
    assert await adapter.bounds(0) == Bounds(0, 3)
    await adapter.enqueue([(0, EventBatch.of(STREAM, [b"3"]))])
    await adapter.aclose()
    assert TailRow.unpack(row()).first is None
    adapter = await open_log(retain_bytes=1, retain_unfinished=False)
    await adapter.apply_retention({})
    await adapter.aclose()
    assert TailRow.unpack(row()).first == 4


@pytest.mark.parametrize("end", [1, 3, 8])
async def test_a_queue_that_ends_before_its_last_block_is_damaged_and_others_are_read(
    open_log: OpenLog, tmp_path: Path, end: int
):
    """A flipped bit in the row of a queue may lower its end."""
    adapter = await open_log()
    for number in range(9):
        await adapter.enqueue([(queue, EventBatch.of(STREAM, [b"%d" % number])) for queue in (0, 1)])
    await adapter.aclose()
    with lmdb.open(str(tmp_path / "log"), max_dbs=10, map_size=1 << 30) as environment:
        state = environment.open_db(b"state")
        with environment.begin(write=True, db=state) as txn:
            txn.put(bytes(4), TailRow(next=end).pack())
    adapter = await open_log()
    behind = "the queue ends here, but records are stored behind that"
    with pytest.raises(CorruptRecord, match=behind):
        await adapter.resume_at(0, 0)
    receiver = await adapter.open_receiver(0, 0)
    assert [batch.offset for batch in (await receiver.receive(100, 100_000)).batches] == list(range(end))
    with pytest.raises(CorruptRecord, match=behind) as caught:
        await receiver.receive(100, 100_000)
    assert caught.value.offset == end
    assert await adapter.bounds(1) == Bounds(0, 9)
    await adapter.skip_damage(0)
    assert await adapter.bounds(0) == Bounds(0, 9)
    receiver = await adapter.open_receiver(0, 0)
    assert len((await receiver.receive(100, 100_000)).batches) == 9


@pytest.mark.parametrize(
    ("database", "key", "value", "message"),
    [
        (b"queue-00000", bytes(9), b"block", "a key or a row has 9 bytes, not 8"),
        (b"state", bytes(4), b"end", "a key or a row has 3 bytes, not 48"),
    ],
)
async def test_a_key_or_row_of_another_size_is_damage(
    open_log: OpenLog, tmp_path: Path, database: bytes, key: bytes, value: bytes, message: str
):
    """A page in the place of another one, as a power failure may leave it with durability `relaxed`."""
    await make(open_log)
    with lmdb.open(str(tmp_path / "log"), max_dbs=10, map_size=1 << 30) as environment:
        opened = environment.open_db(database)
        with environment.begin(write=True, db=opened) as txn:
            txn.delete(bytes(8))
            txn.put(key, value)
    adapter = await open_log()
    with pytest.raises(DataDirectoryError, match=rf"log': the log is damaged: {message}"):
        await adapter.bounds(0)


async def test_a_damaged_last_block_ends_at_the_next_offset(open_log: OpenLog, tmp_path: Path):
    await make(open_log)
    damage(tmp_path / "log", 6, 30)
    adapter = await open_log()
    receiver = await adapter.open_receiver(0, 7)
    with pytest.raises(CorruptRecord) as caught:
        await receiver.receive(1, 1)
    assert (caught.value.offset, caught.value.next_offset) == (7, 9)


async def test_publishing_goes_on_after_a_damaged_block(open_log: OpenLog, tmp_path: Path):
    await make(open_log)
    damage(tmp_path / "log", 6, 0)
    adapter = await open_log()
    await adapter.enqueue([(0, EventBatch.of(STREAM, [b"x"]))])
    receiver = await adapter.open_receiver(0, 9)
    assert [batch.offset for batch in (await receiver.receive(1, 1)).batches] == [9]


async def test_retention_deletes_damaged_blocks_too(open_log: OpenLog, tmp_path: Path):
    await make(open_log)
    damage(tmp_path / "log", 0, 0)
    adapter = await open_log(retain_age_s=1e-6)
    await adapter.apply_retention({})
    assert await adapter.bounds(0) == Bounds(9, 9)


async def test_gap_has_the_reason_of_its_own_range(open_log: OpenLog, tmp_path: Path):
    """Retention removes a block that was skipped as damaged together with others."""
    await make(open_log)
    damage(tmp_path / "log", 3, 30)
    adapter = await open_log(retain_bytes=1, retain_unfinished=False)
    await adapter.skip_damage(0)
    await adapter.apply_retention({0: 0})
    receiver = await adapter.open_receiver(0, 0)
    reasons: list[tuple[int, int, bool]] = []
    at = 0
    while at < (await adapter.bounds(0)).first:
        gap = (await receiver.receive(100, 100_000)).gap
        assert gap is not None
        reasons.append((gap.low, gap.high, "damaged" in gap.reason))
        at = gap.high
    assert not any(low < 3 and is_damage for low, _, is_damage in reasons)


async def test_a_search_by_time_that_meets_a_damaged_block_says_so(open_log: OpenLog, tmp_path: Path):
    await make(open_log)
    for first in (0, 3, 6):
        damage(tmp_path / "log", first, 0)
    adapter = await open_log()
    with pytest.raises(CorruptRecord):
        await adapter.offset_at(0, time.time_ns() // 1000)
