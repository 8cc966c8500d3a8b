"""One agent: which feed serves a delivery, slow consumers, memory, faults, gaps. In virtual time."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from headrace import CorruptRecord, Event, OnFailure, RetryPolicy, SequenceToken, SlowConsumer, StorageError
from headrace.adapters import AdapterContext, Gap
from headrace.adapters.memory import MemoryAdapter
from headrace.agents.agent import FIRST_TICK_S
from headrace.agents.catch_up_budget import CatchUpBudget
from headrace.agents.catch_up_runner import MAX_CATCH_UPS
from headrace.agents.cursor import CursorState
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.simulation.agents import FINE, SimulatedAgent
from tests.simulation.deliveries import Recorder, stream
from tests.simulation.queues import SimulatedQueues
from tests.simulation.virtual_time import virtual_time


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")


async def until(condition: Callable[[], object], limit_s: float = 100.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (time is virtual)
            await asyncio.sleep(FINE)


def numbers(count: int, start: int = 0) -> list[str]:
    return [str(number) for number in range(start, start + count)]


# ---- joining and catching up ---------------------------------------------------------------------------------------


@virtual_time
async def test_subscriptions_at_one_place_share_what_is_read() -> None:
    one, two = Recorder(), Recorder()
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(30)
        bench.attach("one", one)
        bench.attach("two", two)
        await bench.caught_up()
        await bench.publish_numbers(30, start=30)
        await bench.caught_up()
        assert bench.shelf.opened == 1
        assert bench.agent.statistics().received.events == 60
    assert one.seen == two.seen == numbers(60)


@virtual_time
async def test_an_agent_begins_within_its_first_tick() -> None:
    loop = asyncio.get_running_loop()
    async with SimulatedAgent() as bench:
        assert bench.agent.statistics().state == "idle"
        began = loop.time()
        bench.attach("one", Recorder())
        assert bench.agent.statistics().state == "starting"
        await until(lambda: bench.agent.main is not None)
        assert 0 < loop.time() - began <= FIRST_TICK_S + FINE
        assert bench.agent.statistics().state == "running"


@virtual_time
async def test_a_subscription_far_behind_catches_up_beside_the_others() -> None:
    live, late = Recorder(), Recorder()
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(500)
        bench.attach("live", live, 500)
        await until(lambda: bench.agent.main is not None)
        gate = late.hold("100")
        delivery = bench.attach("late", late)
        await until(lambda: "100" in late.started)
        await bench.publish_numbers(200, start=500)
        await until(lambda: len(live.seen) == 200)
        assert bench.agent.statistics().deliveries[1][1]
        gate.set()
        await bench.caught_up()
        assert delivery.progress.feed is bench.agent.main
        await bench.publish_numbers(10, start=700)
        await bench.caught_up()
        await until(lambda: not tasks_named("headrace catch-up"))
        assert bench.shelf.opened == 2
    assert live.seen == numbers(210, 500)
    assert late.seen == numbers(710)


@virtual_time
async def test_more_catch_ups_than_there_is_room_for_all_come_to_the_end() -> None:
    recorders = [Recorder() for _ in range(3 * MAX_CATCH_UPS)]
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, len(bench.agent.catch_ups.running))
            await asyncio.sleep(FINE)

    async with SimulatedAgent(SimulatedQueues(1, latency_s=0.01)) as bench:
        looking = asyncio.create_task(look())
        await bench.publish_numbers(300)
        bench.attach("live", Recorder(), 300)
        await until(lambda: bench.agent.main is not None)
        for number, recorder in enumerate(recorders):
            bench.attach(f"late{number}", recorder, number)
        await bench.caught_up()
        looking.cancel()
    assert most == MAX_CATCH_UPS
    for number, recorder in enumerate(recorders):
        assert recorder.seen == numbers(300 - number, number)


@virtual_time
async def test_catch_ups_together_hold_no_more_than_their_budget() -> None:
    budget = CatchUpBudget(1 << 20)
    recorders = [Recorder() for _ in range(MAX_CATCH_UPS)]
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, sum(feed.cache.bytes for feed in bench.agent.catch_ups.running.values()))
            await asyncio.sleep(FINE)

    async with SimulatedAgent(SimulatedQueues(1, latency_s=0.01), max_events=1000, budget=budget) as bench:
        looking = asyncio.create_task(look())
        payloads = [b"%d" % number + bytes(100_000) for number in range(50)]
        for payload in payloads:
            await bench.publish("a", payload)
        bench.attach("live", Recorder(), 50)
        await until(lambda: bench.agent.main is not None)
        gates = [recorder.hold(payloads[0].decode()) for recorder in recorders]
        for number, recorder in enumerate(recorders):
            bench.attach(f"late{number}", recorder)
        await asyncio.sleep(1)
        for gate in gates:
            gate.set()
        await bench.caught_up()
        await until(lambda: not tasks_named("headrace catch-up"))
        looking.cancel()
    assert budget.limit // 2 < most <= budget.limit
    assert budget.held == 0
    assert [len(recorder.seen) for recorder in recorders] == [50] * MAX_CATCH_UPS


@virtual_time
@pytest.mark.parametrize("slow", [None, SlowConsumer.THROTTLE])
@pytest.mark.parametrize("selector", ["s/*", "s/a"])
async def test_stuck_catch_ups_do_not_keep_others_from_catching_up(slow: SlowConsumer | None, selector: str) -> None:
    stuck, late = Recorder(), Recorder()
    gate = stuck.hold("10")
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(300)
        bench.attach("live", Recorder(), 300)
        await until(lambda: bench.agent.main is not None)
        for number in range(MAX_CATCH_UPS + 1):
            bench.attach(f"stuck{number}", stuck, selector=selector, slow=slow)
        await until(lambda: len(bench.agent.catch_ups.running) == MAX_CATCH_UPS)
        delivery = bench.attach("late", late)
        await bench.caught_up(delivery)
        assert late.seen == numbers(300)
        gate.set()
        await bench.caught_up()
    assert len(stuck.seen) == 300 * (MAX_CATCH_UPS + 1)


@virtual_time
async def test_a_start_past_the_last_event_of_a_batch_is_at_the_next_batch() -> None:
    recorder = Recorder()
    async with SimulatedAgent() as bench:
        await bench.publish("a", b"0", b"1")
        await bench.publish("a", b"2")
        bench.attach("one", recorder, Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0, 2))}), selector="s/a")
        await bench.caught_up()
    assert recorder.seen == ["2"]


@virtual_time
async def test_a_stream_that_was_quiet_for_a_week_loses_nothing() -> None:
    recorder = Recorder()
    async with SimulatedAgent() as bench:
        bench.attach("one", recorder)
        await bench.publish("cold", b"0")
        await bench.caught_up()
        for _ in range(7):
            await asyncio.sleep(24 * 3600)
            await bench.publish_numbers(100, keys=("hot", "warm"), start=1000)
            await bench.caught_up()
        await bench.publish("cold", b"1")
        await bench.caught_up()
    assert [payload for payload in recorder.seen if len(payload) == 1] == ["0", "1"]


# ---- slow consumers ------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_stuck_consumer_is_detached_and_gets_everything_once_afterwards() -> None:
    stuck, others = Recorder(), [Recorder() for _ in range(3)]
    gate = stuck.hold("5")
    async with SimulatedAgent() as bench:
        slow = bench.attach("stuck", stuck)
        for number, recorder in enumerate(others):
            bench.attach(f"other{number}", recorder)
        for start in range(0, 2000, 100):
            await bench.publish_numbers(100, start=start)
            await until(lambda: bench.held()[0] <= bench.limits.max_events)
        await until(lambda: all(len(recorder.seen) == 2000 for recorder in others))
        assert stuck.seen == numbers(5)
        assert slow.statistics().parked == 0  # its handler runs yet
        assert slow.progress.watermark == 5
        gate.set()
        await bench.caught_up()
    assert stuck.seen == numbers(2000)
    assert all(recorder.seen == numbers(2000) for recorder in others)


@virtual_time
async def test_a_stuck_consumer_has_few_cursors_however_many_streams_wait_for_it() -> None:
    stuck, other = Recorder(), Recorder()
    gates = [stuck.hold(str(number)) for number in range(5)]
    async with SimulatedAgent() as bench:
        slow = bench.attach("stuck", stuck, concurrency=5)
        bench.attach("other", other)
        keys = [f"k{number}" for number in range(2000)]
        for start in range(0, 2000, 100):
            await bench.publish_numbers(100, keys=keys, start=start)
            await until(lambda: bench.held()[0] <= bench.limits.max_events)
        await until(lambda: len(other.seen) == 2000)
        assert len(slow.progress.cursors) < 100
        assert len(slow.progress.checkpoint().behind) < 100
        for gate in gates:
            gate.set()
        await bench.caught_up()
    assert sorted(map(int, stuck.seen)) == list(range(2000))
    assert other.seen == numbers(2000)


@virtual_time
async def test_a_slow_consumer_is_detached_as_soon_as_others_have_nothing_to_do() -> None:
    """It makes progress all the time, so it is not stuck; but it would set the pace."""

    async def crawl(event: Event) -> None:
        await asyncio.sleep(0.1)
        crawled.append(event.payload.decode())

    crawled: list[str] = []
    fast = Recorder()
    async with SimulatedAgent(detach_after_s=10.0) as bench:
        await bench.publish_numbers(400)
        slow = bench.attach("slow", crawl)
        bench.attach("fast", fast)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(lambda: len(fast.seen) == 400)
        assert loop.time() - began < 3.0
        await bench.caught_up(slow, limit_s=400)
    assert crawled == numbers(400)


@virtual_time
async def test_streams_that_wait_for_their_turn_are_not_detached() -> None:
    """All handlers are slow, as when the processor is busy: reading the queue again would make it worse."""

    async def crawl(event: Event) -> None:
        await asyncio.sleep(0.1)
        crawled.append(event.payload.decode())

    crawled: list[str] = []
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(400, keys=[f"k{number}" for number in range(16)])
        slow = bench.attach("slow", crawl, concurrency=1)
        await bench.caught_up(slow, limit_s=400)
        assert bench.shelf.opened == 1
    assert slow.counts.detached == 0
    assert sorted(map(int, crawled)) == list(range(400))


@virtual_time
async def test_a_stuck_stream_is_detached_while_slow_ones_go_on() -> None:
    async def crawl(event: Event) -> None:
        await (gate.wait() if event.payload == b"5" else asyncio.sleep(0.1))
        crawled.append(event.payload.decode())

    crawled: list[str] = []
    gate = asyncio.Event()
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(400, keys=[f"k{number}" for number in range(16)])
        slow = bench.attach("slow", crawl, concurrency=4)
        await until(lambda: len(crawled) == 375, limit_s=400)
        assert slow.counts.detached == 1
        gate.set()
        await bench.caught_up(slow, limit_s=400)
    assert sorted(map(int, crawled)) == list(range(400))


@virtual_time
async def test_a_throttling_consumer_sets_the_pace_within_the_cache() -> None:
    stuck, other = Recorder(), Recorder()
    gate = stuck.hold("5")
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(1000)
        bench.attach("stuck", stuck, slow=SlowConsumer.THROTTLE)
        bench.attach("other", other)
        await until(lambda: bench.agent.statistics().state == "throttled")
        await asyncio.sleep(100)
        assert bench.main.pressure
        assert "subscription 'stuck' sets the pace, from offset 5 on" in bench.agent.statistics().reason
        assert bench.held()[0] == bench.limits.max_events // 2
        assert other.seen == numbers(44)  # the bucket before the stuck one's is gone
        gate.set()
        await bench.caught_up()
        assert bench.agent.statistics().state == "running"
    assert stuck.seen == other.seen == numbers(1000)


@virtual_time
async def test_a_batch_above_the_budget_for_detached_ones_does_not_stop_the_queue() -> None:
    stuck, other = Recorder(), Recorder()
    big = b"x" * 5000
    gate = stuck.hold(big.decode())
    async with SimulatedAgent(max_bytes=32 * 1024) as bench:  # an eighth of it is less than the batch
        await bench.publish("a", big)
        bench.attach("stuck", stuck)
        bench.attach("other", other)
        for _ in range(50):
            await bench.publish("b", b"y" * 1000)
        await until(lambda: len(other.seen) == 51)
        gate.set()
        await bench.caught_up()
    assert len(stuck.seen) == 51


@virtual_time
async def test_many_stuck_streams_hold_no_more_than_the_budget() -> None:
    stuck, other = Recorder(), Recorder()
    async with SimulatedAgent(max_bytes=64 * 1024, max_events=10_000) as bench:
        bench.attach("stuck", stuck)
        fast = bench.attach("other", other)
        gates = [stuck.hold(f"{number:01000}") for number in range(60)]
        for number in range(60):
            await bench.publish(f"k{number}", f"{number:01000}".encode())
            await asyncio.sleep(1.0)
            assert bench.held()[1] <= bench.limits.max_bytes
        for gate in gates:
            gate.set()
        await bench.caught_up(fast)
        await bench.caught_up()
    assert len(stuck.seen) == len(other.seen) == 60


@pytest.mark.long
@virtual_time
async def test_streams_that_get_stuck_where_their_catch_up_ends_hold_no_more_than_the_cache() -> None:
    """First in the main cache, then, each in a catch-up of its own, in one of the last batches that this brings."""
    stuck, other = Recorder(), Recorder()
    firsts = [stuck.hold(f"first {number}") for number in range(30)]
    lasts = [stuck.hold(f"last {number}") for number in range(30)]
    async with SimulatedAgent(max_events=800) as bench:
        slow = bench.attach("stuck", stuck)
        fast = bench.attach("other", other)
        for number in range(30):
            await bench.publish(f"k{number}", f"first {number}".encode())
        await bench.publish_numbers(1000, keys=("noise",))
        await bench.caught_up(fast)
        for number, first in enumerate(firsts):
            await bench.publish(f"k{number}", f"last {number}".encode())
            await bench.publish_numbers(60, keys=("noise",))
            await bench.caught_up(fast)
            first.set()
            await until(lambda number=number: f"last {number}" in stuck.started)
            assert bench.held()[0] <= bench.limits.max_events
        for last in lasts:
            last.set()
        await bench.caught_up(slow)
    assert len(stuck.seen) == len(other.seen) == 30 * 62 + 1000


@virtual_time
async def test_a_lonely_slow_stream_does_not_read_the_queue_over_and_over() -> None:
    """A stream that is alone in its catch-up holds up no other stream there."""

    async def crawl(event: Event) -> None:
        if event.stream == stream("slow"):
            await asyncio.sleep(1.0)
        crawled.append(event.payload.decode())

    crawled: list[str] = []
    fast = Recorder()
    async with SimulatedAgent() as bench:
        slow = bench.attach("slow", crawl)
        bench.attach("fast", fast)
        await bench.publish_numbers(40, keys=("slow",))
        await bench.publish_numbers(1000, keys=("b", "c"), start=40)
        await until(lambda: len(fast.seen) == 1040)
        await bench.caught_up(slow, limit_s=1000)
        assert bench.shelf.opened < 12
    assert [number for number in map(int, crawled) if number < 40] == list(range(40))
    assert len(crawled) == 1040


@virtual_time
async def test_streams_go_on_in_the_main_feed_after_a_restart_inside_a_backlog() -> None:
    """With catch-ups beside it, the main feed would run away from them to the queue's end."""
    recorder = Recorder()
    keys = [f"k{number}" for number in range(20)]
    behind = {stream(key): StreamBehind(SequenceToken(60 + number, 0)) for number, key in enumerate(keys)}
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(400, keys=keys)
        bench.attach("one", recorder, Checkpoint(100, behind))
        await bench.caught_up()
        assert bench.shelf.opened == 1
        assert bench.agent.statistics().received.events == 340
    assert sorted(map(int, recorder.seen)) == list(range(60, 400))


