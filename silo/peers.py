"""The other silos of a cluster: calls to them, as one of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from ..proto.v1 import cluster_pb2 as pb
from ..streams.client.connection import Connection, StreamCall, Tls
from ..streams.cluster import SiloRecord
from ..streams.errors import HeadraceError
from .config import SiloConfig

log = logging.getLogger("headrace.silo")

REACH_S = 2.0
"""How long a silo may take to say that it is there."""
CALL_S = 30.0
WHO = pb.DescribeClusterRequest(here=True).SerializeToString()
"""Asks a silo only for itself, where counting may take long."""


class PeerConnections:
    """One connection to each silo, made when it is needed. `aclose` ends them."""

    def __init__(self, secret: str, tls: Tls | None) -> None:
        """Raises InvalidArgument for files that cannot be used."""
        self._secret = secret
        self._tls = tls
        self._credentials = None if tls is None else tls.credentials()
        self._connections: dict[str, tuple[SiloRecord, Connection]] = {}
        self._doubted: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for task in list(self._doubted.values()):
            task.cancel()
        await asyncio.gather(*self._doubted.values(), return_exceptions=True)
        for _, connection in self._connections.values():
            await connection.aclose()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def keep(self, silos: Collection[str]) -> None:
        """Forget the way to all others."""
        for name in self._connections.keys() - set(silos):
            self._close(name)

    def doubt(self, silo: SiloRecord) -> None:
        """Nothing is heard on a connection: where the silo does not answer on it either, the next call makes another.
        Calls that are open there end."""
        if silo.name in self._connections and silo.name not in self._doubted:
            task = asyncio.create_task(self._check(silo), name=f"headrace looks for {silo.name}")
            self._doubted[silo.name] = task
            task.add_done_callback(lambda _: self._doubted.pop(silo.name, None))

    async def _check(self, silo: SiloRecord) -> None:
        if not await self.reach(silo):
            self._close(silo.name)

    def _close(self, name: str) -> None:
        if (known := self._connections.pop(name, None)) is not None:
            closing = asyncio.create_task(known[1].aclose(), name=f"headrace closes the way to {name}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def reach(self, silo: SiloRecord) -> bool:
        """Whether it answers, and is the one that is looked for."""
        why = await self.missed(silo)
        if why:
            log.info("silo %s cannot be reached at %s: %s", silo.name, silo.address, why)
        return not why

    async def missed(self, silo: SiloRecord) -> str:
        """Why a silo cannot be reached; empty where it can."""
        try:
            answer = await self.unary(silo, "ClusterService/DescribeCluster", WHO, timeout_s=REACH_S)
        except HeadraceError as error:
            return str(error).replace("tls.ca", "cluster.ca")
        names = [each.name for each in pb.DescribeClusterResponse.FromString(answer).cluster.silos]
        return "" if names == [silo.name] else f"silo {', '.join(names)} answers there"

    async def unary(self, silo: SiloRecord, method: str, request: bytes, *, timeout_s: float = CALL_S) -> bytes:
        """Call a silo. Raises Unavailable, and what the silo raises."""
        return await self._connection(silo).unary(method, request, timeout_s=timeout_s)

    def stream(self, silo: SiloRecord, method: str) -> StreamCall:
        """Begin a call of a silo. It fails, where it does, at the first `receive`."""
        return self._connection(silo).stream(method)

    def _connection(self, silo: SiloRecord) -> Connection:
        known = self._connections.get(silo.name)
        if known is not None and known[0].incarnation == silo.incarnation and known[0].address == silo.address:
            return known[1]
        self._close(silo.name)
        # As insecure as this silo itself was told to be.
        connection = Connection(silo.address, token=self._secret, tls=self._tls, insecure=True)
        connection.begin(self._credentials)
        self._connections[silo.name] = silo, connection
        return connection


def tls_of(config: SiloConfig) -> Tls | None:
    """How to speak to other silos: as this one is spoken to, with its own certificate."""
    grpc, cluster = config.grpc, config.cluster
    if grpc.certificate is None:
        return None
    ca = (cluster.ca if cluster is not None else None) or grpc.client_ca
    return Tls(ca=ca, certificate=grpc.certificate, key=grpc.key)
