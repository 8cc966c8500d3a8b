"""Tests of durable adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ...streams.events import EventBatch
from ..seam import QueueAdapter
from .harness import BATCHES, AdapterConformance, batch_of, receiving, soon, take, turns


class ConformsToDurable(AdapterConformance):
    """For durable adapters. They are opened again on their directory, and opened twice at once."""

    tests_group = "durable"

    async def test_everything_survives_a_restart(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path, queues=2) as adapter:
            before = [await _read(adapter, queue, BATCHES) for queue in range(2)]
        async with self.adapter(tmp_path, queues=2) as adapter:
            assert [await _read(adapter, queue, BATCHES) for queue in range(2)] == before

    async def test_last_enqueued_batch_survives_a_restart(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            calls = [asyncio.ensure_future(adapter.enqueue([(0, batch_of("s", str(n)))])) for n in range(50)]
        for call in calls:
            await soon(call)
        async with self.adapter(tmp_path) as adapter:
            received = await _read(adapter, 0, 50)
        assert [batch.payloads() for batch in received] == [[str(number).encode()] for number in range(50)]

    async def test_only_unacknowledged_batches_come_again_after_a_restart(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            received = await take(receiver, BATCHES)
            await receiver.acknowledge(received[7].offset)
        async with self.adapter(tmp_path) as adapter:
            assert await _read(adapter, 0, BATCHES - 7) == received[7:]

    async def test_offsets_go_on_after_a_restart(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            bounds = await adapter.bounds(0)
        async with self.adapter(tmp_path) as adapter:
            assert await adapter.bounds(0) == bounds
            (receipt,) = await soon(adapter.enqueue([(0, batch_of("s", "x"))]))
        assert receipt.token is not None
        assert receipt.token.offset >= bounds.next

    async def test_offsets_go_on_after_a_restart_with_everything_acknowledged(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            await take(receiver, BATCHES)
            end = (await adapter.bounds(0)).next
            await receiver.acknowledge(end)
            await adapter.apply_retention({0: end})
        async with self.adapter(tmp_path) as adapter:
            assert (await adapter.bounds(0)).next == end
            (receipt,) = await soon(adapter.enqueue([(0, batch_of("s", "x"))]))
            assert receipt.token is not None
            assert receipt.token.offset >= end
            assert [batch.payloads() for batch in await _read(adapter, 0, 1)] == [[b"x"]]

    async def test_enqueue_of_one_handle_wakes_the_receiver_of_another(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as one, self.adapter(tmp_path) as two:
            for number, (writer, reader) in enumerate(((one, two), (two, one))):
                receiver = await reader.open_receiver(0)
                await take(receiver, number)
                waiting = receiving(receiver)
                await turns()
                assert not waiting.done()
                await soon(writer.enqueue([(0, batch_of("s", str(number)))]))
                assert [batch.payloads() for batch in (await soon(waiting)).batches] == [[str(number).encode()]]

    async def test_two_handles_store_everything_once_and_in_order(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as one, self.adapter(tmp_path) as two:

            async def produce(adapter: QueueAdapter, key: str) -> None:
                for number in range(30):
                    await adapter.enqueue([(0, batch_of(key, str(number)))])

            async with asyncio.TaskGroup() as producers:
                for adapter, key in ((one, "a"), (two, "b"), (one, "c"), (two, "d")):
                    producers.create_task(produce(adapter, key))
            received = await _read(one, 0, 120)
            assert await _read(two, 0, 120) == received
        for key in "abcd":
            mine = [batch.payloads()[0] for batch in received if batch.stream.key == key]
            assert mine == [str(number).encode() for number in range(30)]

    async def test_acknowledgement_of_one_handle_counts_for_the_other(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as one:
            receiver = await one.open_receiver(0)
            received = await take(receiver, BATCHES)
            await receiver.acknowledge(received[4].offset)
            await soon(one.aclose())
            async with self.adapter(tmp_path) as two:
                assert await _read(two, 0, BATCHES - 4) == received[4:]

    async def test_closing_one_handle_leaves_the_other_open(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as one, self.adapter(tmp_path) as two:
            await soon(one.aclose())
            await soon(two.enqueue([(0, batch_of("s", "x"))]))
            assert (await _read(two, 0, BATCHES + 1))[-1].payloads() == [b"x"]

    async def test_handles_agree_on_the_bounds(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as one, self.adapter(tmp_path) as two:
            assert await one.bounds(0) == await two.bounds(0)


async def _read(adapter: QueueAdapter, queue: int, batches: int) -> list[EventBatch]:
    receiver = await adapter.open_receiver(queue)
    received = await take(receiver, batches)
    await receiver.aclose()
    return received
