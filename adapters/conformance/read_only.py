"""What holds for an adapter that is only read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ...streams.errors import NotSupported
from ..seam import QueueAdapter, QueueReceiver
from .harness import batch_of, receiving, turns
from .reading import ReadingTests


class ConformsToReadOnly(ReadingTests):
    """For direction read-only. `open_adapter` opens queues of exactly `BATCHES` batches each, all of them there already
    or as soon as they are asked for, different in each queue, and the same each time."""

    tests_group = "read-only"

    async def fill(self, adapter: QueueAdapter, queues: int) -> None:
        """Nothing to do: the batches are there."""

    async def expect_nothing(self, adapter: QueueAdapter, receiver: QueueReceiver, queue: int = 0) -> None:
        """A receive still waits while other calls, which go the same way, come back several times."""
        waiting = receiving(receiver)
        for _ in range(5):
            await turns()
            await adapter.bounds(queue)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])

    async def test_enqueue_is_refused(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            with pytest.raises(NotSupported):
                await adapter.enqueue([(0, batch_of("a", "x"))])
