"""The provider of a test: waiting, faults, assertions. Each async test here runs in virtual time."""

import asyncio
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import (
    Event,
    EventBatch,
    InvalidArgument,
    NotFound,
    OnFailure,
    RetryPolicy,
    StorageError,
    StreamId,
    StreamState,
    Transaction,
    Unavailable,
)
from headrace.testing import InjectedError, TestProvider, opened_provider
from headrace.testing.virtual_time import OUTSIDE_PATIENCE_S, STARTS_AT_S, NothingLeftToHappenError, VirtualTimeLoop

ORDER = StreamId("orders", "1")
MINUTES = RetryPolicy(max_attempts=5, initial_delay_s=60, max_delay_s=600, max_elapsed_s=7200)


class Handler:
    """Remembers payloads as text. Fails with those of `bad`, as often as they say."""

    def __init__(self, **bad: int) -> None:
        self.seen: list[str] = []
        self.bad = Counter(bad)

    async def __call__(self, event: Event) -> None:
        text = event.payload.decode()
        if self.bad[text] > 0:
            self.bad[text] -= 1
            raise ValueError(f"no carrier for {text}")
        self.seen.append(text)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "headrace.agents")


pytestmark = pytest.mark.usefixtures("quiet")


# ---- waiting -------------------------------------------------------------------------------------------------------


async def test_everything_is_handled_with_retries_of_minutes_and_delays_of_hours(headrace: TestProvider) -> None:
    handler, began = Handler(b=3), time.thread_time()
    await headrace.subscribe("ship", "orders/*", handler, retry=MINUTES)
    await headrace.publish(ORDER, ["a", "b"])
    await headrace.publish(ORDER, "later", delay=timedelta(hours=20))
    await headrace.settled()
    assert handler.seen == ["a", "b", "later"]
    headrace.assert_delivered("ship", ORDER, ["a", "b", "later"])
    headrace.assert_failed_deliveries("ship", ORDER, 3)
    headrace.assert_nothing_lost()
    assert headrace.deliveries("ship")[-1].at >= timedelta(hours=20)
    assert time.thread_time() - began < 5, "hours cost milliseconds"  # of the processor, so load does not matter


async def test_handlers_that_publish_and_others_that_follow_are_waited_for(headrace: TestProvider) -> None:
    last = Handler()

    async def bill(event: Event) -> None:
        await asyncio.sleep(600)
        await headrace.publish(StreamId("bills", "1"), event.payload, delay=timedelta(hours=1))

    await headrace.subscribe("bill", "orders/*", bill)
    await headrace.subscribe("send", "bills/*", last)
    await headrace.publish(ORDER, ["a", "b"])
    await headrace.settled()
    assert last.seen == ["a", "b"]


async def test_timestamps_and_delays_follow_virtual_time(headrace: TestProvider) -> None:
    times = list[int]()

    async def note(event: Event) -> None:
        times.append(event.timestamp_us or 0)

    await headrace.subscribe("note", "orders/*", note)
    await headrace.publish(ORDER, b"a")
    await asyncio.sleep(7200)
    await headrace.publish(ORDER, b"b")
    await headrace.settled()
    assert 7200 <= (times[1] - times[0]) / 1e6 < 7300
    assert abs(times[0] / 1e6 - time.time()) < 3600


async def test_a_subscription_that_never_ends_is_named_with_its_history(headrace: TestProvider) -> None:
    async def stuck(event: Event) -> None:
        await asyncio.Event().wait()

    await headrace.subscribe("stuck", "orders/*", stuck)
    await headrace.publish(ORDER, b"a")
    with pytest.raises(AssertionError) as caught:
        await headrace.settled(timedelta(hours=2))
    first, second, published, delivered = str(caught.value).splitlines()
    assert (first, second) == ("not everything is handled within 2:00:00", "History:")
    assert published.endswith("published orders/1 0 'a'")
    assert delivered.endswith("stuck orders/1 0 'a' attempt 1: running")


def test_a_wait_for_nothing_fails_at_once_and_says_where() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    with opened_provider() as provider, pytest.raises(AssertionError, match=r"test_provider.py:\d+ \(in waits\) waits"):
        provider.run(waits())


