"""The silos of this machine as processes: each holds a lock of its name, so that others see when it has ended."""

from __future__ import annotations

import asyncio
import logging

from ..store.cluster_store import ClusterStore
from ..store.datadir import SILOS, DataDirectory, DirectoryLock, is_held, lock
from ..streams.cluster import LIVING, ClusterView
from ..streams.errors import Busy

log = logging.getLogger("headrace.silo")

BUSY_S = 2.0
"""How long a starting silo waits until its name is free, in seconds: a silo of that name may be ending."""


class SiloProcesses:
    """Declares silos of this machine dead whose processes have ended."""

    def __init__(self, directory: DataDirectory, store: ClusterStore) -> None:
        self._directory = directory
        self._store = store

    async def lock_name(self, name: str) -> DirectoryLock:
        """Lock the silo's name on this machine for this process. A former process may hold it while it ends: wait.
        Raise Busy."""
        until = asyncio.get_running_loop().time() + BUSY_S
        while True:
            try:
                return await asyncio.to_thread(lock, self._directory, SILOS, name, f"the name of silo {name!r} is used")
            except Busy:
                if asyncio.get_running_loop().time() >= until:
                    raise
            await asyncio.sleep(BUSY_S / 20)

    async def end_former(self, name: str, place: str) -> None:
        """Release the leases of a former process of this machine that had this name and has ended.

        Raises Busy if it still runs, with another data directory. A process on another machine is superseded.
        """
        former = next((silo for silo in (await self._store.view()).silos if silo.name == name), None)
        if former is None or not former.process:
            return
        held = former.process != place and await asyncio.to_thread(is_held, former.process)
        if held:
            raise Busy(f"the name of silo {name!r} is used by a process with another data directory: stop it first")
        if held is False:
            await self._store.declare_dead(former)

    async def declare_dead(self, view: ClusterView, own_name: str) -> bool:
        """Release the leases of silos of this machine whose processes have ended. Return whether there were any."""
        others = [silo for silo in view.silos if silo.state in LIVING and silo.process and silo.name != own_name]
        held = await asyncio.to_thread(lambda: [is_held(silo.process) for silo in others])
        dead = [silo for silo, is_running in zip(others, held, strict=True) if is_running is False]
        for silo in dead:
            log.warning("silo %r is dead: its process has ended", silo.name)
            await self._store.declare_dead(silo)
        return bool(dead)
