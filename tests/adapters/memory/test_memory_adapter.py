"""The memory adapter beyond the conformance suite: capacity, isolation, release of memory."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from headrace import Closed, EventBatch, InvalidArgument, QueueFull, StreamId
from headrace.adapters import AdapterContext, Bounds, ProducerSequence, QueueReceiver, Receipt, open_adapter
from headrace.adapters.memory import MemoryAdapter, MemoryOptions

STREAM = StreamId("tests", "memory")
Opening = Callable[..., MemoryAdapter]


@pytest.fixture
async def opened() -> AsyncIterator[Opening]:
    async with AsyncExitStack() as stack:

        def opening(queues: int = 1, **options: Any) -> MemoryAdapter:
            adapter = MemoryAdapter(AdapterContext(provider="tests", queues=queues), MemoryOptions(**options))
            stack.push_async_callback(adapter.aclose)
            return adapter

        yield opening


def batch(*payloads: str) -> EventBatch:
    return EventBatch.of(STREAM, [payload.encode() for payload in payloads])


def singles(payloads: str) -> list[tuple[int, EventBatch]]:
    """One batch of one event per letter, for queue 0."""
    return [(0, batch(letter)) for letter in payloads]


def begun(enqueued: Awaitable[Sequence[Receipt]]) -> asyncio.Future[Sequence[Receipt]]:
    return asyncio.ensure_future(enqueued)


async def letters(receiver: QueueReceiver, max_events: int = 100) -> str:
    """What one receive brings."""
    received = await receiver.receive(max_events, 1 << 20)
    return b"".join(payload for part in received.batches for payload in part.payloads()).decode()


async def test_a_full_queue_refuses_where_the_producer_does_not_wait(opened: Opening):
    adapter = opened(queues=3, capacity=10, segment_size=2, when_full="fail")
    for number in range(10):
        await adapter.enqueue([(number % 3, batch("x"))])
    with pytest.raises(QueueFull, match="no capacity for 1 events, 0 are free of 10"):
        await adapter.enqueue([(0, batch("x"))])


async def test_a_call_above_the_room_left_is_refused_whole(opened: Opening):
    adapter = opened(queues=2, capacity=3, when_full="fail")
    await adapter.enqueue(singles("a"))
    with pytest.raises(QueueFull):
        await adapter.enqueue([(0, batch("b")), (1, batch("c", "d"))])
    assert [await adapter.bounds(queue) for queue in range(2)] == [Bounds(0, 1), Bounds(0, 0)]
    await adapter.enqueue([(1, batch("c", "d"))])


async def test_a_call_above_the_capacity_is_refused_whole_where_the_producer_does_not_wait(opened: Opening):
    adapter = opened(capacity=2, when_full="fail")
    with pytest.raises(QueueFull):
        await adapter.enqueue(singles("abc"))
    assert await adapter.bounds(0) == Bounds(0, 0)


async def test_a_call_above_the_capacity_is_stored_in_slices_where_the_producer_waits(opened: Opening):
    adapter = opened(capacity=2)
    receiver = await adapter.open_receiver(0)
    storing = begun(adapter.enqueue(singles("abc")))
    assert await letters(receiver) == "ab"
    assert not storing.done()
    await receiver.acknowledge(2)
    assert await letters(receiver) == "c"
    assert [receipt.token for receipt in await storing] == [(0, 0), (1, 0), (2, 0)]


async def test_the_list_of_a_waiting_call_belongs_to_the_caller(opened: Opening):
    adapter = opened(capacity=1)
    receiver = await adapter.open_receiver(0)
    await adapter.enqueue(singles("a"))
    batches = singles("b")
    waiting = begun(adapter.enqueue(batches))
    batches.clear()
    await receiver.acknowledge(1)
    assert len(await waiting) == 1
    assert await letters(receiver) == "b"


async def test_nothing_comes_between_the_slices_of_a_call(opened: Opening):
    adapter = opened(capacity=2)
    receiver = await adapter.open_receiver(0)
    storing = [begun(adapter.enqueue(singles("abcd"))), begun(adapter.enqueue(singles("e")))]
    seen = ""
    while len(seen) < 5:
        seen += await letters(receiver, max_events=1)
        await receiver.acknowledge(len(seen))
    assert seen == "abcde"
    await asyncio.gather(*storing)


async def test_waiting_calls_are_stored_in_the_order_in_which_they_were_made(opened: Opening):
    adapter = opened(capacity=3)
    receiver = await adapter.open_receiver(0)
    calls = [begun(adapter.enqueue([(0, batch(*letter)) for letter in part])) for part in ("abc", ["de"], "f")]
    await calls[0]
    assert await letters(receiver) == "abc"
    await receiver.acknowledge(1)
    assert await adapter.bounds(0) == Bounds(1, 3)  # room for f, but de came first
    await receiver.acknowledge(2)
    assert await letters(receiver) == "de"
    await receiver.acknowledge(3)
    assert await letters(receiver) == "f"
    await asyncio.gather(*calls)


async def test_room_comes_back_in_the_middle_of_a_segment_and_over_all_queues(opened: Opening):
    adapter = opened(queues=2, capacity=2, segment_size=1024)
    receiver = await adapter.open_receiver(0)
    await adapter.enqueue(singles("ab"))
    waiting = begun(adapter.enqueue([(1, batch("c"))]))
    await receiver.acknowledge(1)
    await waiting
    assert await adapter.bounds(1) == Bounds(0, 1)


async def test_a_cancelled_call_stores_nothing_and_lets_the_next_one_in(opened: Opening):
    adapter = opened(capacity=3)
    receiver = await adapter.open_receiver(0)
    await adapter.enqueue(singles("ab"))
    large, small = begun(adapter.enqueue(singles("xyz"))), begun(adapter.enqueue(singles("c")))
    large.cancel()
    await small
    await receiver.acknowledge(3)
    assert await adapter.bounds(0) == Bounds(3, 3)


async def test_a_call_cancelled_just_before_room_comes_stores_nothing(opened: Opening):
    adapter = opened(capacity=1)
    receiver = await adapter.open_receiver(0)
    await adapter.enqueue(singles("a"))
    waiting = begun(adapter.enqueue(singles("b")))
    waiting.cancel()
    await receiver.acknowledge(1)
    assert await adapter.bounds(0) == Bounds(1, 1)


async def test_a_call_that_has_begun_is_completed_though_cancelled(opened: Opening):
    adapter = opened(capacity=2)
    receiver = await adapter.open_receiver(0)
    storing = begun(adapter.enqueue(singles("abc"), sequence=ProducerSequence("p", 1, 0)))
    storing.cancel()
    await asyncio.wait([storing])
    assert await letters(receiver) == "ab"
    await receiver.acknowledge(2)
    assert await letters(receiver) == "c"
    assert [r.duplicate for r in await adapter.enqueue(singles("abc"), sequence=ProducerSequence("p", 1, 0))] == [
        True
    ] * 3


async def test_a_duplicate_of_a_waiting_call_is_recognised_when_its_turn_comes(opened: Opening):
    adapter = opened(capacity=2)
    receiver = await adapter.open_receiver(0)
    await adapter.enqueue(singles("ab"))
    first, again = (begun(adapter.enqueue(singles("cd"), sequence=ProducerSequence("p", 1, 0))) for _ in range(2))
    await receiver.acknowledge(2)
    assert [receipt.duplicate for answer in (await first, await again) for receipt in answer] == [
        False,
        False,
        True,
        True,
    ]
    assert await letters(receiver) == "cd"


async def test_a_duplicate_takes_no_room(opened: Opening):
    adapter = opened(capacity=2, when_full="fail")
    sequence = ProducerSequence("p", 1, 0)
    stored = await adapter.enqueue(singles("ab"), sequence=sequence)
    assert await adapter.enqueue(singles("ab"), sequence=sequence) == [Receipt(r.token, True) for r in stored]


async def test_a_batch_that_never_fits_is_refused(opened: Opening):
    adapter = opened(capacity=2)
    with pytest.raises(InvalidArgument, match="3 events for tests/memory never fits"):
        await adapter.enqueue([(0, batch("a")), (0, batch("b", "c", "d"))])
    assert await adapter.bounds(0) == Bounds(0, 0)


async def test_without_a_bound_everything_fits(opened: Opening):
    adapter = opened(capacity=None)
    await adapter.enqueue([(0, batch(*"x" * 1000))] * 200)
    assert (await adapter.statistics(0)).events == 200_000


async def test_closing_refuses_the_calls_that_wait_for_room(opened: Opening):
    adapter = opened(capacity=2)
    await adapter.enqueue(singles("a"))
    waiting = [begun(adapter.enqueue(singles("bc"))), begun(adapter.enqueue(singles("d")))]
    await adapter.aclose()
    for call in waiting:
        with pytest.raises(Closed, match="waited for capacity"):
            await call


async def test_batches_of_different_receivers_are_different_objects(opened: Opening):
    adapter = opened()
    await adapter.enqueue(singles("a"))
    first, again = [(await (await adapter.open_receiver(0)).receive(1, 1)).batches[0] for _ in range(2)]
    assert first == again
    assert first is not again


async def test_a_new_receiver_of_a_queue_supersedes_the_one_before(opened: Opening):
    adapter = opened()
    first = await adapter.open_receiver(0)
    waiting = asyncio.create_task(first.receive(1, 1))
    await asyncio.sleep(0)
    second = await adapter.open_receiver(0)
    with pytest.raises(Closed, match="another receiver of the queue"):
        await waiting
    with pytest.raises(Closed):
        await first.acknowledge(0)
    await first.aclose()
    await adapter.enqueue(singles("a"))
    assert await letters(second) == "a"


async def test_memory_is_let_go_when_the_receiver_has_acknowledged(opened: Opening):
    adapter = opened()
    receiver = await adapter.open_receiver(0)
    key = Anchor("held by its batch alone")
    held = weakref.ref(key)
    await adapter.enqueue([(0, EventBatch.of(StreamId("tests", key), [b"x"]))])
    del key
    gc.collect()
    assert held() is not None
    await receiver.acknowledge(1)
    gc.collect()
    assert held() is None
    assert (await adapter.statistics(0)) == (Bounds(1, 1), 0, 0)


class Anchor(str):
    """A key that can be weakly referenced: shows whether anything still holds a batch of its stream."""

    __slots__ = ("__weakref__",)


async def test_acknowledging_ahead_of_reading_skips(opened: Opening):
    adapter = opened(segment_size=2)
    receiver = await adapter.open_receiver(0)
    await adapter.enqueue(singles("abcde"))
    assert await letters(receiver, max_events=1) == "a"
    await receiver.acknowledge(4)
    assert await letters(receiver) == "e"


async def test_acknowledging_unknown_offsets_is_refused(opened: Opening):
    adapter = opened()
    receiver = await adapter.open_receiver(0)
    with pytest.raises(InvalidArgument, match="the next batch will have offset 0"):
        await receiver.acknowledge(1)


async def test_adapters_of_one_name_do_not_share_data(opened: Opening):
    one, two = opened(), opened()
    await one.enqueue(singles("a"))
    assert (await one.bounds(0), await two.bounds(0)) == (Bounds(0, 1), Bounds(0, 0))


async def test_statistics_count_held_batches(opened: Opening):
    adapter = opened()
    receiver = await adapter.open_receiver(0)
    parts = [batch("a", "b"), batch("c")]
    await adapter.enqueue([(0, part) for part in parts])
    assert await adapter.statistics(0) == (Bounds(0, 2), 3, sum(part.nbytes for part in parts))
    await receiver.acknowledge(1)
    assert await adapter.statistics(0) == (Bounds(1, 2), 1, parts[1].nbytes)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capacity": 0}, "capacity"),
        ({"segment_size": 0}, "segment_size"),
        ({"when_full": "drop"}, "when_full"),
        ({"capcity": 1}, "capcity"),
    ],
)
async def test_a_wrong_option_is_named(options: dict[str, Any], named: str):
    with pytest.raises(InvalidArgument, match=named):
        await open_adapter("memory", AdapterContext(provider="tests", queues=1), options)


@pytest.mark.parametrize("batch_size", [1, 10, 100, 1000])
async def test_the_receivers_get_exactly_everything_from_concurrent_producers(opened: Opening, batch_size: int):
    queues, producers, each = 4, 4, 256
    adapter = opened(queues=queues, capacity=300, segment_size=16)
    total: list[bytes] = []

    async def produce(producer: int) -> None:
        for number in range(each):
            await adapter.enqueue([(number % queues, batch(f"{producer}.{number:03}"))])

    async def consume(queue: int) -> None:
        receiver = await adapter.open_receiver(queue)
        seen = 0
        while seen < producers * each // queues:
            received = await receiver.receive(batch_size, 1 << 20)
            total.extend(payload for part in received.batches for payload in part.payloads())
            seen += len(received.batches)
            await receiver.acknowledge(received.next_offset)

    async with asyncio.TaskGroup() as tasks:
        for queue in range(queues):
            tasks.create_task(consume(queue))
        await asyncio.sleep(0)
        for producer in range(producers):
            tasks.create_task(produce(producer))
    assert sorted(total) == sorted(f"{p}.{n:03}".encode() for p in range(producers) for n in range(each))
