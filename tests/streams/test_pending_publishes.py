"""Publishes under way: their number, their durations, and the flushes that wait for them."""

import asyncio

from headrace.streams.publishing import MEASURED, PendingPublishes


async def turns() -> None:
    """Let the other tasks go on."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_flush_waits_for_the_publishes_that_began_before_it():
    pending = PendingPublishes()
    first, second = pending.begin(), pending.begin()
    flush = asyncio.create_task(pending.flush())
    await turns()
    third = pending.begin()
    pending.end(second)
    pending.end(third)  # began after the flush, and does not count
    await turns()
    assert not flush.done()
    assert pending.under_way == 1
    pending.end(first)
    await turns()
    assert flush.done()


async def test_a_flush_does_not_wait_for_later_publishes():
    pending = PendingPublishes()
    first = pending.begin()
    flush = asyncio.create_task(pending.flush())
    await turns()
    pending.begin()
    pending.end(first)
    await turns()
    assert flush.done()


async def test_flushes_wait_each_for_its_own_publishes():
    pending = PendingPublishes()
    first = pending.begin()
    early = asyncio.create_task(pending.flush())
    await turns()
    second = pending.begin()
    late = asyncio.create_task(pending.flush())
    await turns()
    pending.end(first)
    await turns()
    assert (early.done(), late.done()) == (True, False)
    pending.end(second)
    await turns()
    assert late.done()


async def test_one_publish_in_some_is_measured():
    pending = PendingPublishes()
    for number in [pending.begin() for _ in range(3 * MEASURED)]:
        pending.end(number)
    assert pending.durations.count == 3
    assert pending.under_way == 0
