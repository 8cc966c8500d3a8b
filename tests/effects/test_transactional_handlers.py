"""Handlers whose effects are applied exactly once."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from headrace import (
    Effects,
    Event,
    EventBatch,
    InvalidArgument,
    NotFound,
    NotSupported,
    OnFailure,
    Provider,
    RetryPolicy,
    StreamId,
    Transaction,
    Unavailable,
    subscription,
)
from headrace.effects import StreamState
from headrace.effects.effects import EffectsInScope
from headrace.streams.handlers import Handler
from headrace.streams.identity import SequenceToken
from headrace.streams.transactions import EffectCounts, EffectScope
from tests.effects.databases import UserDatabase, close, engine, user_database

STREAM = StreamId("orders", "42")
ONCE = RetryPolicy(max_attempts=1)
_LOG = text("INSERT INTO log (value) VALUES (:value)")

ENDED = "the handler ended its transaction, which belongs to headrace: return to commit, raise to roll back"

Handle = Callable[[Event, Transaction], Awaitable[None]]


def event_at(offset: int, index: int = 0, stream: StreamId = STREAM) -> Event:
    token = SequenceToken(offset, index)
    return Event(f"{stream.key}@{token}".encode(), timestamp_us=1, stream=stream, token=token)


def batch_at(offset: int, count: int) -> EventBatch:
    batch = EventBatch.of(STREAM, [f"{STREAM.key}@{SequenceToken(offset, i)}".encode() for i in range(count)])
    batch.offset = offset
    return batch


async def write_down(event: Event, tx: Transaction) -> None:
    """The effect. The column is unique, so applying it twice fails."""
    await tx.execute(_LOG, {"value": event.payload.decode()})


async def write_all_down(batch: EventBatch, tx: Transaction) -> None:
    for event in batch:
        await write_down(event, tx)


def in_scope(
    database: UserDatabase, handler: Any = write_down, *, generation: int = 1, batch: bool = False, **options: Any
) -> tuple[EffectsInScope, EffectCounts]:
    counts = EffectCounts()
    scope = EffectScope("here", "billing", 0, generation)
    return Effects(database.engine, **options).scoped(handler, scope, counts, batch=batch), counts


# ---- one scope -------------------------------------------------------------------------------------------------------


async def test_a_redelivered_event_is_not_applied_again(database: UserDatabase):
    effects, counts = in_scope(database)
    for offset in (5, 7, 5, 7, 6):
        await effects.call(event_at(offset))
    assert database.log() == ["42@5", "42@7"]
    assert counts.already_applied == 3


async def test_streams_have_positions_of_their_own(database: UserDatabase):
    effects, _ = in_scope(database)
    for key in ("a", "b"):
        await effects.call(event_at(5, stream=StreamId("orders", key)))
    assert database.log() == ["a@5", "b@5"]


async def test_a_stream_with_a_long_name_has_a_position(database: UserDatabase):
    effects, counts = in_scope(database)
    long = [StreamId("n" * 1024, "%" * 1023 + last) for last in "ab"]
    for stream in (*long, *long):
        event = event_at(5, stream=stream)
        event.payload = stream.key[-1:].encode()
        await effects.call(event)
    assert (database.log(), counts.already_applied) == (["a", "b"], 2)


async def test_a_failed_handler_leaves_neither_effect_nor_position(database: UserDatabase):
    failing = True

    async def fail_once(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        if failing:
            raise ValueError

    effects, counts = in_scope(database, fail_once)
    with pytest.raises(ValueError):
        await effects.call(event_at(5))
    assert (database.log(), database.rows("SELECT * FROM headrace_position")) == ([], [])
    failing = False
    await effects.call(event_at(5))
    assert (database.log(), counts.already_applied) == (["42@5"], 0)


async def test_a_handler_that_is_cancelled_leaves_no_effect(database: UserDatabase):
    began = asyncio.Event()

    async def wait(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        began.set()
        await asyncio.Event().wait()

    effects, _ = in_scope(database, wait)
    task = asyncio.create_task(effects.call(event_at(5)))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert database.log() == []
    again, _ = in_scope(database)
    await again.call(event_at(5))  # no lock is left
    assert database.log() == ["42@5"]


async def test_a_batch_is_one_transaction(database: UserDatabase):
    effects, counts = in_scope(database, write_all_down, batch=True)
    await effects.call(batch_at(5, 3))
    await effects.call(batch_at(5, 3))
    assert (database.log(), counts.already_applied) == (["42@5", "42@5.1", "42@5.2"], 3)


async def test_a_batch_that_was_applied_in_part_is_completed(database: UserDatabase):
    effects, _ = in_scope(database, write_all_down, batch=True)
    single, _ = in_scope(database)
    await single.call(event_at(5, 0))
    await single.call(event_at(5, 1))
    await effects.call(batch_at(5, 4))
    assert database.log() == ["42@5", "42@5.1", "42@5.2", "42@5.3"]


async def test_two_owners_with_the_same_events_apply_each_once(database: UserDatabase):
    first, counts = in_scope(database)
    second, others = in_scope(database)
    for offset in range(20):
        await asyncio.gather(first.call(event_at(offset)), second.call(event_at(offset)))
    assert database.log() == [f"42@{SequenceToken(offset)}" for offset in range(20)]
    assert counts.already_applied + others.already_applied == 20


async def test_a_seek_back_applies_effects_again_and_refuses_owners_of_before(database: UserDatabase):
    before, refused = in_scope(database)
    await before.call(event_at(5))
    await before.call(event_at(6))
    after, _ = in_scope(database, generation=2)
    database.execute("DELETE FROM log")
    await after.call(event_at(5))
    await before.call(event_at(7))
    assert (database.log(), refused.already_applied) == (["42@5"], 1)
    await after.call(event_at(6))
    assert database.log() == ["42@5", "42@6"]


# ---- transactions ----------------------------------------------------------------------------------------------------


async def test_a_session_works_in_the_transaction(database: UserDatabase):
    def add(session: Session, value: str) -> int:
        session.execute(_LOG, {"value": value})
        return 7

    async def handle(event: Event, tx: Transaction) -> None:
        assert await tx.run(add, event.payload.decode()) == 7
        if event.token == (6, 0):
            raise ValueError

    effects, _ = in_scope(database, handle)
    await effects.call(event_at(5))
    with pytest.raises(ValueError):
        await effects.call(event_at(6))
    assert database.log() == ["42@5"]


async def test_a_function_that_only_begins_a_call_is_refused(database: UserDatabase):
    """Otherwise the event would count as applied, without effects. Warnings of coroutines are errors here."""

    async def add(session: Session) -> None:
        session.execute(_LOG, {"value": "lost"})

    async def add_each(session: Session) -> AsyncIterator[None]:
        session.execute(_LOG, {"value": "lost"})
        yield

    def begin(session: Session) -> object:
        return add(session)

    def generate(session: Session) -> Iterator[None]:
        session.execute(_LOG, {"value": "lost"})
        yield

    async def handle(_: Event, tx: Transaction) -> None:
        await tx.run(function)

    effects, _ = in_scope(database, handle)
    for function in (add, partial(add), begin, add_each, generate):
        with pytest.raises(InvalidArgument, match=r"tx\.run: .* instead of a result: write a plain"):
            await effects.call(event_at(5))
        with pytest.raises(InvalidArgument, match=r"tx\.run"):
            async with effects.transaction([event_at(5)], redriven=False) as tx:
                await tx.run(function)
    gc.collect()
    assert database.log() == []
    assert database.rows("SELECT * FROM headrace_position") == []


async def test_results_have_their_rows(database: UserDatabase):
    seen: list[Any] = []

    async def handle(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        seen.append((await tx.execute(text("SELECT value FROM log"))).scalars().all())
        seen.append((await tx.execute(text("DELETE FROM log"))).rowcount)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]

    effects, _ = in_scope(database, handle)
    await effects.call(event_at(5))
    assert seen == [["42@5"], 1]


async def test_an_asyncio_engine_offers_its_connection_and_a_session(async_database: UserDatabase):
    async def handle(event: Event, tx: Transaction) -> None:
        await tx.connection.execute(_LOG, {"value": "by connection"})
        await tx.session.execute(_LOG, {"value": "by session"})

    effects, _ = in_scope(async_database, handle)
    await effects.call(event_at(5))
    assert async_database.log() == ["by connection", "by session"]


async def test_a_plain_engine_refuses_to_offer_asyncio_objects(tmp_path: Path):
    async def handle(_: Event, tx: Transaction) -> None:
        print(tx.session)

    async with user_database("sqlite", str(tmp_path / "user.db"), lambda: "") as database:
        effects, _ = in_scope(database, handle)
        with pytest.raises(NotSupported, match=r"tx.session needs an AsyncEngine.*tx.run"):
            await effects.call(event_at(5))


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_a_transaction_that_postgresql_aborted_is_not_taken_for_committed(
    kind: str, schema_url: Callable[[], str]
):
    async def catch(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        with pytest.raises(IntegrityError):
            await write_down(event, tx)

    async with user_database(kind, "", schema_url) as database:
        effects, _ = in_scope(database, catch)
        with pytest.raises(Exception, match="transaction"):
            await effects.call(event_at(5))
        assert database.rows("SELECT * FROM headrace_position") == []


async def test_a_handler_that_rolls_back_is_not_taken_for_done(async_database: UserDatabase):
    async def undo(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        await tx.session.execute(text("SELECT 1"))
        await tx.session.rollback()

    effects, _ = in_scope(async_database, undo)
    with pytest.raises(InvalidArgument, match=ENDED):
        await effects.call(event_at(5))
    assert (async_database.log(), async_database.rows("SELECT * FROM headrace_position")) == ([], [])


async def test_nothing_is_committed_after_a_rollback_of_the_session(database: UserDatabase):
    """As ORM code does that inserts and, after an IntegrityError, goes on with another statement."""

    def insert_or_note(session: Session) -> None:
        session.execute(_LOG, {"value": "before"})
        session.rollback()
        session.execute(_LOG, {"value": "after"})

    async def handle(_: Event, tx: Transaction) -> None:
        await tx.run(insert_or_note)

    for state in (None, StreamState()):
        effects, _ = in_scope(database, handle, state=state)
        with pytest.raises(InvalidArgument, match=ENDED):
            await effects.call(event_at(5))
        assert (database.log(), database.rows("SELECT * FROM headrace_position")) == ([], [])


@pytest.mark.parametrize("executed_before", [False, True])
@pytest.mark.parametrize("method", ["rollback", "close", "reset", "invalidate"])
async def test_ending_an_unused_session_fails_the_event(
    async_database: UserDatabase, method: str, *, executed_before: bool
):
    """SQLAlchemy ignores the call if the session has executed nothing."""

    async def handle(event: Event, tx: Transaction) -> None:
        if executed_before:
            await write_down(event, tx)
        await tx.run(lambda session: getattr(session, method)())

    effects, _ = in_scope(async_database, handle)
    with pytest.raises(InvalidArgument, match=ENDED):
        await effects.call(event_at(5))
    assert (async_database.log(), async_database.rows("SELECT * FROM headrace_position")) == ([], [])


async def test_rolling_back_an_unused_transaction_of_the_session_fails_the_event(database: UserDatabase):
    def begin_and_fail(session: Session) -> None:
        with suppress(ValueError), session.begin():
            raise ValueError

    async def handle(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        await tx.run(begin_and_fail)

    effects, _ = in_scope(database, handle)
    with pytest.raises(InvalidArgument, match=ENDED):
        await effects.call(event_at(5))
    assert (database.log(), database.rows("SELECT * FROM headrace_position")) == ([], [])


async def test_a_savepoint_that_is_rolled_back_leaves_the_transaction(database: UserDatabase):
    def fail_in_savepoint(session: Session) -> None:
        with suppress(ValueError), session.begin_nested():
            raise ValueError

    async def handle(event: Event, tx: Transaction) -> None:
        await tx.run(fail_in_savepoint)
        await write_down(event, tx)

    effects, _ = in_scope(database, handle)
    await effects.call(event_at(5))
    assert database.log() == ["42@5"]


async def test_the_error_after_which_a_handler_rolls_back_stays(database: UserDatabase):
    def fail(session: Session) -> None:
        try:
            raise ValueError("7")
        except ValueError:
            session.rollback()
            raise

    async def handle(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        await tx.run(fail)

    effects, _ = in_scope(database, handle)
    with pytest.raises(ValueError, match="7"):
        await effects.call(event_at(5))
    assert (database.log(), database.rows("SELECT * FROM headrace_position")) == ([], [])


@pytest.mark.parametrize("method", ["rollback", "commit", "close"])
async def test_a_connection_that_a_handler_ends_is_one_clear_error(async_database: UserDatabase, method: str):
    async def handle(_: Event, tx: Transaction) -> None:
        await tx.run(lambda session: getattr(session.connection(), method)())

    effects, _ = in_scope(async_database, handle)
    with pytest.raises(InvalidArgument, match=ENDED):
        await effects.call(event_at(5))


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_rollback_by_a_statement_is_not_taken_for_done(database: UserDatabase, *, goes_on: bool):
    async def undo(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        await tx.execute(text("ROLLBACK"))
        if goes_on:
            await write_down(event, tx)

    for state in (None, StreamState()):
        effects, _ = in_scope(database, undo, state=state)
        with pytest.raises(InvalidArgument, match=ENDED):
            await effects.call(event_at(5))
        assert (database.log(), database.rows("SELECT * FROM headrace_position")) == ([], [])


async def test_a_task_that_outlives_the_handler_gets_an_error(database: UserDatabase):
    ended = asyncio.Event()
    late: list[asyncio.Task[None]] = []

    async def handle(event: Event, tx: Transaction) -> None:
        async def later() -> None:
            await ended.wait()
            for use in (lambda: write_down(event, tx), lambda: tx.run(lambda _: None)):
                with pytest.raises(InvalidArgument, match="the transaction is over"):
                    await use()

        late.append(asyncio.create_task(later()))

    effects, _ = in_scope(database, handle)
    await effects.call(event_at(5))
    ended.set()
    await asyncio.gather(*late)
    assert database.log() == []


async def test_a_connection_goes_on_after_a_handler_that_ended_its_transaction(schema_url: Callable[[], str]):
    async with user_database("psycopg-async", "", schema_url) as database:
        assert isinstance(database.engine, AsyncEngine)

        async def undo(event: Event, tx: Transaction) -> None:
            await tx.session.execute(text("SELECT 1"))
            await tx.session.rollback()
            await tx.session.execute(_LOG, {"value": event.payload.decode()})

        async with database.engine.connect() as connection:
            scope, counts = EffectScope("here", "billing", 0, 1), EffectCounts()
            with pytest.raises(InvalidArgument, match=ENDED):
                await Effects(connection).scoped(undo, scope, counts, batch=False).call(event_at(5))
            await Effects(connection).scoped(write_down, scope, counts, batch=False).call(event_at(6))
        assert database.log() == ["42@6"]


async def test_a_commit_of_the_session_does_not_commit_early(async_database: UserDatabase):
    async def commit(event: Event, tx: Transaction) -> None:
        await tx.session.execute(_LOG, {"value": event.payload.decode()})
        await tx.session.commit()
        raise ValueError

    effects, _ = in_scope(async_database, commit)
    with pytest.raises(ValueError):
        await effects.call(event_at(5))
    assert async_database.log() == []


async def test_a_serialization_failure_runs_the_handler_again(schema_url: Callable[[], str]):
    async with user_database("psycopg-async", "", schema_url, isolation_level="SERIALIZABLE") as database:
        database.execute("INSERT INTO log (value) VALUES ('0')")
        meet = asyncio.Barrier(2)
        calls = 0

        async def count(event: Event, tx: Transaction) -> None:
            nonlocal calls
            calls += 1
            value = (await tx.execute(text("SELECT value FROM log"))).scalar_one()
            if calls <= 2:
                await meet.wait()
            await tx.execute(text("UPDATE log SET value = :value"), {"value": str(int(value) + 1)})

        effects, _ = in_scope(database, count)
        streams = [StreamId("orders", key) for key in "ab"]
        await asyncio.gather(*(effects.call(event_at(5, stream=stream)) for stream in streams))
        assert (database.log(), calls) == (["2"], 3)


async def test_a_transaction_that_always_collides_is_reported_as_such(schema_url: Callable[[], str]):
    async with user_database("psycopg-async", "", schema_url, isolation_level="REPEATABLE READ") as database:
        database.execute("INSERT INTO log (value) VALUES ('0')")
        calls = 0

        async def collide(_: Event, tx: Transaction) -> None:
            nonlocal calls
            calls += 1
            await asyncio.to_thread(database.execute, "UPDATE log SET value = value || '.'")
            await tx.execute(text("UPDATE log SET value = value || '!'"))

        effects, _ = in_scope(database, collide)
        with pytest.raises(Unavailable, match=r"stream orders/42 collided with another one in 5 attempts"):
            await effects.call(event_at(5))
        assert calls == 5
        with pytest.raises(Unavailable, match=r"stream orders/42 collided with another one: the events are delivered"):
            async with effects.transaction([event_at(5)], redriven=False) as tx:
                await collide(event_at(5), tx)


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_an_outage_of_the_database_is_not_the_events_fault(kind: str):
    made = engine(kind, "postgresql://postgres@127.0.0.1:1/none?options=-csearch_path%3Dnone")
    counts, scope = EffectCounts(), EffectScope("here", "billing", 0, 1)
    effects = Effects(made)
    with pytest.raises(Unavailable, match="the database of the effects or the outbox is not available"):
        await effects.check()
    with pytest.raises(Unavailable):
        await effects.scoped(write_down, scope, counts, batch=False).call(event_at(5))
    await close(made)


async def test_a_connection_that_breaks_in_a_handler_is_not_the_events_fault(schema_url: Callable[[], str]):
    async with user_database("psycopg-async", "", schema_url) as database:

        async def break_connection(event: Event, tx: Transaction) -> None:
            pid = (await tx.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            database.execute("SELECT pg_terminate_backend(:pid)", pid=pid)
            await write_down(event, tx)

        effects, _ = in_scope(database, break_connection)
        with pytest.raises(Unavailable):
            await effects.call(event_at(5))


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_an_outage_of_another_database_is_the_events_failure(database: UserDatabase, kind: str):
    other = engine(kind, "postgresql://postgres@127.0.0.1:1/none?options=-csearch_path%3Dnone")

    async def ask_the_other(_: Event, _tx: Transaction) -> None:
        if isinstance(other, AsyncEngine):
            async with other.connect():
                pass
        else:
            await asyncio.to_thread(other.connect)

    effects, _ = in_scope(database, ask_the_other)
    with pytest.raises((OperationalError, OSError)):
        await effects.call(event_at(5))
    with pytest.raises((OperationalError, OSError)):
        async with effects.transaction([event_at(5)], redriven=False) as tx:
            await ask_the_other(event_at(5), tx)
    await close(other)


async def test_a_full_pool_of_another_engine_is_the_events_failure(database: UserDatabase):
    other = create_engine("sqlite:///:memory:", poolclass=QueuePool, pool_size=1, max_overflow=0, pool_timeout=0.1)
    with other.connect():

        async def ask_the_other(_: Event, _tx: Transaction) -> None:
            await asyncio.to_thread(other.connect)

        effects, _ = in_scope(database, ask_the_other)
        with pytest.raises(PoolTimeout):
            await effects.call(event_at(5))
    other.dispose()


async def test_a_handler_that_waits_for_its_own_lock_in_postgresql_fails(schema_url: Callable[[], str]):
    async with user_database("psycopg-async", "", schema_url) as database:
        database.execute("INSERT INTO log (value) VALUES ('one')")
        assert isinstance(database.engine, AsyncEngine)
        user_engine, change = database.engine, text("UPDATE log SET value = 'two'")

        async def own_connection(_: Event, tx: Transaction) -> None:
            await tx.execute(change)
            async with user_engine.begin() as connection:
                await connection.execute(text("SET LOCAL lock_timeout = '100ms'"))
                await connection.execute(change)

        effects, _ = in_scope(database, own_connection)
        with pytest.raises(DBAPIError, match="lock timeout"):
            await effects.call(event_at(5))


async def test_a_handler_that_locks_itself_out_of_sqlite_fails(tmp_path: Path, schema_url: Callable[[], str]):
    async with user_database(
        "sqlite", str(tmp_path / "user.db"), schema_url, connect_args={"timeout": 0.1}
    ) as database:
        assert isinstance(database.engine, Engine)
        user_engine = database.engine

        def write() -> None:
            with user_engine.begin() as connection:
                connection.execute(_LOG, {"value": "own"})

        async def own_connection(_: Event, _tx: Transaction) -> None:
            await asyncio.to_thread(write)

        effects, _ = in_scope(database, own_connection)
        with pytest.raises(OperationalError, match="database is locked"):
            await effects.call(event_at(5))
        with database.inspecting.connect() as other:
            other.exec_driver_sql("BEGIN IMMEDIATE")
            with pytest.raises(Unavailable, match="database is locked"):  # by another process
                await in_scope(database)[0].call(event_at(5))


# ---- engines that are refused ----------------------------------------------------------------------------------------


async def test_missing_tables_are_one_clear_error(tmp_path: Path, schema_url: Callable[[], str]):
    for kind in ("sqlite", "psycopg-async"):
        async with user_database(kind, str(tmp_path / "user.db"), schema_url, migrated=False) as database:
            given = "sqlite:" if kind == "sqlite" else "URL'"
            with pytest.raises(
                NotFound, match=f"no tables for effects: create them with 'headrace effects migrate {given}"
            ):
                await Effects(database.engine).check()


async def test_an_engine_that_commits_each_statement_is_refused(tmp_path: Path, schema_url: Callable[[], str]):
    for kind in ("sqlite", "aiosqlite", "psycopg", "psycopg-async", "asyncpg"):
        file = str(tmp_path / f"{kind}.db")
        async with user_database(kind, file, schema_url, isolation_level="AUTOCOMMIT") as database:
            with pytest.raises(InvalidArgument, match="this engine commits each statement"):
                await Effects(database.engine).check()


async def test_a_sqlite_database_in_memory_is_refused():
    made = engine("sqlite", "sqlite://")
    with pytest.raises(InvalidArgument, match="effects in SQLite need a file"):
        Effects(made)
    await close(made)


async def test_a_connection_has_one_transaction_at_a_time(async_database: UserDatabase):
    assert isinstance(async_database.engine, AsyncEngine)
    handling, released = asyncio.Event(), asyncio.Event()

    async def handle(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        handling.set()
        await released.wait()

    async with async_database.engine.connect() as connection:
        with pytest.raises(InvalidArgument, match=r"max_transactions.*1 or None"):
            Effects(connection, max_transactions=4)
        effects = Effects(connection, max_transactions=1)
        scoped = effects.scoped(handle, EffectScope("here", "billing", 0, 1), EffectCounts(), batch=False)
        handler = asyncio.create_task(scoped.call(event_at(5)))
        await handling.wait()
        check = asyncio.create_task(Effects(connection).check())  # of another subscription
        await asyncio.sleep(0)
        released.set()
        await asyncio.gather(handler, check)
    assert async_database.log() == ["42@5"]


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("psycopg", r"in a function that tx\.run\(\)"), ("psycopg-async", r"tx\.connection\.begin_nested")],
)
async def test_the_advice_after_a_caught_error_works(kind: str, advice: str, schema_url: Callable[[], str]):
    async def catch(event: Event, tx: Transaction) -> None:
        with suppress(DBAPIError):
            await tx.execute(text("SELECT 1 / 0"))

    async with user_database(kind, "", schema_url) as database:
        effects, _ = in_scope(database, catch)
        with pytest.raises(InvalidArgument, match=advice):
            await effects.call(event_at(5))


def test_other_objects_than_engines_are_refused():
    with pytest.raises(InvalidArgument, match="Effects needs an Engine or an AsyncEngine of SQLAlchemy, not str"):
        Effects("postgresql://localhost")  # pyright: ignore[reportArgumentType]


# ---- a provider ------------------------------------------------------------------------------------------------------


async def test_a_subscription_applies_each_event_once(database: UserDatabase, tmp_path: Path):
    data = tmp_path / "data"
    async with Provider.open(data, queues=2) as provider:
        one = await provider.subscribe("billing", "orders/*", write_down, effects=Effects(database.engine))
        for key in ("a", "b"):
            await provider.stream("orders", key).publish([f"{key}{number}".encode() for number in range(3)])
        await one.caught_up()
    assert sorted(database.log()) == ["a0", "a1", "a2", "b0", "b1", "b2"]


async def test_a_seek_applies_effects_again_and_a_new_provider_skips_nothing(
    async_database: UserDatabase, tmp_path: Path
):
    for name in ("one", "two"):
        async with Provider.open(tmp_path / name, queues=2) as provider:

            async def handle(event: Event, tx: Transaction, name: str = name) -> None:
                await tx.execute(text("INSERT INTO log (value) SELECT COUNT(*) || :value FROM log"), {"value": name})

            one = await provider.subscribe("billing", "orders/*", handle, effects=Effects(async_database.engine))
            await provider.stream("orders", "42").publish(b"x")
            await one.caught_up()
            await one.seek("earliest")
            await one.caught_up()
    assert async_database.log() == ["0one", "1one", "2two", "3two"]


async def test_a_subscription_that_is_created_again_skips_nothing(async_database: UserDatabase, tmp_path: Path):
    async def handle(_: Event, tx: Transaction) -> None:
        await tx.execute(text("INSERT INTO log (value) SELECT COUNT(*) || '.' FROM log"))

    async with Provider.open(tmp_path / "data", queues=2) as provider:
        await provider.stream("orders", "42").publish(b"x")
        for _ in range(2):
            one = await provider.subscribe(
                "billing", "orders/*", handle, start="earliest", effects=Effects(async_database.engine)
            )
            await one.caught_up()
            await one.delete()
    assert async_database.log() == ["0.", "1."]


async def test_resuming_a_paused_stream_repeats_no_effect(async_database: UserDatabase, tmp_path: Path):
    """The event before the paused one is applied, and the checkpoint with it is lost in a crash."""
    attempts = 0

    async def handle(event: Event, tx: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        await write_down(event, tx)
        if event.payload == b"bad" and attempts < 3:
            raise ValueError

    options: Any = {"effects": Effects(async_database.engine), "retry": ONCE, "on_failure": OnFailure.PAUSE}
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        one = await provider.subscribe("billing", "orders/*", handle, circuit_breaker=False, **options)
        await provider.stream("orders", "42").publish([b"good", b"bad"])
        await one.caught_up()
        await one.close()
        before = (await provider.store.attach("default", "billing", exclusive=False)).generation
        assert await provider.resume("billing", StreamId("orders", "42"))
        assert (await provider.store.attach("default", "billing", exclusive=False)).generation == before
        again = await provider.subscribe("billing", "orders/*", handle, circuit_breaker=False, **options)
        await again.caught_up()
    assert async_database.log() == ["good", "bad"]


async def test_an_event_that_was_applied_before_a_crash_is_counted_and_skipped(
    async_database: UserDatabase, tmp_path: Path
):
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        effects = Effects(async_database.engine)
        one = await provider.subscribe("billing", "orders/*", write_down, effects=effects)
        await provider.stream("orders", "42").publish([b"a", b"b"])
        await one.caught_up()
        await one.close()
        before = await provider.store.checkpoints("default", "billing")
        back = {queue: position._replace(next_offset=0) for queue, position in before.items()}
        epoch = (await provider.store.attach("default", "billing")).epoch
        assert not await provider.store.save_checkpoints("default", [("billing", epoch, back)])
        again = await provider.subscribe("billing", "orders/*", write_down, effects=effects)
        await again.caught_up()
        assert provider.statistics().subscriptions[0].already_applied == 2
        await again.close()
        await provider.subscribe("billing", "orders/*", write_down, effects=effects)
        assert provider.statistics().subscriptions[0].already_applied == 2  # it only grows
    assert async_database.log() == ["a", "b"]


async def test_wrong_handlers_are_refused(tmp_path: Path):
    async def of_one(event: Event) -> None: ...

    async def of_batch(batch: EventBatch, tx: Transaction) -> None: ...

    def plain(event: Event, tx: Transaction) -> None: ...

    async def swapped(tx: Transaction, event: Event) -> None: ...

    async with user_database("sqlite", str(tmp_path / "user.db"), lambda: "") as database:
        async with Provider.open(tmp_path / "data") as provider:
            effects: Any = Effects(database.engine)
            subscribe: Any = provider.subscribe
            with pytest.raises(InvalidArgument, match="expected two arguments, event and tx"):
                subscribe("a", "orders/*", of_one, effects=effects)
            with pytest.raises(InvalidArgument, match="takes the transaction first: write `event, tx`"):
                subscribe("a", "orders/*", swapped, effects=effects)
            with pytest.raises(InvalidArgument, match="add batch=True"):
                subscribe("a", "orders/*", of_batch, effects=effects)
            with pytest.raises(InvalidArgument, match="with effects, a handler is an async function"):
                subscribe("a", "orders/*", plain, effects=effects)
            with pytest.raises(InvalidArgument, match="expected Effects\\(engine\\), or None"):
                subscribe("a", "orders/*", of_one, effects=7)
            with pytest.raises(InvalidArgument, match=r"takes a transaction.*effects=Effects\(engine\)"):
                subscribe("a", "orders/*", write_down)
            with pytest.raises(NotSupported, match="effects are for a handler"):
                subscribe("a", "orders/*", effects=effects)


async def _of_tx_by_name(event: Event, tx: object) -> None: ...


async def _of_transaction(event: Event, t: Transaction) -> None: ...


async def _of_value_and_transaction(value: dict[str, str], tx: Transaction) -> None: ...


async def _of_transaction_alone(transaction: Transaction) -> None: ...


async def _of_any_number(event: Event, *tx: object, **more: object) -> None: ...


async def _of_an_event_called_tx(value: dict[str, str], tx: Event) -> None: ...


@pytest.mark.parametrize("handler", [_of_any_number, _of_an_event_called_tx])
def test_a_handler_that_can_be_called_without_a_transaction_is_taken(handler: Any):
    Handler.of(handler, batch=False)


@pytest.mark.parametrize("handler", [_of_tx_by_name, _of_transaction, _of_value_and_transaction, _of_transaction_alone])
@pytest.mark.parametrize("batch", [False, True])
def test_a_handler_with_a_transaction_needs_effects_when_it_is_declared(handler: Any, *, batch: bool):
    declare: Any = subscription
    with pytest.raises(
        InvalidArgument, match=r"takes a transaction, .*: give it effects=Effects\(engine\), or leave out"
    ):
        declare("needs-effects", "orders/*", batch=batch)(handler)


def test_a_handler_with_a_tx_of_its_own_needs_no_effects():
    class Transaction(msgspec.Struct):
        amount: int

    async def of_value(tx: dict[str, str]) -> None: ...

    async def of_transaction(transaction: Transaction) -> None: ...

    async def of_default(event: Event, tx: object = None) -> None: ...

    transaction: Any = of_transaction
    transaction.__annotations__["transaction"] = Transaction
    for handler in (of_value, transaction, of_default):
        assert Handler.of(handler, batch=False).on_event is not None


def test_the_idempotency_key_tells_events_apart():
    key = event_at(5).idempotency_key
    assert (len(key), key) == (32, event_at(5).idempotency_key)
    later = event_at(5)
    later.timestamp_us = 2
    others = [event_at(6), event_at(5, 1), event_at(5, stream=StreamId("orders", "43")), later]
    assert key not in {other.idempotency_key for other in others}
    with pytest.raises(InvalidArgument, match="only a delivered event has one"):
        print(Event(b"x").idempotency_key)
