"""The rights of this process to serve subscriptions: locks in the data directory, which end with the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from ..store.datadir import DataDirectory, DirectoryLock, lock_reader, lock_subscription
from ..streams.errors import Busy


class _TakenLocks(NamedTuple):
    reader: DirectoryLock | None
    subscriptions: dict[str, DirectoryLock]


class SubscriptionLocks:
    """The locks of one provider in this process. Without a data directory no other process can serve, and no lock is
    needed."""

    def __init__(self, directory: DataDirectory | None, provider: str, *, shared: bool, one_reader: bool) -> None:
        """`shared`: the silos of a cluster share each lock. `one_reader`: the queues have one reader each, so one
        process serves all subscriptions; it keeps that right until `release_all`."""
        self._directory = directory
        self._provider = provider
        self._shared = shared
        self._one_reader = one_reader
        self._reader: DirectoryLock | None = None
        self._held: dict[str, DirectoryLock] = {}
        self._taking = asyncio.Lock()

    async def take(self, name: str) -> None:
        """Take the right to serve a subscription, without waiting. Raise Busy, which names a process that has it."""
        if self._directory is not None:
            await self._take(lambda directory: self._lock_one(name, directory))

    async def take_free(self, names: Sequence[str]) -> Mapping[str, str]:
        """Take the rights to serve those of the subscriptions that no other process serves. Return the others by name,
        with the reason."""
        refused: dict[str, str] = {}
        await self._take(lambda directory: self._lock_free(names, directory, refused))
        return refused

    async def _take(self, lock: Callable[[DataDirectory], _TakenLocks]) -> None:
        """Lock in a thread. If this call is cancelled, wait for the thread: it could take a lock later and keep it."""
        assert self._directory is not None
        async with self._taking:
            locking = asyncio.ensure_future(asyncio.to_thread(lock, self._directory))
            try:
                taken = await asyncio.shield(locking)
            except asyncio.CancelledError:
                await asyncio.wait([locking])
                if locking.exception() is None:
                    self._hold(locking.result())
                    for name in locking.result().subscriptions:
                        self.release(name)
                raise
            self._hold(taken)

    def _hold(self, taken: _TakenLocks) -> None:
        self._reader = taken.reader
        self._held.update(taken.subscriptions)

    def _lock(
        self, name: str, directory: DataDirectory, reader: DirectoryLock | None
    ) -> tuple[DirectoryLock | None, DirectoryLock]:
        if reader is None and self._one_reader:
            reader = lock_reader(directory, self._provider, shared=self._shared)
        return reader, lock_subscription(directory, self._provider, name, shared=self._shared)

    def _lock_one(self, name: str, directory: DataDirectory) -> _TakenLocks:
        reader, lock = self._lock(name, directory, self._reader)
        return _TakenLocks(reader, {name: lock})

    def _lock_free(self, names: Sequence[str], directory: DataDirectory, refused: dict[str, str]) -> _TakenLocks:
        reader, locks = self._reader, dict[str, DirectoryLock]()
        for name in names:
            try:
                reader, locks[name] = self._lock(name, directory, reader)
            except Busy as error:
                refused[name] = error.problem
        return _TakenLocks(reader, locks)

    async def holds(self, name: str) -> bool:
        """Whether this process may serve a subscription: it took the right, and no other process can have it.

        False also if the file of the lock was removed or replaced, except in a cluster: there leases decide.
        """
        if self._directory is None:
            return True
        held = self._held.get(name)
        if held is None or not (self._shared or await asyncio.to_thread(held.is_valid)):
            return False
        return self._held.get(name) is held  # else it was released meanwhile

    def release(self, name: str) -> None:
        """Give up the right to serve a subscription, if this process has it."""
        if (held := self._held.pop(name, None)) is not None:
            held.release()

    def release_all(self) -> None:
        """Give up all rights."""
        for name in list(self._held):
            self.release(name)
        if self._reader is not None:
            self._reader.release()
            self._reader = None

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncGenerator[None]:
        """Keep all other processes from serving the subscription meanwhile, silos of a cluster too. Raises Busy.

        The provider must have a data directory.
        """
        assert self._directory is not None
        with await asyncio.to_thread(lock_subscription, self._directory, self._provider, name):
            yield
