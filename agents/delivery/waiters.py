"""Tasks that wait for a change: of members, or of the progress of a delivery."""

from __future__ import annotations

import asyncio

from ...streams.errors import Closed
from .progress import DeliveryProgress


class Waiters:
    """Tasks that wait for the next call of `notify`."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Return at the next `notify`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        await future

    def notify(self) -> None:
        """Wake all waiting tasks."""
        if self._futures:
            futures, self._futures = self._futures, []
            for future in futures:
                if not future.done():
                    future.set_result(None)


class ProgressWaiters(Waiters):
    """Tasks that wait for the progress of one delivery."""

    def __init__(self, progress: DeliveryProgress, name: str, queue: int) -> None:
        super().__init__()
        self._progress = progress
        self._name = name
        self._queue = queue
        self._closed = False

    async def wait_until(self, offset: int) -> None:
        """Return when every event below `offset` is done. Paused streams do not count.

        Raises Closed if the delivery has stopped. Raises CorruptRecord if there is a damaged record below `offset`, and
        every event before that record is done.
        """
        while not self._progress.reached(offset):
            if (damage := self._progress.met_damage()) is not None:
                raise damage
            if self._closed:
                raise Closed(
                    f"subscription {self._name!r} stopped before it came to offset {offset} of queue {self._queue}"
                )
            await self.wait()

    def close(self) -> None:
        """Wake all waiting tasks for the last time: the delivery stops."""
        self._closed = True
        self.notify()
