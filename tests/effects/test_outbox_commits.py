"""With psycopg, a session sends its events to PostgreSQL together with its COMMIT."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import AsyncCursor, Cursor
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from headrace import NotFound, Outbox, StreamId
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_pipeline import SentMessages, sync_engine_of
from tests.effects.test_transactional_handlers import in_scope

STREAM, ACCEPTED = StreamId("orders", "Zoë/42%"), StreamId("orders", "accepted")
OUTBOX = Outbox()
PAYLOAD = bytes(range(256))
EVENT = (STREAM, PAYLOAD)
HOOKS = ("before_execute", "after_execute", "before_cursor_execute", "after_cursor_execute", "do_execute")
BEFORE = 2
"""Transactions before those of a test. The first one prepares the INSERT."""


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
    for _ in range(BEFORE):
        await commit(database, write_and_publish)
    assert stored(database) == (BEFORE, BEFORE)
    await commit(database, check_is_prepared)


def check_is_prepared(session: Session) -> None:
    """Fail if the INSERT has not been sent together with COMMIT: then the test would test something else."""
    driver: Any = session.connection().connection.driver_connection
    assert any(name.startswith(b"headrace_") for name in driver._prepared._names.values())


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
        assert [each.count('"headrace_') for each in waits if '"COMMIT"' in each] == [2]
        assert "INSERT INTO headrace_outbox" not in "".join(waits)
    assert stored(postgres) == (BEFORE + 1, BEFORE + 2)


async def test_nothing_is_committed_if_the_insert_fails(postgres: UserDatabase):
    await prepare(postgres)
    postgres.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''refused''; END'")
    postgres.execute("CREATE TRIGGER refusing BEFORE INSERT ON headrace_outbox EXECUTE FUNCTION refuse()")
    with pytest.raises(DBAPIError, match="refused") as caught:
        await commit(postgres, write_and_publish)
    assert "INSERT INTO headrace_outbox" in str(caught.value)
    assert stored(postgres) == (BEFORE, BEFORE)
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

    with pytest.raises(IntegrityError) as caught:
        await commit(postgres, repeat)
    assert "headrace_outbox" not in str(caught.value)
    assert stored(postgres) == (BEFORE, BEFORE)
    await commit_once_more(postgres)


async def test_a_missing_table_of_the_user_is_no_missing_outbox(postgres: UserDatabase):
    postgres.execute("CREATE FUNCTION read() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM 1 FROM missing; END'")
    postgres.execute(
        "CREATE CONSTRAINT TRIGGER reading AFTER UPDATE ON log DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION read()"
    )
    await prepare(postgres)

    def update(session: Session) -> None:
        write_and_publish(session)
        session.execute(text("UPDATE log SET value = 'changed' WHERE value = '0'"))

    with pytest.raises(ProgrammingError, match='relation "missing" does not exist'):
        await commit(postgres, update)
    await commit_once_more(postgres)


async def test_a_commit_above_a_savepoint_that_fails_leaves_a_connection_that_can_be_used(postgres: UserDatabase):
    await prepare(postgres)
    postgres.execute("ALTER TABLE headrace_outbox RENAME TO moved_away")

    def commit_above_savepoint(session: Session) -> None:
        write_and_publish(session)
        session.begin_nested()
        root = session.get_transaction()
        assert root is not None
        root.commit()

    with pytest.raises(NotFound):
        await commit(postgres, commit_above_savepoint)
    postgres.execute("ALTER TABLE moved_away RENAME TO headrace_outbox")
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
    assert stored(postgres) == (BEFORE + 1, BEFORE)


async def test_a_connection_that_is_lost_fails_the_commit(postgres: UserDatabase):
    await prepare(postgres)

    def lose(session: Session) -> None:
        write_and_publish(session)
        (pid,) = session.execute(text("SELECT pg_backend_pid()")).one()
        postgres.rows("SELECT pg_terminate_backend(:pid, 10000)", pid=pid)

    with pytest.raises(OperationalError) as caught:
        await commit(postgres, lose)
    assert caught.value.connection_invalidated
    assert stored(postgres) == (BEFORE, BEFORE)
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
    pids: list[int] = []

    def work(session: Session) -> None:
        pids.append(session.execute(text("SELECT pg_backend_pid()")).scalar_one())
        write_and_publish(session)

    committing = asyncio.create_task(commit(postgres, work))
    sleeping = "SELECT 1 FROM pg_stat_activity WHERE pid = :pid AND wait_event = 'PgSleep'"
    while not pids or not postgres.rows(sleeping, pid=pids[0]):  # noqa: ASYNC110 (another process sleeps)
        await asyncio.sleep(0.01)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    assert stored(postgres) == (BEFORE, BEFORE)
    postgres.execute(f"DROP TRIGGER waiting ON {blocked}")
    await commit_once_more(postgres)


async def test_psycopg_forgets_prepared_statements_before_the_commit(postgres: UserDatabase):
    await prepare(postgres)

    def roll_back_savepoint(session: Session) -> None:
        write_and_publish(session)
        with session.begin_nested() as savepoint:
            session.execute(text("INSERT INTO log (value) VALUES ('lost')"))
            savepoint.rollback()

    for more in range(1, 4):
        await commit(postgres, roll_back_savepoint)
        assert stored(postgres) == (BEFORE + more, BEFORE + more)


async def test_a_session_that_only_reads_is_followed_by_one_that_publishes(postgres: UserDatabase, tmp_path: Path):
    """psycopg deallocates all prepared statements as the first session ends, by its rollback."""

    def read(session: Session) -> None:
        session.execute(text("SELECT 1"))
        session.rollback()

    with SentMessages(postgres, tmp_path / "trace") as sent:
        await prepare(postgres)
        sent.take()
        await commit(postgres, read)
        for deallocations in (1, 0):
            await commit(postgres, write_and_publish)
            messages = sent.take()
            assert "".join(messages).count("DEALLOCATE ALL") == deallocations
            (commit_message,) = [each for each in messages if '"COMMIT"' in each]
            assert commit_message.count("INSERT INTO headrace_outbox") == deallocations
            assert '"headrace_' in commit_message


async def test_a_statement_that_psycopg_has_evicted_is_prepared_again(postgres: UserDatabase):
    def limit(session: Session) -> None:
        driver: Any = session.connection().connection.driver_connection
        driver.prepared_max, driver.prepare_threshold = 2, 0

    def execute_others(session: Session) -> None:
        for number in range(4):
            session.execute(text(f"SELECT {number}"))

    await commit(postgres, limit)
    await prepare(postgres)
    for more in range(1, 4):
        await commit(postgres, execute_others)
        await commit(postgres, write_and_publish)
        assert stored(postgres) == (BEFORE + more, BEFORE + more)


async def test_nothing_is_prepared_if_psycopg_may_not(postgres: UserDatabase, tmp_path: Path):
    def forbid(session: Session) -> None:
        driver: Any = session.connection().connection.driver_connection
        driver.prepare_threshold = None

    with SentMessages(postgres, tmp_path / "trace") as sent:
        await commit(postgres, forbid)
        await commit(postgres, write_and_publish)
        (message,) = [each for each in sent.take() if "headrace_outbox" in each]
        assert '"COMMIT"' in message
        assert '"headrace_' not in message
    assert stored(postgres) == (1, 1)


async def test_another_encoding_of_the_connection_is_obeyed(postgres: UserDatabase):
    await prepare(postgres)

    def set_encoding(session: Session) -> None:
        session.execute(text("SET LOCAL client_encoding = 'LATIN1'"))
        write_and_publish(session)

    await commit(postgres, set_encoding)
    assert stored(postgres) == (BEFORE + 1, BEFORE + 1)
    assert postgres.rows("SELECT DISTINCT stream FROM headrace_outbox") == [(str(STREAM),)]


async def test_one_commit_may_have_many_and_large_rows(postgres: UserDatabase):
    await prepare(postgres)
    large = PAYLOAD * (1 << 12)

    def publish_many(session: Session) -> None:
        session.execute(text("SELECT 1"))
        OUTBOX.publish(STREAM, [b"x"] * 40_000, connection=session)
        for _ in range(1_000):
            OUTBOX.publish(STREAM, b"x", connection=session)
        for _ in range(8):
            OUTBOX.publish(STREAM, large, connection=session)

    await commit(postgres, publish_many)
    assert postgres.rows("SELECT SUM(events), COUNT(*) FROM headrace_outbox") == [(41_008 + BEFORE, 1_009 + BEFORE)]
    assert postgres.rows("SELECT COUNT(*) FROM headrace_outbox WHERE octet_length(batch) > 1000000") == [(8,)]


@pytest.mark.parametrize("hook", HOOKS)
async def test_listeners_see_the_insert(postgres: UserDatabase, hook: str):
    seen: list[str] = []

    def listen(*args: Any) -> None:
        seen.extend(str(each) for each in args if "headrace_outbox" in str(each))

    await prepare(postgres)
    event.listen(sync_engine_of(postgres), hook, listen)
    await commit(postgres, write_and_publish)
    assert len(seen) == 1


async def test_a_cursor_of_the_user_sees_the_insert(postgres: UserDatabase):
    await prepare(postgres)
    seen: list[str] = []

    class Watching(Cursor):
        def execute(self, query: Any, *args: Any, **options: Any) -> Any:
            seen.append(str(query))
            return super().execute(query, *args, **options)

    class AsyncWatching(AsyncCursor):
        async def execute(self, query: Any, *args: Any, **options: Any) -> Any:
            seen.append(str(query))
            return await super().execute(query, *args, **options)

    def watch(session: Session) -> None:
        driver: Any = session.connection().connection.driver_connection
        is_sync = isinstance(driver, psycopg.Connection)
        driver.cursor_factory = Watching if is_sync else AsyncWatching

    await commit(postgres, watch)
    await commit(postgres, write_and_publish)
    assert sum("INSERT INTO headrace_outbox" in each for each in seen) == 1


async def test_an_engine_of_effects_sends_them_at_once(postgres: UserDatabase, tmp_path: Path):
    """headrace's own listeners for statements see only the transactions of handlers."""
    in_scope(postgres)
    with SentMessages(postgres, tmp_path / "trace") as sent:
        await commit(postgres, write_and_publish)
        assert any('"COMMIT"' in each and "headrace_outbox" in each for each in sent.take())
    event.listen(sync_engine_of(postgres), "before_cursor_execute", lambda *_: None)
    with SentMessages(postgres, tmp_path / "trace") as sent:
        await commit(postgres, write_and_publish)
        assert not any('"COMMIT"' in each and "headrace_outbox" in each for each in sent.take())


