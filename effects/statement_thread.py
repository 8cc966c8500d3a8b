"""A thread for the statements of one transaction."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

R = TypeVar("R")

Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class StatementThread:
    """Runs functions one after the other, and ends when it is not referenced any more.

    It is a daemon thread, unlike those of `concurrent.futures`: a process can end while a statement waits in the
    database.
    """

    def __init__(self, name: str) -> None:
        self._jobs: Jobs = SimpleQueue()
        Thread(target=_run, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Run a function after the earlier ones. Return its result, for the running event loop."""
        result: Future[R] = Future()
        self._jobs.put((result, function))
        return asyncio.wrap_future(result)


def _run(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        result, function = job
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(function())
            except BaseException as error:  # noqa: BLE001 (the caller gets it)
                result.set_exception(error)
        del job, result, function  # they hold the transaction
