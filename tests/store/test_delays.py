"""Delayed batches: due times, holders, and no batch published twice. The clock is the test's."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio

from headrace import StreamId
from headrace.store.delays import CALL_KEPT_S, DelayRelease, DelayStore
from headrace.streams.events import EventBatch, ScheduledBatch
from headrace.streams.publishing import ProducerSequence
from tests.store.delay_places import Clock, Place, add, place_of

STREAM = StreamId("orders", "42")
HOLD_S = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.second_way)])
def place(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Place:
    return place_of(request, tmp_path, clock)


@pytest_asyncio.fixture
async def delays(place: Place) -> AsyncIterator[DelayStore]:
    async with place.opened() as delays:
        yield delays


def later(letter: str, delay_s: float, priority: int = 0) -> ScheduledBatch:
    return ScheduledBatch.of_events(STREAM, [letter.encode()], timedelta(seconds=delay_s), priority)


async def delay(delays: DelayStore, letters: str, delays_s: Iterable[float], queue: int = 0) -> None:
    await add(delays, "p", [(queue, later(*each)) for each in zip(letters, delays_s, strict=True)])


async def claim(delays: DelayStore, holder: str = "me") -> list[DelayRelease]:
    return await delays.claim("p", holder, HOLD_S)


def letters(releases: Sequence[DelayRelease]) -> str:
    return b"".join(payload for each in releases for batch in each.batches for payload in batch.payloads()).decode()


def numbers(releases: Sequence[DelayRelease]) -> dict[int, int]:
    return {each.queue: each.number for each in releases}


async def test_due_events_come_in_the_order_of_their_times_and_not_before(delays: DelayStore, clock: Clock):
    await delay(delays, "cabz", [3, 1, 2, 9])
    assert await delays.due_in_s("p", "me") == 1
    assert await claim(delays) == []
    clock.now_s += 4
    assert letters(await claim(delays)) == "abc"


async def test_events_due_at_one_time_come_in_the_order_of_publishing(delays: DelayStore, clock: Clock):
    await delay(delays, "abc", [1, 1, 1])
    clock.now_s += 1
    assert letters(await claim(delays)) == "abc"


async def test_a_released_batch_is_as_it_was_without_its_delay(delays: DelayStore, clock: Clock):
    batch, urgent = later("a", 1), later("b", 1, priority=7)
    await add(delays, "p", [(0, batch), (0, urgent)])
    clock.now_s += 1
    (release,) = await claim(delays)
    plain, with_priority = release.batches
    assert type(plain) is EventBatch
    assert (plain.stream, plain.count, plain.encoded) == (
        STREAM,
        1,
        EventBatch.of(STREAM, [b"a"], timestamp(batch)).encoded,
    )
    assert isinstance(with_priority, ScheduledBatch)
    assert (with_priority.delay_us, with_priority.priority) == (0, 7)
    assert with_priority.encoded == ScheduledBatch.of_events(STREAM, urgent.events(), None, 7).encoded


def timestamp(batch: EventBatch) -> int:
    return batch.timestamps_us()[0]


async def test_a_release_is_one_holders_until_its_time_is_over(delays: DelayStore, clock: Clock):
    await delay(delays, "a", [1])
    clock.now_s += 1
    (release,) = await claim(delays, "first")
    await delay(delays, "b", [0.5])
    clock.now_s += 1
    assert await claim(delays, "second") == []
    assert await delays.due_in_s("p", "second") == HOLD_S - 1
    assert await delays.due_in_s("p", "first") == 0
    assert await claim(delays, "first") == [release]
    clock.now_s += HOLD_S
    assert await delays.due_in_s("p", "second") == 0
    assert await claim(delays, "second") == [release]
    assert await claim(delays, "first") == []


async def test_the_next_release_is_made_when_the_one_before_is_stored(delays: DelayStore, clock: Clock):
    await delay(delays, "ab", [1, 2])
    clock.now_s += 1
    first = await claim(delays)
    clock.now_s += 1
    assert letters(await claim(delays)) == "a"
    await delays.released("p", numbers(first))
    second = await claim(delays)
    assert letters(second) == "b"
    assert second[0].producer == first[0].producer
    assert second[0].number > first[0].number
    await delays.released("p", numbers(second))
    assert await delays.due_in_s("p", "me") is None
    assert await delays.backlogs("p") == {}


async def test_late_finish_takes_nothing_from_the_next_release(delays: DelayStore, clock: Clock):
    await delay(delays, "ab", [1, 20])
    clock.now_s += 1
    late = await claim(delays, "slow")
    clock.now_s += HOLD_S
    await delays.released("p", numbers(await claim(delays, "other")))
    clock.now_s += 20
    following = await claim(delays, "other")
    await delays.released("p", numbers(late))
    assert letters(await claim(delays, "other")) == letters(following) == "b"


async def test_queues_do_not_wait_for_each_other(delays: DelayStore, clock: Clock):
    await delay(delays, "a", [1], queue=0)
    clock.now_s += 1
    await claim(delays, "stuck")
    await delay(delays, "bc", [0, 0], queue=0)
    await delay(delays, "d", [0], queue=3)
    assert letters(await claim(delays, "other")) == "d"


async def test_providers_know_nothing_of_each_other(delays: DelayStore, clock: Clock):
    await delay(delays, "a", [0])
    assert await delays.due_in_s("q", "me") is None
    assert await delays.claim("q", "me", HOLD_S) == []
    assert letters(await claim(delays)) == "a"


async def test_a_release_is_bounded_in_batches_and_bytes(delays: DelayStore):
    await delay(delays, "abcde", [0] * 5)
    found = await delays.claim("p", "me", HOLD_S, max_batches=2)
    assert letters(found) == "ab"
    await delays.released("p", numbers(found))
    found = await delays.claim("p", "me", HOLD_S, max_bytes=2 * len(found[0].batches[0].encoded) + 1)
    assert letters(found) == "cd"
    await delays.released("p", numbers(found))
    assert letters(await delays.claim("p", "me", HOLD_S, max_bytes=1)) == "e"


async def test_a_release_of_more_rows_than_one_statement_takes(delays: DelayStore):
    await add(delays, "p", [(0, later("a", 0))] * 1_100)
    found = await claim(delays)
    assert len(found[0].batches) == 1_000
    await delays.released("p", numbers(found))
    assert len((await claim(delays))[0].batches) == 100


async def test_a_clock_that_goes_back_makes_things_late_and_one_that_jumps_makes_them_early(
    delays: DelayStore, clock: Clock
):
    await delay(delays, "ab", [10, 7_200])
    clock.now_s += 10
    held = await claim(delays, "dead")
    clock.now_s -= 3_600
    assert await claim(delays) == []
    assert await delays.due_in_s("p", "me") == 3_600 + HOLD_S
    clock.now_s += 3_600 + HOLD_S
    assert await claim(delays) == held
    await delays.released("p", numbers(held))
    clock.now_s += 7_200
    assert letters(await claim(delays)) == "b"


async def test_a_call_that_is_made_again_stores_once(delays: DelayStore):
    for _ in range(2):
        await add(delays, "p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    found = await claim(delays)
    assert letters(found) == "a"
    await delays.released("p", numbers(found))
    await add(delays, "p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    await add(delays, "p", [(0, later("b", 0))], ProducerSequence("you", 1, 0))
    assert letters(await claim(delays)) == "b"


async def test_events_of_a_failed_call_are_gone_when_the_producer_goes_on_without_it(delays: DelayStore):
    await add(delays, "p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    await add(delays, "p", [(0, later("b", 0))], ProducerSequence("me", 2, 1))
    await add(delays, "p", [(0, later("c", 0))], ProducerSequence("me", 3, 1))
    assert letters(await claim(delays)) == "ac"


async def test_a_name_of_a_producer_may_be_any_text(delays: DelayStore):
    for name in ("\0", "\ud800", "x" * 1000):
        for _ in range(2):
            await add(delays, "p", [(0, later("a", 0))], ProducerSequence(name, 1, 0))
    assert letters(await claim(delays)) == "aaa"


async def test_producers_are_forgotten_that_stored_nothing_for_long(delays: DelayStore, clock: Clock):
    await add(delays, "p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    clock.now_s += CALL_KEPT_S - 1
    await delays.forget_calls("p")
    await add(delays, "p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    clock.now_s += 2
    await delays.forget_calls("p")
    await add(delays, "p", [(0, later("b", 0))], ProducerSequence("me", 1, 0))
    assert letters(await claim(delays)) == "ab"


@pytest.mark.parametrize("call", [ProducerSequence("me", 1, 0), ProducerSequence("me", 20, 0)])
@pytest.mark.parametrize("forget", [True, False])
async def test_events_of_a_forgotten_producer_come_though_it_begins_anew(
    delays: DelayStore, clock: Clock, call: ProducerSequence, forget: bool
):
    await add(delays, "p", [(0, later("a", 3 * CALL_KEPT_S))], ProducerSequence("me", 10, 0))
    clock.now_s += CALL_KEPT_S + 1
    if forget:
        await delays.forget_calls("p")
    await add(delays, "p", [(0, later("b", 0))], call)
    await add(delays, "p", [(0, later("c", 0))], ProducerSequence("me", call.number + 1, call.number))
    await add(delays, "p", [(0, later("d", 0))], ProducerSequence("me", call.number + 2, call.number))  # c failed
    clock.now_s += 3 * CALL_KEPT_S
    assert sorted(letters(await claim(delays))) == ["a", "b", "d"]


async def test_delayed_events_can_be_seen(delays: DelayStore):
    await delay(delays, "ab", [5, 3], queue=1)
    waiting = (await delays.backlogs("p"))[1]
    assert waiting == (2, 2, 3.0)


async def test_release_that_many_claim_goes_to_one_of_them_and_nothing_is_left(place: Place):
    """Each letter is in exactly one release, and a release is one holder's."""
    rng = random.Random(7)
    seen: list[str] = []

    async def work(delays: DelayStore, name: str) -> None:
        for _ in range(10):
            await add(delays, "p", [(rng.randrange(3), later(name, 0)) for _ in range(5)])
            found = await delays.claim("p", name, HOLD_S, max_batches=7)
            seen.extend(letters(found))
            await delays.released("p", numbers(found))

    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(place.opened()) for _ in range(4)]
        await asyncio.gather(*(work(delays, name) for delays, name in zip(stores, "abcd", strict=True)))
        while found := await claim(stores[0]):
            seen.extend(letters(found))
            await stores[0].released("p", numbers(found))
    assert sorted(seen) == sorted("abcd" * 50)
