"""Tests of every adapter, read-only or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ...streams.errors import Closed, InvalidArgument, NotSupported
from ...streams.events import EventBatch
from ..receiving import QueueReceiver
from ..seam import Capabilities, ProducerSequence, QueueAdapter
from .harness import ANY, BATCHES, AdapterConformance, check_answer, receiving, soon, take, turns


class ReadingTests(AdapterConformance):
    """Reads filled queues: order, limits, acknowledgement, cancellation, shutdown."""

    async def test_the_inherited_classes_are_those_that_the_capabilities_ask_for(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            declared = _groups(adapter.capabilities)
        inherited = {vars(kind)["tests_group"] for kind in type(self).__mro__ if "tests_group" in vars(kind)}
        assert inherited == declared, "inherit from the classes that fit the capabilities, and from no others"

    async def test_undeclared_capability_is_refused(self, tmp_path: Path) -> None:
        async with self.adapter(tmp_path) as adapter:
            if not adapter.capabilities.rewindable:
                await _refused(lambda: adapter.open_receiver(0, 0))
                await _refused(lambda: adapter.offset_at(0, 0))
                await _refused(lambda: adapter.end_within(0, 0, 1, 1, None))
            if not adapter.capabilities.idempotent:
                await _refused(lambda: adapter.enqueue([], sequence=ProducerSequence("p", 1, 0)))
                await _refused(lambda: adapter.last_sequence("p"))

    async def test_offsets_strictly_increase_within_the_bounds(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            received = await take(await adapter.open_receiver(0), BATCHES)
            bounds = await adapter.bounds(0)
        assert 0 <= bounds.first <= received[0].offset
        assert received[-1].offset < bounds.next

    async def test_events_carry_the_token_of_their_place(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            received = await take(await adapter.open_receiver(0), BATCHES)
        for batch in received:
            events = batch.events()
            assert [event.token for event in events] == [(batch.offset, index) for index in range(batch.count)]
            assert {event.stream for event in events} == {batch.stream}

    @pytest.mark.parametrize(
        ("max_events", "max_bytes"), [(1, ANY), (ANY, 1), (1, 1), (5, ANY), (ANY, 300), (7, 200), (ANY, ANY)]
    )
    async def test_receiving_with_limits_brings_the_same(self, tmp_path: Path, max_events: int, max_bytes: int) -> None:
        async with self.filled(tmp_path) as adapter:
            everything = await _read_once(adapter)
            receiver = await adapter.open_receiver(0)
            assert await take(receiver, BATCHES, max_events=max_events, max_bytes=max_bytes) == everything

    async def test_a_batch_above_the_limit_is_received_alone(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            for _ in range(BATCHES):
                assert len((await soon(receiver.receive(1, 1))).batches) == 1

    async def test_next_offset_is_where_the_receiver_goes_on(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            position = 0
            for _ in range(BATCHES):
                received = await soon(receiver.receive(1, 1))
                check_answer(received, 1, 1)
                assert received.batches[0].offset >= position
                position = received.next_offset
            assert position <= (await adapter.bounds(0)).next

    async def test_unacknowledged_batches_come_again_from_the_next_receiver(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            everything = await _read_once(adapter)
            assert await _read_once(adapter) == everything

    async def test_a_second_receiver_gets_everything_not_acknowledged_too(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            first = await adapter.open_receiver(0)
            received = await take(first, 1, max_events=1)
            await first.acknowledge(received[0].offset)
            second = await adapter.open_receiver(0)
            assert (await take(second, BATCHES))[0] == received[0]
            await second.aclose()
            await first.aclose()

    async def test_acknowledged_batches_do_not_come_again(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            received = await take(receiver, BATCHES)
            await receiver.acknowledge(received[5].offset)
            await receiver.aclose()
            assert await take(await adapter.open_receiver(0), BATCHES - 5) == received[5:]

    async def test_acknowledging_everything_leaves_nothing(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            received = await take(receiver, BATCHES)
            await receiver.acknowledge(received[-1].offset + 1)
            await receiver.aclose()
            await self.expect_nothing(adapter, await adapter.open_receiver(0))

    async def test_acknowledging_never_moves_backwards(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            received = await take(receiver, BATCHES)
            for done in (5, 3, 0):
                await receiver.acknowledge(received[done].offset)
            await receiver.aclose()
            assert (await take(await adapter.open_receiver(0), BATCHES - 5))[0].offset == received[5].offset

    async def test_acknowledging_does_not_disturb_the_receiver(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            everything = await _read_once(adapter)
            receiver = await adapter.open_receiver(0)
            received: list[EventBatch] = []
            while len(received) < BATCHES:
                received += await take(receiver, 1, max_events=1)
                await receiver.acknowledge(received[-1].offset + len(received) % 2)
            assert received == everything

    async def test_batches_received_twice_are_different_objects(self, tmp_path: Path) -> None:
        """Each holder of a batch may write to its cache fields."""
        async with self.filled(tmp_path) as adapter:
            first, second = await _read_once(adapter), await _read_once(adapter)
            assert first == second
            assert not {id(batch) for batch in first} & {id(batch) for batch in second}

    async def test_cancelled_receives_lose_nothing(self, tmp_path: Path) -> None:
        """A receive is cancelled after 0, 1, 2 … turns of the loop. Batches that it still returned count as
        received."""
        async with self.filled(tmp_path) as adapter:
            everything = await _read_once(adapter)
            receiver = await adapter.open_receiver(0)
            received: list[EventBatch] = []
            patience = 0
            while len(received) < BATCHES:
                task = asyncio.create_task(receiver.receive(1, 1))
                await turns(patience)
                task.cancel()
                await soon(asyncio.wait([task]))
                received += [] if task.cancelled() else task.result().batches
                patience = patience + 1 if task.cancelled() else 0
                if patience > 10:
                    received += await take(receiver, 1, max_events=1)
            assert received == everything

    async def test_closing_a_receiver_wakes_its_waiting_receive(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            await take(receiver, BATCHES)
            waiting = receiving(receiver)
            await turns()
            await receiver.aclose()
            with pytest.raises(Closed):
                await soon(waiting)

    async def test_closing_the_adapter_wakes_a_waiting_receive(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            await take(receiver, BATCHES)
            waiting = receiving(receiver)
            await turns()
            await soon(adapter.aclose())
            with pytest.raises(Closed):
                await soon(waiting)

    async def test_a_closed_receiver_is_refused_and_the_adapter_goes_on(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            await receiver.aclose()
            await receiver.aclose()
            with pytest.raises(Closed):
                await soon(receiver.receive(1, 1))
            await take(await adapter.open_receiver(0), BATCHES)

    async def test_a_closed_adapter_is_refused(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            receiver = await adapter.open_receiver(0)
            await soon(adapter.aclose())
            await soon(adapter.aclose())
            await receiver.aclose()
            for refused in (
                lambda: receiver.receive(1, 1),
                lambda: adapter.open_receiver(0),
                lambda: adapter.bounds(0),
            ):
                with pytest.raises(Closed):
                    await soon(refused())

    @pytest.mark.parametrize("queue", [-1, 2])
    async def test_a_queue_that_does_not_exist_is_refused(self, tmp_path: Path, queue: int) -> None:
        async with self.adapter(tmp_path, queues=2) as adapter:
            for refused in (adapter.open_receiver, adapter.bounds, adapter.statistics):
                with pytest.raises(InvalidArgument):
                    await refused(queue)

    async def test_queues_are_independent(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path, queues=2) as adapter:
            one, two = [await adapter.open_receiver(queue) for queue in range(2)]
            received = await take(one, BATCHES)
            await one.acknowledge(received[-1].offset + 1)
            assert await take(two, BATCHES) != received
            await two.aclose()
            await take(await adapter.open_receiver(1), BATCHES)

    async def test_statistics_have_the_bounds(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            await take(await adapter.open_receiver(0), BATCHES)
            assert (await adapter.statistics(0)).bounds == await adapter.bounds(0)

    async def test_retention_keeps_unfinished_batches(self, tmp_path: Path) -> None:
        async with self.filled(tmp_path) as adapter:
            everything = await _read_once(adapter)
            await adapter.apply_retention({0: everything[0].offset})
            assert await _read_once(adapter) == everything


def _groups(capabilities: Capabilities) -> set[str]:
    """The groups of tests that an adapter with these capabilities has to pass. For the other side of each, see
    `AdapterConformance.tests_group`."""
    if capabilities.read_only:
        return {"read-only"} | ({"rewindable read-only"} if capabilities.rewindable else set())
    flags = {
        name for name in ("rewindable", "durable", "idempotent", "delay", "priority") if getattr(capabilities, name)
    }
    return {"read-write"} | flags


async def _refused(call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(NotSupported):
        await call()


async def _read_once(adapter: QueueAdapter) -> list[EventBatch]:
    """Everything in queue 0, by a receiver of its own that acknowledges nothing."""
    receiver: QueueReceiver = await adapter.open_receiver(0)
    received = await take(receiver, BATCHES)
    await receiver.aclose()
    return received
