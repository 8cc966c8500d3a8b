"""Tests of adapters with idempotent producers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import pytest

from ...streams.errors import SequenceConflict
from ..seam import ProducerSequence, QueueAdapter, Receipt
from .harness import AdapterConformance, batch_of, soon, take


class ConformsToIdempotent(AdapterConformance):
    """For idempotent adapters."""

    tests_group = "idempotent"

    async def test_a_repeated_call_stores_nothing(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            stored = await _call(adapter, "ab", 1)
            again = await _call(adapter, "ab", 1)
            assert await _letters(adapter) == "ab"
        assert [receipt.duplicate for receipt in stored] == [False, False]
        assert [receipt.duplicate for receipt in again] == [True, True]
        assert all(a.token in (None, s.token) for a, s in zip(again, stored, strict=True))

    async def test_an_older_call_is_a_duplicate_too(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            for number, letters in enumerate("abc", start=1):
                await _call(adapter, letters, number)
            assert [receipt.duplicate for receipt in await _call(adapter, "a", 1)] == [True]
            assert await _letters(adapter) == "abc"

    async def test_a_call_that_would_leave_a_hole_is_refused_until_it_is_filled(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            await _call(adapter, "a", 1)
            with pytest.raises(SequenceConflict):
                await _call(adapter, "c", 3)
            assert await adapter.last_sequence("p") == 1
            await _call(adapter, "b", 2)
            await _call(adapter, "c", 3)
            assert await _letters(adapter) == "abc"

    async def test_a_first_call_with_something_before_it_is_refused(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            with pytest.raises(SequenceConflict):
                await _call(adapter, "b", 2)
            assert await adapter.last_sequence("p") == 0
            bounds = await adapter.bounds(0)
            assert bounds.first == bounds.next

    async def test_numbers_may_skip(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            await _call(adapter, "a", 10, previous=0)
            await _call(adapter, "b", 1 << 40, previous=10)
            assert await adapter.last_sequence("p") == 1 << 40
            assert await _letters(adapter) == "ab"

    async def test_producers_do_not_know_of_each_other(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            await _call(adapter, "a", 1, producer="one")
            await _call(adapter, "b", 1, producer="two")
            assert [await adapter.last_sequence(producer) for producer in ("one", "two", "three")] == [1, 1, 0]
            assert await _letters(adapter) == "ab"

    async def test_calls_without_a_sequence_do_not_count(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            await _call(adapter, "a", 1)
            await soon(adapter.enqueue([(0, batch_of("s", "b"))]))
            await _call(adapter, "c", 2)
            assert await _letters(adapter) == "abc"

    async def test_calls_made_without_awaiting_follow_each_other(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            calls = [asyncio.ensure_future(_enqueue(adapter, "x", number)) for number in range(1, 31)]
            repeated = [asyncio.ensure_future(_enqueue(adapter, "x", number)) for number in (1, 15, 30)]
            answers = await soon(asyncio.gather(*calls, *repeated))
            assert [receipt.duplicate for (receipt,) in answers] == [False] * 30 + [True] * 3
            assert await _letters(adapter) == "x" * 30

    async def test_holes_are_seen_among_calls_made_without_awaiting(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            calls = [asyncio.ensure_future(_enqueue(adapter, "abde"[i], n)) for i, n in enumerate((1, 2, 4, 5))]
            outcomes = await soon(asyncio.gather(*calls, return_exceptions=True))
            assert [isinstance(outcome, SequenceConflict) for outcome in outcomes] == [False, False, True, True]
            assert await _letters(adapter) == "ab"

    async def test_a_call_over_several_queues_is_stored_once_as_a_whole(self, tmp_path: Path) -> None:
        batches = [(queue, batch_of("s", str(queue))) for queue in range(3)]
        async with self.adapter(tmp_path, queues=3) as adapter:
            for _ in range(2):
                await soon(adapter.enqueue(batches, sequence=ProducerSequence("p", 1, 0)))
            for queue in range(3):
                assert await _letters(adapter, queue) == str(queue)

    async def test_a_call_without_batches_counts(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            assert await _call(adapter, "", 1) == await _call(adapter, "", 1) == []
            assert await adapter.last_sequence("p") == 1
            await _call(adapter, "a", 2)
            assert await _letters(adapter) == "a"

    async def test_numbers_outlive_the_handle_as_the_data_does(self, tmp_path: Path) -> None:
        """Opens the adapter again if it is durable; else uses the same handle, which still has the data."""
        async with self.adapter(tmp_path) as first:
            await _call(first, "a", 1)
            async with self._another_handle(first, tmp_path) as second:
                assert await second.last_sequence("p") == 1
                assert [receipt.duplicate for receipt in await _call(second, "a", 1)] == [True]
                await _call(second, "b", 2)
                assert await _letters(second) == "ab"

    def _another_handle(self, adapter: QueueAdapter, directory: Path) -> AbstractAsyncContextManager[QueueAdapter]:
        return self.adapter(directory) if adapter.capabilities.durable else nullcontext(adapter)


def _enqueue(
    adapter: QueueAdapter, letters: str, number: int, *, previous: int | None = None, producer: str = "p"
) -> Awaitable[Sequence[Receipt]]:
    """Enqueue a batch for each letter, as the call after the one with the previous number."""
    sequence = ProducerSequence(producer, number, number - 1 if previous is None else previous)
    return adapter.enqueue([(0, batch_of("s", letter)) for letter in letters], sequence=sequence)


async def _call(
    adapter: QueueAdapter, letters: str, number: int, *, previous: int | None = None, producer: str = "p"
) -> Sequence[Receipt]:
    return await soon(_enqueue(adapter, letters, number, previous=previous, producer=producer))


async def _letters(adapter: QueueAdapter, queue: int = 0) -> str:
    """Return all letters stored in a queue."""
    await soon(adapter.enqueue([(queue, batch_of("s", "."))]))
    receiver = await adapter.open_receiver(queue)
    letters = ""
    while not letters.endswith("."):
        letters += "".join(batch.payloads()[0].decode() for batch in await take(receiver, 1, max_events=1))
    await receiver.aclose()
    return letters.removesuffix(".")