@virtual_time
async def test_main_feed_starts_again_at_the_position_if_too_much_is_behind() -> None:
    stuck, big = Recorder(), [f"{number:01000}" for number in range(400)]
    gate = stuck.hold(big[0])
    async with SimulatedAgent(max_bytes=64 * 1024, max_events=10_000) as bench:
        for number, payload in enumerate(big):
            await bench.publish(f"k{number % 10}", payload.encode())
        behind = {stream("k0"): StreamBehind(SequenceToken(0, 0))}
        delivery = bench.attach("one", stuck, Checkpoint(390, behind))
        await until(lambda: len(stuck.seen) == 9)  # of the other streams
        assert bench.agent.statistics().received.events < 200
        gate.set()
        await bench.caught_up(delivery)
    assert sorted(map(int, stuck.seen)) == sorted([*range(0, 400, 10), *range(391, 400)])


@virtual_time
async def test_an_offset_that_cannot_be_read_below_the_position_stops_only_the_streams_that_need_it() -> None:
    for error in (CorruptRecord(0, 80, "rotten", 81), StorageError("the old records are away")):
        recorder, keys = Recorder(), [f"k{number}" for number in range(10)]
        async with SimulatedAgent() as bench:
            bench.shelf.unreadable[80] = error
            await bench.publish_numbers(200, keys=keys)
            bench.attach("one", recorder, Checkpoint(100, {stream("k5"): StreamBehind(SequenceToken(75, 0))}))
            await until(lambda: len(recorder.seen) == 91)  # noqa: B023 (awaited at once)
            await bench.publish_numbers(20, keys=keys, start=200)
            await until(lambda: len(recorder.seen) == 109)  # noqa: B023
        assert "85" not in recorder.seen


