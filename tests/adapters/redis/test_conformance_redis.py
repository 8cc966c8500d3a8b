"""The conformance suite over a real Redis, and over Valkey."""

from pathlib import Path

import pytest

from benchmarks.servers import RedisServer
from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.conformance import (
    ConformsToDelay,
    ConformsToDurable,
    ConformsToIdempotent,
    ConformsToPriority,
    ConformsToQueueAdapter,
)
from tests.servers import ValkeyServer, redis_server, valkey_server

__all__ = ("redis_server", "valkey_server")


class TestRedis(ConformsToQueueAdapter, ConformsToDurable, ConformsToIdempotent, ConformsToDelay, ConformsToPriority):
    @pytest.fixture(autouse=True)
    def server(self, redis_server: RedisServer) -> None:
        self.url = f"redis://{redis_server.address}"

    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        return await open_adapter("redis", context, {"url": self.url, "prefix": "".join(directory.parts[1:])})


class TestValkey(TestRedis):
    @pytest.fixture(autouse=True)
    def server(self, valkey_server: ValkeyServer) -> None:
        self.url = f"redis://{valkey_server.address}"
