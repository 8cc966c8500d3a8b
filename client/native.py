"""Calls over the native protocol: see `client/packets.py`. The client learns the silo's port over gRPC.

The user names only the address of gRPC. The silo's health check announces the port of the native protocol, which is
served on the same host. If a connection to that port fails, for example because of a firewall or a proxy, the calls go
over gRPC, as they do to a silo that announces no port. The silo names its process in both places, so the client notices
if another process answers at that port, and sends it no token.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..streams.background import BackgroundTasks
from ..streams.errors import Unavailable
from .connection import KEEPALIVE_MS, SERVICE, SETTLE_S, THIS_SILO_ONLY, GrpcTransport
from .packets import (
    ANNOUNCED,
    MAGIC,
    OPENING,
    BrokenProtocol,
    PacketConnection,
    PacketKind,
    PacketStream,
    in_order,
    wake,
)
from .transport import StreamCall, Transport

log = logging.getLogger("headrace.client")

ASK_S = 5.0
"""Longest time to ask a silo for its port, in seconds."""
CONNECT_S = 1.0
"""Longest time to connect to the port, in seconds. Then calls go over gRPC."""
AGAIN_S = 60.0
"""Time after which a client whose calls go over gRPC looks for the port again, in seconds."""
MAX_BODY = 64 << 20
"""Largest body of a packet. Messages from a silo stay below 4 MiB."""

_CANCELLED, _DEADLINE_EXCEEDED, _INTERNAL = 1, 4, 13


class CallStatus(NamedTuple):
    """How a call failed: gRPC status, code of the error if there is one, and text."""

    status: int
    code: str | None
    text: str


class CallStart(NamedTuple):
    """The beginning of a call."""

    method: str
    """As in "PublisherService/Publish"."""
    request: bytes = b""
    """The request of a unary call."""
    timeout_s: float | None = None


class NativeConnection(PacketConnection):
    """The client's side of a connection. `on_end` is called when a connection that was greeted ends."""

    def __init__(
        self,
        process: bytes,
        authorization: str,
        on_end: Callable[[NativeConnection], None],
        *,
        keepalive_s: float,
    ) -> None:
        super().__init__(MAX_BODY)
        self._keepalive_s = keepalive_s
        self.greeted: asyncio.Future[None] = self.loop.create_future()
        """Done when the silo has answered as the process that was announced."""
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self._process = process
        self._authorization = authorization
        self._on_end = on_end
        self._calls: dict[int, NativeStreamCall] = {}
        self._last = 0

    def begin(self, call: NativeStreamCall, opening: CallStart) -> int:
        """Begin a call and return its number."""
        method, request, timeout_s = opening
        self._last += 1
        name = (SERVICE + method).encode()[1:]
        deadline_ms = 0 if timeout_s is None else min(max(round(timeout_s * 1000), 1), (1 << 32) - 1)
        self._calls[self._last] = call
        self.put(PacketKind.BEGIN, self._last, OPENING.pack(deadline_ms, len(name)) + name + request)
        return self._last

    def forget(self, number: int) -> bool:
        """Forget a call. Return whether it was open."""
        return self._calls.pop(number, None) is not None

    def give_up(self) -> None:
        """End a connection on which the silo is silent. No more calls begin on it."""
        self._on_end(self)
        self.abort(TimeoutError("the silo was silent"))

    def on_packet(self, kind: int, call: int, body: bytes) -> None:
        if not self.greeted.done():
            self._greet(kind, body)
            return
        known = self._calls.get(call)
        if known is not None:  # else it is over, and its last packets were on their way
            self._deliver(known, kind, body)

    def _greet(self, kind: int, body: bytes) -> None:
        if kind != PacketKind.HELLO or body != MAGIC + self._process:
            raise BrokenProtocol("another process answers at the port")
        self.put(PacketKind.HELLO, 0, self._authorization.encode())
        self.greeted.set_result(None)
        self.ping_every(self._keepalive_s)

    def _deliver(self, call: NativeStreamCall, kind: int, body: bytes) -> None:
        if kind == PacketKind.MESSAGE:
            call.messages.arrive(body)
        elif kind == PacketKind.GRANT:
            call.messages.grant(body)
        elif kind == PacketKind.ANSWER:
            call.messages.arrive(body)
            call.end(None)
        elif kind == PacketKind.END:
            call.end(None)
        elif kind == PacketKind.ERROR:
            at = 2 + body[1] if len(body) > 1 else 0
            if not at or len(body) < at:
                raise BrokenProtocol("an error without its status and code")
            call.end(
                CallStatus(body[0], body[2:at].decode(errors="replace") or None, body[at:].decode("utf-8", "replace"))
            )

    def on_lost(self, reason: Exception | None) -> None:
        wake(self.ended)
        if not self.greeted.done():
            self.greeted.set_exception(reason or ConnectionError("the connection was closed"))
            self.greeted.exception()  # mark it as seen: the caller may have given up
            return
        self._on_end(self)
        for call in [*self._calls.values()]:
            call.end(CallStatus(_INTERNAL, None, str(reason or "the silo closed it")))


