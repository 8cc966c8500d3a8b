"""Tests of read-only adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ...streams.errors import NotSupported
from ..receiving import QueueReceiver
from ..seam import QueueAdapter
from .harness import batch_of, receiving, turns
from .reading import ReadingTests


class ConformsToReadOnly(ReadingTests):
    """For read-only adapters. `open_adapter` opens queues of exactly `BATCHES` batches each, which can be received at
    once. They differ between queues, and are the same each time."""

    tests_group = "read-only"

    async def fill(self, adapter: QueueAdapter, queues: int) -> None:
        """Nothing to do: the queues hold their batches already."""

    async def expect_nothing(self, adapter: QueueAdapter, receiver: QueueReceiver, queue: int = 0) -> None:
        """Check that a receive still waits after several other calls of the adapter have returned."""
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
