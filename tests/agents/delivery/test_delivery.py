"""One delivery, fed by hand: order, independence, concurrency, retries, giving up, filters, checkpoints, stopping."""

import asyncio
import contextvars
import logging
import math
from collections.abc import Callable
from itertools import pairwise
from time import monotonic

import pytest

from headrace import Closed, Event, EventBatch, OnFailure, RetryPolicy, SequenceToken, StorageError, Unavailable
from headrace.agents.cursor import CursorState
from headrace.streams.handler_workers import TURN_S
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.simulation.deliveries import HandlerFeed, Recorder, stream, until
from tests.simulation.virtual_time import virtual_time

RESTLESS = RetryPolicy(max_attempts=1_000_000, max_elapsed_s=1e9, initial_delay_s=0.0)


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")


# ---- order, independence, concurrency ------------------------------------------------------------------------------


async def test_events_of_a_stream_come_in_order_over_batches() -> None:
    recorder = Recorder()
    async with HandlerFeed(recorder) as line:
        line.publish("a", b"0", b"1", b"2")
        line.publish("b", b"x")
        line.publish("a", b"3")
        line.publish("a", b"4", b"5")
        await line.done()
    assert [p for p in recorder.seen if p != "x"] == ["0", "1", "2", "3", "4", "5"]
    assert "x" in recorder.seen


async def test_one_batch_of_a_stream_is_in_flight() -> None:
    recorder = Recorder()
    gate = recorder.hold("0")
    async with HandlerFeed(recorder) as line:
        line.publish("a", b"0")
        await until(lambda: recorder.started)
        line.publish("a", b"1")
        line.publish("a", b"2")
        for _ in range(20):
            await asyncio.sleep(0)
        assert recorder.started == ["0"]
        gate.set()
        await line.done()
    assert recorder.seen == ["0", "1", "2"]
    assert recorder.most_running == 1


async def test_a_stuck_stream_does_not_hold_up_the_others() -> None:
    recorder = Recorder()
    gate = recorder.hold("stuck")
    async with HandlerFeed(recorder) as line:
        line.publish("a", b"stuck")
        for number in range(50):
            line.publish(f"k{number % 7}", str(number).encode())
        await until(lambda: len(recorder.seen) == 50)
        line.publish("b", b"late")
        await until(lambda: "late" in recorder.seen)
        gate.set()
        await line.done()
    assert recorder.seen[-1] == "stuck"


async def test_streams_that_got_ready_while_all_workers_wait_are_served() -> None:
    """Each time one handler suspends, another worker must be left for the streams behind it."""
    recorder = Recorder()
    gates = [recorder.hold(f"stuck{number}") for number in range(20)]
    async with HandlerFeed(recorder) as line:
        line.publish_all((f"k{number}", f"stuck{number}".encode()) for number in range(20))
        await until(lambda: len(recorder.started) == 20)
        line.publish_all((f"k{number}", b"next") for number in range(20))
        gates[7].set()
        await until(lambda: recorder.seen == ["stuck7", "next"])
        for gate in gates:
            gate.set()
        await line.done()
    assert len(recorder.seen) == 40


async def test_handlers_that_waited_go_on_with_their_streams_in_the_same_turn_of_the_loop() -> None:
    """A handler that waited long has not had the loop meanwhile, so its worker need not leave the loop to others."""
    started, gate, in_turn = list[str](), asyncio.Event(), list[int]()

    async def handler(event: Event) -> None:
        assert event.stream is not None
        started.append(event.stream.key)
        await gate.wait()

    async with HandlerFeed(handler) as line:
        line.publish_all((f"k{number % 50}", b"") for number in range(100))
        await until(lambda: len(started) == 50)
        later = monotonic() + 2 * TURN_S
        await until(lambda: monotonic() > later)
        gate.set()
        asyncio.get_running_loop().call_soon(lambda: in_turn.append(len(started)))
        await line.done()
    assert in_turn[0] >= 99  # only the first one leaves the loop to others


