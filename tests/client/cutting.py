"""A TCP proxy that cuts connections when the test says so, or lets them fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

CHUNK = 1 << 16


class CuttingProxy:
    """Forwards to `target`, HOST:PORT, which may come and go."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.connections = 0
        """Number of connections so far."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    @classmethod
    @asynccontextmanager
    async def opened(cls, target: str) -> AsyncGenerator[CuttingProxy]:
        proxy = cls(target)
        server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        proxy.address = f"{host}:{port}"
        try:
            yield proxy
        finally:
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

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._forward(reader, writer, self._flows)
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
        host, _, port = self.target.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
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


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
    while data := await reader.read(CHUNK):
        if not flows.is_set():
            await asyncio.Event().wait()
        writer.write(data)
        await writer.drain()
