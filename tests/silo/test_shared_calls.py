"""Events that tasks publish at the same time: in few calls, in order, each with its own batch and its own answer."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import (
    Event,
    EventBatch,
    InvalidArgument,
    Provider,
    RetryPolicy,
    SequenceToken,
    Start,
    StorageError,
    StreamId,
)
from headrace.adapters import Receipt
from headrace.silo import shared_calls
from headrace.silo.shared_calls import SharedCalls
from headrace.streams.publishing import MEASURED, PendingPublishes
from tests.random_examples import examples

STREAM = StreamId("clicks", "all")
MANY = 500


async def received(provider: Provider) -> Sequence[Event]:
    events: list[Event] = []

    async def handle(event: Event) -> None:
        events.append(event)

    subscription = await provider.subscribe("all", "*/*", handler=handle, start=Start.earliest())
    await subscription.caught_up()
    return events


async def test_each_event_has_a_batch_of_its_own(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        tokens = await asyncio.gather(*(provider.publish(STREAM, b"%d" % number) for number in range(MANY)))
        assert tokens == [SequenceToken(at) for at in range(MANY)]
        events = await received(provider)
        assert [event.payload for event in events] == [b"%d" % number for number in range(MANY)]
        assert [event.token for event in events] == tokens
        assert provider.published_events == MANY
        statistics = await provider.adapter.statistics(0)
        assert statistics.events == MANY


async def test_one_event_that_fails_takes_no_other_along(tmp_path: Path) -> None:
    """A handler of batches fails with the whole batch."""

    async def handle(batch: EventBatch) -> None:
        if b"bad" in batch.payloads():
            raise ValueError

    async with Provider.open(tmp_path, queues=1) as provider:
        await asyncio.gather(*(provider.publish(STREAM, b"bad" if number == 50 else b"") for number in range(MANY)))
        once = RetryPolicy(max_attempts=1)
        reading = await provider.subscribe("all", "*/*", handle, batch=True, start=Start.earliest(), retry=once)
        await reading.caught_up()
        assert [letter.payload for letter in await provider.dead_letters("all")] == [b"bad"]


async def test_each_stream_has_its_own(tmp_path: Path) -> None:
    streams = [StreamId("clicks", str(number)) for number in range(3)]
    async with Provider.open(tmp_path, queues=2) as provider:
        published = [(streams[number % 3], b"%d" % number) for number in range(MANY)]
        await asyncio.gather(*(provider.publish(stream, payload) for stream, payload in published))
        events = await received(provider)
        for stream in streams:
            expected = [payload for each, payload in published if each == stream]
            assert [event.payload for event in events if event.stream == stream] == expected


async def test_the_order_of_all_ways_to_publish(tmp_path: Path) -> None:
    """As the calls begin, in each stream, whatever shares a batch."""
    for seed in range(examples(50)):
        rng = random.Random(seed)
        async with Provider.open(tmp_path / str(seed), queues=2) as provider:
            expected = await published_at_random(provider, rng)
            found: dict[StreamId, list[bytes]] = defaultdict(list)
            for event in await received(provider):
                assert event.stream is not None
                found[event.stream].append(event.payload)
            assert found == expected, seed


async def test_the_last_of_many_does_not_overtake_those_that_wait(tmp_path: Path) -> None:
    """When it publishes, the others have their answers, and few publishes are under way."""
    expected: list[bytes] = []

    async def publish(payload: bytes) -> None:
        expected.append(payload)
        await provider.publish(STREAM, payload)

    async def publisher(number: int) -> None:
        await publish(b"first %d" % number)
        if number in (20, 21, 22, MANY - 1):
            await publish(b"second %d" % number)

    async with Provider.open(tmp_path, queues=1) as provider:
        await asyncio.gather(*(publisher(number) for number in range(MANY)))
        assert [event.payload for event in await received(provider)] == expected


async def published_at_random(provider: Provider, rng: random.Random) -> dict[StreamId, list[bytes]]:
    streams = [StreamId("clicks", str(number)) for number in range(rng.choice((1, 2, 5)))]
    expected: dict[StreamId, list[bytes]] = defaultdict(list)
    number = 0

    async def publish(stream: StreamId, payloads: list[bytes], way: int) -> None:
        expected[stream] += payloads
        if way == 1:
            await provider.publish(stream, payloads)
        elif way == 2:
            await provider.publish_many([(stream, payload) for payload in payloads])
        elif way == 3:
            await provider.publish_encoded([EventBatch.of(stream, payloads)])
        elif way == 4:
            await provider.publish(stream, Event(payloads[0]))
        else:
            await provider.publish(stream, payloads[0])

    tasks: list[asyncio.Task[None]] = []
    for _ in range(rng.randrange(1, 10)):
        for _ in range(rng.randrange(60)):
            way = rng.choice((0, 0, 0, 0, 0, 0, 1, 2, 3, 4))
            size = rng.choice((10, 10, 10, shared_calls.MAX_BYTES // 2, shared_calls.MAX_BYTES))
            payloads = [
                f"{number + one} ".encode().ljust(size) for one in range(rng.randrange(1, 4) if 1 <= way < 4 else 1)
            ]
            number += len(payloads)
            tasks.append(asyncio.create_task(publish(rng.choice(streams), payloads, way)))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return expected


async def test_a_cancelled_publisher_leaves_the_others_alone(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        tasks = [asyncio.create_task(provider.publish(STREAM, b"%d" % number)) for number in range(50)]
        await asyncio.sleep(0)
        tasks[30].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [number for number, answer in enumerate(done) if not isinstance(answer, SequenceToken)] == [30]
        assert len(await received(provider)) == 50
        await provider.flush()


async def test_a_closed_provider_refuses_all(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        pass
    done = await asyncio.gather(*(provider.publish(STREAM, b"x") for _ in range(50)), return_exceptions=True)
    assert {type(error).__name__ for error in done} == {"Closed"}


class Store:
    """Takes calls, and answers when the test wants it."""

    def __init__(self) -> None:
        self.calls: list[Sequence[tuple[int, EventBatch]]] = []
        self.answers: list[asyncio.Future[Any]] = []
        self.refuses: Exception | None = None

    def __call__(self, batches: Sequence[tuple[int, EventBatch]]) -> Awaitable[Any]:
        if self.refuses:
            raise self.refuses
        self.calls.append(batches)
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


async def three(store: Store) -> list[asyncio.Future[Receipt]]:
    """Publish three events that share a call."""
    shared = SharedCalls(store, PendingPublishes())
    answers = [shared.add(0, EventBatch.of(STREAM, [b"%d" % number])) for number in range(3)]
    assert shared.waiting
    await asyncio.sleep(0)
    assert not shared.waiting
    return answers


async def test_each_publisher_gets_its_own_receipt() -> None:
    store = Store()
    answers = await three(store)
    receipts = [Receipt(SequenceToken(at)) for at in range(3)]
    store.answers[0].set_result(receipts)
    assert await asyncio.gather(*answers) == receipts
    assert len(store.calls) == 1


async def test_each_publisher_gets_its_own_error() -> None:
    store = Store()
    answers = await three(store)
    answers[1].cancel()
    store.answers[0].set_exception(StorageError("the disk is gone"))
    errors = await asyncio.gather(answers[0], answers[2], return_exceptions=True)
    assert [str(error) for error in errors] == ["the disk is gone"] * 2
    assert errors[0] is not errors[1]


@pytest.mark.parametrize("refusal", [InvalidArgument("no"), ZeroDivisionError("no")])
async def test_a_refusal_reaches_all(refusal: Exception) -> None:
    store = Store()
    store.refuses = refusal
    for answer in await three(store):
        with pytest.raises(type(refusal), match="no"):
            await answer


async def test_a_store_that_is_cancelled_cancels_all() -> None:
    store = Store()
    answers = await three(store)
    store.answers[0].cancel()
    await asyncio.wait(answers)
    assert all(answer.cancelled() for answer in answers)


async def test_events_that_share_a_call_are_under_way_until_their_publishers_continue() -> None:
    """What a publisher does next then shares a call, too."""
    store, publishing = Store(), PendingPublishes()
    shared = SharedCalls(store, publishing)
    seen: list[int] = []

    async def publisher() -> None:
        await shared.add(0, EventBatch.of(STREAM, [b"x"]))
        seen.append(publishing.under_way)

    tasks = [asyncio.create_task(publisher()) for _ in range(2 * MEASURED - 1)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    flush = asyncio.create_task(publishing.flush())
    store.answers[0].set_result([Receipt(SequenceToken(at)) for at in range(len(tasks))])
    await asyncio.gather(*tasks)
    assert seen == [len(tasks)] * len(tasks)
    await flush
    assert publishing.under_way == 0
    assert publishing.durations.count == 2


@pytest.mark.parametrize("refusal", [None, StorageError("the disk is gone")])
async def test_events_that_are_not_stored_are_not_under_way(refusal: Exception | None) -> None:
    store, publishing = Store(), PendingPublishes()
    store.refuses = refusal
    answer = SharedCalls(store, publishing).add(0, EventBatch.of(STREAM, [b"x"]))
    await asyncio.sleep(0)
    if refusal is None:
        store.answers[0].cancel()
    await asyncio.wait([answer])
    await publishing.flush()
    assert publishing.under_way == 0


@pytest.mark.parametrize(("size", "calls"), [(1, 3), (shared_calls.MAX_BYTES // 3, 1001)])
async def test_a_call_has_limits(size: int, calls: int) -> None:
    store = Store()
    shared = SharedCalls(store, PendingPublishes())
    for _ in range(2 * shared_calls.MAX_BATCHES + 1):
        shared.add(0, EventBatch.of(STREAM, [bytes(size)]))
    shared.flush()
    assert sum(map(len, store.calls)) == 2 * shared_calls.MAX_BATCHES + 1
    for call in store.calls:
        assert len(call) <= shared_calls.MAX_BATCHES
        assert sum(len(batch.encoded) for _, batch in call) <= shared_calls.MAX_BYTES
    assert len(store.calls) == calls
    for answer in store.answers:
        answer.cancel()
    await asyncio.sleep(0)