async def test_a_failing_stream_does_not_hold_up_the_others() -> None:
    recorder = Recorder()
    recorder.fail("bad")
    async with HandlerFeed(recorder, retry=RESTLESS) as line:
        line.publish("a", b"bad")
        line.publish("b", b"1")
        line.publish("c", b"2")
        await until(lambda: sorted(recorder.seen) == ["1", "2"])
        assert line.delivery.counts.dead_lettered == 0


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_concurrency_bounds_the_handlers_that_run(concurrency: int) -> None:
    recorder = Recorder()
    gates = [recorder.hold(str(number)) for number in range(8)]
    async with HandlerFeed(recorder, concurrency=concurrency) as line:
        line.publish_all((f"k{number}", str(number).encode()) for number in range(8))
        await until(lambda: recorder.running == concurrency)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(recorder.started) == concurrency
        for gate in gates:
            gate.set()
        await line.done()
    assert recorder.most_running == concurrency
    assert len(recorder.seen) == 8


async def test_a_long_run_of_ready_handlers_lets_the_loop_turn() -> None:
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1
        if len(recorder.seen) < 30_000:
            asyncio.get_running_loop().call_soon(count)

    recorder = Recorder()
    async with HandlerFeed(recorder, max_events=100_000) as line:
        line.publish_all((f"k{number}", b"x") for number in range(30_000))
        count()
        await line.done()
    assert turns > 3


# ---- handlers are ordinary tasks -----------------------------------------------------------------------------------


async def test_timeouts_work_inside_a_handler() -> None:
    attempts: list[str] = []

    async def handler(event: Event) -> None:
        attempts.append("try")
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    async with HandlerFeed(handler) as line:
        line.publish("a", b"1")
        await line.done()
        assert line.sink.dead == [(b"1", "TimeoutError: ", 3)]
    assert len(attempts) == 3


async def test_task_groups_and_context_variables_work_inside_a_handler() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    seen: list[str] = []

    async def child() -> None:
        seen.append(variable.get())

    async def handler(event: Event) -> None:
        assert asyncio.current_task() is not None
        variable.set(event.payload.decode())
        async with asyncio.TaskGroup() as group:
            group.create_task(child())

    async with HandlerFeed(handler) as line:
        line.publish("a", b"1")
        line.publish("b", b"2")
        await line.done()
    assert sorted(seen) == ["1", "2"]


async def _cancels_its_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def _raises_cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("cancel", [_cancels_its_task, _raises_cancelled])
async def test_a_handler_that_cancels_itself_is_a_failure(cancel: Callable[[], asyncio.Future[None]]) -> None:
    seen: list[bytes] = []
    attempts = 0

    async def handler(event: Event) -> None:
        nonlocal attempts
        if event.payload == b"bad":
            attempts += 1
            await cancel()
        seen.append(event.payload)

    async with HandlerFeed(handler) as line:
        line.publish("a", b"bad")
        line.publish("a", b"good")
        line.publish("b", b"other")
        await line.done()
        assert [dead[0] for dead in line.sink.dead] == [b"bad"]
    assert attempts == 3
    assert sorted(seen) == [b"good", b"other"]


async def test_a_cancellation_that_a_handler_leaves_behind_costs_no_stream() -> None:
    seen: list[bytes] = []

    async def handler(event: Event) -> None:
        if event.payload == b"0":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # and returns: whatever the worker awaits next is hit
        elif event.payload == b"bad":
            raise ValueError
        else:
            await asyncio.sleep(0)
        seen.append(event.payload)

    async with HandlerFeed(handler, concurrency=1) as line:
        line.publish_all([("a", b"0"), ("b", b"bad"), ("b", b"bad"), ("c", b"1"), ("a", b"2")])
        await line.done()
    assert sorted(seen) == [b"0", b"1", b"2"]


