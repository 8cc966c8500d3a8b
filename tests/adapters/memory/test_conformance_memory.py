"""The conformance suite over the memory adapter, and over one with tiny segments."""

from pathlib import Path

from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.conformance import ConformsToIdempotent, ConformsToQueueAdapter, ConformsToRewindable


class TestMemory(ConformsToQueueAdapter, ConformsToIdempotent):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        return await open_adapter("memory", AdapterContext(provider="tests", queues=queues, directory=directory), {})


class TestMemoryInTinySegments(ConformsToQueueAdapter, ConformsToIdempotent):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        return await open_adapter("memory", context, {"segment_size": 2, "capacity": None})


class TestRewindableMemory(ConformsToQueueAdapter, ConformsToRewindable, ConformsToIdempotent):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        return await open_adapter("memory", context, {"rewindable": True})
