"""How a test of the suite gets its adapter, and the steps that tests are made of."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from ...streams.events import EventBatch
from ...streams.identity import StreamId
from ..seam import QueueAdapter, QueueReceiver, Receipt, Received

BATCHES = 12
"""Batches in each queue of a filled adapter."""
ANY = 1 << 30
"""A limit that no test reaches."""
DEADLINE_S = 30.0
"""A test gives up on what did not happen within this many seconds. No test measures time."""

T = TypeVar("T")


@pytest.mark.asyncio
class AdapterConformance(ABC):
    """What the classes of the suite have in common. A test gets the adapter with `async with self.adapter(...)`."""

    tests_group: ClassVar[str]
    """What an adapter declares that inherits from the class that sets this."""

    @abstractmethod
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        """Open the adapter with so many queues.

        `directory` exists and is empty for each test. Opened again on the same directory, a durable adapter finds what
        it has stored there, also while the first one is still open.
        """

    @abstractmethod
    async def fill(self, adapter: QueueAdapter, queues: int) -> None:
        """Bring `BATCHES` batches into each of the queues, as the class of its direction does it."""

    @abstractmethod
    async def expect_nothing(self, adapter: QueueAdapter, receiver: QueueReceiver, queue: int = 0) -> None:
        """There is nothing for the receiver. How that is seen depends on the direction."""

    @asynccontextmanager
    async def adapter(self, directory: Path, queues: int = 1) -> AsyncGenerator[QueueAdapter]:
        """An open adapter, closed in the end."""
        adapter = await self.open_adapter(queues, directory)
        try:
            yield adapter
        finally:
            await soon(adapter.aclose())

    @asynccontextmanager
    async def filled(self, directory: Path, queues: int = 1) -> AsyncGenerator[QueueAdapter]:
        """An open adapter with `BATCHES` batches in each queue."""
        async with self.adapter(directory, queues) as adapter:
            await soon(self.fill(adapter, queues))
            yield adapter


async def soon(happening: Awaitable[T]) -> T:
    """Await what must not take long. An AssertionError says that it did not happen."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await happening
    except TimeoutError:
        raise AssertionError(f"it did not happen within {DEADLINE_S} s") from None


async def take(
    receiver: QueueReceiver, batches: int, *, max_events: int = ANY, max_bytes: int = ANY
) -> list[EventBatch]:
    """Receive until there are so many batches, not one more, and check what every answer promises."""
    taken: list[EventBatch] = []
    while len(taken) < batches:
        received = await soon(receiver.receive(max_events, max_bytes))
        check_answer(received, max_events, max_bytes)
        taken += received.batches
    assert len(taken) == batches
    assert in_order(taken)
    return taken


def check_answer(received: Received, max_events: int, max_bytes: int) -> None:
    """At least one batch, in order, none after the one that reaches a limit, and all of them below `next_offset`."""
    assert received.gap is None
    assert received.batches, "receive returned neither a batch nor a gap"
    assert in_order(received.batches)
    assert received.batches[-1].offset < received.next_offset
    before_the_last = received.batches[:-1]
    assert sum(batch.count for batch in before_the_last) < max_events or not before_the_last
    assert sum(batch.nbytes for batch in before_the_last) < max_bytes or not before_the_last


def check_receipt(adapter: QueueAdapter, receipt: Receipt, batch: EventBatch) -> None:
    """The receipt has the batch's place, or, where the adapter keeps no order, one that is below."""
    assert receipt.token is not None
    assert receipt.token == batch.token or (not adapter.capabilities.ordered and receipt.token < batch.token)


def in_order(batches: Sequence[EventBatch]) -> bool:
    """Whether the offsets strictly increase."""
    offsets = [batch.offset for batch in batches]
    return offsets == sorted(set(offsets))


def receiving(receiver: QueueReceiver) -> asyncio.Task[Received]:
    """A receive in a task of its own."""
    return asyncio.create_task(receiver.receive(ANY, ANY), name="receive")


async def turns(count: int = 20) -> None:
    """Let everyone else go on for some turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def batch_of(key: str, *payloads: str) -> EventBatch:
    """A batch for a stream of the suite."""
    return EventBatch.of(StreamId("conformance", key), [payload.encode() for payload in payloads])


def contents(batch: EventBatch) -> tuple[object, ...]:
    """Everything that a batch says apart from its place."""
    events = batch.events()
    return (batch.stream, *((e.payload, dict(e.headers), e.id, e.timestamp_us) for e in events))
