"""The bytes of all catch-ups of a provider."""

import asyncio

from headrace.agents.catch_up_budget import CatchUpBudget, CatchUpShare

LIMIT = 800
READ = 200


async def reserved(share: CatchUpShare) -> asyncio.Task[None]:
    task = asyncio.create_task(share.reserve())
    await asyncio.sleep(0)
    return task


async def test_reads_are_reserved_up_to_the_limit():
    budget = CatchUpBudget(LIMIT)
    tasks = [await reserved(CatchUpShare(budget)) for _ in range(6)]
    assert [task.done() for task in tasks] == [True] * 4 + [False] * 2
    assert budget.held == LIMIT
    for task in tasks:
        task.cancel()


async def test_catch_ups_that_wait_go_on_in_their_order():
    budget = CatchUpBudget(LIMIT)
    large, shares = CatchUpShare(budget), [CatchUpShare(budget) for _ in range(3)]
    large.hold(LIMIT)
    tasks = [await reserved(share) for share in shares]
    assert budget.is_contended
    large.hold(LIMIT - 2 * READ)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, False]
    shares[0].hold(20, 0)
    await asyncio.sleep(0)
    assert not tasks[2].done()
    shares[1].close()
    await tasks[2]
    assert not budget.is_contended


async def test_a_catch_up_that_waits_goes_before_one_that_holds_something():
    budget = CatchUpBudget(LIMIT)
    large, first = CatchUpShare(budget), CatchUpShare(budget)
    large.hold(LIMIT)
    waiting = await reserved(first)
    assert not large.fits
    large.close()
    await waiting
    assert large.fits


async def test_one_read_fits_if_nothing_is_held():
    budget = CatchUpBudget(8)
    share, other = CatchUpShare(budget), CatchUpShare(budget)
    await share.reserve()
    share.hold(5000, 0)
    waiting = await reserved(other)
    assert not waiting.done()
    share.close()
    await waiting


async def test_a_catch_up_that_is_cancelled_while_it_waits_takes_nothing():
    budget = CatchUpBudget(LIMIT)
    large, first, second = (CatchUpShare(budget) for _ in range(3))
    large.hold(LIMIT)
    cancelled, waiting = await reserved(first), await reserved(second)
    cancelled.cancel()
    await asyncio.sleep(0)
    large.close()
    await waiting
    assert budget.held == READ
    first.close()
    second.close()
    assert budget.held == 0
