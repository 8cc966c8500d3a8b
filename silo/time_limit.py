"""A time limit that does not count the time in which this process is busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

LONGEST_S = 2.0
"""The longest that a block may take in seconds, however busy the event loop is."""
TICK_S = 0.02
"""The limit is counted in turns of the event loop of this length. A turn that takes longer counts as one."""


@asynccontextmanager
async def time_limit(limit_s: float) -> AsyncGenerator[None]:
    """Raise TimeoutError after `limit_s` seconds in which the event loop had time; at the latest after `LONGEST_S`.

    With a plain limit, a busy process would say of a sound store that it does not answer.
    """
    loop, ticks = asyncio.get_running_loop(), max(round(limit_s / TICK_S), 1)
    async with asyncio.timeout(LONGEST_S) as timeout:

        def tick() -> None:
            nonlocal ticks, timer
            ticks -= 1
            if ticks:
                timer = loop.call_later(TICK_S, tick)
            elif not timeout.expired():
                timeout.reschedule(loop.time())

        timer = loop.call_later(TICK_S, tick)
        try:
            yield
        finally:
            timer.cancel()
