"""Runs a command's coroutine so that signals end it in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..outcome import INTERRUPTED, Interrupted

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN_S = 0.5
"""What comes within this time of the first signal is the same one: timeout(1), for one, sends it twice."""


def run(main: Coroutine[Any, Any, _T], *, terminated: int = INTERRUPTED) -> _T:
    """Run `main`. SIGINT and SIGTERM cancel it, and when it has cleaned up, Interrupted is raised (with exit code
    `terminated` for SIGTERM); a second signal ends the process at once."""
    logging.basicConfig(format="headrace: %(message)s")
    return asyncio.run(_interruptible(main, terminated))


async def _interruptible(main: Coroutine[Any, Any, _T], terminated: int) -> _T:
    task = asyncio.current_task()
    assert task is not None
    caught: list[signal.Signals] = []
    heed_signals(lambda number: (caught.append(number), task.cancel()))
    try:
        return await main
    except asyncio.CancelledError:
        if not caught:
            raise
        code = terminated if caught[0] is signal.SIGTERM else INTERRUPTED
        raise Interrupted("interrupted" if code else "", code) from None


def heed_signals(stop: Callable[[signal.Signals], object], kill: Callable[[], object] = lambda: None) -> None:
    """From now on the first SIGINT or SIGTERM calls `stop` on the loop; a second one `kill`, and ends this process."""
    loop = asyncio.get_running_loop()
    first: list[float] = []

    def heed(number: signal.Signals) -> None:
        if not first:
            first.append(loop.time())
            stop(number)
        elif loop.time() > first[0] + _AGAIN_S:
            kill()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, heed, number)
