"""The generator beyond the conformance suite: its data, its faults, reconfiguration."""

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from headrace import EventBatch, InvalidArgument, StorageError, StreamId
from headrace.adapters import AdapterContext, QueueReceiver, Received, open_adapter
from headrace.adapters.generator import POISON, GeneratorAdapter, GeneratorOptions
from headrace.proto.v1 import events_pb2

Opening = Callable[..., GeneratorAdapter]


@pytest.fixture
async def opened() -> AsyncIterator[Opening]:
    async with AsyncExitStack() as stack:

        def opening(
            queues: int = 1, queue_of: Callable[[StreamId], int] | None = None, **options: Any
        ) -> GeneratorAdapter:
            context = AdapterContext(provider="tests", queues=queues, queue_of=queue_of)
            adapter = GeneratorAdapter(context, GeneratorOptions(**options))
            stack.push_async_callback(adapter.aclose)
            return adapter

        yield opening


class Clock:
    """The loop's clock, which stands still until it is advanced."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    async def advance(self, seconds: float) -> None:
        for step_s in (0.0, seconds):  # tasks that are ready before have their turn before
            self.now_s += step_s
            for _ in range(5):
                await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock.now_s)
    return clock


def offsets(received: Received) -> list[int]:
    return [batch.offset for batch in received.batches]


async def take(receiver: QueueReceiver, batches: int) -> list[EventBatch]:
    taken: list[EventBatch] = []
    while len(taken) < batches:
        taken += (await receiver.receive(1, 1)).batches
    return taken


async def data(adapter: GeneratorAdapter, queue: int = 0, batches: int = 30) -> list[EventBatch]:
    return await take(await adapter.open_receiver(queue, 0), batches)


async def test_the_same_seed_gives_the_same_bytes(opened: Opening):
    options = {"seed": 7, "skew": 1.2, "payload_bytes": 1, "payload_bytes_max": 30, "poison": 0.1, "batch": 20}
    assert await data(opened(**options)) == await data(opened(**options))


async def test_another_seed_or_queue_gives_other_bytes(opened: Opening):
    def numbers(batches: list[EventBatch]) -> list[str]:
        return [batch.stream.key.partition("-")[2] for batch in batches]

    adapter = opened(queues=2, seed=1)
    first = numbers(await data(adapter))
    assert first != numbers(await data(adapter, queue=1))
    assert first != numbers(await data(opened(seed=2)))
    assert (await data(adapter))[0].payloads() != (await data(opened(seed=2)))[0].payloads()


async def test_payloads_differ_from_batch_to_batch(opened: Opening):
    columns = {b"".join(batch.payloads()) for batch in await data(opened(batch=5))}
    assert len(columns) > 1


async def test_a_batch_reads_the_same_through_the_generated_code(opened: Opening):
    for batch in await data(opened(batch=50, poison=0.05, payload_bytes=0, payload_bytes_max=9)):
        message = events_pb2.EventBatch.FromString(batch.encoded)
        assert StreamId(message.namespace, message.key) == batch.stream == EventBatch.decode(batch.encoded).stream
        assert list(message.sizes) == list(batch.sizes())
        assert message.payload == b"".join(batch.payloads())
        assert list(message.timestamps_us) == list(batch.timestamps_us())[:1]
        assert [dict(h.values) for h in message.headers] in ([dict(e.headers) for e in batch.events()], [])


async def test_payloads_have_the_sizes_asked_for(opened: Opening):
    fixed = await data(opened(batch=50, payload_bytes=33))
    assert {size for batch in fixed for size in batch.sizes()} == {33}
    spread = await data(opened(batch=50, payload_bytes=3, payload_bytes_max=6))
    assert {size for batch in spread for size in batch.sizes()} == {3, 4, 5, 6}


async def test_empty_payloads_are_possible(opened: Opening):
    (batch,) = await data(opened(batch=3, payload_bytes=0), batches=1)
    assert [event.payload for event in batch.events()] == [b"", b"", b""]


async def test_streams_are_all_used_and_evenly(opened: Opening):
    seen = Counter(batch.stream for batch in await data(opened(streams=10, namespace="load"), batches=2000))
    assert len(seen) == 10
    assert {stream.namespace for stream in seen} == {"load"}
    assert max(seen.values()) < 2 * min(seen.values())


@pytest.mark.long
async def test_skew_follows_zipf(opened: Opening):
    seen = Counter(batch.stream.key for batch in await data(opened(streams=100, skew=1.0), batches=5000))
    total = sum(1 / number for number in range(1, 101))
    for number in (1, 2, 4):
        assert seen[f"0-{number - 1}"] == pytest.approx(5000 / number / total, rel=0.15)


async def test_streams_lie_in_the_queues_that_the_mapper_gives_them(opened: Opening):
    def queue_of(stream: StreamId) -> int:
        return sum(stream.key.encode()) % 3

    adapter = opened(queues=3, queue_of=queue_of, streams=20)
    for queue in range(3):
        streams = {batch.stream for batch in await data(adapter, queue, batches=300)}
        assert len(streams) == 20
        assert {queue_of(stream) for stream in streams} == {queue}


async def test_a_mapper_that_never_gives_a_queue_is_an_error(opened: Opening):
    def queue_of(_: StreamId) -> int:
        return 0

    with pytest.raises(InvalidArgument, match="queue 1"):
        await data(opened(queues=2, queue_of=queue_of), queue=1, batches=1)


async def test_poison_events_carry_the_header(opened: Opening):
    events = [event for batch in await data(opened(batch=200, poison=0.05)) for event in batch.events()]
    poisoned = [event for event in events if event.headers]
    assert all(event.headers == {POISON: "true"} for event in poisoned)
    assert len(poisoned) == pytest.approx(0.05 * len(events), rel=0.3)


async def test_a_failed_read_is_reported_and_the_same_batches_come_again(opened: Opening):
    receiver = await opened(read_errors=0.4, seed=3).open_receiver(0)
    errors, received = 0, list[EventBatch]()
    while len(received) < 200:
        try:
            received += (await receiver.receive(1, 1)).batches
        except StorageError:
            errors += 1
    assert [batch.offset for batch in received] == list(range(200))
    assert errors == pytest.approx(200 * 0.4 / 0.6, rel=0.3)


async def test_an_outage_lasts_until_it_is_switched_off(opened: Opening):
    adapter = opened(read_errors=1.0)
    receiver = await adapter.open_receiver(0)
    for _ in range(5):
        with pytest.raises(StorageError, match="queue 0, offset 0"):
            await receiver.receive(1, 1)
    adapter.reconfigure({})
    assert [batch.offset for batch in await take(receiver, 2)] == [0, 1]


async def test_a_stall_comes_before_every_nth_batch(opened: Opening, clock: Clock):
    receiver = await opened(batch=1, stall_every=4, stall_s=5.0).open_receiver(0)
    assert offsets(await receiver.receive(100, 1 << 20)) == [0, 1, 2, 3]
    stalled = asyncio.create_task(receiver.receive(100, 1 << 20))
    await clock.advance(4.9)
    assert not stalled.done()
    await clock.advance(0.1)
    assert offsets(await stalled) == [4, 5, 6, 7]


async def test_a_stall_goes_on_where_it_was_cancelled(opened: Opening, clock: Clock):
    receiver = await opened(batch=1, stall_every=1, stall_s=5.0).open_receiver(0)
    await take(receiver, 1)
    cancelled = asyncio.create_task(receiver.receive(1, 1))
    await clock.advance(4.0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    stalled = asyncio.create_task(receiver.receive(1, 1))
    await clock.advance(1.0)
    assert offsets(await stalled) == [1]


async def test_with_a_rate_a_receiver_waits_until_the_batch_is_due(opened: Opening, clock: Clock):
    receiver = await opened(rate=1000.0, batch=10).open_receiver(0)
    waiting = asyncio.create_task(receiver.receive(1000, 1 << 20))
    await clock.advance(0.009)
    assert not waiting.done()
    await clock.advance(0.001)
    assert offsets(await waiting) == [0]
    await clock.advance(0.035)
    assert offsets(await receiver.receive(1000, 1 << 20)) == [1, 2, 3]


async def test_a_waiting_receiver_follows_a_new_rate(opened: Opening, clock: Clock):
    adapter = opened(rate=0.001)
    receiver = await adapter.open_receiver(0)
    waiting = asyncio.create_task(receiver.receive(1, 1))
    await clock.advance(1.0)
    adapter.reconfigure({"rate": 1000.0, "batch": 10})
    await clock.advance(0.01)
    assert offsets(await waiting) == [0]


async def test_a_receiver_at_the_end_is_woken_by_more_events(opened: Opening):
    adapter = opened(events=3, batch=1)
    receiver = await adapter.open_receiver(0)
    await take(receiver, 3)
    waiting = asyncio.create_task(receiver.receive(1, 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    adapter.reconfigure({"events": 4, "batch": 1})
    assert [batch.offset for batch in (await waiting).batches] == [3]


async def test_reconfiguring_changes_the_data_from_the_next_batch_on(opened: Opening):
    adapter = opened(namespace="old")
    receiver = await adapter.open_receiver(0)
    before = await take(receiver, 3)
    adapter.reconfigure({"namespace": "new"})
    after = await take(receiver, 2)
    assert [batch.stream.namespace for batch in before + after] == ["old"] * 3 + ["new"] * 2
    assert [batch.offset for batch in after] == [3, 4]
    assert await data(adapter, batches=5) == before + after


async def test_a_wrong_reconfiguration_changes_nothing(opened: Opening):
    adapter = opened(namespace="old")
    with pytest.raises(InvalidArgument, match="batch"):
        adapter.reconfigure({"batch": 0})
    assert (await data(adapter, batches=1))[0].stream.namespace == "old"
    assert adapter.options.namespace == "old"


async def test_a_start_that_was_never_reached_here_is_accepted_below_the_end(opened: Opening):
    adapter = opened(events=1000, batch=10)
    assert (await take(await adapter.open_receiver(0, 77), 1))[0].offset == 77
    assert (await adapter.bounds(0)).next == 78
    with pytest.raises(InvalidArgument, match="ends at offset 100"):
        await adapter.open_receiver(0, 101)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"streams": 0}, "streams"),
        ({"poison": 1.5}, "poison"),
        ({"payload_bytes": 20, "payload_bytes_max": 10}, "payload_bytes_max"),
        ({"batch": 65_536, "payload_bytes": 1000}, "set a smaller batch"),
        ({"stall_every": 3}, "stall_s"),
        ({"speed": 3}, "speed"),
    ],
)
async def test_a_wrong_option_is_named(options: dict[str, Any], named: str):
    with pytest.raises(InvalidArgument, match=named):
        await open_adapter("generator", AdapterContext(provider="tests", queues=1), options)


async def test_endless_data_leaves_the_loop_to_others(opened: Opening):
    receiver = await opened().open_receiver(0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(10):
        await receiver.receive(1, 1)
    task.cancel()
    await asyncio.wait([task])
    assert turns >= 10


async def test_closed_receivers_are_not_kept(opened: Opening):
    adapter = opened()
    closed: list[weakref.ref[QueueReceiver]] = []
    for _ in range(3):
        await (receiver := await adapter.open_receiver(0)).aclose()
        closed.append(weakref.ref(receiver))
        del receiver
    gc.collect()
    assert [ref() for ref in closed] == [None] * 3