def test_a_plain_function_runs_coroutines_in_the_loop(headrace: TestProvider) -> None:
    handler = Handler()

    async def scenario() -> str:
        await headrace.subscribe("one", "orders/*", handler)
        await headrace.publish(ORDER, b"a")
        await headrace.settled()
        return "done"

    assert headrace.run(scenario()) == "done"
    headrace.assert_delivered("one", ORDER, "a")


# ---- the world outside of the loop ---------------------------------------------------------------------------------


async def test_time_stands_still_while_a_thread_works(headrace: TestProvider) -> None:
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(0.01):
        await asyncio.to_thread(time.sleep, 0.2)
    assert asyncio.get_running_loop().time() == began


@pytest.mark.parametrize("of_handler", [True, False])
async def test_a_handler_and_the_test_may_wait_for_sockets(headrace: TestProvider, *, of_handler: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        await asyncio.to_thread(time.sleep, 0.05)
        writer.write(line)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    replies = list[bytes]()

    async def ask(event: Event) -> None:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(event.payload + b"\n")
            replies.append(await reader.readline())
            writer.close()
            await writer.wait_closed()

    if of_handler:
        await headrace.subscribe("ask", "orders/*", ask)
        await headrace.publish(ORDER, b"a")
        await headrace.settled()
        headrace.assert_nothing_lost()
    else:
        await ask(Event(b"a"))
    assert replies == [b"a\n"]
    server.close()
    await server.wait_closed()


def test_the_loop_waits_for_a_thread_of_its_own_but_not_for_ever() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        stop = threading.Event()

        def work() -> None:
            time.sleep(OUTSIDE_PATIENCE_S / 10)
            loop.call_soon_threadsafe(answer.set_result, None)
            stop.wait()

        thread = threading.Thread(target=work)
        thread.start()
        async with asyncio.timeout(60):
            await answer
        answered = loop.time()
        await asyncio.sleep(60)  # the thread says nothing: so time passes
        stop.set()
        thread.join()
        return answered, loop.time()

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(lambda: True)) as runner:
        assert runner.run(main()) == (STARTS_AT_S, STARTS_AT_S + 60)


def test_without_a_timer_and_without_the_outside_the_loop_ends_at_once() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.raises(NothingLeftToHappenError):
        runner.run(main())


# ---- faults --------------------------------------------------------------------------------------------------------


async def test_redelivery_brings_all_events_again_in_order_and_finds_a_handler_that_is_not_idempotent(
    headrace: TestProvider,
) -> None:
    balance, handler = Counter[str](), Handler()

    async def add(event: Event) -> None:
        await handler(event)
        balance["sum"] += int(event.payload)

    await headrace.subscribe("add", "orders/*", add)
    await headrace.publish(ORDER, ["1", "2", "3"])
    await headrace.settled()
    await headrace.redeliver("add")
    assert handler.seen == ["1", "2", "3", "1", "2", "3"]
    assert balance["sum"] == 12, "it would be 6 if the handler was idempotent"
    headrace.assert_delivered("add", ORDER, ["1", "2", "3"])
    await headrace.publish(ORDER, "4")
    await headrace.settled()
    await headrace.redeliver("add")
    assert handler.seen[6:] == ["4", "4"], "only those since the last call"
    assert [each.attempt for each in headrace.deliveries("add")] == [1, 1, 1, 2, 2, 2, 1, 2]


async def test_effects_are_applied_once_also_if_events_are_delivered_again(
    headrace: TestProvider, tmp_path: Path
) -> None:
    from sqlalchemy import create_engine  # noqa: PLC0415

    from headrace import Effects  # noqa: PLC0415
    from headrace.effects import schema  # noqa: PLC0415

    engine = create_engine(f"sqlite:///{tmp_path / 'bank.db'}")
    with engine.begin() as connection:
        schema.migrate(connection)
    states = list[int]()

    async def count(event: Event, tx: Transaction) -> None:
        tx.state = (tx.state or 0) + 1
        states.append(tx.state)

    await headrace.subscribe("count", "orders/*", count, effects=Effects(engine, state=StreamState()))
    await headrace.publish(ORDER, ["a", "b"])
    await headrace.settled()
    headrace.fail_handler("count", after=True)
    await headrace.redeliver("count")
    await headrace.publish(ORDER, "c")
    await headrace.settled()
    assert states == [1, 2, 3]
    engine.dispose()