# ---- what handlers look like ---------------------------------------------------------------------------------------


async def test_a_batch_handler_gets_the_stored_batches() -> None:
    got: list[EventBatch] = []

    async def handler(batch: EventBatch) -> None:
        got.append(batch)

    async with HandlerFeed(handler, batch=True) as line:
        published = [line.publish("a", b"0", b"1"), line.publish("a", b"2")]
        await line.done()
        assert got == published
        assert line.delivery.counts.delivered_events == 3
        assert line.delivery.counts.delivered_batches == 2


async def test_a_batch_handler_gets_the_rest_of_a_batch_after_a_restart() -> None:
    got: list[EventBatch] = []

    async def handler(batch: EventBatch) -> None:
        got.append(batch)

    half = Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0, 2))})
    async with HandlerFeed(handler, batch=True, checkpoint=half) as line:
        cursor = line.delivery.progress.cursors[stream("a")]
        cursor.feed = line
        line.publish("a", b"0", b"1", b"2", b"3")
        await line.done()
    (rest,) = got
    assert rest.count == len(rest) == 2
    assert rest.token == SequenceToken(0, 2)
    assert rest.payloads() == [b"2", b"3"]
    assert list(rest.sizes()) == [1, 1]
    assert len(rest.timestamps_us()) == 2
    assert [event.token for event in rest] == [SequenceToken(0, 2), SequenceToken(0, 3)]


class Observer:
    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.errors: list[Exception] = []

    async def on_next(self, event: Event) -> None:
        if event.payload == b"bad":
            raise ValueError("bad")
        self.events.append(event.payload)

    async def on_error(self, error: Exception) -> None:
        self.errors.append(error)
        raise RuntimeError("an observer that cannot even take an error")


async def test_an_observer_is_told_of_events_given_up_on() -> None:
    observer = Observer()
    async with HandlerFeed(observer) as line:
        line.publish("a", b"1", b"bad", b"2")
        await line.done()
    assert observer.events == [b"1", b"2"]
    assert [str(error) for error in observer.errors] == ["bad"]


# ---- retries and giving up -----------------------------------------------------------------------------------------


async def test_a_retry_starts_at_the_event_that_failed() -> None:
    recorder = Recorder()
    recorder.fail("2", 2)
    async with HandlerFeed(recorder) as line:
        line.publish("a", b"0", b"1", b"2", b"3")
        await line.done()
        assert line.delivery.counts.retries == 2
    assert recorder.started == ["0", "1", "2", "2", "2", "3"]


async def test_a_batch_that_failed_is_handled_again_as_a_whole() -> None:
    calls: list[list[bytes]] = []

    async def handler(batch: EventBatch) -> None:
        calls.append(batch.payloads())
        if len(calls) < 3:
            raise ValueError

    async with HandlerFeed(handler, batch=True) as line:
        line.publish("a", b"0", b"1")
        line.publish("a", b"2")
        await line.done()
    assert calls == [[b"0", b"1"]] * 3 + [[b"2"]]


@virtual_time
async def test_attempts_are_apart_as_the_policy_says() -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def handler(event: Event) -> None:
        times.append(loop.time())
        raise ValueError

    policy = RetryPolicy(max_attempts=7, initial_delay_s=1.0, multiplier=2.0, max_delay_s=6.0)
    async with HandlerFeed(handler, retry=policy) as line:
        line.publish("a", b"1")
        await line.done()
    waits = [later - earlier for earlier, later in pairwise(times)]
    ceilings = [1.0, 2.0, 4.0, 6.0, 6.0, 6.0]
    assert len(waits) == len(ceilings)
    assert all(ceiling / 2 <= wait <= ceiling for wait, ceiling in zip(waits, ceilings, strict=True))


