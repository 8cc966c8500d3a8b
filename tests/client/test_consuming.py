"""Consumers of a silo: taking, acknowledging and rejecting events, and their state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace import (
    Busy,
    Client,
    Closed,
    Consumer,
    DefinitionConflict,
    Event,
    Fenced,
    GapRecord,
    HeadraceError,
    InvalidArgument,
    Mode,
    NotFound,
    NotSupported,
    OnFailure,
    ReceivedBatch,
    RetryPolicy,
    Selector,
    SequenceToken,
    SessionState,
    Start,
    StreamId,
    SubscriptionDefinition,
)
from headrace.silo.host import Silo
from tests.client.consumers import PATIENCE_S, numbers, publish, take, until
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


async def left(client: Client, name: str = "s") -> int:
    """Batches from the subscription's watermark on to the end, over all queues."""
    return sum(queue.end_offset - queue.watermark for queue in (await client.subscription(name)).progress)


async def next_of(consumer: Consumer) -> ReceivedBatch:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(consumer)


# ---- taking and acknowledging ----------------------------------------------------------------------------------------


async def test_batches_come_as_they_were_published(client: Client):
    stream = StreamId("orders", "42")
    events = [Event(b"a", headers={"h": "1"}, id="x", timestamp_us=5), Event(b"b"), Event(b"")]
    token = await client.stream(stream).publish(events)
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        batch = await next_of(consumer)
        assert (batch.stream, batch.token, batch.offset, len(batch)) == (stream, token, token.offset, 3)
        assert (batch.attempt, batch.redriven, batch.whole, list(batch.indexes)) == (1, False, True, [0, 1, 2])
        assert batch.payloads() == [b"a", b"b", b""]
        assert batch.sizes() == [1, 1, 0] or list(batch.sizes()) == [1, 1, 0]
        first, second, _ = list(batch)
        assert (first.payload, dict(first.headers), first.id, first.timestamp_us) == (b"a", {"h": "1"}, "x", 5)
        assert (first.stream, first.token) == (stream, token)
        assert second.token == SequenceToken(token.offset, 1)
        assert consumer.id
        assert consumer.definition is not None
        assert consumer.definition.start == Start.earliest()


async def test_acknowledgements_are_saved_when_the_consumer_closed_and_the_rest_continues(client: Client):
    await publish(client, ["a"], 6, each=2)
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        batches = await take(consumer, 6)
        await batches[0].ack()
    assert await left(client) == 2
    async with client.subscribe("s") as consumer:
        again = await take(consumer, 4)
        assert numbers(again) == [2, 3, 4, 5]
        for batch in again:
            await batch.ack()
    assert await left(client) == 0


async def test_single_events_are_acknowledged_in_any_order(client: Client):
    await publish(client, ["a"], 6, each=6)
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        (batch,) = await take(consumer, 6)
        events = batch.events()
        for index in (4, 0, 2):
            await batch.ack(events[index])
        await batch.ack(events[2])  # again is no matter
    async with client.subscribe("s") as consumer:
        (batch,) = await take(consumer, 3)
        assert (numbers([batch]), list(batch.indexes), batch.whole) == ([1, 3, 5], [1, 3, 5], False)
        assert [event.token for event in batch] == [SequenceToken(batch.offset, index) for index in (1, 3, 5)]
        assert batch.token == SequenceToken(batch.offset, 1)
        await batch.ack(SequenceToken(batch.offset, 3))
        with pytest.raises(InvalidArgument, match="use events of this batch"):
            batch.ack(events[0])
        with pytest.raises(InvalidArgument, match="use events of this batch"):
            batch.ack(Event(b"", stream=StreamId("orders", "b"), token=batch.token))
        with pytest.raises(InvalidArgument, match="use events of this batch"):
            batch.ack(Event(b"never delivered"))
        await batch.ack()
    assert await left(client) == 0


async def test_acknowledging_until_an_event_covers_earlier_batches_of_its_stream_only(client: Client):
    await publish(client, ["a", "b"], 6, each=2)
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        batches = await take(consumer, 12)
        third = [batch for batch in batches if batch.stream.key == "a"][2]
        await third.ack_until(third.events()[0])
    async with client.subscribe("s") as consumer:
        again = await take(consumer, 7)
        by_stream = {key: numbers(b for b in again if b.stream.key == key) for key in "ab"}
        assert by_stream == {"a": [5], "b": [0, 1, 2, 3, 4, 5]}