async def test_a_handler_fails_before_or_after_its_work(headrace: TestProvider) -> None:
    handler = Handler()
    await headrace.subscribe("one", "orders/*", handler)
    headrace.fail_handler("one", times=2)
    await headrace.publish(ORDER, "a")
    await headrace.settled()
    assert handler.seen == ["a"]
    headrace.fail_handler("one", error=Unavailable("down"), after=True)
    await headrace.publish(ORDER, "b")
    await headrace.settled()
    assert handler.seen == ["a", "b", "b"]
    headrace.assert_failed_deliveries("one", ORDER, 3)
    errors = [type(each.error) for each in headrace.deliveries("one", "orders/1") if each.error]
    assert errors == [InjectedError, InjectedError, Unavailable]


async def test_a_slow_consumer_holds_up_no_other_stream(headrace: TestProvider) -> None:
    handler = Handler()
    await headrace.subscribe("slow", "orders/*", handler)
    headrace.slow_handler("slow", 3600)
    for key in "12":
        await headrace.publish(StreamId("orders", key), ["a", "b"])
    await headrace.settled()
    assert max(each.at for each in headrace.deliveries("slow")) < timedelta(hours=1.1)
    headrace.slow_handler("slow", 0)
    began = headrace.deliveries("slow")[-1].at
    await headrace.publish(ORDER, "c")
    await headrace.settled()
    assert headrace.deliveries("slow")[-1].at - began < timedelta(hours=1.1)


async def test_a_failed_publish_stores_nothing_or_all_the_same(headrace: TestProvider) -> None:
    handler = Handler()
    await headrace.subscribe("one", "orders/*", handler)
    headrace.fail_publish()
    with pytest.raises(StorageError, match="injected by the test"):
        await headrace.publish(ORDER, "a")
    headrace.fail_publish(error=Unavailable("the answer is lost"), stored=True)
    with pytest.raises(Unavailable):
        await headrace.publish(ORDER, "b")
    await headrace.publish(ORDER, "b")
    await headrace.settled()
    assert handler.seen == ["b", "b"]
    assert "published orders/1 - 'a', failed: injected by the test" in headrace.history()
    assert "published orders/1 0 'b', failed but stored: the answer is lost" in headrace.history()


# ---- results -------------------------------------------------------------------------------------------------------


async def test_a_dead_letter_is_found_and_after_a_redrive_it_is_gone(headrace: TestProvider) -> None:
    handler = Handler(b=5)
    ship = await headrace.subscribe("ship", "orders/*", handler, retry=MINUTES)
    await headrace.publish(ORDER, ["a", "b", "c"])
    await headrace.settled()
    letter = headrace.assert_dead_letter("ship", ORDER, "b", reason="no carrier", attempts=5)
    assert letter.reason == "ValueError: no carrier for b"
    headrace.assert_delivered("ship", ORDER, ["a", "c"])
    with pytest.raises(AssertionError, match="a dead letter of ship in orders/1"):
        headrace.assert_nothing_lost()
    await ship.redrive()
    await headrace.settled()
    headrace.assert_nothing_lost()
    assert handler.seen == ["a", "c", "b"]


