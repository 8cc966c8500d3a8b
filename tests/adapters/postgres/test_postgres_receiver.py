"""Receivers alone: the queue changes while a fetch is under way."""

from __future__ import annotations

import asyncio
import gc

import pytest

from headrace.adapters.postgres.reading import Fetched
from headrace.adapters.postgres.receiver import PostgresReceiver, WatchedQueue
from headrace.streams.errors import Closed, HeadraceError, StorageError
from tests.adapters.postgres.opening import ANY


def ignore(_: PostgresReceiver) -> None: ...


class ShrinkingQueue:
    """A queue that loses its end while a fetch, which has seen the old end, is under way."""

    def __init__(self) -> None:
        self.end = 6
        self.fetching, self.shrunk = asyncio.Event(), asyncio.Event()

    async def fetch(self, position: int, _before_us: int | None) -> Fetched:
        if self.end < position:
            raise StorageError("lost its end")
        self.fetching.set()
        await self.shrunk.wait()
        return Fetched((), position)

    def fault(self) -> HeadraceError | None:
        return None

    def acknowledge(self, offset: int) -> None: ...


async def test_a_fetch_that_has_not_begun_is_cancelled_without_a_warning() -> None:
    queue = ShrinkingQueue()
    watched = WatchedQueue(0, queue.fetch, lambda: queue.end, queue.fault, queue.acknowledge)
    receiver = PostgresReceiver(watched, 5, 0, ignore)
    receiving = asyncio.ensure_future(receiver.receive(ANY, ANY))
    await asyncio.sleep(0)
    await receiver.aclose()
    gc.collect()
    with pytest.raises(Closed):
        await receiving


async def test_an_end_that_is_lost_during_a_fetch_is_a_fault() -> None:
    queue = ShrinkingQueue()
    watched = WatchedQueue(0, queue.fetch, lambda: queue.end, queue.fault, queue.acknowledge)

    receiver = PostgresReceiver(watched, 5, 0, ignore)
    receiving = asyncio.ensure_future(receiver.receive(ANY, ANY))
    await queue.fetching.wait()
    queue.end = 3
    receiver.wake()
    queue.shrunk.set()
    with pytest.raises(StorageError, match="lost its end"):
        await asyncio.wait_for(receiving, 10)
    with pytest.raises(StorageError, match="lost its end"):  # it stays one
        await asyncio.wait_for(receiver.receive(ANY, ANY), 10)
    await receiver.aclose()
