"""Background work that is repeated: checkpoints, redrives, retention, control requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..streams.errors import HeadraceError

log = logging.getLogger("headrace.agents")

MAX_PAUSE_S, MAX_SHARE = 1.0, 0.05
"""Work that takes long gets at most this share of the time, but it is done at least once in so many seconds."""


async def run_periodically(work: Callable[[], Awaitable[None]], period_s: float) -> None:
    """Run `work` every `period_s` seconds, or less often if it takes long or fails. Log its errors and go on."""
    loop, pause_s = asyncio.get_running_loop(), period_s
    while True:
        await asyncio.sleep(pause_s)
        began = loop.time()
        least_s = period_s
        try:
            await work()
        except HeadraceError as error:
            log.warning("background work failed and is tried again: %s", error)
            least_s = max(period_s, min(2 * pause_s, MAX_PAUSE_S))
        except Exception:
            log.exception("background work failed and is tried again")
            least_s = max(period_s, min(2 * pause_s, MAX_PAUSE_S))
        pause_s = max(least_s, min((loop.time() - began) / MAX_SHARE, MAX_PAUSE_S))
