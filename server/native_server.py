"""Serve the native protocol of Python clients: see `client/packets.py`. The calls are those of gRPC.

A connection costs nothing but memory until it is greeted, and has `ConnectionTimes.handshake_s` seconds for TLS and its
greeting. A client that breaks the protocol is disconnected, and a warning is logged, at most once in `WARN_S` seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc

from ..client.packets import (
    ANNOUNCED,
    MAGIC,
    OPENING,
    BrokenProtocol,
    PacketConnection,
    PacketHead,
    PacketKind,
    PacketStream,
    StreamEnd,
    in_order,
    wake,
)
from ..streams.background import end
from ..streams.errors import Busy, HeadraceError, LimitExceeded, PayloadTooLarge, Unavailable
from .config import NO_ADDRESS, GrpcConfig
from .connection_times import FLUSH_S, ConnectionTimes
from .guard import CODE, CallFailure, CallGuard, GuardedCall, failure_of
from .limits import ClientLimits, address_of
from .methods import MethodKind, ServiceMethod

log = logging.getLogger("headrace.silo")

UNSENT_BYTES = 1 << 20
"""If a client leaves more bytes unread, the silo reads nothing more from it: each packet may cause another one."""
BACKLOG = 1024
"""Connections that wait to be accepted."""
WARN_S = 10.0
"""Shortest time between two warnings about broken connections, in seconds."""
MAX_AUTHORIZATION = 8192
"""Most bytes of the client's greeting."""

_BEGINNING = OPENING.size + 255
"""Most bytes before the request in the body of BEGIN."""


