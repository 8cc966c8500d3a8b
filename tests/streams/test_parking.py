"""Parked batches: what is due, who gets it, and what is never published twice. The clock is the test's."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import Connection, text

from headrace.streams import StreamId
from headrace.streams.events import EventBatch, ScheduledBatch
from headrace.streams.parking import CALL_KEPT_S, ParkingLot, Release
from headrace.streams.publishing import ProducerSequence
from headrace.streams.store import ControlStore
from tests.streams.parking_places import Clock, Place, database_of, place_of

STREAM = StreamId("orders", "42")
HOLD_S = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["file", "postgres", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Place:
    return place_of(request, tmp_path, clock)


@pytest_asyncio.fixture
async def parking(place: Place) -> AsyncIterator[ParkingLot]:
    async with place.opened() as lot:
        yield lot


@pytest.fixture(params=["file", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return database_of(request, tmp_path)


@pytest_asyncio.fixture
async def control(where: str) -> AsyncIterator[ControlStore]:
    async with aclosing(await ControlStore.open(where)) as store:
        yield store


def later(letter: str, delay_s: float, priority: int = 0) -> ScheduledBatch:
    return ScheduledBatch.of_events(STREAM, [letter.encode()], timedelta(seconds=delay_s), priority)


async def park(parking: ParkingLot, letters: str, delays_s: Iterable[float], queue: int = 0) -> None:
    await parking.park("p", [(queue, later(*each)) for each in zip(letters, delays_s, strict=True)])


async def claim(parking: ParkingLot, holder: str = "me") -> list[Release]:
    return await parking.claim("p", holder, HOLD_S)


def letters(releases: Sequence[Release]) -> str:
    return b"".join(payload for each in releases for batch in each.batches for payload in batch.payloads()).decode()


def numbers(releases: Sequence[Release]) -> dict[int, int]:
    return {each.queue: each.number for each in releases}


async def test_what_is_due_comes_in_the_order_in_which_it_is_due_and_not_before(parking: ParkingLot, clock: Clock):
    await park(parking, "cabz", [3, 1, 2, 9])
    assert await parking.due_in_s("p", "me") == 1
    assert await claim(parking) == []
    clock.now_s += 4
    assert letters(await claim(parking)) == "abc"


async def test_what_is_due_at_one_time_comes_in_the_order_in_which_it_was_published(parking: ParkingLot, clock: Clock):
    await park(parking, "abc", [1, 1, 1])
    clock.now_s += 1
    assert letters(await claim(parking)) == "abc"


async def test_a_released_batch_is_as_it_was_without_its_delay(parking: ParkingLot, clock: Clock):
    batch, urgent = later("a", 1), later("b", 1, priority=7)
    await parking.park("p", [(0, batch), (0, urgent)])
    clock.now_s += 1
    (release,) = await claim(parking)
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


async def test_a_release_is_one_holders_until_its_time_is_over(parking: ParkingLot, clock: Clock):
    await park(parking, "a", [1])
    clock.now_s += 1
    (release,) = await claim(parking, "first")
    await park(parking, "b", [0.5])
    clock.now_s += 1
    assert await claim(parking, "second") == []
    assert await parking.due_in_s("p", "second") == HOLD_S - 1
    assert await parking.due_in_s("p", "first") == 0
    assert await claim(parking, "first") == [release]
    clock.now_s += HOLD_S
    assert await parking.due_in_s("p", "second") == 0
    assert await claim(parking, "second") == [release]
    assert await claim(parking, "first") == []


async def test_the_next_release_is_made_when_the_one_before_is_stored(parking: ParkingLot, clock: Clock):
    await park(parking, "ab", [1, 2])
    clock.now_s += 1
    first = await claim(parking)
    clock.now_s += 1
    assert letters(await claim(parking)) == "a"
    await parking.released("p", numbers(first))
    second = await claim(parking)
    assert letters(second) == "b"
    assert second[0].producer == first[0].producer
    assert second[0].number > first[0].number
    await parking.released("p", numbers(second))
    assert await parking.due_in_s("p", "me") is None
    assert await parking.waiting("p") == {}


async def test_who_finishes_late_takes_nothing_from_the_next_release(parking: ParkingLot, clock: Clock):
    await park(parking, "ab", [1, 20])
    clock.now_s += 1
    late = await claim(parking, "slow")
    clock.now_s += HOLD_S
    await parking.released("p", numbers(await claim(parking, "other")))
    clock.now_s += 20
    following = await claim(parking, "other")
    await parking.released("p", numbers(late))
    assert letters(await claim(parking, "other")) == letters(following) == "b"


async def test_queues_do_not_wait_for_each_other(parking: ParkingLot, clock: Clock):
    await park(parking, "a", [1], queue=0)
    clock.now_s += 1
    await claim(parking, "stuck")
    await park(parking, "bc", [0, 0], queue=0)
    await park(parking, "d", [0], queue=3)
    assert letters(await claim(parking, "other")) == "d"


async def test_providers_know_nothing_of_each_other(parking: ParkingLot, clock: Clock):
    await park(parking, "a", [0])
    assert await parking.due_in_s("q", "me") is None
    assert await parking.claim("q", "me", HOLD_S) == []
    assert letters(await claim(parking)) == "a"


async def test_a_release_is_bounded_in_batches_and_bytes(parking: ParkingLot):
    await park(parking, "abcde", [0] * 5)
    found = await parking.claim("p", "me", HOLD_S, max_batches=2)
    assert letters(found) == "ab"
    await parking.released("p", numbers(found))
    found = await parking.claim("p", "me", HOLD_S, max_bytes=2 * len(found[0].batches[0].encoded) + 1)
    assert letters(found) == "cd"
    await parking.released("p", numbers(found))
    assert letters(await parking.claim("p", "me", HOLD_S, max_bytes=1)) == "e"


async def test_a_release_of_more_rows_than_one_statement_takes(parking: ParkingLot):
    await parking.park("p", [(0, later("a", 0))] * 1_100)
    found = await claim(parking)
    assert len(found[0].batches) == 1_000
    await parking.released("p", numbers(found))
    assert len((await claim(parking))[0].batches) == 100


async def test_a_clock_that_goes_back_makes_things_late_and_one_that_jumps_makes_them_early(
    parking: ParkingLot, clock: Clock
):
    await park(parking, "ab", [10, 7_200])
    clock.now_s += 10
    held = await claim(parking, "dead")
    clock.now_s -= 3_600
    assert await claim(parking) == []
    assert await parking.due_in_s("p", "me") == 3_600 + HOLD_S
    clock.now_s += 3_600 + HOLD_S
    assert await claim(parking) == held
    await parking.released("p", numbers(held))
    clock.now_s += 7_200
    assert letters(await claim(parking)) == "b"


async def test_a_call_that_is_made_again_parks_once(parking: ParkingLot):
    for _ in range(2):
        await parking.park("p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    found = await claim(parking)
    assert letters(found) == "a"
    await parking.released("p", numbers(found))
    await parking.park("p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    await parking.park("p", [(0, later("b", 0))], ProducerSequence("you", 1, 0))
    assert letters(await claim(parking)) == "b"


async def test_what_a_call_parked_that_failed_is_gone_when_the_producer_goes_on_without_it(parking: ParkingLot):
    await parking.park("p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    await parking.park("p", [(0, later("b", 0))], ProducerSequence("me", 2, 1))
    await parking.park("p", [(0, later("c", 0))], ProducerSequence("me", 3, 1))
    assert letters(await claim(parking)) == "ac"


async def test_a_name_of_a_producer_may_be_any_text(parking: ParkingLot):
    for name in ("\0", "\ud800", "x" * 1000):
        for _ in range(2):
            await parking.park("p", [(0, later("a", 0))], ProducerSequence(name, 1, 0))
    assert letters(await claim(parking)) == "aaa"


async def test_producers_are_forgotten_that_parked_nothing_for_long(parking: ParkingLot, clock: Clock):
    await parking.park("p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    clock.now_s += CALL_KEPT_S - 1
    await parking.forget_calls("p")
    await parking.park("p", [(0, later("a", 0))], ProducerSequence("me", 1, 0))
    clock.now_s += 2
    await parking.forget_calls("p")
    await parking.park("p", [(0, later("b", 0))], ProducerSequence("me", 1, 0))
    assert letters(await claim(parking)) == "ab"


@pytest.mark.parametrize("call", [ProducerSequence("me", 1, 0), ProducerSequence("me", 20, 0)])
@pytest.mark.parametrize("forget", [True, False])
async def test_what_a_forgotten_producer_parked_comes_though_it_begins_anew(
    parking: ParkingLot, clock: Clock, call: ProducerSequence, forget: bool
):
    await parking.park("p", [(0, later("a", 3 * CALL_KEPT_S))], ProducerSequence("me", 10, 0))
    clock.now_s += CALL_KEPT_S + 1
    if forget:
        await parking.forget_calls("p")
    await parking.park("p", [(0, later("b", 0))], call)
    await parking.park("p", [(0, later("c", 0))], ProducerSequence("me", call.number + 1, call.number))
    await parking.park("p", [(0, later("d", 0))], ProducerSequence("me", call.number + 2, call.number))  # c failed
    clock.now_s += 3 * CALL_KEPT_S
    assert sorted(letters(await claim(parking))) == ["a", "b", "d"]


async def test_what_is_parked_can_be_seen(parking: ParkingLot):
    await park(parking, "ab", [5, 3], queue=1)
    waiting = (await parking.waiting("p"))[1]
    assert waiting == (2, 2, 3.0)


async def test_a_damaged_row_is_said_to_be_one_and_holds_up_no_other_queue(control: ControlStore, clock: Clock):
    parking = control.parking(clock)
    await park(parking, "a", [0])
    await park(parking, "b", [0], queue=1)
    damage = text("UPDATE parked SET stream = 'x' WHERE queue = 0")
    await control._database.write(lambda c: c.execute(damage) and None)  # pyright: ignore[reportPrivateUsage]
    damaged, whole = await claim(parking)
    assert damaged.damage.startswith("a parked batch in the control store is damaged")
    assert (damaged.batches, whole.damage, letters([whole])) == ([], "", "b")


async def test_what_many_claim_at_once_goes_to_one_of_them_and_nothing_is_left(place: Place):
    """Each letter is in exactly one release, and a release is one holder's."""
    rng = random.Random(7)
    seen: list[str] = []

    async def work(parking: ParkingLot, name: str) -> None:
        for _ in range(10):
            await parking.park("p", [(rng.randrange(3), later(name, 0)) for _ in range(5)])
            found = await parking.claim("p", name, HOLD_S, max_batches=7)
            seen.extend(letters(found))
            await parking.released("p", numbers(found))

    async with AsyncExitStack() as stack:
        lots = [await stack.enter_async_context(place.opened()) for _ in range(4)]
        await asyncio.gather(*(work(lot, name) for lot, name in zip(lots, "abcd", strict=True)))
        while found := await claim(lots[0]):
            seen.extend(letters(found))
            await lots[0].released("p", numbers(found))
    assert sorted(seen) == sorted("abcd" * 50)


async def test_a_store_of_the_version_before_gets_the_tables(where: str, clock: Clock):
    def before(connection: Connection) -> None:
        for table in ("parked", "parked_calls", "releases"):
            connection.execute(text(f"DROP TABLE {table}"))
        connection.execute(text("UPDATE headrace_schema SET version = 3"))

    async with aclosing(await ControlStore.open(where)) as old:
        await old.set_value("k", "v")
        await old._database.write(before)  # pyright: ignore[reportPrivateUsage]
    async with aclosing(await ControlStore.open(where)) as control:
        assert await control.value("k") == "v"
        parking = control.parking(clock)
        await park(parking, "a", [0])
        found = await claim(parking)
        assert letters(found) == "a"
        await parking.released("p", numbers(found))
        indexes = "SELECT indexdef FROM pg_indexes" if "://" in where else "SELECT sql FROM sqlite_master"
        stored = await control._database.read(lambda c: " ".join(map(str, c.scalars(text(indexes)))))  # pyright: ignore[reportPrivateUsage]
        assert "parked_due" in stored
        assert "parked_taken" in stored