@virtual_time
async def test_an_event_is_given_up_when_its_time_is_over() -> None:
    policy = RetryPolicy(max_attempts=1000, max_elapsed_s=10.0, initial_delay_s=2.0, multiplier=1.0)
    recorder = Recorder()
    recorder.fail("bad")
    async with HandlerFeed(recorder, retry=policy) as line:
        line.publish("a", b"bad", b"1")
        await line.done()
        attempts = line.sink.dead[0][2]
    assert 6 <= attempts <= 11
    assert recorder.seen == ["1"]


@virtual_time
async def test_the_next_event_has_all_attempts_and_all_the_time_again() -> None:
    policy = RetryPolicy(max_attempts=3, max_elapsed_s=10.0, initial_delay_s=3.0, multiplier=1.0)
    recorder = Recorder()
    for payload in ("0", "1", "2"):
        recorder.fail(payload, 2)
    async with HandlerFeed(recorder, retry=policy) as line:
        line.publish("a", b"0", b"1")
        line.publish("a", b"2")
        await line.done()
        assert line.sink.dead == []
    assert recorder.seen == ["0", "1", "2"]


async def test_a_dead_letter_carries_reason_and_attempts_and_the_stream_goes_on() -> None:
    recorder = Recorder()
    recorder.fail("1")
    async with HandlerFeed(recorder) as line:
        line.publish("a", b"0", b"1", b"2")
        await line.done()
        assert line.sink.dead == [(b"1", "ValueError: no 1", 3)]
        assert line.delivery.counts.dead_lettered == 1
    assert recorder.seen == ["0", "2"]


async def test_a_batch_that_is_given_up_on_is_dead_lettered_event_by_event() -> None:
    async def handler(batch: EventBatch) -> None:
        if batch.payloads()[0] == b"0":
            raise ValueError("no")

    async with HandlerFeed(handler, batch=True) as line:
        line.publish("a", b"0", b"1")
        line.publish("a", b"2")
        await line.done()
        assert [dead[0] for dead in line.sink.dead] == [b"0", b"1"]
        assert line.delivery.counts.delivered_events == 1


async def test_skipping_leaves_a_record() -> None:
    recorder = Recorder()
    recorder.fail("1")
    async with HandlerFeed(recorder, on_failure=OnFailure.SKIP) as line:
        line.publish("a", b"0", b"1", b"2")
        await line.done()
        assert line.sink.gaps == [(b"1", "ValueError: no 1")]
        assert line.sink.dead == []
        assert line.delivery.counts.skipped == 1
    assert recorder.seen == ["0", "2"]


@pytest.mark.parametrize("rewindable", [True, False])
async def test_a_paused_stream_stands_still_until_it_is_resumed(rewindable: bool) -> None:
    recorder = Recorder()
    recorder.fail("1", 3)
    async with HandlerFeed(recorder, on_failure=OnFailure.PAUSE, rewindable=rewindable) as line:
        line.publish("a", b"0", b"1", b"2")
        line.publish("b", b"x")
        await line.done()  # without paused streams
        assert recorder.seen == ["0", "x"]
        paused = line.delivery.progress.checkpoint().behind[stream("a")]
        assert paused == StreamBehind(SequenceToken(0, 1), "ValueError: no 1")
        assert not line.delivery.retries.resume(stream("b"))
        assert line.delivery.retries.resume(stream("a"))
        assert not line.delivery.retries.resume(stream("a"))
        (cursor,) = line.parked  # it left the cache, so that it does not fill: the agent brings it back
        line.delivery.adopt(cursor, line)
        await line.done()
    assert recorder.seen == ["0", "x", "1", "2"]


async def test_a_paused_stream_is_paused_after_a_restart() -> None:
    paused = Checkpoint(5, {stream("a"): StreamBehind(SequenceToken(2, 1), "it failed")})
    async with HandlerFeed(Recorder(), checkpoint=paused) as line:
        assert line.delivery.progress.cursors[stream("a")].state is CursorState.PAUSED
        assert line.delivery.progress.checkpoint() == paused