class NativeStreamCall(StreamCall):
    """A call over the native protocol, from the caller's side. `NativeTransport` also makes unary calls with it."""

    def __init__(self, transport: GrpcTransport, index: int, connection: NativeConnection, opening: CallStart) -> None:
        self._transport = transport
        self._index = index
        self._connection = connection
        self._over: asyncio.Future[None] | None = None
        self._open = True
        self._number = connection.begin(self, opening)
        self.messages = PacketStream(connection, self._number)

    @property
    def address(self) -> str:
        return str(self._transport.addresses[self._index])

    async def send(self, message: bytes) -> None:
        try:
            await self.messages.write(message)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def receive(self) -> bytes | None:
        try:
            return await self.messages.read()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_sending(self) -> None:
        if self._open:
            self._connection.put(PacketKind.END, self._number)

    def cancel(self) -> None:
        self.stop(_CANCELLED)

    def stop(self, status: int) -> None:
        """End the call on this side, with a gRPC status."""
        if self._open:
            self._connection.put(PacketKind.CANCEL, self._number)
            self.end(CallStatus(status, None, ""))

    def leave(self) -> None:
        self._transport.leave(self._index)

    async def abandon(self) -> None:
        self.cancel()
        self._transport.leave(self._index)
        self._connection.give_up()

    async def ended(self) -> None:
        if self._open:
            self._over = self._over or self._connection.loop.create_future()
            await asyncio.shield(self._over)

    def end(self, failure: CallStatus | None) -> None:
        """The call is over. `failure` is None if the silo has ended it in order."""
        if not self._connection.forget(self._number):
            return
        self._open = False

        def raise_failure() -> None:
            status = failure or CallStatus(_INTERNAL, None, "the silo has ended the call")
            raise self._transport.failure(self._index, *status)

        self.messages.end_reading(in_order if failure is None else raise_failure)
        self.messages.end_writing(raise_failure)
        wake(self._over)


class LateStreamCall(StreamCall):
    """A call that begins when it is known how the silo can be reached."""

    def __init__(self, address: str, found: asyncio.Task[StreamCall]) -> None:
        self._address = address
        self._found = found

    @property
    def address(self) -> str:
        return self._address

    async def send(self, message: bytes) -> None:
        await (await self._call()).send(message)

    async def done_sending(self) -> None:
        await (await self._call()).done_sending()

    async def receive(self) -> bytes | None:
        return await (await self._call()).receive()

    async def _call(self) -> StreamCall:
        try:
            return await asyncio.shield(self._found)
        except asyncio.CancelledError:
            if self._found.cancelled() and not _is_cancelling():
                raise Unavailable(f"the call to {self._address} was cancelled") from None
            self.cancel()
            raise

    def cancel(self) -> None:
        if (call := self._present()) is not None:
            call.cancel()
        else:
            self._found.cancel()

    def leave(self) -> None:
        if (call := self._present()) is not None:
            call.leave()

    async def abandon(self) -> None:
        self._found.cancel()
        if (call := self._present()) is not None:
            await call.abandon()

    async def ended(self) -> None:
        await asyncio.wait([self._found])
        if (call := self._present()) is not None:
            await call.ended()

    def _present(self) -> StreamCall | None:
        found = self._found
        return found.result() if found.done() and not found.cancelled() and not found.exception() else None


