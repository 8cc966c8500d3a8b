"""headrace as a peer: a provider with one queue of some adapter. Control data is in the memory of each process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headrace import EventBatch, Provider, Start, StreamId

from .peer import PeerConsumer, Producer

WINDOW = 8
"""Publishes that wait for their answer at a time."""
IDLE_S = 1.0


class ProviderClient:
    """The producing and the consuming side of a provider. `options` returns the adapter's options for an address."""

    def __init__(self, adapter: str, options: Callable[[str], Mapping[str, Any]]) -> None:
        self._adapter = adapter
        self._options = options

    @asynccontextmanager
    async def producer(self, address: str, *, batch: int, paced: bool = False) -> AsyncGenerator[Producer]:
        async with self._open(address) as provider:
            yield _ProviderProducer(provider)

    @asynccontextmanager
    async def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AsyncGenerator[PeerConsumer]:
        async with self._open(address) as provider:
            consumer = _ProviderConsumer()
            await provider.subscribe(f"s{number}", "*/*", consumer.handle, batch=True, start=Start.earliest())
            yield consumer

    def _open(self, address: str) -> Any:
        return Provider.open(adapter=self._adapter, queues=1, options=self._options(address))


class Window:
    """Keeps some calls on their way."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def add(self, call: Awaitable[Any]) -> None:
        self._running.add(asyncio.ensure_future(call))
        if len(self._running) >= WINDOW:
            done, self._running = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()

    async def flush(self) -> None:
        await asyncio.gather(*self._running)
        self._running.clear()


class _ProviderProducer:
    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._stream = StreamId("events", "1")
        self._window = Window()

    async def send(self, payloads: Sequence[bytes]) -> None:
        await self._window.add(self._provider.publish(self._stream, list(payloads)))

    async def flush(self) -> None:
        await self._window.flush()


class _ProviderConsumer:
    def __init__(self) -> None:
        self._payloads: list[bytes] = []
        self._arrived = asyncio.Event()

    async def handle(self, batch: EventBatch) -> None:
        self._payloads += batch.payloads()
        self._arrived.set()

    async def receive(self) -> Sequence[bytes]:
        if not self._payloads:
            self._arrived.clear()
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._arrived.wait()
            except TimeoutError:
                return ()
        payloads, self._payloads = self._payloads, []
        return payloads

    async def finish(self) -> None:
        """Every batch was acknowledged when its handler returned."""