@pytest.mark.parametrize("failure", [StorageError("disk on fire"), OSError("no such disk"), asyncio.CancelledError()])
@pytest.mark.parametrize("policy", [OnFailure.DEAD_LETTER, OnFailure.SKIP])
def test_an_event_is_not_passed_before_giving_up_on_it_is_recorded(failure: BaseException, policy: OnFailure) -> None:
    @virtual_time
    async def play() -> None:
        recorder = Recorder()
        recorder.fail("bad")
        async with HandlerFeed(recorder, on_failure=policy) as line:
            line.sink.failures = [failure, failure]
            line.publish("a", b"bad", b"1")
            line.publish("b", b"2")
            await until(lambda: len(line.sink.failures) < 2)
            assert line.delivery.progress.checkpoint().watermark == 0
            await line.done()
            assert len(line.sink.dead) + len(line.sink.gaps) == 1
        assert sorted(recorder.seen) == ["1", "2"]

    play()


def test_a_store_that_is_away_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "headrace.agents")

    @virtual_time
    async def play() -> None:
        recorder = Recorder()
        recorder.fail("bad")
        async with HandlerFeed(recorder) as line:
            line.sink.failures = [StorageError("no store")] * 20
            line.publish("a", b"bad")
            await line.done()
            assert len(line.sink.dead) == 1

    play()
    lines = [record.getMessage() for record in caplog.records]
    unrecorded = [line for line in lines if line.startswith("cannot record")]
    assert 5 <= len(unrecorded) <= 8
    assert "gave up on event 0 of stream" in unrecorded[0]
    assert len([line for line in lines if "gives up on event" in line]) == 1


# ---- filters -------------------------------------------------------------------------------------------------------


def _even(event: Event) -> bool:
    return int(event.payload) % 2 == 0


async def test_a_filter_advances_the_position() -> None:
    recorder = Recorder()
    async with HandlerFeed(recorder, predicate=_even) as line:
        line.publish("a", b"1", b"3")
        line.publish("a", b"4", b"5")
        await line.done()
        assert line.delivery.progress.checkpoint() == Checkpoint(2)
        assert line.delivery.counts.filtered == 3
    assert recorder.seen == ["4"]


async def test_a_batch_handler_gets_what_the_filter_leaves_with_its_own_tokens() -> None:
    got: list[EventBatch] = []

    async def handler(batch: EventBatch) -> None:
        got.append(batch)

    async with HandlerFeed(handler, batch=True, predicate=_even) as line:
        line.publish("a", b"1", b"2", b"3", b"4")
        line.publish("a", b"5")
        whole = line.publish("a", b"6", b"8")
        await line.done()
        assert line.delivery.counts.filtered == 3
        assert line.delivery.counts.delivered_events == 4
    some, second = got
    assert [(e.payload, e.token) for e in some] == [(b"2", SequenceToken(0, 1)), (b"4", SequenceToken(0, 3))]
    assert some.count == 2
    assert some.token == SequenceToken(0, 1)
    assert second == whole


async def test_a_filter_that_raises_lets_the_event_through() -> None:
    recorder = Recorder()
    async with HandlerFeed(recorder, predicate=_even) as line:
        line.publish("a", b"1", b"no number", b"2")
        await line.done()
        assert line.delivery.counts.filtered == 1
    assert recorder.seen == ["no number", "2"]


@pytest.mark.parametrize("batch", [True, False])
async def test_each_event_counts_once_however_often_it_is_tried(batch: bool) -> None:
    async def handler(_: object) -> None:
        raise ValueError

    async with HandlerFeed(handler, batch=batch, predicate=_even) as line:
        line.publish("a", b"1", b"2", b"3")
        await line.done()
        counts = line.delivery.counts
        assert [dead[0] for dead in line.sink.dead] == [b"2"]
        assert (counts.filtered, counts.dead_lettered, counts.delivered_events) == (2, 1, 0)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


