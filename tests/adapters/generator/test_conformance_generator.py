"""The conformance suite over the generator."""

from pathlib import Path

from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.conformance import BATCHES, ConformsToReadOnly, ConformsToRewindableReadOnly


class TestGenerator(ConformsToReadOnly, ConformsToRewindableReadOnly):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        options = {"batch": 3, "events": BATCHES * 3 - 1, "payload_bytes": 10, "payload_bytes_max": 99, "poison": 0.1}
        return await open_adapter("generator", context, options)


class TestGeneratorWithARate(ConformsToReadOnly, ConformsToRewindableReadOnly):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        return await open_adapter("generator", context, {"batch": 2, "events": BATCHES * 2, "rate": 1e5})
