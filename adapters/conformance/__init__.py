# ruff: noqa: E402 (pytest is told of the modules before they are imported)
"""The tests that every adapter passes, for the adapters here and for those of others. Needs pytest and pytest-asyncio.

Inherit from the classes that fit what the adapter declares, and say how to open it:

    class TestMyAdapter(ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable):
        async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
            return await open_adapter(AdapterContext(provider="tests", queues=queues, directory=directory), {})

| capabilities | classes |
|---|---|
| direction read-write | `ConformsToQueueAdapter` |
| direction read-only | `ConformsToReadOnly` |
| rewindable | `ConformsToRewindable`, or `ConformsToRewindableReadOnly` where read-only |
| durable | `ConformsToDurable` |
| idempotent | `ConformsToIdempotent` |
| delay | `ConformsToDelay` |
| priority | `ConformsToPriority` |

One test fails where the classes are not those that the capabilities ask for, so that a group of tests can be left out
only by not declaring what it tests.
"""

import pytest

# Failures then show the values that were compared.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "durable",
            "harness",
            "idempotent",
            "queue",
            "read_only",
            "reading",
            "rewindable",
            "schedule",
            "steps",
        )
    )
)

from .durable import ConformsToDurable
from .harness import BATCHES, AdapterConformance
from .idempotent import ConformsToIdempotent
from .queue import ConformsToQueueAdapter
from .read_only import ConformsToReadOnly
from .rewindable import ConformsToRewindable, ConformsToRewindableReadOnly
from .schedule import ConformsToDelay, ConformsToPriority

__all__ = (
    "BATCHES",
    "AdapterConformance",
    "ConformsToDelay",
    "ConformsToDurable",
    "ConformsToIdempotent",
    "ConformsToPriority",
    "ConformsToQueueAdapter",
    "ConformsToReadOnly",
    "ConformsToRewindable",
    "ConformsToRewindableReadOnly",
)
