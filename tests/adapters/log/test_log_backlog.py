"""How much of a queue is not finished: counted at its beginning, estimated behind it."""

import time
from collections.abc import Awaitable, Callable

from headrace import EventBatch, StreamId
from headrace.adapters import Backlog
from headrace.adapters.log import LogAdapter
from headrace.adapters.log.limits import LogLimits

OpenLog = Callable[..., Awaitable[LogAdapter]]


async def commit(adapter: LogAdapter, *counts: int) -> None:
    """One commit to queue 0, with batches of so many events."""
    batches = [EventBatch.of(StreamId("tests", "log"), [b"x"] * count) for count in counts]
    await adapter.enqueue([(0, batch) for batch in batches])


async def counts(adapter: LogAdapter, offset: int) -> tuple[int, int | None, bool]:
    return (await adapter.backlog(0, offset))[:3]


async def test_events_are_counted_from_the_middle_of_a_block_to_the_end(open_log: OpenLog):
    adapter = await open_log()
    for sizes in ((1, 2, 3), (4, 5), (6,)):
        await commit(adapter, *sizes)
    assert [await counts(adapter, offset) for offset in range(8)] == [
        (6, 21, False), (5, 20, False), (4, 18, False), (3, 15, False), (2, 11, False), (1, 6, False),
        (0, 0, False), (0, 0, False),
    ]  # fmt: skip
    assert await adapter.backlog(1, 0) == Backlog(0, 0)


async def test_it_says_since_when_the_oldest_is_there(open_log: OpenLog):
    adapter = await open_log()
    before = time.time_ns() // 1000
    await commit(adapter, 1)
    between = time.time_ns() // 1000
    await commit(adapter, 1)
    first, second = [(await adapter.backlog(0, offset)).since_us for offset in range(2)]
    assert first is not None
    assert second is not None
    assert before <= first <= between <= second


async def test_backlog_behind_the_counted_blocks_is_estimated(open_log: OpenLog):
    adapter = await open_log(limits=LogLimits(counted_blocks=2))
    for size in (2, 4, 6, 8):
        await commit(adapter, size)
    assert await counts(adapter, 2) == (2, 14, False)
    assert await counts(adapter, 0) == (4, 2 + 4 + 2 * 5, True)


async def test_a_backlog_from_below_the_first_offset_counts_the_retained_batches(open_log: OpenLog):
    adapter = await open_log(retain_age_s=1e-06)
    await commit(adapter, 1)
    await commit(adapter, 2)
    await adapter.apply_retention({0: 1})
    assert await counts(adapter, 0) == (1, 2, False)
