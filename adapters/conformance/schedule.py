"""Tests of adapters with delays or priorities."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from ...streams.events import EventBatch, ScheduledBatch
from ...streams.identity import StreamId
from .harness import AdapterConformance, batch_of, contents, receiving, soon, take, turns

STREAM = StreamId("conformance", "scheduled")
LATER = timedelta(hours=1)


def scheduled(payload: str, delay: timedelta = timedelta(), priority: int = 0) -> ScheduledBatch:
    return ScheduledBatch.of_events(STREAM, [payload.encode()], delay, priority)


class ConformsToDelay(AdapterConformance):
    """For adapters that can delay events."""

    tests_group = "delay"

    async def test_a_delayed_batch_is_received_once_it_is_due(self, tmp_path: Path) -> None:
        batch = scheduled("later", timedelta(milliseconds=300))
        async with self.adapter(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            waiting = receiving(receiver)
            await soon(adapter.enqueue([(0, batch)]))
            await turns()
            assert not waiting.done()
            (received,) = (await soon(waiting)).batches
            assert contents(received) == contents(batch)

    async def test_others_do_not_wait_for_a_delayed_batch(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            await soon(adapter.enqueue([(0, scheduled("later", LATER)), (0, batch_of("s", "now"))]))
            assert _texts(await take(await adapter.open_receiver(0), 1)) == ["now"]

    async def test_batch_that_is_due_first_is_received_first(self, tmp_path: Path) -> None:
        delays = [300, 100, 200]
        async with self.adapter(tmp_path) as adapter:
            batches = [scheduled(str(ms), timedelta(milliseconds=ms)) for ms in delays]
            await soon(adapter.enqueue([(0, batch) for batch in batches]))
            assert _texts(await take(await adapter.open_receiver(0), 3)) == ["100", "200", "300"]

    async def test_a_delayed_batch_that_was_received_comes_again_until_it_is_acknowledged(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            await soon(adapter.enqueue([(0, scheduled("soon", timedelta(milliseconds=50)))]))
            first = await adapter.open_receiver(0)
            received = await take(first, 1)
            await first.aclose()
            second = await adapter.open_receiver(0)
            assert await take(second, 1) == received


class ConformsToPriority(AdapterConformance):
    """For adapters that can deliver some events before others."""

    tests_group = "priority"

    async def test_the_highest_priority_is_received_first(self, tmp_path: Path) -> None:
        priorities = [0, 50, 1, 99, 50]
        async with self.adapter(tmp_path) as adapter:
            for number, priority in enumerate(priorities):
                await soon(adapter.enqueue([(0, scheduled(f"{priority} {number}", priority=priority))]))
            received = await take(await adapter.open_receiver(0), 5)
        assert _texts(received) == ["99 3", "50 1", "50 4", "1 2", "0 0"]

    async def test_a_batch_without_a_priority_is_the_least_urgent(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            await soon(adapter.enqueue([(0, batch_of("s", "plain")), (0, scheduled("urgent", priority=1))]))
            assert _texts(await take(await adapter.open_receiver(0), 2)) == ["urgent", "plain"]


def _texts(batches: list[EventBatch]) -> list[str]:
    return [payload.decode() for batch in batches for payload in batch.payloads()]
