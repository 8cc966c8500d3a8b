"""Writes lines to stdout in a separate thread, as many at a time as wait.

If the reader of stdout stops reading, the thread blocks, but the event loop continues, and signals are handled.
"""

from __future__ import annotations

import asyncio
import os
from queue import SimpleQueue
from threading import Thread

_Write = tuple[bytes, "asyncio.Future[None]"]


class ThreadedWriter:
    """Writes to a file descriptor in a thread, which ends with the process at the latest."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiting: SimpleQueue[_Write] = SimpleQueue()
        Thread(target=self._work, name="headrace stdout", daemon=True).start()

    async def write(self, data: bytes) -> None:
        """Return when `data` is handed to the operating system. Raises OSError, such as BrokenPipeError.

        If it is cancelled, the data may be written or not.
        """
        written: asyncio.Future[None] = self._loop.create_future()
        self._waiting.put((data, written))
        await written

    def _work(self) -> None:
        while True:
            writes = [self._waiting.get()]
            while not self._waiting.empty():
                writes.append(self._waiting.get())
            error = self._write(b"".join(data for data, _ in writes))
            try:
                self._loop.call_soon_threadsafe(_report, writes, error)
            except RuntimeError:  # the loop is closed: no caller waits any more
                return

    def _write(self, data: bytes) -> OSError | None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            error.filename = "stdout"
            return error
        return None


def _report(writes: list[_Write], error: OSError | None) -> None:
    for _, written in writes:
        if written.done():
            continue
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(error)
