"""The other silos of a cluster: calls to them, as one of them."""

from __future__ import annotations

import asyncio
import logging

from ..proto.v1 import cluster_pb2 as pb
from ..streams.client.connection import Connection, StreamCall, Tls
from ..streams.cluster import SiloRecord
from ..streams.errors import HeadraceError
from .config import SiloConfig

log = logging.getLogger("headrace.silo")

REACH_S = 2.0
"""How long a silo may take to say that it is there."""
CALL_S = 30.0


class PeerConnections:
    """One connection to each silo, made when it is needed. `aclose` ends them."""

    def __init__(self, secret: str, tls: Tls | None) -> None:
        """Raises InvalidArgument for files that cannot be used."""
        self._secret = secret
        self._tls = tls
        self._credentials = None if tls is None else tls.credentials()
        self._connections: dict[str, tuple[SiloRecord, Connection]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for _, connection in self._connections.values():
            await connection.aclose()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def reach(self, silo: SiloRecord) -> bool:
        """Whether it answers, and is the one that is looked for."""
        try:
            answer = await self.unary(silo, "ClusterService/DescribeCluster", b"", timeout_s=REACH_S)
        except HeadraceError as error:
            log.info("silo %s cannot be reached at %s: %s", silo.name, silo.address, error)
            return False
        cluster = pb.DescribeClusterResponse.FromString(answer).cluster
        return [each.name for each in cluster.silos] == [silo.name]

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
        if known is not None:
            closing = asyncio.create_task(known[1].aclose(), name=f"headrace closes the way to {silo.name}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
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
