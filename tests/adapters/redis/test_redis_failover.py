"""Another server takes over the address: connections to the one before stay, and are of no use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from redis import Redis

from benchmarks.servers import LOOPBACK, RedisServer
from headrace import EventBatch, StorageError, StreamId
from headrace.adapters import AdapterContext, QueueReceiver
from headrace.adapters.redis import RedisAdapter, open_adapter

ANY = 1 << 30


def batch(payload: str) -> EventBatch:
    return EventBatch.of(StreamId("n", "k"), [payload.encode()])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 (it is another process that sees it)
            await asyncio.sleep(0.05)


async def follow(replica: RedisServer, master: RedisServer) -> None:
    """Return when it has everything."""
    with Redis(port=replica.port) as client:
        direct = cast("Any", client)
        direct.execute_command("REPLICAOF", LOOPBACK, master.port)
        await until(lambda: direct.info("replication")["master_link_status"] == "up")


def lead(server: RedisServer) -> None:
    with Redis(port=server.port) as direct:
        cast("Any", direct).execute_command("REPLICAOF", "NO", "ONE")


class Address:
    """Where clients connect to: each new connection goes to `target`, and stays."""

    def __init__(self, target: RedisServer) -> None:
        self.target = target
        self.url = ""
        self._pipes: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[Address]:
        server = await asyncio.start_server(self._connect, LOOPBACK, 0)
        self.url = f"redis://{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for pipe in self._pipes:
                pipe.cancel()
            await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(LOOPBACK, self.target.port)
        for source, sink in ((reader, back), (there, writer)):
            self._pipes.add(asyncio.create_task(_pipe(source, sink)))


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
    finally:
        sink.close()


async def test_a_master_that_became_a_replica_is_left() -> None:
    with RedisServer() as old, RedisServer() as new:
        await follow(new, old)
        async with Address(old).served() as address, _adapter(address.url) as opened:
            await opened.enqueue([(0, batch("before"))])
            receiver = await opened.open_receiver(0)
            (before,) = (await receiver.receive(ANY, ANY)).batches
            receiving = asyncio.create_task(_received(receiver))
            with Redis(port=new.port) as direct:
                await until(lambda: bool(direct.exists(opened.shards(0)[0].keys.held)))
            address.target = new
            lead(new)
            await follow(old, new)
            async with asyncio.timeout(25):
                await opened.enqueue([(0, batch("after"))])
                (after,) = await receiving
                await receiver.acknowledge(after.offset + 1)
            assert before.offset < after.offset
            assert (await opened.backlog(0, 0)).batches == 0


async def _received(receiver: QueueReceiver) -> Sequence[EventBatch]:
    """Receive as an agent does: once more after each StorageError, which the demoted master's refusal is, too."""
    while True:
        with suppress(StorageError):
            return (await receiver.receive(ANY, ANY)).batches
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _adapter(url: str) -> AsyncGenerator[RedisAdapter]:
    opened = await open_adapter(AdapterContext(provider="p", queues=1), {"url": url})
    try:
        yield opened
    finally:
        await opened.aclose()
