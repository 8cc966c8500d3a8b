"""The conformance suite over adapters without delays of their own, decorated with delays."""

from pathlib import Path

import pytest

from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.conformance import (
    ConformsToDelay,
    ConformsToDurable,
    ConformsToIdempotent,
    ConformsToQueueAdapter,
    ConformsToRewindable,
)
from headrace.silo.delays import DelayingAdapter
from headrace.store.control_store import ControlStore


class WithStore(DelayingAdapter):
    """Closes its store, too."""

    def __init__(self, inner: QueueAdapter, control: ControlStore) -> None:
        super().__init__(inner, control.delay_store(), "tests")
        self._control = control

    async def aclose(self) -> None:
        await super().aclose()
        await self._control.aclose()


async def delaying(name: str, queues: int, directory: Path) -> QueueAdapter:
    context = AdapterContext(provider="tests", queues=queues, directory=directory)
    control = await ControlStore.open("memory" if name == "memory" else directory / "control.db")
    adapter = WithStore(await open_adapter(name, context, {}), control)
    adapter.start()
    return adapter


# The delays are the same over a log, and `test_conformance_memory.py` has the memory without them.
@pytest.mark.slow
class TestMemoryWithDelays(ConformsToQueueAdapter, ConformsToIdempotent, ConformsToDelay):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        return await delaying("memory", queues, directory)


class TestLogWithDelays(
    ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable, ConformsToIdempotent, ConformsToDelay
):
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        return await delaying("log", queues, directory)