@virtual_time
async def test_stuck_streams_below_the_position_do_not_hold_up_the_others() -> None:
    """Their batches are too large to be kept outside of the cache, and fill it."""
    recorder, big = Recorder(), [f"{number:09000}" for number in range(12)]
    gates = [recorder.hold(payload) for payload in big]
    async with SimulatedAgent(max_bytes=64 * 1024) as bench:
        for number, payload in enumerate(big):
            await bench.publish(f"b{number}", payload.encode())
        await bench.publish_numbers(400, keys=[f"k{number}" for number in range(10)])
        behind = {stream(f"b{number}"): StreamBehind(SequenceToken(number, 0)) for number in range(12)}
        bench.attach("one", recorder, Checkpoint(30, behind))
        await until(lambda: len(recorder.seen) == 382)
        for gate in gates:
            gate.set()
        await bench.caught_up()
    assert len(recorder.seen) == 394


@virtual_time
async def test_a_feed_that_fails_again_and_again_starts_below_the_position_only_once() -> None:
    recorder = Recorder()
    gate = recorder.hold("2")
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(400, keys=[f"k{number}" for number in range(10)])
        bench.shelf.unreadable[60] = OSError("gone")
        bench.attach("one", recorder, Checkpoint(80, {stream("k2"): StreamBehind(SequenceToken(2, 0))}))
        await until(lambda: len(recorder.seen) == 288)
        bench.shelf.unreadable.clear()
        gate.set()
        await bench.caught_up()
    assert len(recorder.seen) == 328


