"""Redis Streams: pipelined XADD, and a consumer group that acknowledges each read together with the next one.

redis-py has two clients. The blocking one is nearly twice as fast as the one for asyncio; both are measured.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..servers import RedisServer, Server
from .peer import Peer, PeerConsumer, Producer

STREAM, GROUP, FIELD = "events", "consumers", b"payload"
BLOCK_MS = 1000


class RedisStreams(Peer):
    requires = ("redis", "hiredis")

    def __init__(self, appendfsync: str, *, blocking_client: bool = True) -> None:
        self.appendfsync = appendfsync
        self.name = f"Redis Streams, AOF {appendfsync}" + ("" if blocking_client else ", asyncio client")
        self.client = f"{__name__}:{'blocking' if blocking_client else 'concurrent'}"

    def server(self) -> Server:
        return RedisServer(appendfsync=self.appendfsync)


class _Client:
    """Runs pipelines of commands; the blocking client answers at once, the other one with an awaitable."""

    def __init__(self, *, blocking: bool) -> None:
        self._blocking = blocking

    @asynccontextmanager
    async def producer(self, address: str, *, batch: int, paced: bool = False) -> AsyncGenerator[Producer]:
        async with self._connected(address) as redis:
            yield _Producer(redis)

    @asynccontextmanager
    async def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AsyncGenerator[PeerConsumer]:
        async with self._connected(address) as redis:
            group = f"{GROUP}-{number}"
            await redis.create_group(group)
            yield _Consumer(redis, group, batch)

    @asynccontextmanager
    async def _connected(self, address: str) -> AsyncGenerator[_Redis]:
        redis = _Redis(address, blocking=self._blocking)
        try:
            await redis.run([("PING",)])
            yield redis
        finally:
            await redis.aclose()


class _Redis:
    def __init__(self, address: str, *, blocking: bool) -> None:
        from redis import Redis  # noqa: PLC0415 (only in the process that uses it)
        from redis.asyncio import Redis as AsyncRedis  # noqa: PLC0415

        host, _, port = address.partition(":")
        self._redis: Any = Redis(host, int(port)) if blocking else AsyncRedis(host=host, port=int(port))
        self._blocking = blocking

    async def run(self, commands: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """Send commands in one go, without a transaction; their answers."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline.execute() if self._blocking else await pipeline.execute()

    async def create_group(self, group: str) -> None:
        await self.run([("XGROUP", "CREATE", STREAM, group, "0", "MKSTREAM")])

    async def aclose(self) -> None:
        if self._blocking:
            self._redis.close()
        else:
            await self._redis.aclose()


class _Producer:
    def __init__(self, redis: _Redis) -> None:
        self._redis = redis

    async def send(self, payloads: Sequence[bytes]) -> None:
        await self._redis.run([("XADD", STREAM, "*", FIELD, payload) for payload in payloads])

    async def flush(self) -> None:
        """Every pipeline was acknowledged when `send` returned."""


class _Consumer:
    def __init__(self, redis: _Redis, group: str, batch: int) -> None:
        self._redis = redis
        self._group = group
        self._read = ("XREADGROUP", "GROUP", group, "one", "COUNT", batch, "BLOCK", BLOCK_MS, "STREAMS", STREAM, ">")
        self._unacknowledged: list[bytes] = []

    async def receive(self) -> Sequence[bytes]:
        *_, streams = await self._redis.run([*self._acknowledgement(), self._read])
        if not streams:
            return ()
        entries: Sequence[tuple[bytes, dict[bytes, bytes]]] = streams[0][1]
        self._unacknowledged = [entry_id for entry_id, _ in entries]
        return [fields[FIELD] for _, fields in entries]

    async def finish(self) -> None:
        await self._redis.run(self._acknowledgement())

    def _acknowledgement(self) -> list[tuple[Any, ...]]:
        acknowledged, self._unacknowledged = self._unacknowledged, []
        return [("XACK", STREAM, self._group, *acknowledged)] if acknowledged else []


blocking = _Client(blocking=True)
concurrent = _Client(blocking=False)
