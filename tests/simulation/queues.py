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
from headrace.adapters.receiving import Accept


class SimulatedQueues(QueueAdapter):
    """A rewindable adapter that keeps its batches in lists, for one event loop.

    `latency_s` bounds the random time that each call takes; `faults` is the share of calls that fail. `offers` is the
    share of calls whose batches are offered to the receivers: the other calls are like those of another process.
    """

    capabilities = Capabilities(rewindable=True, durable=True)

    def __init__(
        self,
        queues: int,
        rng: random.Random | None = None,
        *,
        latency_s: float = 0.0,
        faults: float = 0.0,
        offers: float = 0.0,
    ) -> None:
        self.queues: list[list[EventBatch]] = [[] for _ in range(queues)]
        self.first = [0] * queues
        self.receivers: dict[SimulatedReceiver, None] = {}
        self.opened = 0
        self.unreadable: dict[int, Exception] = {}
        """What reading these offsets raises."""
        self.faults = faults
        self._rng = rng or random.Random()
        self._latency_s = latency_s
        self._offers = offers

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        loop = asyncio.get_running_loop()
        receipts: list[Receipt] = []
        ends = [len(stored) for stored in self.queues]
        for queue, batch in batches:
            receipts.append(Receipt(SequenceToken(len(self.queues[queue]))))
            self.queues[queue].append(batch)
        if self._offers and self._rng.random() < self._offers:
            loop.call_later(self._some_latency_s(), self._offer, ends, [len(stored) for stored in self.queues])
        else:
            for receiver in self.receivers:
                receiver.news.set()
        answer: asyncio.Future[Sequence[Receipt]] = loop.create_future()
        answer.set_result(receipts)
        return answer

    def _offer(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        for receiver in list(self.receivers):
            if starts[receiver.queue] < ends[receiver.queue]:
                receiver.offer(starts[receiver.queue], ends[receiver.queue])

    def _some_latency_s(self) -> float:
        return self._rng.choice((0.0, self._latency_s * self._rng.random()))

    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        await self.trouble("open")
        assert start is not None, "the agent always says where a rewindable queue is to be read from"
        if not 0 <= start <= len(self.queues[queue]):
            raise InvalidArgument(f"queue {queue} ends at {len(self.queues[queue])}, not {start}")
        receiver = SimulatedReceiver(self, queue, start)
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
            await asyncio.sleep(self._some_latency_s())
        if self._rng.random() < self.faults:
            raise self._rng.choice((StorageError(f"{what}: try again"), OSError(f"{what}: the cable is out")))


class SimulatedReceiver(QueueReceiver):
    def __init__(self, shelf: SimulatedQueues, queue: int, position: int) -> None:
        self.news = asyncio.Event()
        self.position = position
        self.queue = queue
        self.reads = 0
        self.offered: list[int] = []
        """The sizes of the offers that were accepted."""
        self._shelf = shelf
        self._accept: Accept | None = None
        self._waiting = False
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
                position, self._waiting = self.position, True
                await self.news.wait()
                self._waiting = False
                if self.position > position:
                    return Received((), self.position)
        finally:
            self._receiving = self._waiting = False
        raise Closed("this receiver is closed")

    def offer_to(self, accept: Accept) -> None:
        self._accept = accept

    def offer(self, start: int, end: int) -> None:
        """The batches of these offsets were stored."""
        if self._accept is None or not self._waiting or self.news.is_set() or self.position != start:
            self.news.set()
        elif self._accept(self._batches(start, end)):
            self.offered.append(end - start)
            self.position = end
        else:
            self.news.set()

    def _read(self, max_events: int, max_bytes: int) -> Received:
        self.reads += 1
        low, first = self.position, self._shelf.first[self.queue]
        gap = Gap(low, first, "dropped") if low < first else None
        batches: list[EventBatch] = []
        start = max(low, first)
        if start in self._shelf.unreadable:
            raise self._shelf.unreadable[start]
        for batch in self._batches(start, min((o for o in self._shelf.unreadable if o > start), default=None)):
            if max_events <= 0 or max_bytes <= 0:
                break
            batches.append(batch)
            max_events -= batch.count
            max_bytes -= batch.nbytes
        return Received(batches, start + len(batches), gap)

    def _batches(self, start: int, end: int | None) -> list[EventBatch]:
        stored = self._shelf.queues[self.queue][start:end]
        return [EventBatch(each.stream, each.encoded, each.count, offset) for offset, each in enumerate(stored, start)]

    async def acknowledge(self, offset: int) -> None:
        raise AssertionError("a queue that can rewind is not acknowledged")

    async def aclose(self) -> None:
        self._closed = True
        self.news.set()
        self._shelf.receivers.pop(self, None)