class NativeTransport(Transport):
    """Calls to silos over the native protocol, or over gRPC if a silo cannot be reached by it."""

    is_remote = True

    def __init__(
        self,
        grpc: GrpcTransport,
        *,
        direct: bool = True,
        connect_s: float = CONNECT_S,
        keepalive_s: float = KEEPALIVE_MS / 1000,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Without `direct`, only the addresses of `grpc` are called. `keepalive_s` is the silence of a silo before it
        is pinged, and the time for its answer. `clock` returns seconds; the default is the loop's time."""
        if not direct:
            self.is_remote = False
        self._grpc = grpc
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._clock = clock
        self._tls: ssl.SSLContext | None = None
        self._connections: dict[int, NativeConnection] = {}
        """By index of the address."""
        self._again_at: dict[int, float] = {}
        """Time to look for the port again, by index of the address. Without one, it is not known how the silo can be
        reached."""
        self._decisions: dict[int, asyncio.Task[None]] = {}
        self._others: dict[str, NativeTransport] = {}
        """Transports to other addresses, by `at`."""
        self._tasks = BackgroundTasks()

    @property
    def address(self) -> str:
        return self._grpc.address

    def at(self, address: str) -> NativeTransport:
        grpc = self._grpc.at(address)
        if grpc is self._grpc:
            return self
        known = self._others.get(address)
        if known is None:
            known = self._others[address] = NativeTransport(
                grpc, connect_s=self._connect_s, keepalive_s=self._keepalive_s, clock=self._clock
            )
            known._tls = self._tls
        return known

    def _now(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()

    @property
    def is_native(self) -> bool:
        """Whether the next call goes over the native protocol."""
        return self._grpc.index in self._connections

    async def open(self, timeout_s: float) -> None:
        """As `GrpcTransport.open`."""
        await self.prepare()
        await self.ready(timeout_s)

    async def prepare(self) -> None:
        """As `GrpcTransport.prepare`."""
        self._tls = await self._grpc.prepare()

    def check_loop(self) -> None:
        self._grpc.check_loop()

    def check_open(self) -> None:
        self._grpc.check_open()

    async def ready(self, timeout_s: float) -> None:
        await self.call("ClusterService/DescribeCluster", THIS_SILO_ONLY, timeout_s=timeout_s)

    async def aclose(self) -> None:
        for other in self._others.values():
            await other.aclose()
        await self._tasks.aclose()
        closing = [*self._connections.values()]
        for connection in closing:
            connection.close()
        await self._grpc.aclose()
        if closing:
            await asyncio.wait([connection.ended for connection in closing], timeout=SETTLE_S)
        for connection in closing:
            connection.abort()

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        self.check_open()
        index = self._grpc.index
        if (decision := self._decision(index)) is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(decision)
            except TimeoutError:
                raise self._grpc.failure(index, _DEADLINE_EXCEEDED, None, "") from None
        connection = self._connections.get(index)
        if connection is None:
            return await self._grpc.unary(method, request, timeout_s=timeout_s)
        call = NativeStreamCall(self._grpc, index, connection, CallStart(method, request, timeout_s))
        timer = None if timeout_s is None else connection.loop.call_later(timeout_s, call.stop, _DEADLINE_EXCEEDED)
        try:
            return await call.receive() or b""
        finally:
            if timer is not None:
                timer.cancel()

    def stream(self, method: str) -> StreamCall:
        self.check_open()
        index = self._grpc.index
        if (decision := self._decision(index)) is None:
            return self._begin(index, method)
        late = self._tasks.hold(self._begin_after(decision, index, method), "headrace late call")
        return LateStreamCall(self.address, late)

    async def _begin_after(self, decision: asyncio.Task[None], index: int, method: str) -> StreamCall:
        await asyncio.shield(decision)
        return self._begin(index, method)

    def _begin(self, index: int, method: str) -> StreamCall:
        if (connection := self._connections.get(index)) is None:
            return self._grpc.stream(method)
        return NativeStreamCall(self._grpc, index, connection, CallStart(method))

    # ---- finding the port ------------------------------------------------------------------------------------------

    def _decision(self, index: int) -> asyncio.Task[None] | None:
        """The task that finds out how the silo can be reached; None if that is known. Calls that go over gRPC do not
        wait while the port is looked for again."""
        if index in self._connections:
            return None
        again_at, now = self._again_at.get(index), self._now()
        running = self._decisions.get(index)
        if (running is None or running.done()) and (again_at is None or now >= again_at):
            running = self._decisions[index] = self._tasks.hold(self._decide(index), "headrace native port")
        return running if again_at is None else None

    async def _decide(self, index: int) -> None:
        """Ask the silo for its port, and connect. Raise Unavailable if the silo does not answer over gRPC."""
        announced = (await self._grpc.health_metadata(index, ASK_S)).get(ANNOUNCED)
        connection = None if announced is None else await self._connect(index, announced)
        is_first = index not in self._again_at
        self._again_at[index] = self._now() + AGAIN_S
        if connection is not None and not connection.ended.done():
            self._connections[index] = connection
            if is_first:  # else calls may be open over gRPC
                await self._grpc.disconnect(index)

    async def _connect(self, index: int, announced: str | bytes) -> NativeConnection | None:
        """Connect to the announced port and process. Return None if that fails."""
        port, _, process = str(announced).partition(" ")
        host = self._grpc.addresses[index].host
        connection: NativeConnection | None = None
        try:
            number, name = int(port), None if self._tls is None else host
            made = connection = NativeConnection(
                bytes.fromhex(process),
                self._grpc.authorization,
                partial(self._lose, index),
                keepalive_s=self._keepalive_s,
            )
            async with asyncio.timeout(self._connect_s):
                await connection.loop.create_connection(lambda: made, host, number, ssl=self._tls, server_hostname=name)
                await asyncio.shield(connection.greeted)
        except (OSError, ValueError, OverflowError, BrokenProtocol) as error:  # OSError includes TLS and TimeoutError
            log.debug("calls to %s go over gRPC: port %s cannot be used: %r", self._grpc.addresses[index], port, error)
            connection = None if connection is None else connection.abort()
        except asyncio.CancelledError:
            if connection is not None:
                connection.abort()
            raise
        return connection

    def _lose(self, index: int, connection: NativeConnection) -> None:
        if self._connections.get(index) is connection:
            del self._connections[index]
            self._again_at.pop(index, None)


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
