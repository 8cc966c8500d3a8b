"""Wakes up receivers when a queue has grown, within the process and across processes.

Each handle with receivers has a FIFO in the directory `wake`. After a commit, the committing handle writes the numbers
(u16) of the queues that have grown to the FIFO of every other handle, so that receivers need not poll. A FIFO without a
reader belongs to a handle that died, and is removed. Writes to a full FIFO are dropped: a handle that finds its FIFO
nearly full wakes up all its receivers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
import time
from array import array
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...streams.background import BackgroundTasks
from ...streams.errors import Closed, StorageError
from ...streams.private_files import FILE_MODE
from .limits import LOG_LIMITS, LogLimits

_READ_BYTES = 65536
_NEARLY_FULL_BYTES = 4096
_RING_ALL = 0xFFFF
_MAX_NAMED_QUEUES = 512
"""If more queues have grown than this, the message names none, and wakes up all receivers."""
_CLOCK_STEP_NS = 100_000_000


class Doorbell:
    """Wakes up the receivers of one handle. Belongs to one event loop."""

    def __init__(self, directory: Path, limits: LogLimits = LOG_LIMITS) -> None:
        self._directory = directory
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[int, set[asyncio.Event]] = {}
        self._background = BackgroundTasks()
        self._opening: asyncio.Task[None] | None = None
        self._fifo: int | None = None
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"

    async def listen(self, queue: int) -> asyncio.Event:
        """Return an event that is set whenever the queue may have grown. The caller clears the event, then reads.

        Raises Closed after `aclose`, StorageError if the FIFO cannot be made.
        """
        if not self._closed and (self._opening is None or (self._opening.done() and self._fifo is None)):
            self._opening = self._background.hold(self._open(), "headrace log doorbell")
        if self._opening is not None:
            # Shielded: the thread goes on when its caller is cancelled, and `aclose` must remove the FIFO that it
            # makes.
            await asyncio.shield(self._opening)
        if self._closed:
            raise Closed("the adapter is closed")
        event = asyncio.Event()
        self._listeners.setdefault(queue, set()).add(event)
        return event

    def forget(self, queue: int, event: asyncio.Event) -> None:
        self._listeners.get(queue, set()).discard(event)

    def ring(self, queues: Iterable[int]) -> None:
        for queue in queues:
            for event in self._listeners.get(queue, ()):
                event.set()

    async def aclose(self) -> None:
        self._closed = True
        await self._background.join()
        if self._timer is not None:
            self._timer.cancel()
        if self._fifo is not None:
            self._loop.remove_reader(self._fifo)
            fifo, self._fifo = self._fifo, None
            await asyncio.to_thread(_remove_fifo, self._directory / self.name, fifo)

    async def _open(self) -> None:
        self._fifo = await asyncio.to_thread(_make_fifo, self._directory, self.name)
        self._loop.add_reader(self._fifo, self._on_ring, self._fifo)
        self._tick()

    def _tick(self) -> None:
        self.ring(list(self._listeners))
        self._timer = self._loop.call_later(self._limits.safety_poll_s, self._tick)

    def _on_ring(self, fifo: int) -> None:
        with suppress(BlockingIOError):
            message = os.read(fifo, _READ_BYTES)
            queues = set(_numbers(message))
            self.ring(list(self._listeners) if len(message) >= _NEARLY_FULL_BYTES or _RING_ALL in queues else queues)


class DoorbellRinger:
    """Wakes up the receivers of all other handles, in this process and in others. Used by one thread."""

    def __init__(self, directory: Path, own_name: str) -> None:
        self._directory = directory
        self._own_name = own_name
        self._pipes: dict[str, int] = {}
        self._seen_ns = -1

    def ring(self, queues: Iterable[int]) -> None:
        self._refresh_pipes()
        if self._pipes:
            message = _message(queues)
            for name, pipe in list(self._pipes.items()):
                self._write(name, pipe, message)

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes.clear()

    def _refresh_pipes(self) -> None:
        """Open FIFOs that are new in the directory, and close those that are gone."""
        changed_ns = self._directory.stat().st_mtime_ns
        if changed_ns == self._seen_ns:
            return
        names = {path.name for path in self._directory.iterdir()} - {self._own_name}
        for name in self._pipes.keys() - names:
            os.close(self._pipes.pop(name))
        for name in names - self._pipes.keys():
            if not name.startswith("."):
                self._open(name)
        # A directory's modification time has coarse steps: a second change within one step would go unnoticed.
        self._seen_ns = changed_ns if time.time_ns() - changed_ns > _CLOCK_STEP_NS else -1

    def _open(self, name: str) -> None:
        path = self._directory / name
        try:
            if stat.S_ISFIFO(path.stat().st_mode):
                self._pipes[name] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENXIO:
                path.unlink(missing_ok=True)

    def _write(self, name: str, pipe: int, message: bytes) -> None:
        try:
            os.write(pipe, message)
        except BlockingIOError:
            pass
        except BrokenPipeError:
            os.close(self._pipes.pop(name))
            (self._directory / name).unlink(missing_ok=True)


def _message(queues: Iterable[int]) -> bytes:
    numbers = array("H", queues)
    if len(numbers) > _MAX_NAMED_QUEUES:
        numbers = array("H", [_RING_ALL])
    return numbers.tobytes()


def _numbers(message: bytes) -> array[int]:
    numbers = array("H")
    numbers.frombytes(message)
    return numbers


def _make_fifo(directory: Path, name: str) -> int:
    """Make and open a FIFO. It gets its final name once it has a reader: without one, others would remove it."""
    hidden = directory / f".{name}"
    try:
        os.mkfifo(hidden, FILE_MODE)
        fifo = os.open(hidden, os.O_RDWR | os.O_NONBLOCK)
        hidden.rename(directory / name)
    except OSError as error:
        raise StorageError(f"'{directory}': the FIFO that wakes receivers cannot be made: {error.strerror}") from None
    return fifo


def _remove_fifo(path: Path, fifo: int) -> None:
    path.unlink(missing_ok=True)
    os.close(fifo)
