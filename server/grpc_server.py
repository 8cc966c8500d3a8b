"""Run the gRPC server of a silo: port, TLS, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio

from ..client.grpc_process import use_grpc
from ..streams.errors import Busy, InvalidArgument
from .access import Authenticator
from .config import NO_ADDRESS, GrpcConfig, TlsCredentials, read_credentials
from .connection_times import CONNECTION_TIMES, FLUSH_S, ConnectionTimes
from .guard import CallGuard
from .limits import ClientLimiter, ClientLimits
from .methods import ServiceMethod
from .native_server import native_serving
from .probes import HEALTH, HealthReporter, reflection_methods

log = logging.getLogger("headrace.silo")

KEEPALIVE_TIMEOUT_S = 10.0
"""Time for the answer to a ping, in seconds. Then the connection is closed."""
MIN_PING_S = 5.0
"""Shortest interval of a client's pings, in seconds. A faster client is disconnected (ENHANCE_YOUR_CALM)."""
PENDING_CALLS = 20_000
"""Most calls of all clients that wait to be started. Limits per client do not count them yet."""
WINDOW_BYTES = 256 << 10
"""Bytes of one call that gRPC receives before the silo reads a message. Then it receives the rest of that message."""


@asynccontextmanager
async def serving(
    config: GrpcConfig,
    authenticator: Authenticator,
    services: Callable[[CallGuard], Sequence[ServiceMethod]],
    *,
    drain_s: float,
    times: ConnectionTimes = CONNECTION_TIMES,
) -> AsyncGenerator[str]:
    """Serve the methods of `services` over gRPC and the native protocol for the length of an `async with`.

    gRPC also has health and reflection. Yield its HOST:PORT.

    At its end, health reports NOT_SERVING and new calls are refused. Open calls have `drain_s` seconds to end.

    Raises Busy if the port is taken, OSError if the address cannot be used for another reason, InvalidArgument for
    certificates that cannot be read, or a host that is not of this machine.
    """
    guard = CallGuard(authenticator, _limits(config.limits), certificates=config.client_ca is not None)
    methods = services(guard)
    server = _server(guard, methods, config.limits, times)
    credentials = await asyncio.to_thread(read_credentials, config)
    port = await _bind(server, config, credentials)
    async with native_serving(config, guard, methods, times):
        await server.start()
        try:
            yield config.at(port)
        finally:
            await _stop(server, guard, drain_s)


def _limits(limits: ClientLimits) -> ClientLimiter:
    return ClientLimiter(limits, asyncio.get_running_loop().time)


def _server(
    guard: CallGuard, methods: Sequence[ServiceMethod], limits: ClientLimits, times: ConnectionTimes
) -> grpc.aio.Server:
    use_grpc()
    server = grpc.aio.server(options=_options(limits, times))
    own = sorted({method.service for method in methods})
    probes = [*HealthReporter(guard).methods(), *reflection_methods([*own, HEALTH])]
    guard.open_services([*methods, *probes])
    for service, handlers in guard.handlers([*methods, *probes]).items():
        server.add_registered_method_handlers(service, dict(handlers))
    return server


def _options(limits: ClientLimits, times: ConnectionTimes) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # else two silos share a port, and each gets some of the calls
        # Above the limit itself: the guard refuses most messages that are too large, with a better text than gRPC.
        ("grpc.max_receive_message_length", 2 * limits.message_bytes),
        ("grpc.max_concurrent_streams", limits.calls),
        # Above this, gRPC cancels calls of any client without a reason. The guard refuses calls of the one client.
        ("grpc.server.max_pending_requests", PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
        ("grpc.keepalive_time_ms", _ms(times.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _ms(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        # A fixed window: else gRPC buffers megabytes of each call before the silo reads them.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(MIN_PING_S)),
        ("grpc.max_connection_idle_ms", _ms(times.idle_s)),
        ("grpc.server_handshake_timeout_ms", _ms(times.handshake_s)),
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


async def _bind(server: grpc.aio.Server, config: GrpcConfig, credentials: TlsCredentials | None) -> int:
    """Bind the port and return it. Raise Busy, OSError, InvalidArgument."""
    assert config.port is not None
    await _check_free(config.host, config.port)
    where = config.at(config.port)
    try:
        if credentials is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, _tls(credentials))
    except RuntimeError as error:
        raise OSError(errno.EADDRNOTAVAIL, f"gRPC cannot be served on {where}: {error}") from None


async def _check_free(host: str, port: int) -> None:
    """Try to bind the address before gRPC does: gRPC gives no reason for a failure.

    Raise Busy, OSError; InvalidArgument for a host that is not of this machine.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise InvalidArgument(f"grpc.host: {host!r} is not an address of this machine: {error.strerror}") from None
    missing = [address for family, *_, address in found if not _try_to_bind(family, address)]
    if len(missing) == len(found):
        where = f"{missing[0][0]}:{port}"
        raise OSError(errno.EADDRNOTAVAIL, f"gRPC cannot be served on {where}: this machine has no such address")


def _try_to_bind(family: socket.AddressFamily, address: Any) -> bool:
    """Return False if this machine has no such address. Raise Busy, OSError."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno in NO_ADDRESS:
            return False
        where = f"{address[0]}:{address[1]}"
        if error.errno != errno.EADDRINUSE:
            raise OSError(error.errno, f"gRPC cannot be served on {where}: {error.strerror}") from None
        raise Busy(
            f"{where} is in use by another process, perhaps a silo: stop it, or name another port for gRPC"
        ) from None
    return True


def _tls(credentials: TlsCredentials) -> grpc.ServerCredentials:
    pair = (credentials.key, credentials.certificate)
    ca = credentials.client_ca
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


async def _stop(server: grpc.aio.Server, guard: CallGuard, drain_s: float) -> None:
    for service in guard.services:
        guard.close(service)
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await guard.wait_until_idle()
    if guard.open_calls:
        log.warning("gRPC calls did not end within %.1f s and are cancelled: %d", drain_s, guard.open_calls)
    await server.stop(FLUSH_S if not guard.open_calls else None)
