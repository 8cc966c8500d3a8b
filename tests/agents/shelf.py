"""Queues for simulations: lists that outlive their readers, with faults and retention on request."""

import asyncio
import random
from collections.abc import Awaitable, Sequence

from headrace import Closed, EventBatch, InvalidArgument, SequenceToken, StorageError
from headrace.adapters import (
    Bounds,
    Capabilities,
    Gap,
    ProducerSequence,
    QueueAdapter,
    QueueReceiver,
    QueueStatistics,
    Receipt,
    Received,
)


class Shelf(QueueAdapter):
    """A rewindable adapter that keeps its batches in lists, for one event loop.

    `latency_s` bounds the random time that each call takes; `faults` is the share of calls that fail.
    """

    capabilities = Capabilities(rewindable=True, durable=True)

    def __init__(
        self, queues: int, rng: random.Random | None = None, *, latency_s: float = 0.0, faults: float = 0.0
    ) -> None:
        self.queues: list[list[EventBatch]] = [[] for _ in range(queues)]
        self.first = [0] * queues
        self.receivers: dict[ShelfReceiver, None] = {}
        self.opened = 0
        self.faults = faults
        self._rng = rng or random.Random()
        self._latency_s = latency_s

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        receipts: list[Receipt] = []
        for queue, batch in batches:
            receipts.append(Receipt(SequenceToken(len(self.queues[queue]))))
            self.queues[queue].append(batch)
        for receiver in self.receivers:
            receiver.news.set()
        answer: asyncio.Future[Sequence[Receipt]] = asyncio.get_running_loop().create_future()
        answer.set_result(receipts)
        return answer

    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        await self.trouble("open")
        assert start is not None, "the agent always says where a rewindable queue is to be read from"
        if not 0 <= start <= len(self.queues[queue]):
            raise InvalidArgument(f"queue {queue} ends at {len(self.queues[queue])}, not {start}")
        receiver = ShelfReceiver(self, queue, start)
        self.receivers[receiver] = None
        self.opened += 1
        return receiver

    async def bounds(self, queue: int) -> Bounds:
        return Bounds(self.first[queue], len(self.queues[queue]))

    async def statistics(self, queue: int) -> QueueStatistics:
        return QueueStatistics(await self.bounds(queue))

    async def aclose(self) -> None:
        for receiver in list(self.receivers):
            await receiver.aclose()

    def drop(self, queue: int, below: int) -> None:
        """Retention that takes no notice of watermarks."""
        self.first[queue] = max(self.first[queue], below)

    async def trouble(self, what: str) -> None:
        """The time that a call takes, and its chance to fail."""
        if self._latency_s:
            await asyncio.sleep(self._rng.choice((0.0, self._latency_s * self._rng.random())))
        if self._rng.random() < self.faults:
            raise self._rng.choice((StorageError(f"{what}: try again"), OSError(f"{what}: the cable is out")))


class ShelfReceiver(QueueReceiver):
    def __init__(self, shelf: Shelf, queue: int, position: int) -> None:
        self.news = asyncio.Event()
        self.position = position
        self._shelf = shelf
        self._queue = queue
        self._closed = False
        self._receiving = False

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        assert max_events > 0
        assert max_bytes > 0
        assert not self._receiving, "two concurrent receives"
        self._receiving = True
        try:
            while not self._closed:
                await self._shelf.trouble("receive")
                self.news.clear()
                received = self._read(max_events, max_bytes)
                if received.batches or received.gap:
                    self.position = received.next_offset
                    return received
                await self.news.wait()
        finally:
            self._receiving = False
        raise Closed("this receiver is closed")

    def _read(self, max_events: int, max_bytes: int) -> Received:
        low, first = self.position, self._shelf.first[self._queue]
        gap = Gap(low, first, "dropped") if low < first else None
        batches: list[EventBatch] = []
        start = max(low, first)
        for offset, stored in enumerate(self._shelf.queues[self._queue][start:], start):
            if max_events <= 0 or max_bytes <= 0:
                break
            batches.append(EventBatch(stored.stream, stored.encoded, stored.count, offset))
            max_events -= stored.count
            max_bytes -= stored.nbytes
        return Received(batches, start + len(batches), gap)

    async def acknowledge(self, offset: int) -> None:
        raise AssertionError("a queue that can rewind is not acknowledged")

    async def aclose(self) -> None:
        self._closed = True
        self.news.set()
        self._shelf.receivers.pop(self, None)
