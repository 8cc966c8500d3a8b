"""Connections and calls from this silo to the other silos of its cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

import grpc.aio

from ..client.connection import GrpcTransport, Tls
from ..client.transport import StreamCall
from ..proto.v1 import cluster_pb2 as pb
from ..streams.background import BackgroundTasks
from ..streams.cluster import SiloRecord
from ..streams.errors import HeadraceError, Unavailable
from .config import SiloConfig

log = logging.getLogger("headrace.silo")

REACH_S = 2.0
"""Timeout of the question whether a silo is alive, in seconds."""
AS_SETTINGS = {
    "address": "cluster.address",
    "tls": "grpc.certificate",
    "tls.ca": "cluster.ca",
    "tls.certificate": "grpc.certificate",
}
"""Settings of a silo by the names of a connection's options in Python, for `HeadraceError.text_for`."""
CALL_S = 30.0
"""Default timeout of a call to another silo, in seconds."""


class _PeerTransport(GrpcTransport):
    """The connection to one silo. All consumers share it, so a silent call alone does not end it."""

    # The connection is closed because its silo is not a member any more, or does not answer. A retry may reach another.
    closed_error = partial(Unavailable, "the connection to the silo was given up")
    on_silence: Callable[[], None]
    """Called when the silo is silent in a call."""

    async def renew(self, index: int, channel: grpc.aio.Channel) -> None:
        self.on_silence()


class PeerConnections:
    """One connection to each silo, made at the first call. `aclose` ends them."""

    def __init__(self, secret: str, tls: Tls | None, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`credentials` are those of `tls`."""
        self._secret = secret
        self._tls = tls
        self._credentials = credentials
        self._connections: dict[str, tuple[SiloRecord, GrpcTransport]] = {}
        self._checks = BackgroundTasks()
        self._closing = BackgroundTasks()

    async def aclose(self) -> None:
        await self._checks.aclose()
        for _, connection in self._connections.values():
            await connection.aclose()
        await self._closing.join()

    def keep(self, silos: Collection[str]) -> None:
        """Close the connections to all silos but these."""
        for name in self._connections.keys() - set(silos):
            self._close(name)

    def _suspect(self, silo: SiloRecord) -> None:
        """Check a silo that is silent in a call. If it does not answer on its connection, the connection ends with its
        calls; the next call makes a new one."""
        name = f"headrace check {silo.name}"
        if silo.name in self._connections and name not in self._checks:
            self._checks.start(self._check(silo), name)

    async def _check(self, silo: SiloRecord) -> None:
        if not await self.reach(silo):
            self._close(silo.name)

    def _close(self, name: str) -> None:
        if (known := self._connections.pop(name, None)) is not None:
            self._closing.start(known[1].aclose(), f"headrace close {name}")

    async def reach(self, silo: SiloRecord) -> bool:
        """Return whether the silo answers at its address."""
        why = await self.why_unreachable(silo)
        if why is not None:
            log.info("silo %r cannot be reached at %s: %s", silo.name, silo.address, why.text_for(AS_SETTINGS))
        return why is None

    async def why_unreachable(self, silo: SiloRecord) -> HeadraceError | None:
        """Return why a silo cannot be reached, None if it can. Its process answers without the store."""
        request = pb.ProbeSiloRequest(silo=silo.name).SerializeToString()
        try:
            answer = await self.unary(silo, "ClusterService/ProbeSilo", request, timeout_s=REACH_S)
        except HeadraceError as error:
            return error
        here = pb.ProbeSiloResponse.FromString(answer).here
        return None if here else Unavailable("another silo answers there")

    async def unary(self, silo: SiloRecord, method: str, request: bytes, *, timeout_s: float = CALL_S) -> bytes:
        """Call a silo. Raise Unavailable, and the errors that the silo raises."""
        return await self._connection(silo).unary(method, request, timeout_s=timeout_s)

    def stream(self, silo: SiloRecord, method: str) -> StreamCall:
        """Begin a streaming call to a silo. An error is raised by the first `receive`."""
        return self._connection(silo).stream(method)

    def _connection(self, silo: SiloRecord) -> GrpcTransport:
        known = self._connections.get(silo.name)
        if known is not None and known[0].incarnation == silo.incarnation and known[0].address == silo.address:
            return known[1]
        self._close(silo.name)
        # Without TLS if this silo has none: its configuration allowed that.
        connection = _PeerTransport(silo.address, token=self._secret, tls=self._tls, insecure=True)
        connection.on_silence = partial(self._suspect, silo)
        connection.begin(self._credentials)
        self._connections[silo.name] = silo, connection
        return connection


def tls_of(config: SiloConfig) -> Tls | None:
    """TLS for calls to other silos: this silo's certificate. None if this silo serves without TLS."""
    grpc, cluster = config.grpc, config.cluster
    if grpc.certificate is None:
        return None
    ca = (cluster.ca if cluster is not None else None) or grpc.client_ca
    return Tls(ca=ca, certificate=grpc.certificate, key=grpc.key)