class NativeCall(GuardedCall):
    """A call over the native protocol, which runs in a task of its own."""

    def __init__(
        self,
        connection: NativeServerConnection,
        number: int,
        method: ServiceMethod,
        request: bytes,
        deadline: float | None,
    ) -> None:
        """`deadline` is in seconds of the loop's clock."""
        super().__init__(connection.peer, connection.authorization)
        self.messages = PacketStream(connection, number)
        self.number = number
        self.size = len(request)
        self._deadline = deadline
        self._connection = connection
        self._method = method
        self._stopped = False
        requests = (request,) if method.kind is not MethodKind.STREAM else ()
        if requests:
            self.messages.end_reading(in_order)
        self.task = connection.loop.create_task(self._run(requests), name=f"headrace {method.name}")
        self.task.add_done_callback(self._on_end)

    @property
    def common_name(self) -> str:
        return self._connection.common_name

    async def read(self) -> bytes | None:
        message = await self.messages.read()
        if message is not None:
            self.check_message(message)
        return message

    async def write(self, message: bytes) -> None:
        await self.messages.write(message)

    def remaining_s(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._connection.loop.time()

    def stop(self) -> None:
        """Cancel the call, because the caller has cancelled it or is gone."""
        self._stopped = True
        self.messages.end_writing(_gone)
        self.task.cancel()

    async def _run(self, requests: Sequence[bytes]) -> None:
        connection = self._connection
        try:
            answer = await connection.server.guard.run(self._method, self, *requests)
        except Exception as error:  # noqa: BLE001 (the caller gets a status, and the log the bugs)
            connection.refuse(self.number, connection.server.guard.note_failure(self._method, error))
            return
        if self._method.kind is MethodKind.UNARY:
            connection.put(PacketKind.ANSWER, self.number, answer)
        else:
            connection.put(PacketKind.END, self.number)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self._stopped:
            cancelled = CallFailure(grpc.StatusCode.CANCELLED, "the silo has cancelled the call", ())
            self._connection.refuse(self.number, cancelled)
        self._connection.forget(self)


def _gone() -> None:
    raise Unavailable("the caller is gone")


class NativeServerConnection(PacketConnection):
    """The silo's side of a connection."""

    def __init__(self, server: NativeServer) -> None:
        super().__init__(MAX_AUTHORIZATION, unsent_limit=UNSENT_BYTES)
        self.server = server
        self.peer = ""
        self.common_name = ""
        self.authorization: str | None = None
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self._calls: dict[int, NativeCall] = {}
        self._last = 0
        self._greeted = False
        self._greeting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = _peer(transport.get_extra_info("peername"))
        self.common_name = _common_name(transport.get_extra_info("peercert"))
        self._greeting = self.loop.call_later(
            self.server.times.handshake_s, self.abort, TimeoutError("no greeting arrived")
        )
        if self.server.enter(self):
            self.put(PacketKind.HELLO, 0, MAGIC + self.server.process)

    def on_lost(self, reason: Exception | None) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        for call in self._calls.values():
            call.stop()
        if isinstance(reason, BrokenProtocol | TimeoutError):
            self.server.warn(f"a connection of {self.peer} was closed: {reason}")
        self.server.leave(self)
        wake(self.lost)

    def on_packet(self, kind: int, call: int, body: bytes) -> None:
        if not self._greeted:
            self._greet(kind, body)
        elif kind == PacketKind.BEGIN:
            self._begin(call, body)
        elif call > self._last or kind not in _ABOUT_CALLS:
            raise BrokenProtocol(f"a packet of kind {kind} about call {call:,}, which has not begun")
        elif (known := self._calls.get(call)) is not None:  # else it is over, and the packet was on its way
            self._deliver(known, kind, body)

    def _greet(self, kind: int, body: bytes) -> None:
        if kind != PacketKind.HELLO:
            raise BrokenProtocol("the first packet is no greeting")
        assert self._greeting is not None
        self._greeting.cancel()
        self._greeted = True
        self.authorization = body.decode("utf-8", "replace") or None
        self.max_body = self.server.limits.message_bytes + _BEGINNING
        self.ping_every(self.server.times.native_keepalive_s)

    def _begin(self, number: int, body: bytes) -> None:
        self._note_number(number)
        if len(body) < OPENING.size or len(body) < (at := OPENING.size + body[OPENING.size - 1]):
            raise BrokenProtocol("a call without the name of its method")
        deadline_ms, _ = OPENING.unpack_from(body)
        name = body[OPENING.size : at].decode("utf-8", "replace")
        method = self.server.methods.get(name)
        if method is None:
            unknown = f"the silo has no method {name!r} in the native protocol"
            self.refuse(number, CallFailure(grpc.StatusCode.UNIMPLEMENTED, unknown, ()))
        elif len(self._calls) >= self.server.limits.calls:
            self.refuse(number, failure_of(LimitExceeded(f"{len(self._calls):,} calls are open: end some first")))
        elif self._is_full(len(body)):
            self.refuse(number, failure_of(self._unread_error()))
        else:
            deadline = self.loop.time() + deadline_ms / 1000 if deadline_ms else None
            call = self._calls[number] = NativeCall(self, number, method, body[at:], deadline)
            self.unread += call.size

    def _note_number(self, number: int) -> None:
        """Note the number of a new call."""
        if number <= self._last:
            raise BrokenProtocol(f"call {number:,} begins after call {self._last:,}")
        self._last = number

    def _deliver(self, call: NativeCall, kind: int, body: bytes) -> None:
        if kind == PacketKind.MESSAGE:
            if self._is_full(len(body)):
                call.messages.end_reading(_raising(self._unread_error()))
            call.messages.arrive(body)
        elif kind == PacketKind.END:
            call.messages.end_reading(in_order)
        elif kind == PacketKind.GRANT:
            call.messages.grant(body)
        else:
            call.stop()

    def _is_full(self, nbytes: int) -> bool:
        return self.unread + nbytes > self.server.limits.publish_bytes

    def _unread_error(self) -> LimitExceeded:
        return LimitExceeded(f"{self.unread:,} bytes of the connection wait to be read: wait for answers")

    def on_oversize(self, head: PacketHead) -> None:
        if not self._greeted or head.kind not in (PacketKind.BEGIN, PacketKind.MESSAGE):
            super().on_oversize(head)
        error = PayloadTooLarge("the message", head.size, self.server.limits.message_bytes)
        if head.kind == PacketKind.BEGIN:
            self._note_number(head.call)
            self.refuse(head.call, failure_of(error))
        elif (known := self._calls.get(head.call)) is not None:
            known.messages.end_reading(_raising(error))

    def refuse(self, number: int, failure: CallFailure) -> None:
        """Tell the client that a call has failed."""
        code = dict(failure.trailers).get(CODE, "").encode()
        status = cast("tuple[int, str]", failure.status.value)[0]
        self.put(PacketKind.ERROR, number, bytes((status, len(code))) + code + failure.details.encode())

    def forget(self, call: NativeCall) -> None:
        """Forget a call that is over."""
        self.unread -= call.size
        call.messages.discard()
        del self._calls[call.number]

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """The tasks of the open calls."""
        return [call.task for call in self._calls.values()]


_ABOUT_CALLS = frozenset((PacketKind.MESSAGE, PacketKind.END, PacketKind.CANCEL, PacketKind.GRANT))


def _raising(error: HeadraceError) -> StreamEnd:
    def end() -> None:
        raise error

    return end


class NativeServer:
    """The connections of a silo's native port."""

    def __init__(
        self, guard: CallGuard, methods: Sequence[ServiceMethod], limits: ClientLimits, times: ConnectionTimes
    ) -> None:
        self.guard = guard
        self.methods: Mapping[str, ServiceMethod] = {method.name: method for method in methods}
        self.limits = limits
        self.times = times
        self.process = secrets.token_bytes(16)
        """Names this process: clients that were told of another one disconnect."""
        self._connections: set[NativeServerConnection] = set()
        self._by_address: Counter[str] = Counter()
        self._warn_at = 0.0
        self._not_logged = 0

    def enter(self, connection: NativeServerConnection) -> bool:
        """Count a new connection. Abort it, and return False, if its address has too many."""
        address = address_of(connection.peer)
        self._connections.add(connection)
        self._by_address[address] += 1
        if self._by_address[address] <= self.limits.connections:
            return True
        connection.abort(BrokenProtocol(f"{address} has more than {self.limits.connections:,} connections"))
        return False

    def leave(self, connection: NativeServerConnection) -> None:
        """Forget a connection that has ended."""
        address = address_of(connection.peer)
        self._connections.discard(connection)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def warn(self, message: str) -> None:
        """Log a warning, unless one was logged a short time ago."""
        now = asyncio.get_running_loop().time()
        if now < self._warn_at:
            self._not_logged += 1
            return
        log.warning("%s%s", message, f" ({self._not_logged:,} more before it)" if self._not_logged else "")
        self._warn_at, self._not_logged = now + WARN_S, 0

    async def aclose(self) -> None:
        """Close all connections when their answers are sent, and wait until their calls have ended."""
        connections = [*self._connections]
        tasks = [task for connection in connections for task in connection.tasks]
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.wait([connection.lost for connection in connections], timeout=0 if tasks else FLUSH_S)
        for connection in connections:
            connection.abort()
        await end(*tasks)


@asynccontextmanager
async def native_serving(
    config: GrpcConfig, guard: CallGuard, methods: Sequence[ServiceMethod], times: ConnectionTimes
) -> AsyncGenerator[None]:
    """Serve the native protocol for the length of an `async with`, and let gRPC's health check announce its port.

    Raises Busy if the port is taken, and OSError if it cannot be served for another reason.
    """
    if not config.native:
        yield
        return
    loop = asyncio.get_running_loop()
    native = NativeServer(guard, methods, config.limits, times)
    tls = await asyncio.to_thread(_tls, config)
    sockets = await _bound(config.host, config.native_port)
    handshake_s = None if tls is None else times.handshake_s
    listening = [
        await loop.create_server(
            lambda: NativeServerConnection(native),
            sock=each,
            ssl=tls,
            ssl_handshake_timeout=handshake_s,
            backlog=BACKLOG,
        )
        for each in sockets
    ]
    log.info("Python clients use port %d of %s (grpc.native_port)", sockets[0].getsockname()[1], config.host)
    guard.announce(ANNOUNCED, f"{sockets[0].getsockname()[1]} {native.process.hex()}")
    try:
        yield
    finally:
        for server in listening:
            server.close()
        await native.aclose()


def _tls(config: GrpcConfig) -> ssl.SSLContext | None:
    if config.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.client_ca)
    context.load_cert_chain(config.certificate, config.key, password="")
    if config.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def _bound(host: str, port: int) -> Sequence[socket.socket]:
    """Bind the same port of all addresses of the host. Raise Busy, OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in dict.fromkeys((each[0], each[4][0]) for each in found):
        try:
            bound = socket.create_server((str(address), port), family=family, dualstack_ipv6=address == "::")
        except OSError as error:
            missing = error
            if sockets or error.errno in NO_ADDRESS:  # clients that use this address call over gRPC
                continue
            if error.errno == errno.EADDRINUSE:
                raise Busy(
                    f"{host}:{port} is in use by another process, perhaps a silo: stop it, or change grpc.native_port"
                ) from None
            raise
        bound.setblocking(False)
        sockets.append(bound)
        port = bound.getsockname()[1]
    if not sockets and missing is not None:
        raise missing
    return sockets


def _peer(name: Any) -> str:
    """Return the address of the other side, in gRPC's form."""
    if not isinstance(name, tuple):
        return "unknown"
    host, port = cast("tuple[str, int]", name[:2])
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _common_name(certificate: Any) -> str:
    """Return the name in a certificate, as `ssl` gives it; "" without a certificate."""
    subject = cast("dict[str, Any]", certificate or {}).get("subject", ())
    return next((value for part in subject for name, value in part if name == "commonName"), "")