@virtual_time
async def test_events_that_are_gone_below_the_position_are_one_gap() -> None:
    recorder = Recorder()
    behind = {stream("k5"): StreamBehind(SequenceToken(105, 0)), stream("k6"): StreamBehind(SequenceToken(256, 0))}
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(400, keys=[f"k{number}" for number in range(10)])
        bench.shelf.drop(0, 280)
        bench.attach("one", recorder, Checkpoint(300, behind))
        await bench.caught_up()
        assert bench.gaps == [("one", Gap(105, 280, "dropped"))]


@pytest.mark.long
@virtual_time
async def test_a_consumer_that_hangs_for_hours_takes_no_more_memory() -> None:
    recorder = Recorder()
    gate = recorder.hold("0")
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(300, keys=[f"k{number}" for number in range(30)])
        delivery = bench.attach("one", recorder, concurrency=1)
        await asyncio.sleep(3600)
        assert len(delivery.progress.ready) < 100
        gate.set()
        await bench.caught_up()
    assert sorted(map(int, recorder.seen)) == list(range(300))


# ---- coming and going ----------------------------------------------------------------------------------------------


@virtual_time
async def test_a_withdrawn_subscription_goes_on_exactly_where_it_stopped() -> None:
    recorder = Recorder()
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(50, keys=("a", "b", "c"))
        gate = recorder.hold("10")
        delivery = bench.attach("one", recorder)
        await until(lambda: len(recorder.seen) == 36)
        checkpoint = await bench.agent.detach("one", 0.0)
        assert delivery.statistics().in_flight == 0
        assert checkpoint == Checkpoint(50, {stream("b"): StreamBehind(SequenceToken(10, 0))})
        assert not any(bucket.pins for bucket in bench.main.buckets)
        assert checkpoint is not None
        gate.set()
        bench.attach("one", recorder, checkpoint)
        await bench.caught_up()
    assert sorted(recorder.seen, key=int) == numbers(50)


