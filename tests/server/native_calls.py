"""Clients of a server of the test's own: over gRPC, over the native protocol, and one that sends any bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from headrace.client.connection import GrpcTransport
from headrace.client.native import NativeTransport
from headrace.client.packets import ANNOUNCED, HEAD, OPENING, PacketKind

Transports = NativeTransport | GrpcTransport


class Hearing(GrpcTransport):
    """A client that hears another announcement than the silo's if `announced` is set; "": none."""

    announced: str | None = None

    async def health_metadata(self, index: int, timeout_s: float) -> Mapping[str, str | bytes]:
        if self.announced is None:
            return await super().health_metadata(index, timeout_s)
        return {ANNOUNCED: self.announced} if self.announced else {}


class HearingTransport(NativeTransport):
    """A native client whose announcements a test changes."""

    def __init__(self, hearing: Hearing, **times: Any) -> None:
        super().__init__(hearing, **times)
        self._hearing = hearing

    @contextmanager
    def told(self, announced: str) -> Generator[None]:
        """Hear this port and process instead of the silo's."""
        self._hearing.announced = announced
        try:
            yield
        finally:
            self._hearing.announced = None


@asynccontextmanager
async def calling(
    address: str, *, native: bool = True, times: Mapping[str, Any] | None = None, **options: Any
) -> AsyncGenerator[Transports]:
    """A client of the server, over the native protocol or over gRPC. `times` are those of `NativeTransport`."""
    grpc = Hearing(address, **options)
    transport = HearingTransport(grpc, **(times or {})) if native else grpc
    await transport.prepare()
    try:
        yield transport
    finally:
        await transport.aclose()


async def native_port(address: str, **options: Any) -> int:
    """The port that the server announces."""
    grpc = GrpcTransport(address, **options)
    await grpc.prepare()
    try:
        return int(str((await grpc.health_metadata(0, 10))[ANNOUNCED]).split()[0])
    finally:
        await grpc.aclose()


def packet(kind: int, call: int = 0, body: bytes = b"") -> bytes:
    return HEAD.pack(len(body), call, kind) + body


def beginning(number: int, method: str, request: bytes = b"", deadline_ms: int = 0) -> bytes:
    return packet(PacketKind.BEGIN, number, OPENING.pack(deadline_ms, len(method)) + method.encode() + request)


GREETING = packet(PacketKind.HELLO)


class RawClient:
    """A connection to the native port that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def connected(cls, port: int, *first: bytes) -> AsyncGenerator[RawClient]:
        """Connect, and send these bytes. The silo's greeting is read."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = cls(reader, writer)
        try:
            writer.write(b"".join(first))
            yield client
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def packet(self) -> tuple[int, int, bytes]:
        """The next packet: kind, call and body."""
        size, call, kind = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        return kind, call, await self._reader.readexactly(size)

    async def packet_of(self, wanted: int) -> tuple[int, int, bytes]:
        """The next packet of this kind."""
        while (found := await self.packet())[0] != wanted:
            pass
        return found

    async def ended(self) -> None:
        """Return when the silo has closed the connection."""
        with suppress(ConnectionError):
            while await self._reader.read(65536):
                pass
