"""Descriptions of a silo and of its cluster, as the cluster service gives them."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from ...proto.v1 import cluster_pb2 as pb
from ...streams.cluster import LIVING, ClusterView, SiloRecord, SiloState
from ...streams.errors import HeadraceError
from .agent_changes import AgentChanges, RunningSilo
from .describing import described, silent, silent_ms, unserved

if TYPE_CHECKING:
    from ..clustering import Clustering

log = logging.getLogger("headrace.silo")

WATCH_S = 1.0
"""Interval at which a watcher gets changes, in seconds."""
ASK_S = 2.0
"""Time that a silo has to describe itself, in seconds. A slower silo is shown as unreachable."""


class ClusterDescriptions:
    """Describes the cluster. With `counted`, a description has the lag of each queue, which costs reading."""

    def __init__(self, silo: RunningSilo, changes: AgentChanges, version: str) -> None:
        self._silo = silo
        self._changes = changes
        self._version = version
        self._looking = asyncio.Lock()
        self._recent: dict[bool, tuple[float, pb.Cluster]] = {}
        """The time of the last description and the description, by whether it is counted."""

    @property
    def silo_name(self) -> str:
        clustering = self._silo.clustering
        return socket.gethostname() if clustering is None or clustering.view is None else clustering.name

    async def recent(self, counted: bool) -> pb.Cluster:
        """Return a description at most half of `WATCH_S` old: many may watch, and each description costs time."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if counted not in self._recent or now - self._recent[counted][0] > WATCH_S / 2:
                self._recent[counted] = now, await self.describe(counted)
            return self._recent[counted][1]

    async def describe(self, counted: bool, *, alone: bool = False) -> pb.Cluster:
        """Describe the whole cluster, or this silo alone."""
        clustering = self._silo.clustering
        if alone or clustering is None or (view := clustering.view) is None:
            return pb.Cluster(silos=[await self._describe_self(counted)])
        silos = [silo for silo in view.silos if silo.state != SiloState.LEFT]
        found = await asyncio.gather(*(self._describe_silo(clustering, view, silo, counted) for silo in silos))
        return pb.Cluster(silos=found, unserved=unserved(found, clustering.membership, self._silo.providers))

    async def _describe_self(self, counted: bool) -> pb.Silo:
        return pb.Silo(
            name=self.silo_name,
            address=self._silo.grpc_address or "",
            state=self._changes.state,
            providers=[await described(provider, counted=counted) for provider in self._silo.providers.values()],
            version=self._version,
        )

    async def _describe_silo(
        self, clustering: Clustering, view: ClusterView, record: SiloRecord, counted: bool
    ) -> pb.Silo:
        """Return the silo's own description, or one from the cluster's store if the silo does not answer."""
        providers = self._silo.providers
        if record.state not in LIVING:
            return silent(record, "dead", view, providers)
        is_self = record.name == self.silo_name
        found = await self._describe_self(counted) if is_self else await _ask(clustering, record, counted)
        if found is None:
            return silent(record, "unreachable", view, providers)
        found.address, found.silent_ms = record.address, silent_ms(record, view)
        found.settings.update(record.settings)
        return found


async def _ask(clustering: Clustering, record: SiloRecord, counted: bool) -> pb.Silo | None:
    """Ask a silo for its description. None if it does not answer, or if another silo answers at its address."""
    request = pb.DescribeClusterRequest(here=not counted).SerializeToString()
    try:
        answer = await clustering.call(record.name, "ClusterService/DescribeCluster", request, timeout_s=ASK_S)
    except HeadraceError as error:
        log.info("silo %s did not describe itself: %s", record.name, error)
        return None
    found = pb.DescribeClusterResponse.FromString(answer).cluster.silos
    return found[0] if [silo.name for silo in found] == [record.name] else None