async def test_a_consumer_iterates_in_several_tasks_and_ends_when_it_is_closed(client: Client):
    await publish(client, "abc", 20)
    seen: list[int] = []

    async def work(consumer: Consumer) -> None:
        async for batch in consumer:
            seen.extend(numbers([batch]))
            await batch.ack()

    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        tasks = [asyncio.create_task(work(consumer)) for _ in range(3)]
        await until(lambda: len(seen) == 60)
    await asyncio.gather(*tasks)
    assert sorted(seen) == sorted(list(range(20)) * 3)
    assert consumer.state is SessionState.CLOSED
    with pytest.raises(StopAsyncIteration):
        await anext(consumer)
    assert await left(client) == 0


async def test_a_cancelled_wait_loses_no_batch(client: Client):
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        for number in range(20):
            waiting = asyncio.ensure_future(anext(consumer))
            await asyncio.sleep(0)
            await publish(client, ["a"], 1, first=number)
            waiting.cancel()
            await asyncio.wait([waiting])
            batch = await next_of(consumer) if waiting.cancelled() else waiting.result()
            assert numbers([batch]) == [number]
            await batch.ack()


async def test_a_batch_cannot_be_acknowledged_once_its_consumer_is_closed(client: Client):
    await publish(client, ["a"], 1)
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        batch = await next_of(consumer)
    for late in (batch.ack, batch.nack, lambda: batch.ack_until(batch.token)):
        with pytest.raises(Closed, match="is closed"):
            late()
    await consumer.aclose()


async def test_waiting_for_a_closed_consumer_to_catch_up_raises_closed(client: Client):
    async with client.subscribe("s", ORDERS) as consumer:
        await publish(client, "a", 1)
        waiting = asyncio.create_task(consumer.caught_up())
        await take(consumer, 1)
    for caught_up in (waiting, consumer.caught_up()):
        with pytest.raises(Closed, match="it gets no more events"):
            await asyncio.wait_for(caught_up, PATIENCE_S)

    async def ignore(_: Event) -> None: ...

    subscription = await client.subscribe("s", ORDERS, ignore)
    await subscription.caught_up()
    await subscription.close()
    await publish(client, "a", 1)
    with pytest.raises(Closed, match="it gets no more events"):
        await asyncio.wait_for(subscription.caught_up(), PATIENCE_S)


async def test_closing_the_client_closes_its_consumers(silo: Silo):
    assert silo.grpc_address is not None
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(silo.grpc_address))
        other = await stack.enter_async_context(Client(silo.grpc_address))
        await publish(client, ["a"], 1)
        consumer = await client.subscribe("s", ORDERS, start="earliest").__aenter__()
        await (await next_of(consumer)).ack()
        await client.aclose()
        assert consumer.state is SessionState.CLOSED
        assert await left(other) == 0


# ---- rejecting -------------------------------------------------------------------------------------------------------


async def test_rejected_events_come_again_before_later_events(client: Client):
    await publish(client, ["a"], 6, each=2)
    async with client.subscribe("s", ORDERS, start="earliest", retry=QUICK) as consumer:
        first, second, third = await take(consumer, 6)
        await second.nack("not yet", event=second.events()[1])
        await third.ack()  # too late: it was given back
        await second.ack(second.events()[0])
        await first.ack()
        again = await take(consumer, 3)
        assert numbers(again) == [3, 4, 5]
        assert again[0].attempt == 2
        for batch in again:
            await batch.ack()
        assert consumer.statistics().late == 1
    assert await left(client) == 0


async def test_a_rejection_may_say_when(client: Client):
    await publish(client, ["a", "b"], 1)
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        one, two = await take(consumer, 2)
        await one.nack("tomorrow", delay=timedelta(days=1))
        await two.nack("now", delay=timedelta())
        (again,) = await take(consumer, 1)
        assert (again.stream, again.attempt) == (two.stream, 2)
        for wrong in (timedelta(seconds=-1), timedelta(days=8)):
            with pytest.raises(InvalidArgument, match="delay"):
                again.nack(delay=wrong)


