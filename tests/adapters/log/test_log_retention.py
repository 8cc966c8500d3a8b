"""Retention: the batches that go, those that must stay, and the trace that is left."""

import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import EventBatch, StreamId
from headrace.adapters import Bounds, Gap
from headrace.adapters.log import LogAdapter
from headrace.adapters.log.retention import REASON, RetentionLimits
from headrace.adapters.log.rows import TailRow

OpenLog = Callable[..., Awaitable[LogAdapter]]
STREAM = StreamId("tests", "retention")
KEEP_NOTHING: dict[str, float] = {"retain_age_s": 1e-6}


async def publish(adapter: LogAdapter, count: int, queue: int = 0, size: int = 1) -> None:
    """That many batches, each in a block of its own."""
    for number in range(count):
        await adapter.enqueue([(queue, EventBatch.of(STREAM, [b"%d" % number + b"x" * size]))])


async def test_everything_is_kept_where_nothing_else_is_said(open_log: OpenLog):
    adapter = await open_log()
    await publish(adapter, 10)
    await adapter.apply_retention({0: 10})
    assert await adapter.bounds(0) == Bounds(0, 10)


async def test_finished_old_blocks_are_removed(open_log: OpenLog):
    adapter = await open_log(**KEEP_NOTHING)
    await publish(adapter, 10)
    await adapter.apply_retention({0: 6})
    assert await adapter.bounds(0) == Bounds(6, 10)
    assert (await adapter.statistics(0)).events == 4
    assert await adapter.gaps(0) == []


async def test_a_block_stays_whole_while_one_batch_of_it_is_unfinished(open_log: OpenLog):
    adapter = await open_log(**KEEP_NOTHING)
    await adapter.enqueue([(0, EventBatch.of(STREAM, [b"x"]))] * 5)
    await adapter.apply_retention({0: 4})
    assert await adapter.bounds(0) == Bounds(0, 5)
    await adapter.apply_retention({0: 5})
    assert await adapter.bounds(0) == Bounds(5, 5)
    assert (await adapter.statistics(0))[1:] == (0, 0)


async def test_a_queue_without_subscriptions_is_limited_by_age_and_size_only(open_log: OpenLog):
    adapter = await open_log(retain_bytes=50_000)
    await publish(adapter, 100, size=1000)
    await publish(adapter, 100, queue=1, size=1000)
    await adapter.apply_retention({1: 0})
    kept = await adapter.statistics(0)
    assert kept.bytes is not None
    assert 48_000 < kept.bytes <= 50_000
    assert kept.bounds.first > 0
    assert await adapter.gaps(0) == []
    assert await adapter.bounds(1) == Bounds(0, 100)


async def test_young_blocks_stay(open_log: OpenLog):
    adapter = await open_log(retain_age_s=3600.0)
    await publish(adapter, 10)
    await adapter.apply_retention({0: 10})
    assert await adapter.bounds(0) == Bounds(0, 10)


async def test_offsets_go_on_after_everything_was_deleted(open_log: OpenLog):
    adapter = await open_log(**KEEP_NOTHING)
    await publish(adapter, 3)
    await adapter.apply_retention({})
    await adapter.aclose()
    adapter = await open_log(**KEEP_NOTHING)
    await publish(adapter, 1)
    assert await adapter.bounds(0) == Bounds(3, 4)
    assert await adapter.offset_at(0, 0) == 3


async def test_more_than_one_transaction_deletes(open_log: OpenLog):
    adapter = await open_log(**KEEP_NOTHING)
    await publish(adapter, 200)
    await adapter.apply_retention({})
    assert await adapter.bounds(0) == Bounds(200, 200)


async def test_a_receiver_below_the_first_offset_gets_a_gap_and_continues(open_log: OpenLog):
    adapter = await open_log(**KEEP_NOTHING)
    early = await adapter.open_receiver(0, 0)
    await publish(adapter, 10)
    middle = await adapter.open_receiver(0, 5)
    await adapter.apply_retention({0: 8})
    for receiver, start in ((early, 0), (middle, 5), (await adapter.open_receiver(0, 2), 2)):
        received = await receiver.receive(100, 100_000)
        assert received == ((), 8, Gap(start, 8, "removed by retention"))
        received = await receiver.receive(100, 100_000)
        assert [batch.offset for batch in received.batches] == [8, 9]
        assert received.gap is None


async def test_a_receiver_of_an_emptied_queue_gets_a_gap_and_waits(open_log: OpenLog):
    adapter = await open_log(**KEEP_NOTHING)
    await publish(adapter, 3)
    await adapter.apply_retention({})
    receiver = await adapter.open_receiver(0, 1)
    assert await receiver.receive(1, 1) == ((), 3, Gap(1, 3, "removed by retention"))
    await publish(adapter, 1)
    assert [batch.offset for batch in (await receiver.receive(1, 1)).batches] == [3]


async def test_unfinished_events_that_were_deleted_leave_one_gap_record(open_log: OpenLog):
    adapter = await open_log(retain_unfinished=False, **KEEP_NOTHING)
    started_us = time.time_ns() // 1000
    await publish(adapter, 100)
    await adapter.apply_retention({0: 30})
    await publish(adapter, 5)
    await adapter.apply_retention({0: 30})
    await publish(adapter, 5)
    await adapter.apply_retention({0: 110})
    await publish(adapter, 5)
    await adapter.apply_retention({0: 112})
    found = await adapter.gaps(0)
    assert [(gap.low, gap.high, gap.reason) for gap in found] == [(30, 105, REASON), (112, 115, REASON)]
    assert all(started_us < gap.time_us <= time.time_ns() // 1000 for gap in found)
    assert await adapter.gaps(1) == []
    receiver = await adapter.open_receiver(0, 40)
    assert (await receiver.receive(1, 1)).gap == Gap(40, 115, REASON)


async def test_a_gap_record_begins_at_the_watermark_within_its_block(open_log: OpenLog):
    adapter = await open_log(retain_unfinished=False, **KEEP_NOTHING)
    for queue in (1, 0):
        await adapter.enqueue([(queue, EventBatch.of(STREAM, [b"x"]))] * 5)
    await adapter.apply_retention({0: 3, 1: 2})
    assert [gap[:2] for gap in await adapter.gaps(0)] == [(3, 5)]
    assert [gap[:2] for gap in await adapter.gaps(1)] == [(2, 5)]


@given(
    before_us=st.none() | st.integers(0, 10),
    nbytes=st.none() | st.integers(0, 10),
    keep_from=st.none() | st.integers(0, 10),
    held=st.integers(0, 10),
    time_us=st.integers(0, 10),
    end=st.integers(1, 10),
)
def test_unfinished_batches_stay_despite_other_limits(
    before_us: int | None, nbytes: int | None, keep_from: int | None, held: int, time_us: int, end: int
):
    allowed = RetentionLimits(before_us, nbytes, keep_from).allow(TailRow(nbytes=held), time_us, end)
    too_old = before_us is not None and time_us < before_us
    too_much = nbytes is not None and held > nbytes
    unfinished = keep_from is not None and end > keep_from
    assert allowed == ((too_old or too_much) and not unfinished)


@pytest.mark.parametrize("size", [100_000, 300_000])
async def test_deleted_space_is_used_again(open_log: OpenLog, size: int):
    adapter = await open_log(map_bytes=32 << 20, retain_bytes=1_000_000)
    for _ in range(8):
        await publish(adapter, 5_000_000 // size, size=size)
        await adapter.apply_retention({})
    held = (await adapter.statistics(0)).bytes
    assert held is not None
    assert held <= 1_000_000
