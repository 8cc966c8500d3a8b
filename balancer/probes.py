"""Probes silos that send no heartbeats, and votes that they are dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ..streams.background import BackgroundTasks
from ..streams.cluster import LIVING, SiloRecord
from ..streams.errors import HeadraceError, StorageError
from .sightings import Sightings

log = logging.getLogger("headrace.balancer")


class ReachableSilos(Protocol):
    """The connections to the other silos."""

    async def reach(self, silo: SiloRecord) -> bool:
        """Return whether the silo itself answers. Takes a bounded time."""
        ...


class VoteStore(Protocol):
    """The part of `headrace.store.cluster_store.ClusterStore` that takes votes about dead silos."""

    async def suspect(self, me: SiloRecord, suspect: SiloRecord, peers: Collection[str]) -> bool: ...


class SiloProbes:
    """The probes of one silo. Belongs to one event loop."""

    def __init__(
        self,
        store: VoteStore,
        peers: ReachableSilos,
        sightings: Sightings,
        *,
        dead_after_s: float,
        me: Callable[[], SiloRecord],
        background: BackgroundTasks,
    ) -> None:
        """`me` returns the probing silo as the cluster knows it now. `dead_after_s`: see `ClusterOptions`. Probes run
        in `background`."""
        self._store = store
        self._peers = peers
        self._sightings = sightings
        self._dead_after_s = dead_after_s
        self._me = me
        self._loop = asyncio.get_running_loop()
        self._background = background
        self._silos: Sequence[SiloRecord] = ()

    def start(self, silos: Sequence[SiloRecord]) -> None:
        """Probe the silos that have sent no heartbeat for `dead_after_s`. `silos` are those of the last view that
        `sightings` has seen."""
        self._silos = silos
        for silo in silos:
            is_silent = silo.state in LIVING and not self._is_heard(silo)
            name = f"headrace probe {silo.name}"
            if is_silent and silo.name != self._me().name and name not in self._background:
                self._background.start(self._probe(silo), name)

    def _is_heard(self, silo: SiloRecord) -> bool:
        return self._sightings.silent_s(silo, self._loop.time()) < self._dead_after_s

    async def _probe(self, silo: SiloRecord) -> None:
        try:
            if await self._peers.reach(silo):
                return
            peers = [peer.name for peer in self._silos if self._is_heard(peer)]
            if await self._store.suspect(self._me(), silo, peers):
                log.warning("silo %r is dead: it sends no heartbeats, and its peers cannot reach it", silo.name)
        except StorageError as error:
            log.warning("silo %r cannot vote against silo %r: %s", self._me().name, silo.name, error)
        except HeadraceError as error:
            log.info("silo %r cannot vote against silo %r: %s", self._me().name, silo.name, error)
