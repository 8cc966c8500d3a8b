"""A session sends events to PostgreSQL together with its COMMIT, if psycopg has prepared the INSERT."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from headrace import NotFound, Outbox, StreamId
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_pipeline import SentMessages, sync_engine_of

STREAM = StreamId("orders", "Zoë/42%")
OUTBOX = Outbox()
PAYLOAD = bytes(range(256))
EVENT = (STREAM, PAYLOAD)
FIRST_PREPARED = 6
"""psycopg prepares a statement after it has executed it five times."""


@pytest.fixture(params=["psycopg", "psycopg-async"])
async def postgres(request: pytest.FixtureRequest, schema_url: Callable[[], str]) -> AsyncIterator[UserDatabase]:
    """A database, whose engine has one connection."""
    async with user_database(request.param, "", schema_url, pool_size=1, max_overflow=0) as database:
        yield database


async def commit(database: UserDatabase, work: Callable[[Session], None]) -> None:
    """Commit a session. If that fails, only close it, without a rollback."""
    if isinstance(database.engine, AsyncEngine):
        async with AsyncSession(database.engine) as session:
            await session.run_sync(work)
            await session.commit()
        return
    engine = database.engine

    def in_thread() -> None:
        with Session(engine) as session:
            work(session)
            session.commit()

    await asyncio.to_thread(in_thread)


def write_and_publish(session: Session) -> None:
    session.execute(text("INSERT INTO log (value) VALUES ((SELECT COUNT(*) FROM log))"))
    OUTBOX.publish(STREAM, PAYLOAD, connection=session)


def stored(database: UserDatabase) -> tuple[int, int]:
    """The number of rows that users wrote, and of events in the outbox."""
    with database.inspecting.begin() as connection:
        events = OUTBOX.published(connection=connection)
        assert set(events) <= {EVENT}
        return connection.execute(text("SELECT COUNT(*) FROM log")).scalar_one(), len(events)


async def prepare(database: UserDatabase) -> None:
    for _ in range(FIRST_PREPARED):
        await commit(database, write_and_publish)
    assert stored(database) == (FIRST_PREPARED, FIRST_PREPARED)


async def commit_once_more(database: UserDatabase) -> None:
    """Show that the connection, and the pool, can be used, and that nothing of the last transaction is left."""
    before = stored(database)
    await commit(database, write_and_publish)
    assert stored(database) == (before[0] + 1, before[1] + 1)


async def test_insert_and_commit_are_sent_at_once(postgres: UserDatabase, tmp_path: Path):
    with SentMessages(postgres, tmp_path / "trace") as sent:
        await prepare(postgres)
        sent.take()

        def publish_twice(session: Session) -> None:
            write_and_publish(session)
            with session.begin_nested():
                OUTBOX.publish(STREAM, PAYLOAD, connection=session)

        await commit(postgres, publish_twice)
        waits = sent.take()
        assert [each.count('"_pg3_') for each in waits if '"COMMIT"' in each] == [2]
        assert "INSERT INTO headrace_outbox" not in "".join(waits)
    assert stored(postgres) == (FIRST_PREPARED + 1, FIRST_PREPARED + 2)


async def test_nothing_is_committed_if_the_insert_fails(postgres: UserDatabase):
    await prepare(postgres)
    postgres.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''refused''; END'")
    postgres.execute("CREATE TRIGGER refusing BEFORE INSERT ON headrace_outbox EXECUTE FUNCTION refuse()")
    with pytest.raises(DBAPIError, match="refused") as caught:
        await commit(postgres, write_and_publish)
    assert "INSERT INTO headrace_outbox" in str(caught.value)
    assert stored(postgres) == (FIRST_PREPARED, FIRST_PREPARED)
    postgres.execute("DROP TRIGGER refusing ON headrace_outbox")
    await commit_once_more(postgres)


async def test_a_missing_table_is_named_with_the_command(postgres: UserDatabase):
    await prepare(postgres)
    postgres.execute("ALTER TABLE headrace_outbox RENAME TO moved_away")
    with pytest.raises(NotFound, match="headrace effects migrate"):
        await commit(postgres, write_and_publish)
    postgres.execute("ALTER TABLE moved_away RENAME TO headrace_outbox")
    await commit_once_more(postgres)


async def test_a_constraint_that_is_checked_at_the_commit_fails_it(postgres: UserDatabase):
    postgres.execute("ALTER TABLE log DROP CONSTRAINT log_value_key")
    postgres.execute("ALTER TABLE log ADD UNIQUE (value) DEFERRABLE INITIALLY DEFERRED")
    await prepare(postgres)

    def repeat(session: Session) -> None:
        write_and_publish(session)
        session.execute(text("INSERT INTO log (value) VALUES ('0')"))

    with pytest.raises(IntegrityError):
        await commit(postgres, repeat)
    assert stored(postgres) == (FIRST_PREPARED, FIRST_PREPARED)
    await commit_once_more(postgres)


async def test_a_failed_commit_leaves_the_session_to_be_rolled_back(postgres: UserDatabase):
    await prepare(postgres)
    postgres.execute("ALTER TABLE headrace_outbox ADD CHECK (events > 1) NOT VALID")

    def go_on(session: Session) -> None:
        write_and_publish(session)
        with pytest.raises(IntegrityError):
            session.commit()
        with pytest.raises(Exception, match="no further SQL"):
            session.execute(text("SELECT 1"))
        session.rollback()
        session.execute(text("INSERT INTO log (value) VALUES ('later')"))

    await commit(postgres, go_on)
    assert postgres.log()[-1] == "later"
    assert stored(postgres) == (FIRST_PREPARED + 1, FIRST_PREPARED)


async def test_a_connection_that_is_lost_fails_the_commit(postgres: UserDatabase):
    await prepare(postgres)

    def lose(session: Session) -> None:
        write_and_publish(session)
        (pid,) = session.execute(text("SELECT pg_backend_pid()")).one()
        postgres.rows("SELECT pg_terminate_backend(:pid, 10000)", pid=pid)

    with pytest.raises(OperationalError) as caught:
        await commit(postgres, lose)
    assert caught.value.connection_invalidated
    assert stored(postgres) == (FIRST_PREPARED, FIRST_PREPARED)
    await commit_once_more(postgres)


@pytest.mark.parametrize("postgres", ["psycopg-async"], indirect=True)
@pytest.mark.parametrize("blocked", ["log", "headrace_outbox"])
async def test_a_commit_that_is_cancelled_leaves_nothing(postgres: UserDatabase, blocked: str):
    await prepare(postgres)
    postgres.execute("CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); END'")
    postgres.execute(
        f"CREATE CONSTRAINT TRIGGER waiting AFTER INSERT ON {blocked} DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    committing = asyncio.create_task(commit(postgres, write_and_publish))
    while not postgres.rows("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    assert stored(postgres) == (FIRST_PREPARED, FIRST_PREPARED)
    postgres.execute(f"DROP TRIGGER waiting ON {blocked}")
    await commit_once_more(postgres)


async def test_psycopg_forgets_prepared_statements_before_the_commit(postgres: UserDatabase):
    await prepare(postgres)

    def roll_back_savepoint(session: Session) -> None:
        write_and_publish(session)
        with session.begin_nested() as savepoint:
            session.execute(text("INSERT INTO log (value) VALUES ('lost')"))
            savepoint.rollback()

    for more in range(1, FIRST_PREPARED + 2):
        await commit(postgres, roll_back_savepoint)
        assert stored(postgres) == (FIRST_PREPARED + more, FIRST_PREPARED + more)


async def test_another_encoding_of_the_connection_is_obeyed(postgres: UserDatabase):
    await prepare(postgres)

    def set_encoding(session: Session) -> None:
        session.execute(text("SET LOCAL client_encoding = 'LATIN1'"))
        write_and_publish(session)

    await commit(postgres, set_encoding)
    assert stored(postgres) == (FIRST_PREPARED + 1, FIRST_PREPARED + 1)
    assert postgres.rows("SELECT DISTINCT stream FROM headrace_outbox") == [(str(STREAM),)]


async def test_a_row_may_have_more_events_than_a_small_integer(postgres: UserDatabase):
    await prepare(postgres)

    def publish_many(session: Session) -> None:
        session.execute(text("SELECT 1"))
        OUTBOX.publish(STREAM, [b"x"] * 40_000, connection=session)

    await commit(postgres, publish_many)
    assert postgres.rows("SELECT SUM(events) FROM headrace_outbox") == [(40_000 + FIRST_PREPARED,)]


@pytest.mark.parametrize("hook", ["before_cursor_execute", "after_cursor_execute", "before_execute", "after_execute"])
async def test_listeners_see_the_insert(postgres: UserDatabase, hook: str):
    seen: list[str] = []

    def listen(*args: Any) -> None:
        seen.extend(str(each) for each in args if "headrace_outbox" in str(each))

    event.listen(sync_engine_of(postgres), hook, listen)
    await prepare(postgres)
    seen.clear()
    await commit(postgres, write_and_publish)
    assert len(seen) == 1


async def test_a_log_of_statements_has_the_insert(postgres: UserDatabase, caplog: pytest.LogCaptureFixture):
    await prepare(postgres)
    with caplog.at_level(logging.INFO, "sqlalchemy.engine"):
        await commit(postgres, write_and_publish)
    assert sum("INSERT INTO headrace_outbox" in each for each in caplog.messages) == 1


@pytest.mark.parametrize("late", [False, True])
async def test_a_listener_of_the_commit_is_still_in_the_transaction(postgres: UserDatabase, *, late: bool):
    await prepare(postgres)
    found: list[int] = []

    def count(connection: Any) -> None:
        found.append(connection.execute(text("SELECT COUNT(*) FROM headrace_outbox")).scalar_one())
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))  # only a warning if no transaction is open
        assert connection.connection.driver_connection.info.transaction_status == TransactionStatus.INTRANS

    def listen(session: Session) -> None:
        event.listen(session.connection(), "commit", count)

    def work(session: Session) -> None:
        write_and_publish(session)
        if late:
            event.listen(session, "before_commit", listen)
        else:
            listen(session)

    await commit(postgres, work)
    assert found == [FIRST_PREPARED + 1]
    assert stored(postgres) == (FIRST_PREPARED + 1, FIRST_PREPARED + 1)


async def test_events_of_a_later_listener_follow(postgres: UserDatabase):
    await prepare(postgres)

    def publish(session: Session) -> None:
        OUTBOX.publish(STREAM, PAYLOAD, connection=session)

    def work(session: Session) -> None:
        write_and_publish(session)
        event.listen(session, "before_commit", publish)

    await commit(postgres, work)
    assert stored(postgres) == (FIRST_PREPARED + 1, FIRST_PREPARED + 2)


@pytest.mark.parametrize("postgres", ["psycopg"], indirect=True)
async def test_a_transaction_that_the_driver_began_is_not_committed(postgres: UserDatabase):
    await prepare(postgres)

    def work(session: Session) -> None:
        write_and_publish(session)
        with session.connection().connection.driver_connection.transaction():  # pyright: ignore[reportOptionalMemberAccess, reportUnknownMemberType]
            session.commit()

    with pytest.raises(DBAPIError, match="Explicit commit"):
        await commit(postgres, work)
    assert stored(postgres) == (FIRST_PREPARED, FIRST_PREPARED)


@pytest.mark.parametrize("postgres", ["psycopg"], indirect=True)
async def test_a_session_writes_into_the_transaction_of_a_connection_when_it_commits(postgres: UserDatabase):
    await prepare(postgres)

    def join(session: Session) -> None:
        connection = session.connection()
        with Session(connection, join_transaction_mode="rollback_only") as joined:
            write_and_publish(joined)
            joined.commit()
        assert len(OUTBOX.published(connection=connection)) == FIRST_PREPARED + 1

    await commit(postgres, join)
    assert stored(postgres) == (FIRST_PREPARED + 1, FIRST_PREPARED + 1)


@pytest.mark.parametrize("postgres", ["psycopg"], indirect=True)
async def test_a_session_with_two_databases_commits_neither_if_the_insert_fails(
    postgres: UserDatabase, schema_url: Callable[[], str]
):
    await prepare(postgres)
    postgres.execute("ALTER TABLE headrace_outbox ADD CHECK (events > 1) NOT VALID")
    async with user_database("psycopg", "", schema_url) as other:
        sessions: list[Session] = []

        def write_to_both(session: Session) -> None:
            sessions.append(session)  # SQLAlchemy commits connections in the order of their addresses in memory
            session.execute(text("INSERT INTO log (value) VALUES ('x')"), bind_arguments={"bind": other.engine})
            write_and_publish(session)

        for _ in range(20):
            with pytest.raises(IntegrityError):
                await commit(postgres, write_to_both)
            assert (stored(postgres)[0], other.log()) == (FIRST_PREPARED, [])
