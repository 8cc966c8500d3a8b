"""Measures how late the event loop runs its tasks. A handler that blocks the loop holds up everything else in it."""

from __future__ import annotations

import asyncio

from ..streams.histograms import Histogram

CHECK_S = 0.25
"""Interval of measuring, in seconds. Most blocks that are shorter are missed."""


class LoopDelay:
    """Sleeps in `run`, and measures how much later than asked it wakes up."""

    def __init__(self) -> None:
        self.delays = Histogram()

    async def run(self) -> None:
        """Measure until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + CHECK_S
            await asyncio.sleep(CHECK_S)
            self.delays.observe(loop.time() - due)
