"""Effects of consumers in other processes, each applied exactly once."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from headrace import (
    Client,
    Effects,
    Event,
    InvalidArgument,
    NotFound,
    NotSupported,
    ReceivedBatch,
    RetryPolicy,
    StreamId,
    StreamState,
    Transaction,
)
from headrace.effects import batches
from headrace.silo.host import Silo
from headrace.streams.subscriptions import DeadLetter, Selector, Start, SubscriptionDefinition
from tests.client.consumers import PATIENCE_S, until
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_transactional_handlers import write_all_down, write_down
from tests.silo.services.calling import opened

SCRIPT = Path(__file__).with_name("killed_effects.py")
ORDERS = "orders/*"
ONCE = RetryPolicy(max_attempts=1)
QUICK = RetryPolicy(max_attempts=3, initial_delay_s=0.0)


@pytest.fixture
async def silo(tmp_path: Path) -> AsyncIterator[Silo]:
    async with opened(tmp_path / "data") as silo:
        yield silo


@pytest.fixture
async def client(silo: Silo) -> AsyncIterator[Client]:
    assert silo.grpc_address is not None
    async with Client(silo.grpc_address) as client:
        yield client


async def until_letters(client: Client, number: int) -> Sequence[DeadLetter]:
    """Wait until there are so many dead letters, and no redrive is requested. Return them."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            letters = await client.dead_letters("billing")
            if len(letters) == number and not any(letter.redrive for letter in letters):
                return letters
            await asyncio.sleep(0.05)


# ---- batches ---------------------------------------------------------------------------------------------------------


async def test_a_batch_is_applied_in_a_transaction_and_acknowledged(database: UserDatabase, client: Client):
    effects = Effects(database.engine)
    await client.stream("orders", "42").publish([b"a", b"b"])
    async with client.subscribe("billing", ORDERS, start="earliest") as consumer:
        batch = await anext(consumer)
        async with batch.effects(effects) as tx:
            await write_all_down(batch, tx)
            assert [event.payload for event in tx.events] == [b"a", b"b"]
        await consumer.saved()
    assert database.log() == ["a", "b"]
    assert [state.next_offset for state in (await client.subscription("billing")).progress if state.end_offset] == [1]


async def test_a_redelivered_batch_has_no_events_to_apply(async_database: UserDatabase, client: Client):
    """The acknowledgement is lost: the first consumer ends before it has sent it."""
    engine = async_database.engine
    assert isinstance(engine, AsyncEngine)
    await client.stream("orders", "42").publish([b"a", b"b"])
    seen: list[int] = []
    for _ in range(2):
        async with client.subscribe("billing", ORDERS, start="earliest") as consumer:
            batch = await anext(consumer)
            async with engine.connect() as connection:
                kept = batch.holder
                batch.holder = _Deaf(kept) if not seen else kept  # pyright: ignore[reportAttributeAccessIssue]
                async with batch.effects(connection) as tx:
                    seen.append(len(tx.events))
                    for event in tx.events:
                        await write_down(event, tx)
                assert not connection.in_transaction()
    assert (seen, async_database.log()) == ([2, 0], ["a", "b"])


class _Deaf:
    """Loses the acknowledgement."""

    def __init__(self, holder: Any) -> None:
        self.account, self.effect_scope, self.lines = holder.account, holder.effect_scope, holder.lines

    def acknowledge(self, batch: Any) -> None:
        pass


async def test_a_failed_batch_is_rolled_back_rejected_and_delivered_again(async_database: UserDatabase, client: Client):
    await client.stream("orders", "42").publish([b"a", b"b"])
    async with client.subscribe("billing", ORDERS, start="earliest", retry=QUICK) as consumer:
        batch = await anext(consumer)
        with pytest.raises(ZeroDivisionError):
            await _apply_and_fail(batch, Effects(async_database.engine))
        assert async_database.log() == []
        again = await anext(consumer)
        assert again.attempt == 2
        async with again.effects(Effects(async_database.engine)) as tx:
            await write_all_down(again, tx)
    assert async_database.log() == ["a", "b"]