async def test_a_log_of_statements_has_the_insert(postgres: UserDatabase, caplog: pytest.LogCaptureFixture):
    await prepare(postgres)
    with caplog.at_level(logging.INFO, "sqlalchemy.engine"):
        await commit(postgres, write_and_publish)
    assert sum("INSERT INTO headrace_outbox" in each for each in caplog.messages) == 1


@pytest.mark.parametrize("late", [False, True])
async def test_a_listener_of_the_commit_is_still_in_the_transaction(postgres: UserDatabase, *, late: bool):
    await prepare(postgres)
    found: list[int] = []

    def note_transaction(connection: Connection) -> None:
        found.append(connection.execute(text("SELECT pg_current_xact_id()::text::bigint")).scalar_one())

    def listen(session: Session) -> None:
        event.listen(session.connection(), "commit", note_transaction)

    def work(session: Session) -> None:
        write_and_publish(session)
        note_transaction(session.connection())
        if late:
            event.listen(session, "before_commit", listen)
        else:
            listen(session)

    await commit(postgres, work)
    assert found[0] == found[1]
    assert stored(postgres) == (BEFORE + 1, BEFORE + 1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
async def test_an_exception_as_the_commit_begins_leaves_neither_row_nor_event(
    postgres: UserDatabase, error: type[BaseException]
):
    """SQLAlchemy leaves the transaction open in the pool then. As a listener raises, a signal may do at any line."""

    def fail(_: Connection) -> None:
        raise error

    def work(session: Session) -> None:
        write_and_publish(session)
        event.listen(session.connection(), "commit", fail)

    await prepare(postgres)
    with pytest.raises(error):
        await commit(postgres, work)
    await commit_once_more(postgres)
    assert stored(postgres) == (BEFORE + 1, BEFORE + 1)


async def test_a_listener_that_uses_another_database_late_commits_neither_if_the_insert_fails(
    postgres: UserDatabase, schema_url: Callable[[], str]
):
    postgres.execute(f"ALTER TABLE headrace_outbox ADD CHECK (stream = '{ACCEPTED}') NOT VALID")
    async with user_database(postgres.kind, "", schema_url) as other:
        sessions: list[Session] = []

        def publish_accepted(session: Session) -> None:
            session.execute(text("SELECT 1"))
            OUTBOX.publish(ACCEPTED, b"x", connection=session)

        def write_into_other(session: Session) -> None:
            statement = text("INSERT INTO log (value) VALUES ('x')")
            session.execute(statement, bind_arguments={"bind": sync_engine_of(other)})

        def work(session: Session) -> None:
            sessions.append(session)  # SQLAlchemy commits connections in the order of their addresses in memory
            write_and_publish(session)
            event.listen(session, "before_commit", write_into_other)

        for _ in range(10):
            await commit(postgres, publish_accepted)
            await commit(postgres, check_is_prepared)
            with pytest.raises(IntegrityError):
                await commit(postgres, work)
            assert other.log() == []


async def test_the_reason_of_the_server_is_told(postgres: UserDatabase):
    await prepare(postgres)
    pids: list[int] = []

    def work(session: Session) -> None:
        pids.append(session.execute(text("SELECT pg_backend_pid()")).scalar_one())
        write_and_publish(session)

    with postgres.inspecting.begin() as locking:
        locking.execute(text("LOCK TABLE headrace_outbox"))
        committing = asyncio.create_task(commit(postgres, work))
        waiting = "SELECT 1 FROM pg_stat_activity WHERE pid = :pid AND wait_event_type = 'Lock'"
        while not pids or not postgres.rows(waiting, pid=pids[0]):  # noqa: ASYNC110 (another process waits)
            await asyncio.sleep(0.01)
        postgres.rows("SELECT pg_terminate_backend(:pid)", pid=pids[0])
        with pytest.raises(OperationalError, match="due to administrator command") as caught:
            await committing
    assert caught.value.connection_invalidated
    await commit_once_more(postgres)


async def test_an_engine_with_execution_options(postgres: UserDatabase):
    """SQLAlchemy before 2.0.40 lets nothing listen to its connections."""
    options = {"isolation_level": "REPEATABLE READ"}
    await prepare(postgres)
    await commit(postgres._replace(engine=postgres.engine.execution_options(**options)), write_and_publish)
    assert stored(postgres) == (BEFORE + 1, BEFORE + 1)


async def test_events_of_a_later_listener_follow(postgres: UserDatabase):
    await prepare(postgres)

    def publish(session: Session) -> None:
        OUTBOX.publish(STREAM, PAYLOAD, connection=session)

    def work(session: Session) -> None:
        write_and_publish(session)
        event.listen(session, "before_commit", publish)

    await commit(postgres, work)
    assert stored(postgres) == (BEFORE + 1, BEFORE + 2)


@pytest.mark.parametrize("postgres", ["psycopg"], indirect=True)
async def test_a_transaction_that_the_driver_began_is_not_committed(postgres: UserDatabase):
    await prepare(postgres)

    def work(session: Session) -> None:
        write_and_publish(session)
        with session.connection().connection.driver_connection.transaction():  # pyright: ignore[reportOptionalMemberAccess, reportUnknownMemberType]
            session.commit()

    with pytest.raises(DBAPIError, match="Explicit commit"):
        await commit(postgres, work)
    assert stored(postgres) == (BEFORE, BEFORE)


@pytest.mark.parametrize("postgres", ["psycopg"], indirect=True)
async def test_a_session_writes_into_the_transaction_of_a_connection_when_it_commits(postgres: UserDatabase):
    await prepare(postgres)

    def join(session: Session) -> None:
        connection = session.connection()
        with Session(connection, join_transaction_mode="rollback_only") as joined:
            write_and_publish(joined)
            joined.commit()
        assert len(OUTBOX.published(connection=connection)) == BEFORE + 1

    await commit(postgres, join)
    assert stored(postgres) == (BEFORE + 1, BEFORE + 1)


@pytest.mark.parametrize("postgres", ["psycopg"], indirect=True)
async def test_a_session_with_two_databases_commits_neither_if_the_insert_fails(
    postgres: UserDatabase, schema_url: Callable[[], str]
):
    await prepare(postgres)
    postgres.execute(f"ALTER TABLE headrace_outbox ADD CHECK (stream = '{ACCEPTED}') NOT VALID")
    async with user_database("psycopg", "", schema_url) as other:
        sessions: list[Session] = []

        def write_to_both(session: Session) -> None:
            sessions.append(session)  # SQLAlchemy commits connections in the order of their addresses in memory
            session.execute(text("INSERT INTO log (value) VALUES ('x')"), bind_arguments={"bind": other.engine})
            write_and_publish(session)

        def publish_accepted(session: Session) -> None:
            session.execute(text("SELECT 1"))
            OUTBOX.publish(ACCEPTED, b"x", connection=session)

        for _ in range(10):
            await commit(postgres, publish_accepted)
            await commit(postgres, check_is_prepared)
            with pytest.raises(IntegrityError):
                await commit(postgres, write_to_both)
            assert other.log() == []
