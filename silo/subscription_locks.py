"""The rights of this process to serve subscriptions: locks in the data directory, which end with the process.

This process takes each right once, also if the silos of a cluster share it, and also without a data directory. So a
subscription is not served again while its handlers still end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from ..store.datadir import DataDirectory, DirectoryLock, lock_reader, lock_subscription
from ..streams.errors import Busy
from ..streams.subscriptions import parent_name


class _TakenLocks(NamedTuple):
    reader: DirectoryLock | None
    subscriptions: dict[str, DirectoryLock]


class SubscriptionLocks:
    """The locks of one provider in this process. Without a data directory no other process can serve, and no file is
    locked."""

    def __init__(self, directory: DataDirectory | None, provider: str, *, shared: bool, one_reader: bool) -> None:
        """`shared`: the silos of a cluster share each lock. `one_reader`: the queues have one reader each, so one
        process serves all subscriptions; it keeps that right until `release_all`."""
        self._directory = directory
        self._provider = provider
        self._shared = shared
        self._one_reader = one_reader
        self._reader: DirectoryLock | None = None
        self._held: dict[str, DirectoryLock | None] = {}
        """By subscription. None: there is no data directory."""
        self._taking = asyncio.Lock()

    async def take(self, name: str) -> None:
        """Take the right to serve a subscription, without waiting. Raises Busy if another process has the right (the
        error names that process), or if this process has not released it yet."""
        async with self._taking:
            if name in self._held:
                hint = "its handlers still end, so try again later"
                raise Busy(self._ending(name), hint=hint)
            await self._take(lambda directory: self._lock_one(name, directory), [name])

    async def take_free(self, names: Sequence[str]) -> Mapping[str, str]:
        """Take the rights to serve those of the subscriptions that no process serves. Return the others by name, with
        the reason."""
        async with self._taking:
            refused = {name: self._ending(name) for name in names if name in self._held}
            if free := [name for name in names if name not in refused]:
                await self._take(lambda directory: self._lock_free(free, directory, refused), free)
        return refused

    def _ending(self, name: str) -> str:
        return f"subscription {parent_name(name)!r} has not ended in this process yet"

    async def _take(self, lock: Callable[[DataDirectory], _TakenLocks], names: Sequence[str]) -> None:
        """Lock in a thread. If this call is cancelled, wait for the thread: it could take a lock later and keep it.
        Without a data directory, this process has the rights to serve the subscriptions `names` at once."""
        if self._directory is None:
            self._held.update(dict.fromkeys(names))
            return
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

    def is_taken(self, name: str) -> bool:
        """Whether this process took the right to serve a subscription, and has not given it up."""
        return name in self._held

    async def holds(self, name: str) -> bool:
        """Whether this process may serve a subscription: it took the right, and no other process can have it.

        False also if the file of the lock was removed or replaced, except in a cluster: there leases decide.
        """
        if self._directory is None:
            return name in self._held
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