async def test_a_checkpoint_is_exact_however_streams_interleave() -> None:
    recorder = Recorder()
    async with HandlerFeed(recorder) as line:
        recorder.hold("a1")
        recorder.hold("c0")
        line.publish("a", b"a0", b"a1", b"a2")  # 0
        line.publish("b", b"b0")  # 1
        line.publish("c", b"c0")  # 2
        line.publish("b", b"b1")  # 3
        await until(lambda: recorder.running == 2 and "b1" in recorder.seen)
        checkpoint = line.delivery.progress.checkpoint()
        assert checkpoint == Checkpoint(
            4, {stream("a"): StreamBehind(SequenceToken(0, 1)), stream("c"): StreamBehind(SequenceToken(2, 0))}
        )
        assert checkpoint.watermark == line.delivery.progress.watermark == 0


async def test_a_delivery_goes_on_exactly_where_a_checkpoint_says() -> None:
    checkpoint = Checkpoint(
        4, {stream("a"): StreamBehind(SequenceToken(0, 1)), stream("ahead"): StreamBehind(SequenceToken(5, 1))}
    )
    recorder = Recorder()
    async with HandlerFeed(recorder, checkpoint=checkpoint) as line:
        assert line.delivery.progress.checkpoint() == checkpoint
        for cursor in line.delivery.progress.cursors.values():
            cursor.feed = line
        line.publish("a", b"a0", b"a1")  # 0
        line.publish("b", b"b0")  # 1
        line.publish("a", b"a2")  # 2
        line.publish("b", b"b1")  # 3
        line.publish("b", b"b2")  # 4
        line.publish("ahead", b"h0", b"h1")  # 5
        await line.done()
    assert sorted(recorder.seen) == ["a1", "a2", "b2", "h1"]


async def test_the_position_never_goes_up_because_many_streams_are_ahead() -> None:
    ahead = {stream(f"k{number}"): StreamBehind(SequenceToken(100 + number)) for number in range(10)}
    async with HandlerFeed(Recorder(), checkpoint=Checkpoint(7, ahead)) as line:
        assert line.delivery.progress.checkpoint() == Checkpoint(7, ahead)


async def test_nothing_of_streams_that_are_not_selected_is_kept() -> None:
    recorder = Recorder()
    async with HandlerFeed(recorder, selector="s/a") as line:
        line.publish("b", b"b")
        line.publish("a", b"a")
        await line.done()
        assert not line.delivery.progress.cursors
    assert recorder.seen == ["a"]


# ---- leaving the cache ---------------------------------------------------------------------------------------------


async def test_a_running_handler_keeps_its_batch_when_its_cursor_is_detached() -> None:
    recorder = Recorder()
    gate = recorder.hold("0")
    async with HandlerFeed(recorder) as line:
        line.publish("a", b"0", b"1")
        line.publish("a", b"2")
        await until(lambda: recorder.started)
        cursor = line.delivery.progress.cursors[stream("a")]
        line.delivery.detach(cursor)
        assert not any(bucket.pins for bucket in line.cache.buckets)
        gate.set()
        await until(lambda: line.parked)
        assert recorder.seen == ["0", "1"]
        assert (cursor.state, cursor.token, cursor.batch) == (CursorState.PARKED, SequenceToken(1, 0), None)
        assert line.delivery.progress.checkpoint().behind == {stream("a"): StreamBehind(SequenceToken(1, 0))}


async def test_a_detached_cursor_in_line_is_parked_and_comes_only_once_when_it_is_back() -> None:
    recorder = Recorder()
    gate = recorder.hold("busy")
    async with HandlerFeed(recorder, concurrency=1) as line:
        line.publish("a", b"busy")
        await until(lambda: recorder.started)
        line.publish("b", b"0")
        line.publish("b", b"1")
        for _ in range(3):
            cursor = line.delivery.progress.cursors[stream("b")]
            line.delivery.detach(cursor)
            assert cursor.state is CursorState.PARKED
            line.delivery.adopt(cursor, line)
        gate.set()
        await line.done()
    assert recorder.seen == ["busy", "0", "1"]


