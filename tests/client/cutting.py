"""A TCP proxy that cuts connections when the test says so, or lets them fall silent.

It forwards a silo's ports, gRPC and native, at the same numbers of another loopback address. So a client that learns
the native port through the proxy also connects to that port through the proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial

from headrace.client.connection import GrpcTransport
from headrace.client.packets import ANNOUNCED

CHUNK = 1 << 16
HOST = "127.0.0.2"


class CuttingProxy:
    """Forwards to the silo at `target`, HOST:PORT."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.address = f"{HOST}:{port}"
        self.connections = 0
        """Number of connections so far."""
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    @classmethod
    @asynccontextmanager
    async def opened(cls, target: str) -> AsyncGenerator[CuttingProxy]:
        proxy = cls(target)
        ports = [int(target.rpartition(":")[2]), *await _native_ports(target)]
        servers = [await asyncio.start_server(partial(proxy._accept, port), HOST, port) for port in ports]
        try:
            yield proxy
        finally:
            for server in servers:
                server.close()
            proxy.cut()
            await asyncio.gather(*proxy._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break all connections, and lose the bytes on their way."""
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()

    def hush(self) -> None:
        """Drop all bytes of the open connections silently from now on. New connections work."""
        self._flows.clear()
        self._flows = asyncio.Event()
        self._flows.set()

    async def _accept(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._forward(port, reader, writer)
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _forward(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flows = self._flows
        there, back = await asyncio.open_connection(self._host, port)
        self._writers |= {writer, back}
        directions = [asyncio.create_task(_copy(reader, back, flows)), asyncio.create_task(_copy(there, writer, flows))]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            back.transport.abort()
            self._writers.discard(back)
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)


async def _native_ports(target: str) -> list[int]:
    """The silo's native port; nothing if it has none."""
    transport = GrpcTransport(target)
    transport.begin(None)
    try:
        announced = (await transport.health_metadata(0, 10)).get(ANNOUNCED)
        return [] if announced is None else [int(str(announced).split()[0])]
    finally:
        await transport.aclose()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
    while data := await reader.read(CHUNK):
        if not flows.is_set():
            await asyncio.Event().wait()
        writer.write(data)
        await writer.drain()