async def test_event_rejected_too_often_is_a_dead_letter_and_can_be_redriven(client: Client):
    await publish(client, ["a"], 3, each=3)
    async with client.subscribe("s", ORDERS, start="earliest", retry=RetryPolicy(max_attempts=1)) as consumer:
        (batch,) = await take(consumer, 3)
        await batch.ack_until(batch.events()[0])
        await batch.nack("x" * 5000, event=batch.events()[1])
        (rest,) = await take(consumer, 1)
        assert numbers([rest]) == [2]
        await rest.ack()
        (letter,) = await client.dead_letters("s")
        assert (letter.payload, letter.reason, letter.attempts) == (b"1", "x" * 1000, 1)
        assert await consumer.redrive([letter.id]) == 1
        dead = await next_of(consumer)
        assert (dead.redriven, numbers([dead]), dead.token) == (True, [1], letter.token)
        await dead.nack("still")
        await reasons_are(client, "still")
        assert await consumer.redrive() == 1
        dead = await next_of(consumer)
        await dead.ack()
        await reasons_are(client)


async def reasons_are(client: Client, *endings: str) -> None:
    """Return once there are so many dead letters, whose reasons end so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            letters = await client.dead_letters("s")
            if len(letters) == len(endings) and all(map(str.endswith, (one.reason for one in letters), endings)):
                return
            await asyncio.sleep(0.01)


async def test_a_stream_that_is_paused_after_a_failure_is_resumed(client: Client):
    await publish(client, ["a"], 2)
    options: dict[str, Any] = {"retry": RetryPolicy(max_attempts=1), "on_failure": OnFailure.PAUSE}
    async with client.subscribe("s", ORDERS, None, start="earliest", **options) as consumer:
        batch = await next_of(consumer)
        await batch.nack("halt")
        stream = StreamId("orders", "a")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await consumer.resume(stream):
                    break
                await asyncio.sleep(0.01)
        assert not await consumer.resume(stream)
        again = await take(consumer, 2)
        assert numbers(again) == [0, 1]


# ---- credit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [{"max_events": 10}, {"max_bytes": 400}])
async def test_a_consumer_never_holds_more_than_it_may(client: Client, bounds: dict[str, Any]):
    await publish(client, "abcdefgh", 40)
    async with client.subscribe("s", ORDERS, None, start="earliest", **bounds) as consumer:
        done = 0
        async with asyncio.timeout(PATIENCE_S):
            async for batch in consumer:
                state = consumer.statistics()
                assert state.held_events <= bounds.get("max_events", 1 << 30)
                assert state.held_bytes <= bounds.get("max_bytes", 1 << 30) + 32 * state.held_events
                done += len(batch)
                await batch.ack()
                if done == 320:
                    break
        assert consumer.statistics().held_events == 0


async def test_unacknowledged_events_count_until_they_are_acknowledged(client: Client):
    await publish(client, "abcdefgh", 4)
    async with client.subscribe("s", ORDERS, start="earliest", max_events=5) as consumer:
        batches = await take(consumer, 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(consumer)
        await batches[0].ack()
        batches += await take(consumer, 1)
        assert consumer.statistics().held_events == 5
        for batch in batches:
            await batch.ack()
        await take(consumer, 5)


async def test_an_event_that_is_larger_than_all_of_the_credit_comes_all_the_same(client: Client):
    await client.stream("orders", "a").publish(bytes(100_000))
    async with client.subscribe("s", ORDERS, start="earliest", max_bytes=1000) as consumer:
        batch = await next_of(consumer)
        assert batch.sizes()[0] == 100_000
        await batch.ack()


async def test_a_batch_that_is_larger_than_the_credit_comes_in_parts(client: Client):
    await publish(client, ["a"], 100, each=100)
    async with client.subscribe("s", ORDERS, start="earliest", max_events=30) as consumer:
        seen: list[int] = []
        async for batch in consumer:
            assert len(batch) <= 30
            assert not batch.whole
            seen += numbers([batch])
            await batch.ack()
            if len(seen) == 100:
                break
        assert seen == list(range(100))
    assert await left(client) == 0


# ---- modes -----------------------------------------------------------------------------------------------------------


async def test_a_mode_may_be_text(client: Client):
    async with client.subscribe("s", "n/*", mode="bound") as consumer:
        assert consumer.definition is not None
        assert consumer.definition.mode is Mode.BOUND
    with pytest.raises(
        InvalidArgument, match=r"^'boud' is not a mode of a subscription: use one of 'shared', 'bound', "
    ):
        client.subscribe("t", "n/*", mode="boud")


async def test_a_batch_has_its_stream_queue_and_attempt(client: Client):
    async with client.subscribe("s", "n/*") as consumer:
        await client.stream("n", "k").publish([b"1", b"2"])
        batch = await anext(consumer)
        queue = batch.queue
        assert repr(batch) == f"ReceivedBatch(n/k, queue={queue}, offset={batch.offset}, count=2, attempt=1)"
        await batch.ack()


async def test_mode_shared_gives_each_event_to_one_consumer(client: Client):
    await publish(client, "abcdefgh", 30)
    seen: dict[str, list[tuple[str, int]]] = {"one": [], "two": []}

    async def work(name: str) -> None:
        async with client.subscribe("s", ORDERS, start="earliest", consumer=name, max_events=10) as consumer:
            async for batch in consumer:
                seen[name] += [(batch.stream.key, number) for number in numbers([batch])]
                await asyncio.sleep(0)
                await batch.ack()

    tasks = [asyncio.create_task(work(name)) for name in seen]
    await until(lambda: sum(map(len, seen.values())) == 240)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert sorted(seen["one"] + seen["two"]) == [(key, number) for key in "abcdefgh" for number in range(30)]
    for taken in seen.values():
        for key in "abcdefgh":
            mine = [number for stream, number in taken if stream == key]
            assert mine == sorted(mine)


async def test_mode_bound_reports_the_queues_of_each_consumer(client: Client):
    await publish(client, "abcdefgh", 1)
    options: dict[str, Any] = {"mode": Mode.BOUND, "start": "earliest"}
    async with client.subscribe("s", ORDERS, None, consumer="one", **options) as one:
        await until(lambda: one.assignment == frozenset({0, 1}))
        async with client.subscribe("s", ORDERS, None, consumer="two", **options) as two:
            for batch in await take(one, 1):
                await batch.ack()
            taken = asyncio.create_task(drain(one))
            await until(lambda: bool(one.assignment) and bool(two.assignment))
            assert one.assignment is not None
            assert two.assignment is not None
            assert one.assignment | two.assignment == frozenset({0, 1})
            assert not one.assignment & two.assignment
        await until(lambda: one.assignment == frozenset({0, 1}))
    await taken


async def drain(consumer: Consumer) -> None:
    async for batch in consumer:
        await batch.ack()


async def test_mode_broadcast_gives_everything_to_everybody(client: Client):
    options: dict[str, Any] = {"mode": Mode.BROADCAST, "start": "earliest"}
    await publish(client, ["a"], 3)
    async with (
        client.subscribe("s", ORDERS, None, consumer="one", **options) as one,
        client.subscribe("s", ORDERS, None, consumer="two", **options) as two,
    ):
        for consumer in (one, two):
            batches = await take(consumer, 3)
            assert numbers(batches) == [0, 1, 2]
            await batches[-1].ack_until(batches[-1].events()[-1])
    await publish(client, ["a"], 1, first=3)
    async with client.subscribe("s", ORDERS, None, consumer="one", **options) as one:
        assert numbers([await next_of(one)]) == [3]


async def test_a_consumer_may_keep_its_position_itself(client: Client):
    options: dict[str, Any] = {"mode": Mode.BROADCAST, "start": "earliest", "keeps_positions": True}
    await publish(client, "abc", 5)
    async with client.subscribe("s", ORDERS, None, **options) as consumer:
        batches = await take(consumer, 15)
        for batch in batches[:7]:
            await batch.ack()
        await consumer.saved()
        kept = dict(consumer.positions)
    rest = sorted((batch.stream, batch.token) for batch in batches[7:])
    async with client.subscribe("s", ORDERS, None, positions=kept, **options) as consumer:
        assert sorted((batch.stream, batch.token) for batch in await take(consumer, 8)) == rest
    async with client.subscribe("s", ORDERS, None, **options) as consumer:
        assert len(await take(consumer, 15)) == 15
        assert await client.seek("s", "earliest") == await consumer.seek("earliest") == 1


# ---- the subscription ------------------------------------------------------------------------------------------------


async def test_after_a_seek_acknowledged_events_come_again(client: Client):
    await publish(client, ["a"], 3)
    async with client.subscribe("s", ORDERS, start="earliest") as consumer:
        for batch in await take(consumer, 3):
            await batch.ack()
        await consumer.caught_up()
        await consumer.seek("earliest")
        again = await take(consumer, 3)
        assert numbers(again) == [0, 1, 2]
        for batch in again:
            await batch.ack()
        await consumer.caught_up()
        await consumer.seek(Start.latest())
    assert await left(client) == 0


async def test_deleting_the_subscription_ends_its_consumers(client: Client):
    states: list[SessionState] = []
    async with client.subscribe("s", ORDERS, on_state=states.append) as one, client.subscribe("s", ORDERS) as two:
        waiting = asyncio.create_task(anext(one))
        await two.delete()
        with pytest.raises(HeadraceError) as ended:
            await waiting
        assert isinstance(ended.value, Fenced | NotFound)
        assert one.error is ended.value
        with pytest.raises(type(ended.value)):
            await anext(one)
    assert states == [SessionState.OPEN, SessionState.CLOSED]
    assert await client.subscriptions() == []


async def test_consumer_with_the_same_id_takes_over(client: Client):
    await publish(client, ["a"], 2)
    async with client.subscribe("s", ORDERS, start="earliest", consumer="me") as one:
        assert numbers(await take(one, 2)) == [0, 1]
        async with client.subscribe("s", ORDERS, start="earliest", consumer="me") as two:
            with pytest.raises(Fenced, match="took over"):
                await next_of(one)
            assert numbers(await take(two, 2)) == [0, 1]


async def test_the_state_tells_when_all_is_done(client: Client):
    states: list[SessionState] = []
    await publish(client, ["a"], 1)
    options: dict[str, Any] = {"session_timeout_s": 0.5, "on_state": states.append}
    async with client.subscribe("s", ORDERS, None, start="earliest", **options) as consumer:
        assert consumer.state is SessionState.OPEN
        await (await next_of(consumer)).ack()
        await until(lambda: consumer.state is SessionState.CAUGHT_UP)
        await publish(client, ["a"], 1, first=1)
        await until(lambda: consumer.state is SessionState.OPEN)
    assert states == [SessionState.OPEN, SessionState.CAUGHT_UP, SessionState.OPEN, SessionState.CLOSED]


async def test_a_listener_that_raises_does_not_disturb_others(client: Client, caplog: pytest.LogCaptureFixture):
    def fail(state: SessionState) -> None:
        raise LookupError(state)

    async with client.subscribe("s", ORDERS, on_state=fail):
        pass
    told = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in told] == ["SessionState.OPEN", "SessionState.CLOSED"]


async def test_gaps_are_told(client: Client, silo: Silo):
    told: list[GapRecord] = []
    await publish(client, ["a"], 2)
    options: dict[str, Any] = {"retry": RetryPolicy(max_attempts=1), "on_failure": OnFailure.SKIP}
    async with client.subscribe("s", ORDERS, None, start="earliest", on_gap=told.append, **options) as consumer:
        batch = await next_of(consumer)
        await batch.nack("skip it")
        assert numbers([await next_of(consumer)]) == [1]
        for gap in told:
            assert gap in consumer.gaps


# ---- refusals --------------------------------------------------------------------------------------------------------


async def test_impossible_arguments_are_refused_before_anything_happens(client: Client):
    wrong: list[tuple[type[HeadraceError], dict[str, Any]]] = [
        (InvalidArgument, {"name": "not a name"}),
        (InvalidArgument, {"name": "s", "selector": "nowhere"}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "start": "someday"}),
        (InvalidArgument, {"name": "s", "start": "earliest"}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "consumer": "no/id"}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "max_events": 0}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "max_bytes": 0}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "concurrency": 0}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "timeout_s": 0}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "session_timeout_s": -1}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "positions": {0: b"x"}}),
        (InvalidArgument, {"name": "s", "selector": ORDERS, "handler": print}),
        (NotSupported, {"name": "s", "selector": ORDERS, "filter": bool}),
    ]
    for error, options in wrong:
        with pytest.raises(error):
            client.subscribe(**options)
    with pytest.raises(InvalidArgument, match="no handler"):
        await client.subscribe("s", ORDERS)  # type: ignore[misc]

    async def handle(event: Event) -> None: ...

    with pytest.raises(InvalidArgument, match="has a handler"):
        async with client.subscribe("s", ORDERS, handle):  # type: ignore[attr-defined]
            pass
    assert await client.subscriptions() == []


async def test_refusal_of_the_silo_is_raised(client: Client, silo: Silo):
    with pytest.raises(NotFound):
        async with client.subscribe("missing"):
            pass
    async with client.subscribe("s", ORDERS):
        with pytest.raises(DefinitionConflict):
            async with client.subscribe("s", "others/*"):
                pass

    async def handle(event: Event) -> None: ...

    await silo.providers["default"].subscribe("inside", ORDERS, handle)
    with pytest.raises(Busy):
        async with client.subscribe("inside"):
            pass
    with pytest.raises(InvalidArgument):
        async with client.subscribe("s", ORDERS, keeps_positions=True):
            pass


# ---- pulling ---------------------------------------------------------------------------------------------------------


async def test_batches_are_pulled_and_acknowledged_in_calls_of_their_own(client: Client):
    await publish(client, ["a"], 5)
    await client.create_subscription(
        SubscriptionDefinition(name="s", selector=Selector(ORDERS), start=Start.earliest(), retry=QUICK)
    )
    pulled = await client.pull("s", "me", max_events=2, wait_s=5)
    assert numbers(pulled) == [0, 1]
    assert pulled[0].attempt == 1
    await pulled[0].ack()
    await pulled[1].nack("again", delay=timedelta())
    assert await client.acknowledge(pulled) == 0
    assert repr(pulled).startswith("Pulled('s', 'me', [Received")
    again = await client.pull("s", "me", wait_s=5)
    assert numbers(again) == [1, 2, 3, 4]
    for batch in again:
        await batch.ack()
    rest = await client.pull("s", "me", after=again)
    assert (len(rest), rest.refused, rest.gaps) == (0, 0, [])
    assert await client.acknowledge(pulled) == 0
    await client.caught_up("s")
    with pytest.raises(NotFound):
        await client.pull("missing", "me")


@pytest.mark.parametrize(
    "options",
    [
        {"wait_s": -1},
        {"wait_s": 1e9},
        {"wait_s": float("nan")},
        {"max_events": -1},
        {"max_events": 1 << 32},
        {"max_bytes": -1},
        {"max_bytes": 1.5},
        {"session_timeout_s": -1},
        {"session_timeout_s": 1e9},
        {"after": [1]},
    ],
)
async def test_a_pull_that_cannot_be_meant_is_refused(client: Client, options: dict[str, Any]):
    with pytest.raises(InvalidArgument, match=f"^{next(iter(options))} is |acknowledge takes"):
        await client.pull("s", "me", **options)


async def test_a_consumer_that_pulled_leaves_when_its_client_is_closed(silo: Silo, client: Client):
    await publish(client, ["a"], 1)
    async with client.subscribe("s", ORDERS, start="earliest", retry=QUICK):
        pass
    async with Client(silo.grpc_address or "") as another:
        assert numbers(await another.pull("s", "me", wait_s=5)) == [0]
        assert [consumer.id for consumer in (await client.subscription("s")).consumers] == ["me"]
    assert not (await client.subscription("s")).consumers
    assert numbers(await client.pull("s", "other", wait_s=5)) == [0]


async def test_acknowledge_takes_only_pulled_batches(client: Client):
    with pytest.raises(InvalidArgument, match="takes the result of `pull`, not list"):
        await client.acknowledge([1])  # type: ignore[arg-type]


async def test_wrong_iteration_is_refused_with_the_right_form(client: Client):
    with pytest.raises(InvalidArgument, match="write `async with client"):
        aiter(client.subscribe("s", ORDERS))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="with SyncClient"):
        client.__enter__()
    assert await client.subscriptions() == []
