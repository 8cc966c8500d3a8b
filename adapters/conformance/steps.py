"""Random steps on an adapter, compared with a simple model: a list per queue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from ...streams.events import EventBatch
from ..receiving import QueueReceiver
from ..seam import QueueAdapter, Receipt
from .harness import ANY, batch_of, check_answer, contents, soon


class _ModelQueue:
    """The expected contents of a queue, and the position of its receiver. Positions count batches, not offsets."""

    def __init__(self) -> None:
        self.stored: list[EventBatch] = []
        self.offsets: list[int] = []
        self.acknowledged = 0
        self.position = 0
        self.receiver: QueueReceiver | None = None


class RandomSteps:
    """Enqueues without awaiting, receives, acknowledges and reopens, in an order that depends on the seed alone."""

    def __init__(self, adapter: QueueAdapter, *, queues: int, seed: int, batch_events: int = 4) -> None:
        self._adapter = adapter
        self._batch_events = batch_events
        self._rng = random.Random(seed)  # noqa: S311 (a test that can be repeated)
        self._queues = [_ModelQueue() for _ in range(queues)]
        self._calls: list[asyncio.Future[Sequence[Receipt]]] = []
        self._made = 0

    async def run(self, steps: int) -> None:
        """Take this many steps, then read the rest. Compare with the model after each step."""
        for _ in range(steps):
            step = self._rng.choice(
                [self._enqueue, self._enqueue, self._settle, self._receive, self._receive, self._finish]
            )
            await step()
        await self._settle()
        for queue in self._queues:
            while queue.position < len(queue.stored):
                await self._receive_from(queue)

    async def _enqueue(self) -> None:
        places = [self._rng.randrange(len(self._queues)) for _ in range(self._rng.randint(1, 6))]
        batches = [(place, self._batch()) for place in places]
        for place, batch in batches:
            self._queues[place].stored.append(batch)
        self._calls.append(asyncio.ensure_future(self._adapter.enqueue(batches)))

    def _batch(self) -> EventBatch:
        payloads = [f"{self._made}.{index}" for index in range(self._rng.randint(1, self._batch_events))]
        self._made += 1
        return batch_of(self._rng.choice("abc"), *payloads)

    async def _settle(self) -> None:
        """Await all calls of `enqueue` so far."""
        calls, self._calls = self._calls, []
        for call in calls:
            assert all(receipt.token is not None and not receipt.duplicate for receipt in await soon(call))

    async def _receive(self) -> None:
        queue = self._rng.choice(self._queues)
        if queue.position < len(queue.stored):
            await self._receive_from(queue)

    async def _receive_from(self, queue: _ModelQueue) -> None:
        receiver = queue.receiver or await self._reopen(queue)
        max_events, max_bytes = self._rng.choice([1, 3, 10, ANY]), self._rng.choice([1, 100, ANY])
        received = await soon(receiver.receive(max_events, max_bytes))
        check_answer(received, max_events, max_bytes)
        end = queue.position + len(received.batches)
        expected = queue.stored[queue.position : end]
        assert [contents(batch) for batch in received.batches] == [contents(batch) for batch in expected]
        offsets = [batch.offset for batch in received.batches]
        known = queue.offsets[queue.position : end]
        assert offsets[: len(known)] == known, "the same batches came again with other offsets"
        queue.offsets[queue.position : end] = offsets
        queue.position = end

    async def _finish(self) -> None:
        """Acknowledge some of the received batches, or open another receiver, or both."""
        queue = self._rng.choice(self._queues)
        if queue.receiver is not None and queue.position and self._rng.random() < 0.7:
            done = self._rng.randrange(queue.position)
            await queue.receiver.acknowledge(queue.offsets[done] + 1)
            queue.acknowledged = max(queue.acknowledged, done + 1)
        if self._rng.random() < 0.5:
            await self._reopen(queue)

    async def _reopen(self, queue: _ModelQueue) -> QueueReceiver:
        """Open another receiver, which gets all batches that are not acknowledged."""
        if queue.receiver is not None:
            await queue.receiver.aclose()
        queue.receiver = await self._adapter.open_receiver(self._queues.index(queue))
        queue.position = queue.acknowledged
        return queue.receiver
