"""Runs a command's coroutine so that signals end it in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..outcome import INTERRUPTED, Interrupted

_T = TypeVar("_T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(main: Coroutine[Any, Any, _T], *, terminated: int = INTERRUPTED) -> _T:
    """Run `main`. SIGINT and SIGTERM cancel it, and when it has cleaned up, Interrupted is raised (with exit code
    `terminated` for SIGTERM); a second signal ends the process at once."""
    logging.basicConfig(format="headrace: %(message)s")
    return asyncio.run(_interruptible(main, terminated))


async def _interruptible(main: Coroutine[Any, Any, _T], terminated: int) -> _T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    caught: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if caught:
            end_now(number)
        caught.append(number)
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await main
    except asyncio.CancelledError:
        if not caught:
            raise
        code = terminated if caught[0] is signal.SIGTERM else INTERRUPTED
        raise Interrupted("interrupted" if code else "", code) from None
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def end_now(number: signal.Signals) -> None:
    """End this process by the signal, whatever it is doing."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
