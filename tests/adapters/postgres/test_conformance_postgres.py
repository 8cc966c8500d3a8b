"""The conformance suite over a real server of PostgreSQL."""

from pathlib import Path

import pytest

from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.conformance import (
    ConformsToDurable,
    ConformsToIdempotent,
    ConformsToQueueAdapter,
    ConformsToRewindable,
)


class TestPostgres(ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable, ConformsToIdempotent):
    @pytest.fixture(autouse=True)
    def server(self, postgres_url: str) -> None:
        self.url = postgres_url

    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        return await open_adapter("postgres", context, {"url": self.url, "create": True})
