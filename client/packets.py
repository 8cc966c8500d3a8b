"""The packets of the native protocol, with which Python clients call a silo, and the flow control of its calls.

The native protocol carries the same calls as gRPC over one TCP or TLS connection. Everything happens in callbacks of
the event loop: a message costs no thread, no task and no timer. `client/native.py` and `server/native_server.py` are
the two sides.

A packet is a head of 9 bytes, numbers in network order, and a body:

    size of the body u32 | number of the call u32 | kind u8 | body

| kind     | sent by | body                                                                                        |
|----------|---------|---------------------------------------------------------------------------------------------|
| HELLO    | silo    | first packet: "headrace", version u8, 16 bytes that name the silo's process                  |
| HELLO    | client  | second packet: the value of the metadata `authorization`; empty without a token              |
| BEGIN    | client  | deadline in ms u32 (0: none), length of the name u8, `package.Service/Method`, the request   |
| MESSAGE  | both    | one message of a stream                                                                     |
| END      | both    | client: no more messages follow; silo: the call has ended in order                          |
| ANSWER   | silo    | the response of a unary call, which ends it                                                 |
| ERROR    | silo    | gRPC status u8, length of the code u8, the code, the text: the call has failed              |
| CANCEL   | client  | the call ends, and nothing more is sent for it                                              |
| GRANT    | both    | u32: this many more bytes of messages may be sent for the call                              |
| PING     | both    | the other side answers with PONG                                                            |

The client numbers its calls upwards from 1; packets about a connection have the number 0. Each side of a call may send
messages as long as the bytes sent are below `WINDOW` plus all grants. The last message may go above this limit, so any
message can be sent. The receiver grants as many bytes as its reader has taken. So a reader that is slow holds up only
its own call, and the receiver holds at most `WINDOW` and one message for it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, cast

MAGIC = b"headrace\x01"
"""Beginning of a silo's HELLO: name and version of the protocol."""
ANNOUNCED = "headrace-native"
"""Trailing metadata of gRPC's health check: the port of the native protocol and the name of the silo's process."""
HEAD = struct.Struct("!IIB")
OPENING = struct.Struct("!IB")
"""Beginning of the body of BEGIN."""
U32 = struct.Struct("!I")
WINDOW = 4 << 20
"""Bytes of messages that may be sent for a call before its reader has taken any."""
TURN_PACKETS = 500
"""Most packets of one connection that are handled before others have their turn."""
WRITE_BUFFER_BYTES = 256 << 10
"""Bytes that wait to be sent. With more of them, calls wait."""
FLUSH_BYTES = 1 << 16
"""Packets of one turn of the loop are sent together. More bytes than these are sent at once."""


class PacketKind(IntEnum):
    HELLO, BEGIN, MESSAGE, END, ANSWER, ERROR, CANCEL, GRANT, PING, PONG = range(10)


class PacketHead(NamedTuple):
    """The head of a packet."""

    size: int
    call: int
    kind: int


class BrokenProtocol(Exception):
    """The other side has sent a packet that the protocol does not allow. It ends the connection."""