@virtual_time
async def test_a_withdrawal_that_is_cancelled_leaves_nothing_in_the_cache() -> None:
    stuck, other = Recorder(), Recorder()
    stuck.hold("3")
    async with SimulatedAgent() as bench:
        bench.attach("stuck", stuck, slow=SlowConsumer.THROTTLE)
        bench.attach("other", other)
        await bench.publish_numbers(20)
        await until(lambda: len(other.seen) == 20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await bench.agent.detach("stuck", 60.0)
        await bench.publish_numbers(500, start=20)
        await until(lambda: len(other.seen) == 520)
        assert stuck.running == 0


@virtual_time
async def test_closing_while_everything_is_busy_gives_exact_checkpoints() -> None:
    recorder = Recorder()
    gates = [recorder.hold(str(number)) for number in range(0, 300, 37)]
    bench = SimulatedAgent()
    await bench.publish_numbers(300, keys=("a", "b", "c", "d", "e"))
    bench.attach("live", Recorder(), 300)
    bench.attach("late", recorder)
    await asyncio.sleep(3.0)
    done = await bench.agent.aclose(0.0)
    assert await bench.agent.aclose(0.0) == {}
    for gate in gates:
        gate.set()
    assert done["live"] == Checkpoint(300)
    before = len(recorder.seen)
    assert 0 < before < 300
    async with SimulatedAgent(bench.adapter) as again:
        again.attach("late", recorder, done["late"])
        await again.caught_up()
    assert sorted(recorder.seen, key=int) == numbers(300)


# ---- faults --------------------------------------------------------------------------------------------------------


class Faulty(SimulatedQueues):
    """Fails with each of `errors` first, then works."""

    def __init__(self) -> None:
        super().__init__(1)
        self.errors: list[Exception] = []
        self.calls: list[float] = []

    async def trouble(self, what: str) -> None:
        self.calls.append(asyncio.get_running_loop().time())
        if self.errors:
            raise self.errors.pop(0)


@virtual_time
@pytest.mark.parametrize("error", [StorageError, OSError])
async def test_reading_goes_on_after_errors_with_growing_pauses(error: type[Exception]) -> None:
    recorder = Recorder()
    faulty = Faulty()
    async with SimulatedAgent(faulty) as bench:
        delivery = bench.attach("one", recorder)
        await bench.publish_numbers(10)
        await bench.caught_up()
        faulty.errors = [error(f"fault {number}") for number in range(8)]
        faulty.calls.clear()
        await bench.publish_numbers(10, start=10)
        await until(lambda: bench.agent.statistics().state == "faulted")
        assert "fault" in bench.agent.statistics().reason
        await bench.caught_up()
        assert bench.agent.statistics().state == "running"
        assert bench.agent.statistics().reason == ""
        assert bench.agent.statistics().received.events == 20
        assert delivery.counts.delivered_events == 20
        gaps = [later - earlier for earlier, later in zip(faulty.calls, faulty.calls[1:], strict=False)]
        assert gaps[0] < max(gaps) <= 5.0
    assert recorder.seen == numbers(20)


@virtual_time
@pytest.mark.parametrize("error", [StorageError, OSError])
async def test_a_catch_up_goes_on_after_errors(error: type[Exception]) -> None:
    recorder = Recorder()
    faulty = Faulty()
    async with SimulatedAgent(faulty) as bench:
        await bench.publish_numbers(500)
        bench.attach("live", Recorder(), 500)
        await until(lambda: bench.agent.main is not None)
        bench.attach("late", recorder)
        for _ in range(5):
            await until(lambda: faulty.errors == [])
            faulty.errors = [error("fault")]
            await asyncio.sleep(0.01)
        await bench.caught_up()
    assert recorder.seen == numbers(500)


@virtual_time
async def test_a_catch_up_that_came_to_the_end_while_the_queue_was_down_joins_when_it_is_back() -> None:
    recorder = Recorder()
    faulty = Faulty()
    async with SimulatedAgent(faulty) as bench:
        await bench.publish_numbers(100)
        bench.attach("live", Recorder(), 100)
        await until(lambda: bench.agent.main is not None)
        gate = recorder.hold("50")
        delivery = bench.attach("late", recorder)
        await until(lambda: recorder.running)
        (reading,) = [task for task in tasks_named("headrace feed") if task.get_name() == "headrace feed 0"]
        reading.cancel()  # for whatever reason
        gate.set()
        await bench.caught_up()
        await until(lambda: bench.agent.main is not None and delivery.progress.feed is bench.agent.main)
        await until(lambda: not tasks_named("headrace catch-up"))
    assert recorder.seen == numbers(100)


# ---- gaps ----------------------------------------------------------------------------------------------------------


@virtual_time
async def test_events_deleted_by_retention_are_reported_and_the_others_delivered() -> None:
    late, live = Recorder(), Recorder()
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(200)
        bench.shelf.drop(0, 120)
        bench.attach("live", live, 200)
        bench.attach("late", late, 20)
        await bench.caught_up()
        assert bench.gaps == [("late", Gap(20, 120, "dropped"))]
        assert [d.counts.gaps for d in bench.agent.deliveries.values()] == [0, 1]
        assert bench.agent.deliveries["late"].progress.checkpoint() == Checkpoint(200)
    assert late.seen == numbers(80, 120)
    assert live.seen == []


@virtual_time
async def test_a_gap_of_everything_ends_a_catch_up() -> None:
    late = Recorder()
    async with SimulatedAgent() as bench:
        await bench.publish_numbers(200)
        bench.shelf.drop(0, 200)
        bench.attach("late", late, 20)
        bench.attach("live", Recorder(), 200)
        await bench.caught_up()
        await bench.publish_numbers(3, start=200)
        await bench.caught_up()
        assert bench.gaps == [("late", Gap(20, 200, "dropped"))]
    assert late.seen == ["200", "201", "202"]


# ---- queues that cannot rewind -------------------------------------------------------------------------------------


def memory() -> MemoryAdapter:
    return MemoryAdapter(AdapterContext(provider="p", queues=1))


@virtual_time
async def test_a_queue_that_cannot_rewind_goes_back_for_an_older_subscription() -> None:
    live, late = Recorder(), Recorder()
    async with SimulatedAgent(memory()) as bench:
        bench.attach("live", live)
        await bench.publish_numbers(300, keys=("a", "b"))
        await bench.caught_up()
        bench.attach("late", late, 100)
        await bench.caught_up()
        await bench.publish_numbers(10, start=300)
        await bench.caught_up()
    assert sorted(live.seen, key=int) == numbers(310)
    assert sorted(late.seen, key=int) == numbers(210, 100)


@pytest.mark.long
@virtual_time
@pytest.mark.parametrize("on_failure", list(OnFailure))
async def test_going_back_loses_nothing_of_streams_that_wait_or_are_paused(on_failure: OnFailure) -> None:
    live, late = Recorder(), Recorder()
    live.fail("2", 2)
    retry = RetryPolicy(max_attempts=2 if on_failure is OnFailure.PAUSE else 5, initial_delay_s=10.0)
    async with SimulatedAgent(memory()) as bench:
        one = bench.attach("live", live, on_failure=on_failure, retry=retry)
        await bench.publish_numbers(6, keys=("a", "b", "c"))
        await until(lambda: len(live.seen) == 4)
        if on_failure is OnFailure.PAUSE:
            await until(lambda: bench.cursor(one, "c").state is CursorState.PAUSED)
        bench.attach("late", late)
        await bench.publish_numbers(200, keys=("a", "b", "c"), start=6)
        await until(lambda: len(late.seen) == 206)
        one.retries.resume(stream("c"))
        await bench.caught_up()
    assert sorted(live.seen, key=int) == numbers(206)
    assert [number for number in map(int, live.seen) if number % 3 == 2] == list(range(2, 206, 3))


@virtual_time
async def test_a_stream_that_is_paused_since_before_the_start_goes_on_when_it_is_resumed() -> None:
    recorder = Recorder()
    paused = Checkpoint(6, {stream("c"): StreamBehind(SequenceToken(2, 0), "it failed")})
    async with SimulatedAgent(memory()) as bench:
        await bench.publish_numbers(6, keys=("a", "b", "c"))
        one = bench.attach("one", recorder, paused)
        await bench.publish_numbers(300, keys=("a", "b", "c"), start=6)
        await bench.caught_up()
        one.retries.resume(stream("c"))
        await bench.caught_up()
    assert [number for number in map(int, recorder.seen) if number % 3 == 2] == list(range(2, 306, 3))


@virtual_time
async def test_a_slow_consumer_of_a_queue_that_cannot_rewind_sets_the_pace() -> None:
    stuck, other = Recorder(), Recorder()
    gate = stuck.hold("5")
    async with SimulatedAgent(memory()) as bench:
        await bench.publish_numbers(1000)
        bench.attach("stuck", stuck)
        bench.attach("other", other)
        await until(lambda: bench.agent.statistics().state == "throttled")
        await asyncio.sleep(100)
        assert bench.held()[0] == len(other.seen) == bench.limits.max_events
        gate.set()
        await bench.caught_up()
    assert stuck.seen == other.seen == numbers(1000)


# ---- events done out of order --------------------------------------------------------------------------------------


@virtual_time
async def test_done_events_do_not_push_out_the_events_delivered_with_them() -> None:
    """Each batch fills a bucket: the first one is let go of while those behind it are being offered."""
    recorder = Recorder()
    async with SimulatedAgent(max_events=20) as bench:
        await bench.publish_numbers(1, keys=("a",))
        await bench.publish_numbers(20, keys=("b",), start=1)
        bench.attach("sub", recorder, Checkpoint(0, {stream("a"): StreamBehind(SequenceToken(0), "", ((0, 0, 1),))}))
        await bench.caught_up()
    assert recorder.seen == numbers(20, 1)


def tasks_named(prefix: str) -> list[asyncio.Task[object]]:
    """The tasks that run, and whose names begin so."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(prefix)]
