"""Reads a queue by `receive` and by the offers of its receiver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from ...streams.events import EventBatch
from ..receiving import QueueReceiver
from .harness import ANY


class ReadingWithOffers:
    """Accepts some offers. Collects the batches in the order in which they come, and checks each step."""

    def __init__(self, receiver: QueueReceiver, seed: int) -> None:
        self.found: list[EventBatch] = []
        self._receiver = receiver
        self._rng = random.Random(seed)  # noqa: S311 (a test that can be repeated)
        self._receiving = False
        self._accepted = False
        self._problem = ""
        receiver.offer_to(self._accept)
        self._task = asyncio.create_task(self._read(), name="receive")

    async def until(self, count: int) -> None:
        """Return when this many batches have come. Raises AssertionError if a check failed."""
        while len(self.found) < count:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0)
        assert not self._problem, self._problem

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _accept(self, batches: Sequence[EventBatch]) -> bool:
        if not self._receiving:
            self._problem = "batches are offered while no call of receive waits"
        if not batches:
            self._problem = "no batches are offered"
        if self._rng.random() < 0.3:
            return False
        self._accepted = True
        self.found += batches
        return True

    async def _read(self) -> None:
        while True:
            self._receiving, self._accepted = True, False
            received = await self._receiver.receive(self._rng.choice((1, 2, ANY)), ANY)
            self._receiving = False
            assert received.gap is None
            assert received.batches or self._accepted, "receive returned nothing, and nothing was accepted"
            self.found += received.batches
            assert not self.found or self.found[-1].offset < received.next_offset
            await asyncio.sleep(0)
