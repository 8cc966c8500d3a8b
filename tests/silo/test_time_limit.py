"""Time in which the event loop is busy does not count."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.silo.time_limit import LONGEST_S, time_limit


async def test_a_block_that_waits_ends_in_time() -> None:
    with pytest.raises(TimeoutError):
        async with time_limit(0.1):
            await asyncio.sleep(LONGEST_S)


async def test_a_busy_event_loop_is_no_reason_to_end_a_block() -> None:
    async with time_limit(0.1):
        for _ in range(4):
            await asyncio.sleep(0)
            time.sleep(0.1)  # noqa: ASYNC251 (it blocks the event loop)


async def test_a_block_ends_at_the_latest_however_busy_the_event_loop_is() -> None:
    async with asyncio.timeout(2 * LONGEST_S):
        with pytest.raises(TimeoutError):
            async with time_limit(3600.0):
                await asyncio.Event().wait()


async def test_an_error_in_the_block_is_raised() -> None:
    with pytest.raises(ValueError, match="x"):
        async with time_limit(0.1):
            raise ValueError("x")