async def _apply_and_fail(batch: ReceivedBatch, effects: Effects, *, events: int = 2) -> None:
    async with batch.effects(effects) as tx:
        assert len(tx.events) == events
        for event in tx.events:
            await write_down(event, tx)
        _ = 1 / 0


async def test_a_batch_whose_time_is_over_is_rejected_so_that_the_next_one_does_not_pass_it(
    async_database: UserDatabase, client: Client
):
    effects = Effects(async_database.engine)
    for number in range(6):
        await client.stream("orders", "42").publish(b"%d" % number)
    slow = [True]
    async with client.subscribe("billing", ORDERS, start="earliest", retry=QUICK) as consumer:
        while len(async_database.log()) < 6:
            batch = await asyncio.wait_for(anext(consumer), PATIENCE_S)
            try:
                async with (
                    asyncio.timeout(0.2 if slow and batch.offset == 2 else PATIENCE_S),
                    batch.effects(effects) as tx,
                ):
                    await write_all_down(batch, tx)
                    if slow and batch.offset == 2:
                        await asyncio.sleep(PATIENCE_S)
            except TimeoutError:
                slow.clear()
    assert async_database.log() == ["0", "1", "2", "3", "4", "5"]


async def test_a_batch_whose_time_is_over_while_it_waits_for_an_earlier_one_comes_again(
    async_database: UserDatabase, client: Client
):
    effects = Effects(async_database.engine)
    for number in range(2):
        await client.stream("orders", "42").publish(b"%d" % number)
    async with client.subscribe("billing", ORDERS, start="earliest", retry=QUICK) as consumer:
        first, second = await anext(consumer), await anext(consumer)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), second.effects(effects):
                pass
        async with first.effects(effects) as tx:
            await write_all_down(first, tx)
        again = await asyncio.wait_for(anext(consumer), PATIENCE_S)
        async with again.effects(effects) as tx:
            await write_all_down(again, tx)
    assert async_database.log() == ["0", "1"]


