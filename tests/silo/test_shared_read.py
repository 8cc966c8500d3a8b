"""Reads of the store that callers cause. In virtual time."""

import asyncio

from headrace.silo.shared_read import INTERVAL_S, SharedRead
from tests.simulation.virtual_time import virtual_time


@virtual_time
async def test_reads_keep_an_interval_also_after_one_that_was_cancelled() -> None:
    loop, began_at = asyncio.get_running_loop(), list[float]()

    async def read() -> None:
        began_at.append(loop.time())
        await asyncio.sleep(0.1)

    shared = SharedRead(read)
    await shared.read()
    cancelled = asyncio.create_task(shared.read())
    await asyncio.sleep(INTERVAL_S - 0.05)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await shared.read()
    assert [round(at - began_at[0], 6) for at in began_at] == [0, INTERVAL_S, 2 * INTERVAL_S]
