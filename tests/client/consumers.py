"""Helpers that the tests of consumers share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from headrace import Client, Consumer, ReceivedBatch, StreamId

PATIENCE_S = 60


async def until(condition: Callable[[], bool]) -> None:
    """Return once it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def publish(client: Client, streams: Iterable[str], count: int, *, first: int = 0, each: int = 1) -> None:
    """Events `first` to `first + count` to each of the streams of namespace orders, so many to a batch."""
    for start in range(first, first + count, each):
        payloads: list[bytes] = [str(number).encode() for number in range(start, min(start + each, first + count))]
        await asyncio.gather(*(client.stream("orders", key).publish(payloads) for key in streams))


async def take(consumer: Consumer, events: int) -> list[ReceivedBatch]:
    """Batches with so many events in all, or more."""
    batches: list[ReceivedBatch] = []
    async with asyncio.timeout(PATIENCE_S):
        async for batch in consumer:
            batches.append(batch)
            if sum(len(each) for each in batches) >= events:
                break
    return batches


def numbers(batches: Iterable[ReceivedBatch]) -> list[int]:
    return [int(payload) for batch in batches for payload in batch.payloads()]


class Seen:
    """The events that a user received, in order, by stream."""

    def __init__(self) -> None:
        self.streams: dict[StreamId, list[int]] = {}

    def note(self, batch: ReceivedBatch) -> None:
        self.streams.setdefault(batch.stream, []).extend(map(int, batch.payloads()))

    @property
    def count(self) -> int:
        return sum(map(len, self.streams.values()))

    def doubled(self) -> list[int]:
        """Numbers that came more than once, as often as they came too often."""
        return [n for seen in self.streams.values() for n, times in Counter(seen).items() for _ in range(times - 1)]
