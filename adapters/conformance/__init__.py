# ruff: noqa: E402 (pytest is told of the modules before they are imported)
"""Tests that every adapter must pass, Headrace's own and others. Needs pytest and pytest-asyncio.

Inherit from the classes that fit the adapter's capabilities, and define how to open the adapter:

    class TestMyAdapter(ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable):
        async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
            return await open_adapter(AdapterContext(provider="tests", queues=queues, directory=directory), {})

| capabilities | classes |
|---|---|
| not read-only | `ConformsToQueueAdapter` |
| read-only | `ConformsToReadOnly` |
| rewindable | `ConformsToRewindable`, or `ConformsToRewindableReadOnly` if it is read-only |
| durable | `ConformsToDurable` |
| idempotent | `ConformsToIdempotent` |
| delay | `ConformsToDelay` |
| priority | `ConformsToPriority` |

One test fails if the classes do not match the capabilities. So a group of tests can be left out only if the adapter
does not declare the capability.
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
