"""Tests of adapters that are not read-only."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pytest

from ...streams.errors import Closed, InvalidArgument, PayloadTooLarge
from ...streams.events import MAX_EVENT_BYTES, Event, EventBatch
from ...streams.identity import StreamId
from ..receiving import QueueReceiver
from ..seam import QueueAdapter
from .harness import BATCHES, batch_of, check_receipt, contents, receiving, soon, take, turns
from .offers import ReadingWithOffers
from .reading import ReadingTests
from .steps import RandomSteps


class ConformsToQueueAdapter(ReadingTests):
    """For adapters that are not read-only."""

    tests_group = "read-write"
    batch_events: ClassVar[int] = 4
    """Largest number of events in most batches of the suite. 1 for queues that store each event by itself."""

    async def fill(self, adapter: QueueAdapter, queues: int) -> None:
        """Batches of one to three events, of a few streams, some larger than others."""
        for number in range(BATCHES):
            payloads = [
                f"{number}.{index}" * (1 + number % 4 * 10) for index in range(min(1 + number % 3, self.batch_events))
            ]
            await adapter.enqueue([(queue, batch_of(f"{queue}-{number % 4}", *payloads)) for queue in range(queues)])

    async def expect_nothing(self, adapter: QueueAdapter, receiver: QueueReceiver, queue: int = 0) -> None:
        """Enqueue a batch, and check that it is the next one received."""
        waiting = receiving(receiver)
        await turns()
        await soon(adapter.enqueue([(queue, batch_of("marker", "enqueued now"))]))
        assert _payloads((await soon(waiting)).batches[:1]) == ["enqueued now"]

    async def test_enqueued_batches_are_received_unchanged(self, tmp_path: Path) -> None:
        batches = _all_sorts_of_batches()
        async with self.adapter(tmp_path) as adapter:
            receipts = await soon(adapter.enqueue([(0, batch) for batch in batches]))
            received = await take(await adapter.open_receiver(0), len(batches))
        assert [contents(batch)[0] for batch in received] == [batch.stream for batch in batches]
        for enqueued, batch, receipt in zip(batches, received, receipts, strict=True):
            assert contents(batch) == contents(enqueued)
            check_receipt(adapter, receipt, batch)
            assert not receipt.duplicate

    async def test_receipts_come_in_the_order_of_the_call_for_any_queues(self, tmp_path: Path) -> None:
        batches = [(number % 3, batch_of(str(number), "x")) for number in range(9)]
        async with self.adapter(tmp_path, queues=3) as adapter:
            receipts = await soon(adapter.enqueue(batches))
            received = [await take(await adapter.open_receiver(queue), 3) for queue in range(3)]
        for n, receipt in enumerate(receipts):
            check_receipt(adapter, receipt, received[n % 3][n // 3])
        assert [received[n % 3][n // 3].stream.key for n in range(9)] == [str(n) for n in range(9)]

    async def test_calls_are_stored_in_order_without_awaiting_in_between(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            calls = [asyncio.ensure_future(adapter.enqueue([(0, batch_of("a", str(n)))])) for n in range(200)]
            receipts = [receipt for call in calls for receipt in await soon(call)]
            received = await take(await adapter.open_receiver(0), 200)
        for receipt, batch in zip(receipts, received, strict=True):
            check_receipt(adapter, receipt, batch)
        assert _payloads(received) == [str(number) for number in range(200)]

    async def test_events_of_a_stream_keep_their_order_among_concurrent_producers(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:

            async def produce(key: str) -> None:
                for number in range(20):
                    await adapter.enqueue([(0, batch_of(key, f"{number}"))])

            async with asyncio.TaskGroup() as producers:
                for key in "abcdef":
                    producers.create_task(produce(key))
            received = await take(await adapter.open_receiver(0), 120)
        by_stream: defaultdict[StreamId, list[EventBatch]] = defaultdict(list)
        for batch in received:
            by_stream[batch.stream].append(batch)
        assert [_payloads(batches) for batches in by_stream.values()] == [[str(n) for n in range(20)]] * 6

    async def test_a_batch_can_be_enqueued_again_and_stays_as_it_was(self, tmp_path: Path) -> None:
        batch = batch_of("a", "x")
        batch.offset = 77
        async with self.adapter(tmp_path, queues=2) as adapter:
            await soon(adapter.enqueue([(0, batch), (0, batch), (1, batch)]))
            received = await take(await adapter.open_receiver(0), 2)
            received += await take(await adapter.open_receiver(1), 1)
        assert batch.offset == 77
        assert [contents(each) for each in received] == [contents(batch)] * 3
        assert not any(each is batch for each in received)

    async def test_the_list_of_a_call_belongs_to_the_caller(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            batches = [(0, batch_of("a", "x"))]
            call = adapter.enqueue(batches)
            batches.clear()
            assert len(await soon(call)) == 1
            assert _payloads(await take(await adapter.open_receiver(0), 1)) == ["x"]

    async def test_a_waiting_receive_is_woken_by_an_enqueue(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            for payload in "abc":
                waiting = receiving(receiver)
                await turns()
                assert not waiting.done()
                await soon(adapter.enqueue([(0, batch_of("s", payload))]))
                assert _payloads((await soon(waiting)).batches) == [payload]

    async def test_a_receive_waits_while_only_other_queues_have_something(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path, queues=2) as adapter:
            receiver = await adapter.open_receiver(0)
            await soon(adapter.enqueue([(1, batch_of("s", "x"))]))
            await self.expect_nothing(adapter, receiver)

    async def test_a_receive_cancelled_while_data_comes_loses_nothing(self, tmp_path: Path) -> None:
        """Cancelled some turns of the loop before or after the data came, which differ from time to time."""
        async with self.adapter(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            received: list[EventBatch] = []
            for number in range(60):
                waiting = receiving(receiver)
                await turns(number % 7)
                call = asyncio.ensure_future(adapter.enqueue([(0, batch_of("s", str(number)))]))
                await turns(number)
                waiting.cancel()
                await soon(asyncio.wait([waiting, call]))
                received += [] if waiting.cancelled() else waiting.result().batches
            if len(received) < 60:
                received += await take(receiver, 60 - len(received))
        assert _payloads(received) == [str(number) for number in range(60)]

    @pytest.mark.parametrize("seed", range(3))
    async def test_offered_and_received_batches_are_all_of_them_once_and_in_order(
        self, tmp_path: Path, seed: int
    ) -> None:
        """Some offers are accepted and some are not. An adapter need not offer anything."""
        async with self.adapter(tmp_path) as adapter:
            reading = ReadingWithOffers(await adapter.open_receiver(0), seed)
            for first in range(0, 120, 3):
                batches = [batch_of("s", str(number)) for number in range(first, first + 3)]
                calls = [asyncio.ensure_future(adapter.enqueue([(0, batch)])) for batch in batches]
                await soon(asyncio.gather(*calls) if first % 2 else calls[2])
                await turns(first % 7)
            await soon(reading.until(120))
            await reading.stop()
            assert _payloads(reading.found) == [str(number) for number in range(120)]
            assert await take(await adapter.open_receiver(0), 120) == reading.found

    async def test_bounds_of_an_empty_queue_are_empty_and_grow_with_it(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path, queues=2) as adapter:
            empty = await adapter.bounds(0)
            assert empty.first == empty.next
            (receipt,) = await soon(adapter.enqueue([(0, batch_of("s", "x"))]))
            assert receipt.token is not None
            bounds = await adapter.bounds(0)
            assert bounds.first <= receipt.token.offset < bounds.next
            other = await adapter.bounds(1)
            assert other.first == other.next

    async def test_the_largest_event_is_stored(self, tmp_path: Path) -> None:
        payload = random.Random(1).randbytes(MAX_EVENT_BYTES)  # noqa: S311 (data to test with)
        async with self.adapter(tmp_path) as adapter:
            await soon(adapter.enqueue([(0, EventBatch.of(StreamId("conformance", "large"), [payload]))]))
            (received,) = await take(await adapter.open_receiver(0), 1)
        assert received.payloads() == [payload]

    async def test_a_very_large_batch_is_stored_whole_or_refused_whole(self, tmp_path: Path) -> None:
        large = EventBatch.of(StreamId("conformance", "large"), [bytes(MAX_EVENT_BYTES)] * 24)
        batches = [batch_of("s", "before"), large, batch_of("s", "after")]
        async with self.adapter(tmp_path) as adapter:
            expected = batches
            try:
                await soon(adapter.enqueue([(0, batch) for batch in batches]))
            except PayloadTooLarge:
                expected = batches[:1]
                await soon(adapter.enqueue([(0, batches[0])]))
            received = await take(await adapter.open_receiver(0), len(expected))
        assert [contents(batch) for batch in received] == [contents(batch) for batch in expected]

    @pytest.mark.parametrize("queue", [-1, 2])
    async def test_a_call_with_an_unknown_queue_is_refused_whole(self, tmp_path: Path, queue: int) -> None:
        async with self.adapter(tmp_path, queues=2) as adapter:
            with pytest.raises(InvalidArgument):
                await soon(adapter.enqueue([(0, batch_of("s", "x")), (queue, batch_of("s", "y"))]))
            await self.expect_nothing(adapter, await adapter.open_receiver(0))

    async def test_closing_finishes_earlier_calls(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            calls = [asyncio.ensure_future(adapter.enqueue([(0, batch_of("s", str(n)))])) for n in range(50)]
            await soon(adapter.aclose())
            receipts = list(chain.from_iterable([await soon(call) for call in calls]))
        assert len({receipt.token for receipt in receipts}) == 50

    async def test_a_closed_adapter_refuses_to_enqueue(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            await soon(adapter.aclose())
            with pytest.raises(Closed):
                await soon(adapter.enqueue([(0, batch_of("s", "x"))]))

    @pytest.mark.parametrize("seed", range(12))
    async def test_random_steps_match_a_list(self, tmp_path: Path, seed: int) -> None:
        async with self.adapter(tmp_path, queues=3) as adapter:
            await RandomSteps(adapter, queues=3, seed=seed, batch_events=self.batch_events).run(steps=80)


def _all_sorts_of_batches() -> list[EventBatch]:
    odd_names = [("", ""), ("a/b", "c"), ("a", "b/c"), ("überall", "ключ\n\x00"), ("n" * 1024, "k" * 1024)]
    plain = [EventBatch.of(StreamId(namespace, key), [b"x"]) for namespace, key in odd_names]
    stream = StreamId("conformance", "rich")
    rich = [
        Event(b"one", headers={"type": "größer", "": "empty"}, id="id-1", timestamp_us=1_700_000_000_000_001),
        Event(b"", id="id-2", timestamp_us=-5),
        Event(bytes(range(256)), headers={"k": ""}),
    ]
    return [
        *plain,
        EventBatch.of(stream, rich),
        EventBatch.of(stream, [b""]),
        EventBatch.of(stream, [b"", b""]),
        EventBatch.of(stream, [str(number).encode() for number in range(3000)]),
    ]


def _payloads(batches: Iterable[EventBatch]) -> list[str]:
    return [payload.decode() for batch in batches for payload in batch.payloads()]
