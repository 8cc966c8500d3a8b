"""Runs a command's coroutine, and ends it in order after a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...streams.outcomes import INTERRUPTED, CommandInterrupted

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REPEATED_WITHIN_S = 0.5
"""A second signal within this time, in seconds, counts as the first: timeout(1), for example, sends it twice."""


def run(main: Coroutine[Any, Any, _T], *, terminated: int = INTERRUPTED) -> _T:
    """Run `main`. SIGINT and SIGTERM cancel it; after its clean-up, Interrupted is raised, with exit code `terminated`
    for SIGTERM. A second signal ends the process at once."""
    logging.basicConfig(format="headrace: %(message)s")
    return asyncio.run(_interruptible(main, terminated))


async def _interruptible(main: Coroutine[Any, Any, _T], terminated: int) -> _T:
    task = asyncio.current_task()
    assert task is not None
    caught: list[signal.Signals] = []
    handle_signals(lambda number: (caught.append(number), task.cancel()))
    try:
        return await main
    except asyncio.CancelledError:
        if not caught:
            raise
        code = terminated if caught[0] is signal.SIGTERM else INTERRUPTED
        raise CommandInterrupted("interrupted" if code else "", code) from None


def handle_signals(stop: Callable[[signal.Signals], object], kill: Callable[[], object] = lambda: None) -> None:
    """Call `stop` on the loop at the first SIGINT or SIGTERM; at a second one call `kill`, and end this process."""
    loop = asyncio.get_running_loop()
    first: list[float] = []

    def on_signal(number: signal.Signals) -> None:
        if not first:
            first.append(loop.time())
            stop(number)
        elif loop.time() > first[0] + _REPEATED_WITHIN_S:
            kill()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
