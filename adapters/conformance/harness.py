"""Opens adapters for the tests, and has the steps that tests share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from ...streams.events import EventBatch
from ...streams.identity import StreamId
from ..receiving import QueueReceiver, Received
from ..seam import QueueAdapter, Receipt

BATCHES = 12
"""Batches in each queue of a filled adapter."""
ANY = 1 << 30
"""A limit that no test reaches."""
deadline_s = ContextVar("deadline_s", default=30.0)
"""Seconds after which a test fails if an expected event does not occur. No test measures time."""

T = TypeVar("T")


@pytest.mark.asyncio
class AdapterConformance(ABC):
    """Base class of the suite. A test opens the adapter by `async with self.adapter(...)`."""

    tests_group: ClassVar[str]
    """The capability of adapters that must inherit from the class that sets this."""

    @abstractmethod
    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        """Open the adapter with this number of queues.

        `directory` exists and is empty for each test. A durable adapter that is opened again on the same directory
        finds its stored batches there, even while the first one is still open.
        """

    @abstractmethod
    async def fill(self, adapter: QueueAdapter, queues: int) -> None:
        """Make each queue hold `BATCHES` batches."""

    @abstractmethod
    async def expect_nothing(self, adapter: QueueAdapter, receiver: QueueReceiver, queue: int = 0) -> None:
        """Check that there is no batch for the receiver."""

    @asynccontextmanager
    async def adapter(self, directory: Path, queues: int = 1) -> AsyncGenerator[QueueAdapter]:
        """Open an adapter, and close it in the end."""
        adapter = await self.open_adapter(queues, directory)
        try:
            yield adapter
        finally:
            await soon(adapter.aclose())

    @asynccontextmanager
    async def filled(self, directory: Path, queues: int = 1) -> AsyncGenerator[QueueAdapter]:
        """Open an adapter with `BATCHES` batches in each queue."""
        async with self.adapter(directory, queues) as adapter:
            await soon(self.fill(adapter, queues))
            yield adapter


async def soon(happening: Awaitable[T]) -> T:
    """Await a result. Raises AssertionError if it takes longer than `deadline_s`."""
    limit_s = deadline_s.get()
    try:
        async with asyncio.timeout(limit_s):
            return await happening
    except TimeoutError:
        raise AssertionError(f"it did not happen within {limit_s} s") from None


async def take(
    receiver: QueueReceiver, batches: int, *, max_events: int = ANY, max_bytes: int = ANY
) -> list[EventBatch]:
    """Receive exactly this many batches, and check every result of `receive`."""
    taken: list[EventBatch] = []
    while len(taken) < batches:
        received = await soon(receiver.receive(max_events, max_bytes))
        check_answer(received, max_events, max_bytes)
        taken += received.batches
    assert len(taken) == batches
    assert in_order(taken)
    return taken


def check_answer(received: Received, max_events: int, max_bytes: int) -> None:
    """Check a result of `receive`: at least one batch, in order, none after the one that reaches a limit, and all below
    `next_offset`."""
    assert received.gap is None
    assert received.batches, "receive returned neither a batch nor a gap"
    assert in_order(received.batches)
    assert received.batches[-1].offset < received.next_offset
    before_the_last = received.batches[:-1]
    assert sum(batch.count for batch in before_the_last) < max_events or not before_the_last
    assert sum(batch.nbytes for batch in before_the_last) < max_bytes or not before_the_last


def check_receipt(adapter: QueueAdapter, receipt: Receipt, batch: EventBatch) -> None:
    """Check that the receipt has the batch's token. If the adapter is not ordered, it may be a lower one."""
    assert receipt.token is not None
    assert receipt.token == batch.token or (not adapter.capabilities.ordered and receipt.token < batch.token)


def in_order(batches: Sequence[EventBatch]) -> bool:
    """Return whether the offsets strictly increase."""
    offsets = [batch.offset for batch in batches]
    return offsets == sorted(set(offsets))


def receiving(receiver: QueueReceiver) -> asyncio.Task[Received]:
    """Start a receive in a new task."""
    return asyncio.create_task(receiver.receive(ANY, ANY), name="receive")


async def turns(count: int = 20) -> None:
    """Let other tasks run for some turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def batch_of(key: str, *payloads: str) -> EventBatch:
    """Return a batch for a stream of the suite."""
    return EventBatch.of(StreamId("conformance", key), [payload.encode() for payload in payloads])


def contents(batch: EventBatch) -> tuple[object, ...]:
    """Return all contents of a batch except its token."""
    events = batch.events()
    return (batch.stream, *((e.payload, dict(e.headers), e.id, e.timestamp_us) for e in events))