# ---- waiting and stopping ------------------------------------------------------------------------------------------


async def test_waiting_for_a_position_ends_when_the_delivery_is_stopped() -> None:
    recorder = Recorder()
    recorder.hold("0")
    line = HandlerFeed(recorder)
    line.publish("a", b"0")
    waiting = asyncio.create_task(line.done())
    await until(lambda: recorder.started)
    await line.delivery.stop(0.0)
    with pytest.raises(Closed):
        await waiting


async def test_a_stop_lets_the_present_event_end_and_starts_no_other() -> None:
    recorder = Recorder()
    gate = recorder.hold("1")
    line = HandlerFeed(recorder, concurrency=1)
    line.publish("a", b"0", b"1", b"2", b"3")
    line.publish("b", b"x")
    await until(lambda: "1" in recorder.started)
    stopping = asyncio.create_task(line.delivery.stop(60.0))
    await asyncio.sleep(0)
    gate.set()
    await stopping
    assert recorder.seen == ["0", "1"]
    assert recorder.started == ["0", "1"]
    assert line.delivery.progress.checkpoint() == Checkpoint(
        2, {stream("a"): StreamBehind(SequenceToken(0, 2)), stream("b"): StreamBehind(SequenceToken(1, 0))}
    )


@virtual_time
async def test_a_handler_that_does_not_end_in_time_is_cancelled_and_its_event_not_done() -> None:
    loop = asyncio.get_running_loop()
    recorder = Recorder()
    recorder.hold("1")
    line = HandlerFeed(recorder)
    line.publish("a", b"0", b"1")
    await until(lambda: "1" in recorder.started)
    began = loop.time()
    await line.delivery.stop(2.5)
    assert loop.time() - began == 2.5
    assert recorder.running == 0
    assert line.delivery.progress.checkpoint() == Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0, 1))})


@virtual_time
async def test_no_retry_comes_after_a_stop() -> None:
    recorder = Recorder()
    gate = recorder.hold("late")
    recorder.fail("bad")
    recorder.fail("late")
    line = HandlerFeed(recorder, retry=RetryPolicy(initial_delay_s=1.0))
    line.publish("a", b"bad")
    line.publish("b", b"late")
    await until(lambda: len(recorder.started) == 2)
    stopping = asyncio.create_task(line.delivery.stop(60.0))
    await asyncio.sleep(0)
    gate.set()  # it fails while the delivery is stopping
    await stopping
    await asyncio.sleep(100)
    assert recorder.started == ["bad", "late"]


async def test_a_stop_that_is_cancelled_leaves_no_handler_running() -> None:
    recorder = Recorder()
    recorder.hold("0")
    line = HandlerFeed(recorder)
    line.publish("a", b"0")
    await until(lambda: recorder.started)
    stopping = asyncio.create_task(line.delivery.stop(60.0))
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    await until(lambda: not recorder.running)


# ---- once more -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [True, False])
async def test_a_redriven_event_comes_as_it_was(batch: bool) -> None:
    got: list[Event] = []

    async def handler(what: Event | EventBatch) -> None:
        got.extend([what] if isinstance(what, Event) else what)
        if isinstance(what, EventBatch):
            assert what.token == SequenceToken(7, 3)
            assert what.offset == 7

    event = Event(b"x", {"h": "1"}, "id", 5, stream=stream("a"), token=SequenceToken(7, 3))
    async with HandlerFeed(handler, batch=batch) as line:
        assert await line.delivery.redrive(event) is None
    assert got == [event]


async def test_a_redriven_event_that_fails_says_why() -> None:
    recorder = Recorder()
    recorder.fail("x")
    event = Event(b"x", stream=stream("a"), token=SequenceToken(7, 3))
    async with HandlerFeed(recorder) as line:
        error = await line.delivery.redrive(event)
    assert str(error) == "no x"


