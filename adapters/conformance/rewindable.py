"""Tests of rewindable adapters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ...streams.errors import InvalidArgument
from ...streams.events import EventBatch
from ..seam import QueueAdapter
from .harness import ANY, BATCHES, AdapterConformance, batch_of, receiving, soon, take, turns

_LONG_AGO_US = 0
_FAR_AHEAD_US = 1 << 60


class RewindingTests(AdapterConformance):
    """Rewinds in filled queues, by offset and by time."""

    async def test_a_receiver_can_start_at_any_offset(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            everything = await take(await adapter.open_receiver(0), BATCHES)
            for index, batch in enumerate(everything):
                receiver = await adapter.open_receiver(0, batch.offset)
                assert await take(receiver, BATCHES - index) == everything[index:]
                await receiver.aclose()

    async def test_a_receiver_that_starts_at_the_next_offset_waits(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            await take(await adapter.open_receiver(0), BATCHES)
            end = (await adapter.bounds(0)).next
            await self.expect_nothing(adapter, await adapter.open_receiver(0, end))

    async def test_a_start_above_the_next_offset_is_refused(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            await take(await adapter.open_receiver(0), BATCHES)
            end = (await adapter.bounds(0)).next
            with pytest.raises(InvalidArgument):
                await adapter.open_receiver(0, end + 1)

    async def test_receivers_of_one_queue_are_independent(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            one, two = await adapter.open_receiver(0), await adapter.open_receiver(0, 0)
            for _ in range(BATCHES):
                assert await take(one, 1, max_events=1) == await take(two, 1, max_events=1)
            await one.aclose()
            await self.expect_nothing(adapter, two)

    async def test_starting_at_an_offset_moves_no_other_receiver(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            everything = await take(await adapter.open_receiver(0), BATCHES)
            await take(await adapter.open_receiver(0, everything[7].offset), BATCHES - 7)
            assert await take(await adapter.open_receiver(0), BATCHES) == everything

    async def test_the_offsets_of_times_before_and_after_everything_are_the_bounds(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            await take(await adapter.open_receiver(0), BATCHES)
            assert await adapter.offset_at(0, _LONG_AGO_US) == (await adapter.bounds(0)).first
            assert await adapter.offset_at(0, _FAR_AHEAD_US) == (await adapter.bounds(0)).next

    async def test_limits_reach_as_far_as_their_events_and_bytes(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            everything = await take(await adapter.open_receiver(0), BATCHES)
            events = sum(batch.count for batch in everything)
            nbytes = sum(batch.nbytes for batch in everything)
            limits = [(0, None), (None, 0), (events, nbytes), (None, None)]
            limits += [(number, None) for number in range(1, events, max(events // 20, 1))]
            limits += [(None, number) for number in range(1, nbytes, max(nbytes // 20, 1))]
            for index in (0, 1, BATCHES - 1):
                batches = everything[index:]
                start, end = batches[0].offset, batches[-1].offset + 1
                for max_events, max_bytes in limits:
                    reached = await soon(adapter.end_within(0, start, end, max_events, max_bytes))
                    assert reached == _reached(batches, max_events, max_bytes)

    async def test_limits_reach_to_the_end_that_is_given_and_to_that_of_the_queue(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            everything = await take(await adapter.open_receiver(0), BATCHES)
            first, middle, end = everything[0].offset, everything[BATCHES // 2].offset, (await adapter.bounds(0)).next
            for max_events in (ANY, None):
                assert await soon(adapter.end_within(0, first, middle, max_events, None)) == middle
                assert await soon(adapter.end_within(0, first, end + 1, max_events, None)) == end
                assert await soon(adapter.end_within(0, end, end + 1, max_events, None)) == end
                assert await soon(adapter.end_within(0, first, first, max_events, None)) == first


class ConformsToRewindableReadOnly(RewindingTests):
    """For read-only rewindable adapters."""

    tests_group = "rewindable read-only"


class ConformsToRewindable(RewindingTests):
    """For rewindable adapters that are not read-only."""

    tests_group = "rewindable"

    async def test_a_receiver_can_start_at_a_time(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            moments: list[int] = []
            tokens: list[int] = []
            for number in range(4):
                moments.append(await _a_moment_of_its_own(adapter))
                (receipt,) = await soon(adapter.enqueue([(0, batch_of("s", str(number)))]))
                assert receipt.token is not None
                tokens.append(receipt.token.offset)
            moments.append(await _a_moment_of_its_own(adapter))
            found = [await adapter.offset_at(0, moment) for moment in moments]
            end = (await adapter.bounds(0)).next
        assert found == [*tokens, end]

    async def test_a_time_finds_the_batch_that_was_stored_at_exactly_that_time(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            tokens: list[int] = []
            for number in range(2):
                await _a_moment_of_its_own(adapter)
                (receipt,) = await soon(adapter.enqueue([(0, batch_of("s", str(number)))]))
                assert receipt.token is not None
                tokens.append(receipt.token.offset)
            stored_us = (await adapter.backlog(0, tokens[1])).since_us
            assert stored_us is not None, "a rewindable adapter knows when a batch was stored"
            found = [await adapter.offset_at(0, stored_us + difference_us) for difference_us in (-1, 0, 1)]
            end = (await adapter.bounds(0)).next
        assert found == [tokens[1], tokens[1], end]

    async def test_a_receiver_at_the_end_gets_later_batches(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0, (await adapter.bounds(0)).next)
            waiting = receiving(receiver)
            await turns()
            await soon(adapter.enqueue([(0, batch_of("s", "new"))]))
            assert [batch.payloads() for batch in (await soon(waiting)).batches] == [[b"new"]]

    async def test_all_receivers_of_a_queue_are_woken(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            waiting = [receiving(await adapter.open_receiver(0)) for _ in range(3)]
            await turns()
            await soon(adapter.enqueue([(0, batch_of("s", "x"))]))
            for received in waiting:
                assert [batch.payloads() for batch in (await soon(received)).batches] == [[b"x"]]


def _reached(batches: Sequence[EventBatch], max_events: int | None, max_bytes: int | None) -> int:
    """Return the offset after the last batch within the limits, counted batch by batch."""
    events = nbytes = 0
    for index, batch in enumerate(batches):
        events, nbytes = events + batch.count, nbytes + batch.nbytes
        over = (max_events is not None and events > max_events) or (max_bytes is not None and nbytes > max_bytes)
        if over and index:
            return batch.offset
    return batches[-1].offset + 1


async def _a_moment_of_its_own(adapter: QueueAdapter) -> int:
    """Return a time in microseconds that separates earlier commits from later ones."""
    resolution = adapter.capabilities.time_resolution_us
    now = await _clock_after(time.time_ns() // 1000)
    moment = (now // resolution + 1) * resolution  # the first time that the adapter can tell from earlier ones
    await _clock_after(moment)
    return moment


async def _clock_after(moment: int) -> int:
    while (now := time.time_ns() // 1000) <= moment:  # noqa: ASYNC110 (a microsecond: no event tells of the clock)
        await asyncio.sleep(0)
    return now