@pytest.mark.long
async def test_tasks_that_share_a_consumer_apply_the_batches_of_a_stream_in_order(
    async_database: UserDatabase, client: Client
):
    effects = Effects(async_database.engine)
    for number in range(30):
        await client.stream("orders", "42").publish(b"%d" % number)

    async with client.subscribe("billing", ORDERS, start="earliest") as consumer:

        async def take(pause_s: float) -> None:
            async for batch in consumer:
                await asyncio.sleep(pause_s)
                async with batch.effects(effects) as tx:
                    await write_all_down(batch, tx)

        tasks = [asyncio.create_task(take(pause_s)) for pause_s in (0.0, 0.001, 0.01, 0.03)]
        await asyncio.wait_for(consumer.caught_up(), PATIENCE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert async_database.log() == [str(number) for number in range(30)]


async def test_a_batch_is_refused_while_an_earlier_one_of_its_stream_is_set_aside(
    async_database: UserDatabase, client: Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batches, "WAIT_FOR_EARLIER_S", 0.1)
    effects = Effects(async_database.engine)
    for text_ in (b"a", b"b"):
        await client.stream("orders", "42").publish(text_)
    async with client.subscribe("billing", ORDERS, start="earliest", retry=QUICK) as consumer:
        aside, later = await anext(consumer), await anext(consumer)
        with pytest.raises(InvalidArgument, match="apply the batches of a stream one after the other"):
            async with later.effects(effects):
                raise AssertionError
        async with aside.effects(effects) as tx:
            await write_all_down(aside, tx)
        again = await asyncio.wait_for(anext(consumer), PATIENCE_S)
        async with again.effects(effects) as tx:
            await write_all_down(again, tx)
    assert async_database.log() == ["a", "b"]


async def test_a_batch_whose_failure_cannot_be_noted_is_delivered_again(async_database: UserDatabase, client: Client):
    effects = Effects(async_database.engine)
    await client.stream("orders", "42").publish([b"a", b"b"])
    async_database.execute("ALTER TABLE headrace_unapplied RENAME TO hidden")  # an error that is no outage
    async with client.subscribe("billing", ORDERS, start="earliest", retry=ONCE) as consumer:
        with pytest.raises(ZeroDivisionError):
            await _apply_and_fail(await anext(consumer), effects)
        again = await asyncio.wait_for(anext(consumer), PATIENCE_S)
        async with again.effects(effects) as tx:
            await write_all_down(again, tx)
    assert async_database.log() == ["a", "b"]
    assert not await client.dead_letters("billing")


async def test_batches_on_one_connection_are_applied_one_after_the_other(async_database: UserDatabase, client: Client):
    engine: Any = async_database.engine
    for number in range(4):
        await client.stream("orders", str(number)).publish(b"%d" % number)
    open_now: list[int] = []

    async def apply(batch: ReceivedBatch, connection: AsyncConnection) -> None:
        async with batch.effects(connection) as tx:
            open_now.append(1)
            await write_all_down(batch, tx)
            await asyncio.sleep(0.02)
            assert len(open_now) == 1
            open_now.clear()

    async with client.subscribe("billing", ORDERS, start="earliest") as consumer, engine.connect() as connection:
        batches = [await anext(consumer) for _ in range(4)]
        await asyncio.gather(*(apply(batch, connection) for batch in batches))
    assert sorted(async_database.log()) == ["0", "1", "2", "3"]


ENDS: dict[str, Callable[[ReceivedBatch], Awaitable[None]]] = {
    "ack": lambda batch: batch.ack(),
    "ack one": lambda batch: batch.ack(batch.events()[0]),
    "ack_until": lambda batch: batch.ack_until(batch.events()[0]),
    "nack": lambda batch: batch.nack("no"),
}


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_a_batch_cannot_be_acknowledged_or_rejected_inside_of_its_block(
    async_database: UserDatabase, client: Client, end: Callable[[ReceivedBatch], Awaitable[None]]
):
    effects = Effects(async_database.engine)

    async def apply_and_end(batch: ReceivedBatch) -> None:
        async with batch.effects(effects) as tx:
            await write_all_down(batch, tx)
            await end(batch)

    await client.stream("orders", "42").publish([b"a", b"b"])
    async with client.subscribe("billing", ORDERS, start="earliest", retry=QUICK) as consumer:
        batch = await anext(consumer)
        with pytest.raises(InvalidArgument, match="is acknowledged at the end of its"):
            await apply_and_end(batch)
        assert async_database.log() == []
        again = await anext(consumer)
        async with again.effects(effects) as tx:
            await write_all_down(again, tx)
        await end(again)  # after the block it has no effect
        await consumer.saved()
    assert async_database.log() == ["a", "b"]


async def test_nobody_else_ends_a_batch_whose_block_is_open(async_database: UserDatabase, client: Client):
    """Neither another task, nor a later batch of the stream, nor a second block."""
    effects = Effects(async_database.engine)
    stream = client.stream("orders", "42")
    await stream.publish(b"a")
    await stream.publish(b"b")
    async with client.subscribe("billing", ORDERS, start="earliest", retry=QUICK) as consumer:
        first, second = await anext(consumer), await anext(consumer)
        async with first.effects(effects) as tx:
            await write_all_down(first, tx)
            with pytest.raises(InvalidArgument, match="is acknowledged at the end of its"):
                await asyncio.create_task(acknowledged(first))
            with pytest.raises(InvalidArgument, match="is acknowledged at the end of its"):
                await second.ack_until(second.events()[0])
            with pytest.raises(InvalidArgument, match="open already"):
                async with first.effects(effects):
                    pass
        await second.ack_until(second.events()[0])
        await consumer.saved()
    assert async_database.log() == ["a"]


async def acknowledged(batch: ReceivedBatch) -> None:
    await batch.ack()


async def test_a_batch_inside_of_the_block_of_another_one_on_its_connection_is_refused(
    async_database: UserDatabase, client: Client
):
    engine: Any = async_database.engine
    for number in range(2):
        await client.stream("orders", str(number)).publish(b"%d" % number)
    async with client.subscribe("billing", ORDERS, start="earliest") as consumer, engine.connect() as connection:
        outer, inner = [await anext(consumer) for _ in range(2)]
        async with outer.effects(connection) as tx:
            await write_all_down(outer, tx)
            with pytest.raises(InvalidArgument, match="would wait for itself: leave that `async with` first"):
                async with inner.effects(connection):
                    pass
        again = await anext(consumer)
        async with again.effects(connection) as tx:
            await write_all_down(again, tx)
        await consumer.saved()
    assert sorted(async_database.log()) == ["0", "1"]
    assert again.attempt == 1  # the refusal is no attempt


async def test_batches_on_one_engine_are_bounded_together(tmp_path: Path, client: Client):
    """SQLite has one writer: a second one would wait for the lock, and fail if it waits too long."""
    async with user_database("aiosqlite", str(tmp_path / "u.db"), lambda: "", connect_args={"timeout": 0}) as database:
        for number in range(4):
            await client.stream("orders", str(number)).publish(b"%d" % number)

        async def apply(batch: ReceivedBatch) -> None:
            async with batch.effects(database.engine) as tx:  # pyright: ignore[reportArgumentType]
                await write_all_down(batch, tx)
                await asyncio.sleep(0.02)

        async with client.subscribe("billing", ORDERS, start="earliest") as consumer:
            await asyncio.gather(*[apply(await anext(consumer)) for _ in range(4)])
        assert sorted(database.log()) == ["0", "1", "2", "3"]


async def test_a_refused_redrive_stays_refused_after_an_error(async_database: UserDatabase, client: Client):
    """Otherwise the next redrive would apply an event that perhaps is applied already."""
    effects = Effects(async_database.engine)
    await client.stream("orders", "42").publish(b"unknown")
    async with client.subscribe("billing", ORDERS, start="earliest", retry=ONCE, circuit_breaker=False) as consumer:
        await (await anext(consumer)).nack("without effects")
        await until_letters(client, 1)
        for _ in range(2):
            assert await client.redrive("billing") == 1
            with pytest.raises(ZeroDivisionError):
                await _apply_and_fail(await anext(consumer), effects, events=0)
            await until_letters(client, 1)


async def test_a_batch_publishes_by_the_outbox_and_keeps_a_state(async_database: UserDatabase, client: Client):
    effects = Effects(async_database.engine, state=StreamState())
    for payload in (b"a", b"b"):
        await client.stream("orders", "42").publish(payload)
    async with client.subscribe("billing", ORDERS, start="earliest") as consumer:
        states: list[Any] = []
        while len(states) < 2:
            batch = await anext(consumer)
            async with batch.effects(effects) as tx:
                states.append(tx.state)
                tx.state = (tx.state or 0) + len(tx.events)
                await tx.publish(StreamId("invoices", "1"), [event.payload for event in tx.events])
    assert states == [None, 1]
    assert (
        async_database.rows("SELECT provider, stream, events FROM headrace_outbox")
        == [("default", "invoices/1", 1)] * 2
    )


async def test_after_a_seek_a_batch_of_before_has_no_events(async_database: UserDatabase, client: Client):
    """Otherwise its position would count for the new generation, and the events that the seek repeats were skipped."""
    for payload in (b"a", b"b"):
        await client.stream("orders", "42").publish(payload)
    async with client.subscribe("billing", ORDERS, start="earliest") as consumer:
        held = [await anext(consumer), await anext(consumer)]
        await consumer.seek("earliest")
        repeated = await anext(consumer)
        async with held[1].effects(Effects(async_database.engine)) as tx:
            assert tx.events == ()
        for batch in (repeated, await anext(consumer)):
            async with batch.effects(Effects(async_database.engine)) as tx:
                for event in tx.events:
                    await write_down(event, tx)
    assert async_database.log() == ["a", "b"]


async def test_a_redrive_applies_a_batch_once_and_refuses_one_that_is_not_known(
    async_database: UserDatabase, client: Client
):
    effects = Effects(async_database.engine)
    await client.stream("orders", "42").publish([b"unknown"])
    options: Any = {"start": "earliest", "retry": ONCE, "circuit_breaker": False}
    async with client.subscribe("billing", ORDERS, None, **options) as consumer:
        await (await anext(consumer)).nack("without effects")
        await until_letters(client, 1)
        await client.stream("orders", "42").publish([b"failed"])
        batch = await anext(consumer)
        with pytest.raises(ZeroDivisionError):
            async with batch.effects(effects):
                _ = 1 / 0
        await until_letters(client, 2)
        await client.stream("orders", "42").publish([b"last"])
        async with (await anext(consumer)).effects(effects) as tx:
            await write_down(tx.events[0], tx)
        assert await client.redrive("billing") == 2
        redriven: list[bytes] = []
        for _ in range(2):
            batch = await anext(consumer)
            async with batch.effects(effects) as tx:
                for event in tx.events:
                    await write_down(event, tx)
                    redriven.append(event.payload)
        assert redriven == [b"failed"]
        (letter,) = await until_letters(client, 1)
        assert letter.payload == b"unknown"
        assert letter.reason.startswith("it is not known whether the effects of this event are applied")
        assert letter.reason.endswith("; it had failed with: without effects")
        assert letter.attempts == 1
    assert async_database.log() == ["last", "failed"]


async def test_what_cannot_be_applied_is_refused(tmp_path: Path, client: Client):
    await client.stream("orders", "42").publish(b"a")
    async with user_database("aiosqlite", str(tmp_path / "u.db"), lambda: "", migrated=False) as database:
        effects: Any = Effects(database.engine)
        async with client.subscribe("billing", ORDERS, start="earliest", retry=QUICK) as consumer:
            with pytest.raises(NotFound, match="create them with 'headrace effects migrate"):
                async with (await anext(consumer)).effects(effects):
                    pass
            with pytest.raises(InvalidArgument, match="Effects needs an Engine or an AsyncEngine"):
                async with (await anext(consumer)).effects("postgresql://"):  # pyright: ignore[reportArgumentType]
                    pass
        (pulled,) = await client.pull("billing", "one", wait_s=10)
        with pytest.raises(NotSupported, match="effects are for batches of `subscribe`, not of `pull`"):
            pulled.effects(effects)
        async with client.subscribe("all", ORDERS, start="earliest", mode="broadcast", consumer="me") as consumer:
            with pytest.raises(NotSupported, match="has mode broadcast"):
                (await anext(consumer)).effects(effects)
        subscribe: Any = client.subscribe
        with pytest.raises(NotSupported, match="has mode broadcast"):
            subscribe("all", ORDERS, write_down, mode="broadcast", effects=effects)
        with pytest.raises(NotFound, match="create them with 'headrace effects migrate"):
            await subscribe("b", ORDERS, write_down, effects=effects)
        with pytest.raises(InvalidArgument, match="expected two arguments, event and tx"):
            subscribe("b", ORDERS, _plain, effects=effects)


async def _plain(event: Event) -> None: ...


# ---- handlers --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("batch", [False, True])
async def test_handlers_in_a_client_apply_each_event_once(async_database: UserDatabase, client: Client, *, batch: bool):
    fails = {b"bad"}

    async def handle(delivered: Any, tx: Transaction) -> None:
        for event in delivered if batch else [delivered]:
            await write_down(event, tx)
            if event.payload in fails:
                raise ValueError("bad")

    effects = Effects(async_database.engine)
    options: Any = {"batch": batch, "retry": ONCE, "circuit_breaker": False, "start": "earliest", "effects": effects}
    one = await client.subscribe("billing", ORDERS, handle, **options)
    for payload in (b"first", b"bad", b"last"):
        await client.stream("orders", "42").publish(payload)
    await one.caught_up()
    assert async_database.log() == ["first", "last"]
    fails.clear()
    assert await one.redrive() == 1
    await until_letters(client, 0)
    assert async_database.log() == ["first", "last", "bad"]
    await one.seek("earliest")
    async_database.execute("DELETE FROM log")
    await one.caught_up()
    assert async_database.log() == ["first", "bad", "last"]
    await one.close()


@pytest.mark.long
@pytest.mark.parametrize("batch", [False, True])
async def test_events_of_a_handler_whose_failure_cannot_be_noted_are_delivered_again(
    async_database: UserDatabase, client: Client, *, batch: bool
):
    calls: list[int] = []

    async def handle(delivered: Any, tx: Transaction) -> None:
        for event in delivered if batch else [delivered]:
            await write_down(event, tx)
        calls.append(1)
        if len(calls) < 3:
            raise ValueError("bad")

    async_database.execute("ALTER TABLE headrace_unapplied RENAME TO hidden")  # an error that is no outage
    effects = Effects(async_database.engine)
    options: Any = {"batch": batch, "retry": ONCE, "start": "earliest", "effects": effects}
    one = await client.subscribe("billing", ORDERS, handle, **options)
    await client.stream("orders", "42").publish([b"a", b"b"])
    await asyncio.wait_for(one.caught_up(), PATIENCE_S)
    assert async_database.log() == ["a", "b"]
    assert not await client.dead_letters("billing")
    await one.close()


@pytest.mark.long
@pytest.mark.parametrize("batch", [False, True])
async def test_a_dead_letter_that_a_handler_refuses_keeps_its_reason_and_its_attempts(
    async_database: UserDatabase, client: Client, *, batch: bool
):
    async def handle(delivered: Any, tx: Transaction) -> None:
        await (write_all_down if batch else write_down)(delivered, tx)

    options: Any = {"retry": ONCE, "circuit_breaker": False, "start": "earliest"}
    async with client.subscribe("billing", ORDERS, None, **options) as consumer:
        await client.stream("orders", "42").publish(b"unknown")
        await (await anext(consumer)).nack("without effects")
        await until_letters(client, 1)
    options |= {"batch": batch, "effects": Effects(async_database.engine)}
    one = await client.subscribe("billing", ORDERS, handle, **options)
    for _ in range(2):
        assert await one.redrive() == 1
        (letter,) = await until_letters(client, 1)
        assert letter.reason.startswith("it is not known whether the effects of this event are applied")
        assert letter.reason.endswith("'headrace deadletters delete'; it had failed with: without effects")
        assert letter.attempts == 1
    await one.close()


async def test_a_seek_while_a_handler_runs_skips_nothing(async_database: UserDatabase, client: Client):
    """The events after the seek in the old batch count for the old generation."""
    began, sought = asyncio.Event(), asyncio.Event()

    async def handle(event: Event, tx: Transaction) -> None:
        began.set()
        await sought.wait()
        count = text("INSERT INTO log (value) SELECT COUNT(*) || :value FROM log")
        await tx.execute(count, {"value": event.payload.decode()})

    await client.stream("orders", "42").publish([b"a", b"b"])
    effects = Effects(async_database.engine)
    one = await client.subscribe("billing", ORDERS, handle, start="earliest", effects=effects)
    await began.wait()
    await one.seek("earliest")
    await until(lambda: one.consumer.statistics().received_events == 4)
    sought.set()
    await one.caught_up()
    assert async_database.log() == ["0a", "1b", "2a", "3b"]
    await one.close()


# ---- kills -----------------------------------------------------------------------------------------------------------


# `test_bank_kills.py` kills on SQLite, too.
@pytest.mark.parametrize("kind", [pytest.param("aiosqlite", marks=pytest.mark.slow), "psycopg-async"])
async def test_a_kill_between_commit_and_acknowledgement_repeats_no_effect(
    kind: str, tmp_path: Path, client: Client, silo: Silo, schema_url: Callable[[], str]
):
    async with user_database(kind, str(tmp_path / "user.db"), schema_url) as database:
        definition = SubscriptionDefinition(name="billing", selector=Selector(ORDERS), start=Start.earliest())
        await client.create_subscription(definition)
        for number in range(30):
            await client.stream("orders", str(number % 3)).publish([b"%d.%d" % (number, part) for part in range(3)])
        for kill in (1, 3, 0):
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(SCRIPT), str(silo.grpc_address), _url(database), str(kill)
            )
            assert await process.wait() == (-signal.SIGKILL if kill else 0)
        expected = [f"{number}.{part}" for number in range(30) for part in range(3)]
        assert sorted(database.log(), key=lambda value: [int(each) for each in value.split(".")]) == expected


def _url(database: UserDatabase) -> str:
    return database.engine.url.render_as_string(hide_password=False)