async def test_failed_assertions_show_what_was_expected_and_the_history_of_the_stream(headrace: TestProvider) -> None:
    await headrace.subscribe("ship", "orders/*", Handler(b=1), retry=RetryPolicy(max_attempts=1))
    await headrace.publish(ORDER, ["a", "b"])
    await headrace.publish(StreamId("orders", "2"), "x")
    await headrace.settled()
    with pytest.raises(AssertionError) as caught:
        headrace.assert_delivered("ship", "orders/1", ["a", "b"])
    lines = [line.partition(" s ")[2] or line for line in str(caught.value).splitlines()]
    assert lines == [
        "ship handled other events of orders/1",
        "  expected: ['a', 'b']",
        "  found:    ['a']",
        "History of orders/1:",
        "published orders/1 0 'a'",
        "published orders/1 0.1 'b'",
        "ship orders/1 0 'a' attempt 1: handled",
        "ship orders/1 0.1 'b' attempt 1: failed: ValueError: no carrier for b",
        "  dead letter of ship: orders/1 0.1 'b', 1 attempts: ValueError: no carrier for b",
    ]
    with pytest.raises(AssertionError, match="1 attempts: ValueError: no carrier for b"):
        headrace.assert_dead_letter("ship", "orders/1", "b", attempts=2)
    with pytest.raises(AssertionError, match=r"expected: one dead letter with payload 'a'"):
        headrace.assert_dead_letter("ship", "orders/1", "a")
    with pytest.raises(AssertionError, match=r"expected: 3\n *found: *1"):
        headrace.assert_failed_deliveries("ship", "orders/1", 3)


async def test_paused_streams_skipped_events_and_running_handlers_count_as_lost(headrace: TestProvider) -> None:
    once = RetryPolicy(max_attempts=1)
    await headrace.subscribe("pause", "a/*", Handler(x=1), retry=once, on_failure=OnFailure.PAUSE)
    await headrace.publish(StreamId("a", "1"), "x")
    await headrace.settled()
    with pytest.raises(AssertionError, match="1 streams of pause paused"):
        headrace.assert_nothing_lost()
    await headrace.resume("pause", StreamId("a", "1"))
    await headrace.settled()
    headrace.assert_nothing_lost()
    await headrace.subscribe("skip", "b/*", Handler(x=1), retry=once, on_failure=OnFailure.SKIP)
    await headrace.publish(StreamId("b", "1"), "x")
    await headrace.settled()
    with pytest.raises(AssertionError, match="a gap of skip: ValueError: no carrier for x"):
        headrace.assert_nothing_lost()


async def test_batches_values_and_seeks_work_as_in_production(headrace: TestProvider) -> None:
    sums = list[int]()

    class Order(msgspec.Struct):
        amount: int

    async def batches(batch: EventBatch) -> None:
        sums.append(len(list(batch.events())))

    async def values(order: Order) -> None:
        sums.append(order.amount)

    await headrace.subscribe("batches", "orders/*", batches, batch=True)
    typed = await headrace.subscribe("values", "orders/*", values)
    await headrace.publish(ORDER, [Order(100), Order(200)])
    await headrace.publish(ORDER, b"no order")
    await headrace.settled()
    assert sorted(sums) == [1, 2, 100, 200]
    headrace.assert_delivered("batches", ORDER, [Order(100), Order(200), b"no order"])
    headrace.assert_dead_letter("values", ORDER, b"no order", reason="PayloadInvalid", attempts=1)
    await typed.seek("earliest")
    await headrace.settled()
    assert sorted(sums) == [1, 2, 100, 100, 200, 200]


async def test_wrong_names_and_options_are_refused_in_one_line(headrace: TestProvider) -> None:
    await headrace.subscribe("ship", "orders/*", Handler())
    with pytest.raises(InvalidArgument, match="no subscription 'shp' was served in this test; served were: ship"):
        headrace.deliveries("shp")
    with pytest.raises(InvalidArgument, match="no subscription 'shp'"):
        headrace.fail_handler("shp")
    with pytest.raises(NotFound):
        await headrace.redeliver("shp")
    with pytest.raises(InvalidArgument, match="times"):
        headrace.fail_publish(times=0)
    with pytest.raises(InvalidArgument, match="outside of a running one"), opened_provider():
        pass


def test_wrong_options_are_refused() -> None:
    wrong: Any = {"queue": 3}
    with pytest.raises(InvalidArgument, match="queues"), opened_provider(queues=0):
        pass
    with pytest.raises(InvalidArgument, match="queue"), opened_provider(**wrong):
        pass


def test_the_end_of_a_loop_waits_for_its_threads() -> None:
    """The thread that joins the others is none of the executor's, and answers after a while of real time."""
    busy = threading.Event()

    async def leave_a_thread() -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, busy.wait, 0.2).cancel()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(leave_a_thread())
