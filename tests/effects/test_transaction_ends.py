"""How a handler's transaction ends: with statements that run, by the handler itself, or with its connection."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from headrace import Event, InvalidArgument, StreamState, Transaction, Unavailable
from headrace.effects.observed import ObservedTransaction
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_transactional_handlers import ENDED, event_at, in_scope

WRITE = text("INSERT INTO log (value) VALUES (:value)")
FIRST, SECOND, TAKEN = {"value": "first"}, {"value": "second"}, {"value": "taken"}
Way = Callable[[Transaction], Awaitable[Any]]


@pytest.fixture(params=["psycopg-async", "asyncpg"])
async def asynchronous(request: pytest.FixtureRequest, schema_url: Callable[[], str]) -> AsyncIterator[UserDatabase]:
    async with user_database(request.param, "", schema_url) as made:
        made.execute("INSERT INTO log (value) VALUES ('taken')")
        yield made


@pytest.fixture
async def psycopg(schema_url: Callable[[], str]) -> AsyncIterator[UserDatabase]:
    async with user_database("psycopg-async", "", schema_url) as made:
        yield made


def nothing_is_applied(database: UserDatabase) -> bool:
    return database.log() in ([], ["taken"]) and database.rows("SELECT COUNT(*) FROM headrace_position") == [(0,)]


# ---- statements that still run ---------------------------------------------------------------------------------------


async def gathered(tx: Transaction) -> None:
    try:
        await asyncio.gather(tx.execute(WRITE, TAKEN), tx.execute(WRITE, FIRST))
    except SQLAlchemyError:
        pass


async def left_in_a_task(tx: Transaction) -> None:
    await tx.execute(WRITE, FIRST)
    failing = asyncio.create_task(tx.execute(text("INSERT INTO log (value) SELECT 'taken' FROM pg_sleep(0.2)")))
    failing.add_done_callback(lambda done: done.exception())
    await asyncio.sleep(0.05)


async def waiting_for_the_connection(tx: Transaction) -> None:
    connection = tx.connection

    async def fail_later() -> None:
        await asyncio.sleep(0.05)
        await connection.execute(text("SELECT 1 / 0"))

    failing = asyncio.create_task(fail_later())
    failing.add_done_callback(lambda done: done.exception())
    await connection.execute(text("INSERT INTO log (value) SELECT 'first' FROM pg_sleep(0.2)"))


async def left_on_the_connection(tx: Transaction) -> None:
    connection = tx.connection
    statements = [
        asyncio.create_task(connection.execute(WRITE, FIRST)),
        asyncio.create_task(connection.execute(text("SELECT 1 / 0 FROM pg_sleep(0.2)"))),
    ]
    for each in statements:
        each.add_done_callback(lambda done: done.exception())
    await asyncio.wait(statements, return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.parametrize("way", [gathered, left_in_a_task, waiting_for_the_connection, left_on_the_connection])
async def test_a_statement_that_fails_at_the_commit_fails_the_event(asynchronous: UserDatabase, way: Way):
    """PostgreSQL answers such a COMMIT by a rollback, and psycopg does not report that."""

    async def handler(_: Event, tx: Transaction) -> None:
        await way(tx)

    effects, _ = in_scope(asynchronous, handler)
    with pytest.raises((InvalidArgument, SQLAlchemyError)):
        await effects.call(event_at(5))
    with pytest.raises((InvalidArgument, SQLAlchemyError)):
        async with effects.transaction([event_at(5)], redriven=False) as tx:
            await way(tx)
    await asyncio.sleep(0.3)  # until the last statement has ended
    assert nothing_is_applied(asynchronous)


async def test_a_task_that_goes_on_with_another_statement_fails_the_event(asynchronous: UserDatabase):
    """Otherwise its first statement would be committed, and the second one refused, because the transaction is over."""
    tasks: list[asyncio.Task[None]] = []

    async def leave_a_task(_: Event, tx: Transaction) -> None:
        async def write_both() -> None:
            await tx.execute(text("INSERT INTO log (value) SELECT 'first' FROM pg_sleep(0.2)"))
            await tx.execute(WRITE, SECOND)

        tasks.append(asyncio.create_task(write_both()))
        await asyncio.sleep(0.05)

    effects, _ = in_scope(asynchronous, leave_a_task)
    with pytest.raises(InvalidArgument, match="a statement still runs"):
        await effects.call(event_at(5))
    with suppress(InvalidArgument, SQLAlchemyError):
        await tasks[0]
    assert nothing_is_applied(asynchronous)


async def test_a_task_whose_statement_ends_during_the_last_flush_fails_the_event(asynchronous: UserDatabase):
    tasks: list[asyncio.Task[None]] = []

    async def leave_a_task(_: Event, tx: Transaction) -> None:
        async def write_both() -> None:
            await tx.execute(text("INSERT INTO log (value) SELECT 'first' FROM pg_sleep(0.2)"))
            await tx.execute(WRITE, SECOND)

        tx.session.add(Written(value="flushed"))
        tasks.append(asyncio.create_task(write_both()))
        await asyncio.sleep(0.05)

    effects, _ = in_scope(asynchronous, leave_a_task)
    with pytest.raises(InvalidArgument, match="a statement still runs"):
        await effects.call(event_at(5))
    with suppress(InvalidArgument, SQLAlchemyError):
        await tasks[0]
    assert nothing_is_applied(asynchronous)


async def test_an_error_that_the_handler_catches_is_named_with_its_remedy(asynchronous: UserDatabase):
    async def catch(_: Event, tx: Transaction) -> None:
        with suppress(SQLAlchemyError):
            await tx.execute(WRITE, TAKEN)

    effects, _ = in_scope(asynchronous, catch)
    with pytest.raises(InvalidArgument, match=r"has aborted the transaction: use tx\.connection\.begin_nested\(\)"):
        await effects.call(event_at(5))
    assert nothing_is_applied(asynchronous)


@pytest.mark.parametrize("stateful", [False, True])
async def test_a_handler_that_catches_its_cancellation_fails(either: UserDatabase, stateful: bool):
    async def catch(_: Event, tx: Transaction) -> None:
        await tx.execute(WRITE, FIRST)
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    began = asyncio.Event()
    effects, _ = in_scope(either, catch, state=StreamState() if stateful else None)
    running = asyncio.create_task(effects.call(event_at(5)))
    await began.wait()
    running.cancel()
    with pytest.raises(InvalidArgument, match="has caught the CancelledError"):
        await running
    assert nothing_is_applied(either)


async def test_a_handler_may_limit_the_time_of_a_part(either: UserDatabase):
    """The limit cancels the handler, and takes that back."""

    async def limit(_: Event, tx: Transaction) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        await tx.execute(WRITE, FIRST)

    effects, _ = in_scope(either, limit)
    await effects.call(event_at(5))
    assert either.log() == ["first"]


async def test_statements_that_were_gathered_and_awaited_are_committed(psycopg: UserDatabase):
    async def handler(_: Event, tx: Transaction) -> None:
        await asyncio.gather(tx.execute(WRITE, FIRST), tx.execute(WRITE, SECOND))

    effects, _ = in_scope(psycopg, handler)
    await effects.call(event_at(5))
    assert sorted(psycopg.log()) == ["first", "second"]


# ---- handlers that end the transaction -------------------------------------------------------------------------------


@pytest.fixture(params=["psycopg-async", "aiosqlite"])
async def either(
    request: pytest.FixtureRequest, tmp_path: Path, schema_url: Callable[[], str]
) -> AsyncIterator[UserDatabase]:
    async with user_database(request.param, str(tmp_path / "user.db"), schema_url) as made:
        yield made


async def apply(database: UserDatabase, way: Way, *, stateful: bool) -> None:
    """Apply an event, and then one whose handler does something. With state, no statement precedes the second one."""

    async def handler(delivered: Event, tx: Transaction) -> None:
        if delivered.token == event_at(5).token:
            await way(tx)

    effects, _ = in_scope(database, handler, state=StreamState() if stateful else None)
    await effects.call(event_at(4))
    await effects.call(event_at(5))


def is_not_applied(database: UserDatabase) -> bool:
    return database.log() == [] and database.rows("SELECT token_offset FROM headrace_position") == [(4,)]


def then_write(statement: str) -> Way:
    async def way(tx: Transaction) -> None:
        await tx.connection.execute(text(statement))
        await tx.connection.execute(WRITE, FIRST)

    return way


async def by_the_session(tx: Transaction) -> None:
    await tx.session.execute(text("rollback"))
    await tx.session.execute(WRITE, FIRST)


async def rolled_back_by_the_driver(tx: Transaction) -> None:
    await tx.connection.execute(WRITE, FIRST)
    driver: Any = (await tx.connection.get_raw_connection()).driver_connection
    await driver.rollback()


async def by_the_driver(tx: Transaction) -> None:
    await rolled_back_by_the_driver(tx)
    await tx.connection.execute(WRITE, SECOND)


async def by_closing(tx: Transaction) -> None:
    def work(session: Session) -> None:
        session.execute(WRITE, FIRST)
        (session.get_transaction() or session.begin()).close()

    await tx.run(work)


async def by_closing_after_a_savepoint(tx: Transaction) -> None:
    def work(session: Session) -> None:
        with session.begin_nested():
            session.execute(WRITE, FIRST)
        (session.get_transaction() or session.begin()).close()

    await tx.run(work)


async def by_closing_without_a_statement(tx: Transaction) -> None:
    await tx.run(lambda session: session.begin().close())


SQL = (
    "ROLLBACK",
    "ROLLBACK AND CHAIN",
    " commit and chain",
    "COMMIT",
    "ROLLBACK WORK",
    "ROLLBACK; BEGIN",
    "END",
    "ABORT",
    "/* by an\nagent */ COMMIT",
    "-- by an agent\nCOMMIT",
    ";COMMIT",
)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(then_write(statement), id=statement) for statement in SQL),
        by_the_session,
        by_the_driver,
        rolled_back_by_the_driver,
        by_closing,
        by_closing_after_a_savepoint,
        by_closing_without_a_statement,
    ],
)
async def test_a_handler_that_ends_the_transaction_fails(either: UserDatabase, way: Way, stateful: bool):
    with pytest.raises(InvalidArgument, match=ENDED):
        await apply(either, way, stateful=stateful)
    assert is_not_applied(either)


SETTINGS_OF_THE_SESSION = (
    "SET search_path TO other",
    'set/* tenant */"search_path" = other',
    "SET SESSION search_path TO other",
    "SET SCHEMA 'other'",
    "-- tenant\nSET ROLE other",
    "SET SESSION ROLE other",
    "SET role = other",
    "SET SESSION AUTHORIZATION other",
    "SET SESSION SESSION AUTHORIZATION other",
    "SET session_authorization TO other",
    "RESET search_path",
    "RESET ROLE",
    "RESET SESSION AUTHORIZATION",
    "RESET ALL",
    "DISCARD ALL",
)


async def test_a_setting_that_moves_the_next_position_is_refused(psycopg: UserDatabase):
    for statement in SETTINGS_OF_THE_SESSION:
        with pytest.raises(InvalidArgument, match=r"sets search_path or the role .*: write SET LOCAL"):
            await apply(psycopg, then_write(statement), stateful=False)
        assert is_not_applied(psycopg)


async def test_settings_of_the_transaction_and_other_settings_are_allowed(psycopg: UserDatabase):
    async def way(tx: Transaction) -> None:
        await tx.execute(WRITE, FIRST)
        for statement in (
            "SET LOCAL search_path TO pg_catalog",
            "SET LOCAL ROLE NONE",
            "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED",
            "SET TIME ZONE 'UTC'",
            "SET role.mine TO 'other'",
            "RESET statement_timeout",
        ):
            await tx.execute(text(statement))

    await apply(psycopg, way, stateful=False)
    assert psycopg.log() == ["first"]
    assert psycopg.rows("SELECT token_offset FROM headrace_position") == [(5,)]


async def test_a_commit_of_the_driver_fails_the_event(psycopg: UserDatabase):
    """The position is committed by then, so what follows must not be."""

    async def way(tx: Transaction) -> None:
        def work(session: Session) -> None:
            session.connection().connection.dbapi_connection.commit()  # pyright: ignore[reportOptionalMemberAccess]
            session.execute(WRITE, FIRST)

        await tx.run(work)

    with pytest.raises(InvalidArgument, match=ENDED):
        await apply(psycopg, way, stateful=False)
    assert psycopg.log() == []


@pytest.mark.parametrize("stateful", [False, True])
async def test_commits_of_the_session_and_of_its_savepoints_are_allowed(either: UserDatabase, stateful: bool):
    async def way(tx: Transaction) -> None:
        async with tx.session.begin_nested():
            await tx.session.execute(WRITE, FIRST)
        await tx.session.commit()
        async with tx.session.begin():
            await tx.session.execute(WRITE, SECOND)

    await apply(either, way, stateful=stateful)
    assert either.log() == ["first", "second"]


@pytest.mark.timeout(20)
async def test_many_comments_take_no_time(psycopg: UserDatabase):
    async def way(tx: Transaction) -> None:
        await tx.execute(text("/* a * b */ -- c\n" * 40 + "INSERT INTO log (value) VALUES ('first')"))

    await apply(psycopg, way, stateful=False)
    assert psycopg.log() == ["first"]


@pytest.mark.parametrize("stateful", [False, True])
async def test_savepoints_in_sql_are_allowed(either: UserDatabase, stateful: bool):
    async def way(tx: Transaction) -> None:
        await tx.execute(text("SAVEPOINT one"))
        await tx.execute(WRITE, SECOND)
        await tx.execute(text("ROLLBACK/* not all */TO one"))
        await tx.execute(text("ROLLBACK TRANSACTION TO SAVEPOINT one"))
        await tx.execute(WRITE, FIRST)

    await apply(either, way, stateful=stateful)
    assert either.log() == ["first"]


@pytest.mark.parametrize("stateful", [False, True])
async def test_the_release_of_a_savepoint_in_sql_commits_nothing(either: UserDatabase, stateful: bool):
    async def way(tx: Transaction) -> None:
        await tx.execute(text("SAVEPOINT one"))
        await tx.execute(WRITE, FIRST)
        await tx.execute(text("RELEASE SAVEPOINT one"))
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        await apply(either, way, stateful=stateful)
    assert is_not_applied(either)


@pytest.mark.parametrize("name", ["commit", "rollback"])
async def test_a_listener_of_the_user_may_end_the_transaction(either: UserDatabase, name: str):
    assert isinstance(either.engine, AsyncEngine)

    def end(connection: Connection) -> None:
        connection.exec_driver_sql(name)

    event.listen(either.engine.sync_engine, name, end)

    async def way(tx: Transaction) -> None:
        await tx.execute(WRITE, FIRST)
        if name == "rollback":
            raise ValueError("no luck")

    if name == "rollback":
        with pytest.raises(ValueError, match="no luck"):
            await apply(either, way, stateful=False)
    else:
        await apply(either, way, stateful=False)
        assert either.log() == ["first"]


def observed_transactions() -> set[int]:
    gc.collect()
    return {id(one) for one in gc.get_objects() if isinstance(one, ObservedTransaction)}


async def test_nothing_is_kept_of_a_transaction_that_has_ended(database: UserDatabase):
    async def way(tx: Transaction) -> None:
        await tx.execute(WRITE, FIRST)

    before = observed_transactions()  # errors of earlier tests may hold some
    for _ in range(5):
        with pytest.raises(SQLAlchemyError):
            await apply(database, lambda tx: tx.execute(text("SELECT nothing")), stateful=True)
    await apply(database, way, stateful=False)
    assert len(observed_transactions() - before) <= 2  # a thread may keep its last one


# ---- connections and disks that break --------------------------------------------------------------------------------


async def goes_on(tx: Transaction) -> None:
    try:
        await tx.execute(WRITE, FIRST)
    finally:
        await tx.execute(WRITE, SECOND)


async def swallows_it(tx: Transaction) -> None:
    try:
        await tx.execute(WRITE, FIRST)
    except SQLAlchemyError:
        pass


async def raises_another_error(tx: Transaction) -> None:
    try:
        await tx.execute(WRITE, FIRST)
    except SQLAlchemyError:
        raise ValueError("no luck") from None


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
@pytest.mark.parametrize("way", [goes_on, swallows_it, raises_another_error])
async def test_a_lost_connection_is_an_outage_whatever_the_handler_does(
    kind: str, way: Way, schema_url: Callable[[], str]
):
    async with user_database(kind, "", schema_url) as database:

        async def handler(_: Event, tx: Transaction) -> None:
            pid = (await tx.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            database.execute("SELECT pg_terminate_backend(:pid)", pid=pid)
            await way(tx)

        effects, _ = in_scope(database, handler)
        with pytest.raises(Unavailable, match="the database of the effects or the outbox is not available"):
            await effects.call(event_at(5))
        with pytest.raises(Unavailable, match="the database of the effects or the outbox is not available"):
            async with effects.transaction([event_at(6)], redriven=False) as tx:
                await handler(event_at(6), tx)
        assert nothing_is_applied(database)


async def test_a_full_disk_in_a_savepoint_is_an_outage(tmp_path: Path, schema_url: Callable[[], str]):
    """SQLite ends the transaction itself, so that nothing is left to roll back."""
    async with user_database("aiosqlite", str(tmp_path / "user.db"), schema_url) as database:

        async def handler(_: Event, tx: Transaction) -> None:
            pages = (await tx.execute(text("PRAGMA page_count"))).scalar_one()
            await tx.execute(text(f"PRAGMA max_page_count = {pages}"))
            async with tx.connection.begin_nested():
                await tx.execute(WRITE, {"value": "x" * 1_000_000})

        effects, _ = in_scope(database, handler)
        with pytest.raises(Unavailable, match="database or disk is full"):
            await effects.call(event_at(5))
        assert nothing_is_applied(database)


class Base(DeclarativeBase):
    pass


class Written(Base):
    __tablename__ = "log"

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[str]


@pytest.mark.parametrize("listened", ["after_flush", "after_flush_postexec"])
@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_an_error_that_a_listener_catches_in_the_last_flush_is_not_taken_for_done(
    kind: str, listened: str, schema_url: Callable[[], str]
):
    """PostgreSQL answers the COMMIT by a rollback then, which psycopg does not report."""

    def fail(session: Session, *_: object) -> None:
        with suppress(SQLAlchemyError):
            session.connection().execute(text("SELECT 1 / 0"))

    def work(session: Session) -> None:
        session.add(Written(value="first"))
        event.listen(session, listened, fail)

    async def handler(_: Event, tx: Transaction) -> None:
        await tx.run(work)

    async with user_database(kind, "", schema_url) as database:
        effects, _ = in_scope(database, handler)
        with pytest.raises(Exception, match="aborted"):
            await effects.call(event_at(5))
        assert nothing_is_applied(database)
