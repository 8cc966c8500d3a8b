"""The conformance suite over the embedded log."""

from pathlib import Path

from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.conformance import (
    ConformsToDurable,
    ConformsToIdempotent,
    ConformsToQueueAdapter,
    ConformsToRewindable,
)


class TestLog(ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable, ConformsToIdempotent):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        return await open_adapter("log", context, {})
