"""A wire between processes of this machine that can be cut: silently, as a network does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress


class Wire:
    """Made by `wired`. What comes to `address` goes to where `target` says, and back."""

    def __init__(self, target: Callable[[], str]) -> None:
        self.address = ""
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Drop everything from now on, without closing the connection."""
        self._whole.clear()

    def mend(self) -> None:
        """New connections come through. Those that were cut are told so."""
        for task in self._tasks:
            task.cancel()
        self._whole.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._pass_on(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # asyncio's server would log it
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        host, _, port = self._target().rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, back))
                both.create_task(self._pump(there, writer))
        except* OSError:
            pass
        finally:
            back.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._whole.wait()
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError  # one direction has ended, so the other one does

    async def aclose(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def wired(target: Callable[[], str]) -> AsyncGenerator[Wire]:
    wire = Wire(target)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    wire.address = f"{host}:{port}"
    try:
        yield wire
    finally:
        server.close()
        await wire.aclose()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await server.wait_closed()
