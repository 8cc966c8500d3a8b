"""Handlers in a client: they run as in a silo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace import (
    Client,
    Event,
    EventBatch,
    Fenced,
    HeadraceError,
    InvalidArgument,
    NotFound,
    RetryPolicy,
    SessionState,
    StreamId,
    Unavailable,
)
from headrace.silo.host import Silo
from tests.client.consumers import PATIENCE_S, publish, until
from tests.silo.services.calling import opened

ORDERS = "orders/*"
QUICK = RetryPolicy(max_attempts=3, initial_delay_s=0.0)


@pytest_asyncio.fixture
async def silo(tmp_path: Path) -> AsyncIterator[Silo]:
    async with opened(tmp_path / "data") as silo:
        yield silo


@pytest_asyncio.fixture
async def client(silo: Silo) -> AsyncIterator[Client]:
    assert silo.grpc_address is not None
    async with Client(silo.grpc_address) as client:
        yield client


async def test_a_function_is_given_events(client: Client):
    seen: dict[str, list[int]] = {"a": [], "b": []}

    async def handle(event: Event) -> None:
        assert event.stream is not None
        seen[event.stream.key].append(int(event.payload))

    await publish(client, "ab", 30, each=7)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest")
    await subscription.caught_up()
    assert seen == {"a": list(range(30)), "b": list(range(30))}
    assert subscription.name == "s"
    assert subscription.definition is not None
    await subscription.close()
    await subscription.close()
    assert subscription.consumer.state is SessionState.CLOSED
    state = await client.subscription("s")
    assert all(queue.next_offset == queue.end_offset for queue in state.progress)


async def test_a_function_is_given_batches(client: Client):
    seen: list[list[bytes]] = []

    async def handle(batch: EventBatch) -> None:
        seen.append(batch.payloads())

    await publish(client, "a", 4, each=2)
    subscription = await client.subscribe("s", ORDERS, handle, batch=True, start="earliest")
    await subscription.caught_up()
    assert seen == [[b"0", b"1"], [b"2", b"3"]]
    await subscription.close()


async def test_an_observer_is_told_of_events_errors_and_the_end(client: Client):
    class Watch:
        def __init__(self) -> None:
            self.seen: list[bytes] = []
            self.errors: list[Exception] = []
            self.completed = 0

        async def on_next(self, event: Event) -> None:
            if event.payload == b"1":
                raise ValueError("one")
            self.seen.append(event.payload)

        async def on_error(self, error: Exception) -> None:
            self.errors.append(error)

        async def on_completed(self) -> None:
            self.completed += 1

    watch = Watch()
    await publish(client, "a", 3, each=3)
    subscription = await client.subscribe("s", ORDERS, watch, start="earliest", retry=QUICK)
    await subscription.caught_up()
    assert (watch.seen, [str(error) for error in watch.errors]) == ([b"0", b"2"], ["one"])
    (letter,) = await client.dead_letters("s")
    assert (letter.payload, letter.reason, letter.attempts) == (b"1", "ValueError: one", 3)
    await subscription.delete()
    assert watch.completed == 1
    assert await client.subscriptions() == []


async def test_an_observer_is_told_once_of_each_event_given_up(client: Client):
    errors: list[str] = []

    class Watch:
        async def on_next(self, event: Event) -> None:
            raise ValueError(event.payload)

        async def on_error(self, error: Exception) -> None:
            errors.append(str(error))

    await publish(client, "a", 3, each=3)
    subscription = await client.subscribe("s", ORDERS, Watch(), start="earliest", retry=QUICK)
    await subscription.caught_up()
    assert errors == ["b'0'", "b'1'", "b'2'"]
    assert [letter.attempts for letter in await client.dead_letters("s")] == [3, 3, 3]
    await client.redrive("s")
    async with asyncio.timeout(PATIENCE_S):
        while {letter.attempts for letter in await client.dead_letters("s")} != {4}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert {letter.reason for letter in await client.dead_letters("s")} == {
        "ValueError: b'0'", "ValueError: b'1'", "ValueError: b'2'",
    }  # fmt: skip
    await subscription.close()


async def test_a_failed_event_is_retried_before_later_events(client: Client):
    seen: list[int] = []
    failures = {3: 2, 5: 1}

    async def handle(event: Event) -> None:
        number = int(event.payload)
        seen.append(number)
        if failures.get(number):
            failures[number] -= 1
            raise RuntimeError(number)

    await publish(client, "a", 8, each=4)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest", retry=QUICK)
    await subscription.caught_up()
    assert seen == [0, 1, 2, 3, 3, 3, 4, 5, 5, 6, 7]
    assert await client.dead_letters("s") == []
    await subscription.close()


async def test_a_failed_batch_is_retried_as_one(client: Client):
    seen: list[list[bytes]] = []

    async def handle(batch: EventBatch) -> None:
        seen.append(batch.payloads())
        if len(seen) == 1:
            raise RuntimeError("once")

    await publish(client, "a", 4, each=2)
    subscription = await client.subscribe("s", ORDERS, handle, batch=True, start="earliest", retry=QUICK)
    await subscription.caught_up()
    assert seen == [[b"0", b"1"], [b"0", b"1"], [b"2", b"3"]]
    await subscription.close()


async def test_streams_run_side_by_side_up_to_the_concurrency(client: Client):
    running = 0
    most = 0
    inside: set[StreamId | None] = set()

    async def handle(event: Event) -> None:
        nonlocal running, most
        assert event.stream not in inside, "two handlers of one stream"
        inside.add(event.stream)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        inside.discard(event.stream)

    await publish(client, "abcdefgh", 10)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest", concurrency=3)
    await subscription.caught_up()
    assert most == 3
    await subscription.close()


async def test_a_stuck_stream_holds_up_no_other(client: Client):
    seen: list[str] = []
    free = asyncio.Event()

    async def handle(event: Event) -> None:
        assert event.stream is not None
        if event.stream.key == "a":
            await free.wait()
        seen.append(event.stream.key)

    await publish(client, "ab", 10)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest")
    await until(lambda: len(seen) == 10)
    assert set(seen) == {"b"}
    free.set()
    await subscription.caught_up()
    assert len(seen) == 20
    await subscription.close()


async def test_many_stuck_handlers_with_a_large_backlog_hold_up_no_other_stream(client: Client):
    """The stuck streams have more events than the credit of a client."""
    free, stuck, last = asyncio.Event(), set[str](), asyncio.Event()

    async def handle(event: Event) -> None:
        assert event.stream is not None
        if event.stream.key == "last":
            last.set()
        else:
            stuck.add(event.stream.key)
            await free.wait()

    keys = [str(number) for number in range(120)]
    await publish(client, keys, 100, each=100)
    await publish(client, ["last"], 1)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest")
    await until(lambda: len(stuck) == 120 and last.is_set())
    free.set()
    await subscription.caught_up()
    await subscription.close()


async def test_finished_events_of_a_long_batch_are_acknowledged_before_its_end(client: Client):
    stuck = asyncio.Event()

    async def handle(event: Event) -> None:
        if event.payload == b"5":
            stuck.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)

    await publish(client, "a", 10, each=10)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest")
    await stuck.wait()
    assert subscription.consumer.statistics().acknowledged_events == 5
    await subscription.close(drain_s=0.0)
    rest: list[bytes] = []
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        async with asyncio.timeout(PATIENCE_S):
            rest = (await anext(consumer)).payloads()
    assert rest == [b"5", b"6", b"7", b"8", b"9"]


async def test_closing_waits_for_running_handlers_and_starts_no_other(client: Client):
    started: list[bytes] = []
    free = asyncio.Event()

    async def handle(event: Event) -> None:
        started.append(event.payload)
        await free.wait()

    await publish(client, "a", 5, each=5)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest")
    await until(lambda: started == [b"0"])
    closing = asyncio.create_task(subscription.close())
    await asyncio.sleep(0)
    free.set()
    await closing
    assert started == [b"0"]
    async with client.subscribe("s") as consumer, asyncio.timeout(PATIENCE_S):
        assert (await anext(consumer)).payloads() == [b"1", b"2", b"3", b"4"]


async def test_a_handler_cannot_wait_for_its_own_end(client: Client):
    raised: list[Exception] = []
    subscriptions: list[Any] = []

    async def handle(event: Event) -> None:
        for end in (subscriptions[0].close, subscriptions[0].delete):
            try:
                await end()
            except InvalidArgument as error:
                raised.append(error)

    subscriptions.append(await client.subscribe("s", ORDERS, handle, start="earliest"))
    await publish(client, "a", 1)
    await until(lambda: len(raised) == 2)
    await subscriptions[0].close()


async def test_wait_for_the_end_raises_the_reason(client: Client):
    errors: list[Exception] = []

    class Watch:
        async def on_next(self, event: Event) -> None: ...

        async def on_error(self, error: Exception) -> None:
            errors.append(error)

    subscription = await client.subscribe("s", ORDERS, Watch())
    waiting = asyncio.create_task(subscription.ended())
    await client.delete_subscription("s")
    with pytest.raises(HeadraceError) as ended:
        await waiting
    assert isinstance(ended.value, Fenced | NotFound)
    await subscription.close()
    assert errors == [ended.value]


async def test_a_handler_may_time_out_and_cancel_itself(client: Client):
    seen: list[bytes] = []

    async def handle(event: Event) -> None:
        seen.append(event.payload)
        if seen.count(event.payload) > 1:
            return
        if event.payload == b"0":
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    await publish(client, "a", 2)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest", retry=QUICK)
    await subscription.caught_up()
    assert seen == [b"0", b"0", b"1", b"1"]
    await subscription.close()


async def test_a_seek_replays_to_the_handler(client: Client):
    seen: list[int] = []

    async def handle(event: Event) -> None:
        seen.append(int(event.payload))

    await publish(client, "a", 5)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest")
    await subscription.caught_up()
    await subscription.seek("earliest")
    await subscription.caught_up()
    assert seen == [0, 1, 2, 3, 4] * 2
    await subscription.close()


async def test_an_outage_is_one_line_without_a_traceback(client: Client, caplog: pytest.LogCaptureFixture):
    failing = True

    async def handle(event: Event) -> None:
        nonlocal failing
        if failing:
            failing = False
            raise Unavailable("the database is down") from OSError("no route")

    caplog.set_level("WARNING", "headrace.client")
    await publish(client, "a", 1)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest", retry=QUICK)
    await subscription.caught_up()
    await subscription.close()
    (failed,) = [record for record in caplog.records if record.name == "headrace.client"]
    assert "the database is down" in failed.getMessage()
    assert not failed.exc_info


async def test_the_first_failure_is_a_warning_with_its_traceback(client: Client, caplog: pytest.LogCaptureFixture):
    async def handle(event: Event) -> None:
        raise ValueError(event.payload)

    await publish(client, "a", 2)
    subscription = await client.subscribe("s", ORDERS, handle, start="earliest", retry=QUICK)
    await subscription.caught_up()
    await subscription.close()
    failed = [record for record in caplog.records if record.name == "headrace.client" and record.exc_info]
    assert [record.levelname for record in failed] == ["WARNING", "WARNING"]
    first, second = (record.getMessage() for record in failed)
    assert first.endswith("attempt 1: ValueError: b'0'")
    assert second.endswith("ValueError: b'1' (more failures, not shown: 2)")