class PacketConnection(asyncio.Protocol):
    """One side of a connection: it splits the received bytes into packets, and joins packets before they are sent.

    A subclass implements `on_packet` and `on_lost`. `max_body` limits the body of a packet: the body of a larger one is
    dropped while it arrives, and `on_oversize` is called.
    """

    def __init__(self, max_body: int, unsent_limit: int | None = None) -> None:
        """With `unsent_limit`, nothing is read while more bytes than these wait to be sent."""
        self.unread: int = 0
        """Bytes of messages that wait for their readers, over all calls."""
        self.writable = True
        """Whether the socket takes more bytes now."""
        self.waiting: dict[asyncio.Future[None], None] = {}
        """Writers that wait until it is writable."""
        self.loop = asyncio.get_running_loop()
        self.max_body = max_body
        self._unsent_limit = unsent_limit
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        """The beginning of a packet, in pieces."""
        self._size = 0
        """Bytes in `_received`."""
        self._needed = HEAD.size
        """Bytes of the packet in `_received`, as far as they are known."""
        self._dropping = 0
        """Bytes of an oversized body that are still to arrive."""
        self._busy = False
        """Whether received packets wait for the next turn."""
        self._choked = False
        """Whether the other side leaves too many bytes unread."""
        self._out: list[bytes] = []
        self._out_size = 0
        self._heard = self._pinged = False
        self._timer: asyncio.TimerHandle | None = None
        self._end: Exception | None = None

    def count_unread(self, nbytes: int) -> None:
        """Count bytes of messages that wait for their readers; negative when they are read."""
        self.unread += nbytes

    # ---- for the subclass ------------------------------------------------------------------------------------------

    def on_packet(self, kind: int, call: int, body: bytes) -> None:
        """Handle a packet. BrokenProtocol ends the connection."""
        raise NotImplementedError

    def on_oversize(self, head: PacketHead) -> None:
        """Handle a packet whose body is above the limit, and dropped."""
        raise BrokenProtocol(f"a packet of {head.size:,} bytes: the limit is {self.max_body:,}")

    def on_lost(self, reason: Exception | None) -> None:
        """The connection has ended. Called once."""
        raise NotImplementedError

    # ---- sending ---------------------------------------------------------------------------------------------------

    def put(self, kind: PacketKind, call: int, body: bytes = b"") -> None:
        """Send a packet at the end of this turn of the loop."""
        if not self._out:
            self.loop.call_soon(self.flush)
        self._out += (HEAD.pack(len(body), call, kind), body)
        self._out_size += len(body) + HEAD.size
        if self._out_size >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the packets of this turn now."""
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(self._out)
        self._out.clear()
        self._out_size = 0

    def close(self) -> None:
        """Close the connection when everything is sent."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: Exception | None = None) -> None:
        """Close the connection at once. What was not sent is lost."""
        self._end = self._end or reason
        if self._transport is not None:
            self._transport.abort()

    def ping_every(self, seconds: float) -> None:
        """Ping if nothing arrives for a time, and abort the connection if no answer arrives for as long again."""
        self._timer = self.loop.call_later(seconds, self.ping_every, seconds)
        if not self._heard and self._pinged:
            self.abort(TimeoutError(f"the other side was silent for {2 * seconds:g} s"))
        elif not self._heard:
            self._pinged = True
            self.put(PacketKind.PING, 0)
        self._heard = False

    # ---- callbacks of asyncio --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        # asyncio sets it only on sockets that were made with the number of TCP, which accepted ones may not have.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.on_lost(self._end or exc)
        self._wake_writers()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._choked = False
        self._read_on()
        self._wake_writers()

    def _wake_writers(self) -> None:
        for waiter in self.waiting:
            wake(waiter)

    def data_received(self, data: bytes) -> None:
        self._heard, self._pinged = True, False
        if self._dropping:
            dropped = min(self._dropping, len(data))
            self._dropping -= dropped
            data = data[dropped:]
        if self._received:
            self._received.append(data)
            self._size += len(data)
            if self._busy or self._size < self._needed:
                return
            data = self._joined()
        self._parse(data)

    def _joined(self) -> bytes:
        data = b"".join(self._received)
        self._received.clear()
        return data

    def _parse(self, data: bytes) -> None:
        """Handle the packets in `data`, and keep the beginning of the next one."""
        at, end = 0, len(data)
        self._needed = HEAD.size
        try:
            for _ in range(TURN_PACKETS):
                if end - at < HEAD.size:
                    break
                size, call, kind = HEAD.unpack_from(data, at)
                start = at + HEAD.size
                if size > self.max_body:
                    self.on_oversize(PacketHead(size, call, kind))
                    at = min(start + size, end)
                    self._dropping = start + size - at
                    continue
                if end - start < size:
                    self._needed = HEAD.size + size
                    break
                at = start + size
                self._on_packet(kind, call, data[start:at])
            else:
                self._busy = True
                self._read_on()
                self.loop.call_soon(self._parse_on)
        except BrokenProtocol as broken:
            self.abort(broken)
            return
        if at < end:
            self._received.append(data[at:])
            self._size = end - at
        limit = self._unsent_limit
        if limit is not None and not self.writable and self._unsent() > limit:
            self._choked = True
            self._read_on()

    def _parse_on(self) -> None:
        self._busy = False
        if self._transport is None or not self._transport.is_closing():
            self._parse(self._joined())
            self._read_on()

    def _read_on(self) -> None:
        """Read from the socket, or stop reading."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._busy or self._choked:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _unsent(self) -> int:
        assert self._transport is not None
        return self._transport.get_write_buffer_size() + self._out_size

    def _on_packet(self, kind: int, call: int, body: bytes) -> None:
        if kind == PacketKind.PING:
            self.put(PacketKind.PONG, 0)
        elif kind != PacketKind.PONG:
            self.on_packet(kind, call, body)


class PacketStream:
    """The messages of one call in both directions. Only one `read` and one `write` may run at a time."""

    __slots__ = ("_arrived", "_connection", "_grantable", "_number", "_owed", "_read_end", "_reader", "_window",
                 "_write_end", "_writer")  # fmt: skip

    def __init__(self, connection: PacketConnection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._arrived: deque[bytes] = deque()
        self._read_end: StreamEnd | None = None
        self._write_end: StreamEnd | None = None
        self._window = WINDOW
        """Bytes that may be sent."""
        self._owed = WINDOW
        """Bytes that the other side may send."""
        self._grantable = 0
        """Bytes that the reader has taken, and that are not granted again yet."""
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def read(self) -> bytes | None:
        """Return the next message, None if no more follow. Raise the error that ended the call."""
        while not self._arrived:
            if self._read_end is not None:
                return self._read_end()
            self._reader = self._connection.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._arrived.popleft()
        cost = len(message) + HEAD.size
        self._connection.count_unread(-cost)
        self._grantable += cost
        if self._grantable >= WINDOW // 4 and self._read_end is None:
            self._owed += self._grantable
            self._connection.put(PacketKind.GRANT, self._number, U32.pack(self._grantable))
            self._grantable = 0
        return message

    async def write(self, message: bytes) -> None:
        """Send a message. Wait while the other side does not read. Raise the error that ended the call."""
        connection = self._connection
        while self._write_end is None and (self._window <= 0 or not connection.writable):
            writer = self._writer = connection.loop.create_future()
            if self._window > 0:
                connection.waiting[writer] = None
            try:
                await writer
            finally:
                self._writer = None
                connection.waiting.pop(writer, None)
        if self._write_end is not None:
            self._write_end()
        self._window -= len(message) + HEAD.size
        connection.put(PacketKind.MESSAGE, self._number, message)

    # ---- for the connection ----------------------------------------------------------------------------------------

    def arrive(self, message: bytes) -> None:
        """A message has arrived. Raise BrokenProtocol if it was not granted."""
        if self._read_end is not None:
            return
        if self._owed <= 0:
            raise BrokenProtocol(f"a message of call {self._number} that was not granted")
        cost = len(message) + HEAD.size
        self._owed -= cost
        self._connection.count_unread(cost)
        self._arrived.append(message)
        wake(self._reader)

    def grant(self, body: bytes) -> None:
        """The other side allows more messages."""
        if len(body) != U32.size:
            raise BrokenProtocol(f"a grant of {len(body)} bytes")
        self._window += U32.unpack(body)[0]
        if self._window > 0:
            wake(self._writer)

    def end_reading(self, end: StreamEnd) -> None:
        """No more messages arrive. After those that are here, `read` returns what `end` returns, or raises its
        error."""
        self._read_end = self._read_end or end
        wake(self._reader)

    def end_writing(self, end: StreamEnd) -> None:
        """No more messages can be sent: `write` raises the error of `end`."""
        self._write_end = self._write_end or end
        wake(self._writer)

    def discard(self) -> None:
        """Forget the messages that were not read."""
        self._connection.count_unread(-sum([len(message) + HEAD.size for message in self._arrived]))
        self._arrived.clear()


StreamEnd = Callable[[], None]
"""Called when a call has ended: returns None for an end in order, or raises the HeadraceError that ended the call."""


def in_order() -> None:
    """The StreamEnd of a call, or of its direction, that has ended in order."""


def wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
