"""How a handler's transaction ends: with statements that run, by the handler itself, or with its connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from headrace import Event, InvalidArgument, Transaction, Unavailable
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


async def left_on_the_connection(tx: Transaction) -> None:
    connection = tx.connection
    statements = [
        asyncio.create_task(connection.execute(WRITE, FIRST)),
        asyncio.create_task(connection.execute(text("SELECT 1 / 0 FROM pg_sleep(0.2)"))),
    ]
    for each in statements:
        each.add_done_callback(lambda done: done.exception())
    await asyncio.wait(statements, return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.parametrize("way", [gathered, left_in_a_task, left_on_the_connection])
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


async def test_statements_that_were_gathered_and_awaited_are_committed(psycopg: UserDatabase):
    async def handler(_: Event, tx: Transaction) -> None:
        await asyncio.gather(tx.execute(WRITE, FIRST), tx.execute(WRITE, SECOND))

    effects, _ = in_scope(psycopg, handler)
    await effects.call(event_at(5))
    assert sorted(psycopg.log()) == ["first", "second"]


# ---- handlers that end the transaction -------------------------------------------------------------------------------


def then_write(statement: str) -> Way:
    async def way(tx: Transaction) -> None:
        await tx.connection.execute(text(statement))
        await tx.connection.execute(WRITE, FIRST)

    return way


async def by_the_session(tx: Transaction) -> None:
    await tx.session.execute(text("rollback"))
    await tx.session.execute(WRITE, FIRST)


async def by_the_driver(tx: Transaction) -> None:
    driver: Any = (await tx.connection.get_raw_connection()).driver_connection
    await driver.rollback()
    await tx.connection.execute(WRITE, FIRST)


async def by_the_driver_in_one_call(tx: Transaction) -> None:
    def work(session: Session) -> None:
        session.connection().connection.dbapi_connection.commit()  # pyright: ignore[reportOptionalMemberAccess]
        session.execute(WRITE, FIRST)

    await tx.run(work)


async def by_closing(tx: Transaction) -> None:
    def work(session: Session) -> None:
        session.execute(WRITE, FIRST)
        (session.get_transaction() or session.begin()).close()

    await tx.run(work)


async def by_closing_without_a_statement(tx: Transaction) -> None:
    await tx.run(lambda session: session.begin().close())


@pytest.mark.parametrize(
    "way",
    [
        *map(
            then_write,
            ("ROLLBACK", "ROLLBACK AND CHAIN", " commit and chain", "ROLLBACK WORK", "ROLLBACK; BEGIN", "END", "ABORT"),
        ),
        by_the_session,
        by_the_driver,
        by_the_driver_in_one_call,
        by_closing,
        by_closing_without_a_statement,
    ],
)
async def test_a_handler_that_ends_the_transaction_and_goes_on_fails(psycopg: UserDatabase, way: Way):
    async def handler(_: Event, tx: Transaction) -> None:
        await way(tx)

    effects, _ = in_scope(psycopg, handler)
    with pytest.raises(InvalidArgument, match=ENDED):
        await effects.call(event_at(5))
    assert psycopg.log() == []


async def test_commits_of_the_session_and_of_its_savepoints_are_allowed(psycopg: UserDatabase):
    async def handler(_: Event, tx: Transaction) -> None:
        async with tx.session.begin_nested():
            await tx.session.execute(WRITE, FIRST)
        await tx.session.commit()
        async with tx.session.begin():
            await tx.session.execute(WRITE, SECOND)

    effects, _ = in_scope(psycopg, handler)
    await effects.call(event_at(5))
    assert psycopg.log() == ["first", "second"]


async def test_savepoints_in_sql_are_allowed(psycopg: UserDatabase):
    async def handler(_: Event, tx: Transaction) -> None:
        for back in ("ROLLBACK TO one", "ROLLBACK WORK TO SAVEPOINT one"):
            await tx.execute(text("SAVEPOINT one"))
            await tx.execute(WRITE, SECOND)
            await tx.execute(text(back))
        await tx.execute(WRITE, FIRST)

    effects, _ = in_scope(psycopg, handler)
    await effects.call(event_at(5))
    assert psycopg.log() == ["first"]


# ---- connections that break ------------------------------------------------------------------------------------------


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
        with pytest.raises(Unavailable, match="the database of the effects is not available"):
            await effects.call(event_at(5))
        with pytest.raises(Unavailable, match="the database of the effects is not available"):
            async with effects.transaction([event_at(6)], redriven=False) as tx:
                await handler(event_at(6), tx)
        assert nothing_is_applied(database)