async def test_a_redriven_handler_that_is_cancelled_has_failed() -> None:
    async def handler(event: Event) -> None:
        raise asyncio.CancelledError

    event = Event(b"x", stream=stream("a"), token=SequenceToken(7, 3))
    async with HandlerFeed(handler) as line:
        assert isinstance(await line.delivery.redrive(event), asyncio.CancelledError)


async def test_a_redrive_can_be_cancelled() -> None:
    recorder = Recorder()
    recorder.hold("x")
    event = Event(b"x", stream=stream("a"), token=SequenceToken(7, 3))
    async with HandlerFeed(recorder) as line:
        redriving = asyncio.create_task(line.delivery.redrive(event))
        await until(lambda: recorder.running)
        redriving.cancel()
        await asyncio.wait([redriving])
        assert redriving.cancelled()


class Lease:
    """The term of a queue's lease, in loop time."""

    until = math.inf


async def test_a_stream_that_stopped_at_the_end_of_its_lease_goes_on_when_the_lease_does():
    lease, handled, stopped = Lease(), list[bytes](), asyncio.Event()

    async def handle(event: Event) -> None:
        handled.append(event.payload)
        if len(handled) == 1:
            lease.until = 0.0
            stopped.set()

    async with HandlerFeed(handle, term=lease) as line:
        line.publish("a", b"1", b"2")
        await stopped.wait()
        await asyncio.sleep(0)
        assert handled == [b"1"]
        lease.until = math.inf
        await line.done()
    assert handled == [b"1", b"2"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [
        record for record in caplog.records if record.levelno == logging.WARNING and "failed on" in record.getMessage()
    ]


@virtual_time
@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
async def test_an_outage_is_one_line_without_a_traceback_unless_debug_is_on(
    caplog: pytest.LogCaptureFixture, level: int
) -> None:
    async def handle(event: Event) -> None:
        raise Unavailable("the database is down") from OSError("no route")

    caplog.set_level(level, "headrace.agents")
    async with HandlerFeed(handle, circuit_breaker=False) as line:
        line.publish("a", b"one")
        await asyncio.sleep(0.5)
        (record,) = warnings(caplog)
        assert record.getMessage().endswith("not counted: Unavailable: the database is down")
        assert bool(record.exc_info) == (level == logging.DEBUG)


@virtual_time
async def test_the_first_failure_of_a_stream_is_a_warning_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(event: Event) -> None:
        raise ValueError(event.payload)

    caplog.set_level(logging.DEBUG, "headrace.agents")
    patient = RetryPolicy(max_attempts=1000, max_elapsed_s=1e6, initial_delay_s=1, max_delay_s=1)
    async with HandlerFeed(handle, retry=patient) as line:
        line.publish("a", b"one")
        line.publish("b", b"two")
        await asyncio.sleep(30)
        first = warnings(caplog)
        assert [record.getMessage().partition(",")[0] for record in first] == [
            "subscription 'sub' failed on event 0 of stream s/a", "subscription 'sub' failed on event 1 of stream s/b",
        ]  # fmt: skip
        assert all(record.exc_info and record.exc_info[0] is ValueError for record in first)
        await asyncio.sleep(600)
        later = warnings(caplog)[2:]
        assert len(later) == 10
        assert "more failures, not shown" in later[-1].getMessage()


@virtual_time
async def test_failures_of_many_streams_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(event: Event) -> None:
        raise ValueError(event.payload)

    caplog.set_level(logging.WARNING, "headrace.agents")
    patient = RetryPolicy(max_attempts=1000, max_elapsed_s=1e6, initial_delay_s=60, max_delay_s=60)
    async with HandlerFeed(handle, retry=patient) as line:
        for number in range(1000):
            line.publish(str(number), b"x")
        await asyncio.sleep(10)
        assert len(warnings(caplog)) == 5
