"""The main feed takes batches that its process has just stored without reading them. In virtual time."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from headrace import Event, EventBatch, StorageError
from headrace.agents.feed import OFFER_BATCHES, RECEIVE_BYTES
from tests.simulation.agents import FINE, SimulatedAgent
from tests.simulation.deliveries import Recorder, stream
from tests.simulation.queues import SimulatedQueues, SimulatedReceiver
from tests.simulation.virtual_time import virtual_time


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 (time is virtual)
            await asyncio.sleep(FINE)


def offering_bench(*, max_events: int = 80, max_bytes: int = 8 << 20) -> SimulatedAgent:
    return SimulatedAgent(SimulatedQueues(1, offers=1.0), max_events=max_events, max_bytes=max_bytes)


async def waiting_receiver(bench: SimulatedAgent) -> SimulatedReceiver:
    """The receiver of the main feed, once it waits at the end of an empty queue."""
    await until(lambda: bench.shelf.receivers)
    (receiver,) = bench.shelf.receivers
    await until(lambda: receiver.reads)
    return receiver


@virtual_time
async def test_batches_stored_in_this_process_are_delivered_without_a_read() -> None:
    seen = Recorder()
    async with offering_bench(max_events=10_000) as bench:
        bench.attach("one", seen)
        receiver = await waiting_receiver(bench)
        await bench.publish_numbers(3)
        await bench.publish_numbers(500, start=3)
        await bench.caught_up()
        assert receiver.reads == 1
        assert receiver.offered == [3, 500]
        assert bench.agent.statistics().received.events == 503
        assert bench.agent.statistics().next_offset == 503
    assert seen.seen == numbers(503)


@virtual_time
async def test_a_handler_gets_an_offered_event_before_the_publisher_goes_on_for_long() -> None:
    """The event is handed out in the turn of the loop in which its commit is reported."""
    seen = Recorder()
    async with offering_bench() as bench:
        bench.attach("one", seen)
        await waiting_receiver(bench)
        await bench.publish_numbers(1)
        for _ in range(3):  # the report, the worker, the handler
            await asyncio.sleep(0)
        assert seen.seen == ["0"]


@virtual_time
async def test_a_full_cache_takes_no_offers_and_nothing_is_lost() -> None:
    gate = asyncio.Event()
    seen: list[str] = []

    async def slow(event: Event) -> None:
        await gate.wait()
        seen.append(event.payload.decode())

    async with offering_bench(max_events=80) as bench:
        bench.attach("one", slow)
        receiver = await waiting_receiver(bench)
        for number in range(200):
            await bench.publish_numbers(1, start=number)
            await asyncio.sleep(FINE)
            assert bench.main.events <= 40, "the main feed has half of the cache"
        assert sum(receiver.offered) == 40
        gate.set()
        await bench.caught_up()
    assert seen == numbers(200)


@virtual_time
async def test_an_offer_with_more_events_than_fit_is_read() -> None:
    seen = Recorder()
    async with offering_bench(max_events=80) as bench:
        bench.attach("one", seen)
        receiver = await waiting_receiver(bench)
        await bench.publish_numbers(41)
        await bench.caught_up()
        assert receiver.offered == []
        await waiting_receiver(bench)
        await bench.publish_numbers(30, start=41)
        await bench.caught_up()
        assert receiver.offered == [30]
    assert seen.seen == numbers(71)


@virtual_time
async def test_offered_batches_count_as_passed_for_a_subscription_that_wants_none_of_them() -> None:
    seen = Recorder()
    async with offering_bench() as bench:
        bench.attach("one", seen, selector="s/other")
        receiver = await waiting_receiver(bench)
        waiting = asyncio.ensure_future(bench.agent.deliveries["one"].waiters.wait_until(3))
        await bench.publish_numbers(3)
        async with asyncio.timeout(1):
            await waiting
        assert receiver.offered == [3]
    assert seen.seen == []


@virtual_time
async def test_a_feed_takes_only_offers_that_follow_its_cache() -> None:
    async with offering_bench() as bench:
        bench.attach("one", Recorder())
        await waiting_receiver(bench)
        feed = bench.agent.main
        assert feed is not None
        made = [EventBatch(stream("a"), EventBatch.of(stream("a"), [b"x"]).encoded, 1, offset) for offset in range(3)]
        assert not feed.accept(made[1:])
        assert feed.accept(made[:2])
        assert not feed.accept(made[:2])
        assert not feed.accept(made[1:])
        assert feed.accept(made[2:])
        assert [entry.batch.offset for entry in bench.main.entries_from(0)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("batches", "size"), [(OFFER_BATCHES + 1, 1), (3, RECEIVE_BYTES // 2), (1, RECEIVE_BYTES + 1)], ids=str
)
@virtual_time
async def test_an_offer_that_is_too_large_for_one_turn_is_read(batches: int, size: int) -> None:
    seen: list[int] = []

    async def count(event: Event) -> None:
        seen.append(len(event.payload))

    async with offering_bench(max_events=100_000, max_bytes=64 << 20) as bench:
        bench.attach("one", count)
        receiver = await waiting_receiver(bench)
        payload = bytes(min(size, 1 << 20))
        large = [EventBatch.of(stream("a"), [payload] * (2 if size > 1 << 20 else 1)) for _ in range(batches)]
        await bench.adapter.enqueue([(0, batch) for batch in large])
        await bench.caught_up()
        assert receiver.offered == []
        assert len(seen) == sum(batch.count for batch in large)


@virtual_time
async def test_an_offer_after_batches_of_another_process_is_read() -> None:
    seen = Recorder()
    async with offering_bench() as bench:
        bench.attach("one", seen)
        receiver = await waiting_receiver(bench)
        bench.shelf.queues[0].append(EventBatch.of(stream("b"), [b"other"]))
        await bench.publish_numbers(1)
        await bench.caught_up()
        assert receiver.offered == []
    assert seen.seen == ["other", "0"]


@virtual_time
async def test_no_offer_is_taken_until_a_read_shows_that_an_error_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")
    seen = Recorder()
    async with offering_bench() as bench:
        bench.attach("one", seen)
        receiver = await waiting_receiver(bench)
        assert bench.agent.main is not None
        bench.agent.main.fault = str(StorageError("the disk is out"))
        await bench.publish_numbers(1)
        await bench.caught_up()
        assert receiver.offered == []
        await bench.publish_numbers(1, start=1)
        await bench.caught_up()
        assert receiver.offered == [1]
    assert seen.seen == ["0", "1"]


@pytest.mark.parametrize("offers", [0.0, 1.0])
@virtual_time
async def test_an_agent_whose_delivery_fails_on_new_batches_starts_again_and_loses_nothing(
    offers: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")
    seen = Recorder()
    async with SimulatedAgent(SimulatedQueues(1, offers=offers)) as bench:
        delivery = bench.attach("one", seen)
        await waiting_receiver(bench)
        offer, failures = delivery.offer, [RuntimeError("a bug")]

        def fail_once(*args: object) -> None:
            if failures:
                raise failures.pop()
            offer(*args)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType] (passed on)

        delivery.offer = fail_once  # type: ignore[method-assign]
        await bench.publish_numbers(3)
        await until(lambda: bench.agent.statistics().state == "faulted")
        assert "a bug" in bench.agent.statistics().reason
        await bench.caught_up()
        assert bench.shelf.opened == 2
    assert seen.seen == numbers(3)


@virtual_time
async def test_an_agent_that_closes_takes_no_offers() -> None:
    seen = Recorder()
    async with offering_bench() as bench:
        bench.attach("one", seen)
        receiver = await waiting_receiver(bench)
        await bench.publish_numbers(1)
        closing = asyncio.ensure_future(bench.agent.aclose())
        await closing
        assert receiver.offered == []
