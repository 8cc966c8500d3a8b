"""Databases of effects: which errors are outages, and cancelled transactions."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, NullPool, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import PendingRollbackError

from headrace import Effects, Event, InvalidArgument, Transaction, Unavailable
from headrace.agents.effects_service import PositionedFailures
from headrace.effects import StreamState
from headrace.effects.administration import engine_of, opened
from headrace.effects.database import database_of
from headrace.effects.schema import metadata, migrate
from tests.client.consumers import until
from tests.effects.databases import UserDatabase, close, engine, user_database
from tests.effects.test_transactional_handlers import event_at, in_scope, write_down


@pytest.mark.parametrize("kind", ["sqlite", "aiosqlite"])
@pytest.mark.parametrize("pragma", ["max_page_count = 1", "query_only = 1"])
async def test_a_full_disk_or_a_read_only_file_is_not_the_events_fault(kind: str, pragma: str, tmp_path: Path):
    async with user_database(kind, str(tmp_path / "u.db"), lambda: "") as database:

        def limit(driver: Any, _: object) -> None:
            driver.execute(f"PRAGMA {pragma}")

        event.listen(database_engine(database), "connect", limit)
        effects, _ = in_scope(database)
        large = event_at(5)
        large.payload = b"x" * 100_000
        with pytest.raises(Unavailable, match=r"full|readonly"):
            await effects.call(large)
        assert database.log() == []


def database_engine(database: UserDatabase) -> Any:
    return getattr(database.engine, "sync_engine", database.engine)


@pytest.mark.parametrize("kind", ["sqlite", "aiosqlite"])
async def test_an_engine_whose_listener_begins_the_transactions_is_taken(kind: str, tmp_path: Path):
    """The recipe of SQLAlchemy's documentation for savepoints in SQLite. It turns off those of the driver."""
    async with user_database(kind, str(tmp_path / "u.db"), lambda: "") as database:

        def leave_to_us(driver: Any, _: object) -> None:
            driver.isolation_level = None

        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        event.listen(database_engine(database), "connect", leave_to_us)
        event.listen(database_engine(database), "begin", begin)
        effects, _ = in_scope(database)
        await Effects(database.engine).check()
        await effects.call(event_at(5))
        await effects.call(event_at(5))
        assert len(database.log()) == 1
        await effects.call(event_at(6))
        assert len(database.log()) == 2


def test_a_migration_of_sqlite_is_done_or_not_done(tmp_path: Path):
    """The driver commits each CREATE outside a transaction: then a second try met tables without a version."""
    made = create_engine(f"sqlite:///{tmp_path}/u.db")

    def fail(_: object, __: object, statement: str, *___: object) -> None:
        if "headrace_outbox_lane" in statement:
            raise OSError("the process ends here")

    event.listen(made, "before_cursor_execute", fail)
    with pytest.raises(OSError, match="ends here"), made.begin() as connection:
        migrate(connection)
    event.remove(made, "before_cursor_execute", fail)
    assert inspect(made).get_table_names() == []
    with made.begin() as connection:
        assert migrate(connection)
    assert set(inspect(made).get_table_names()) == set(metadata.tables)
    made.dispose()


async def test_a_file_that_cannot_be_opened_is_an_outage(tmp_path: Path):
    engine = create_engine(f"sqlite:///{tmp_path}/missing/u.db")
    with pytest.raises(Unavailable, match="unable to open database file"):
        await Effects(engine).check()
    engine.dispose()


async def test_a_transaction_that_is_cancelled_twice_waits_for_its_thread(tmp_path: Path):
    """Otherwise its connection would go back to the pool while a statement runs on it."""
    began, released = threading.Event(), threading.Event()
    engine = create_engine(f"sqlite:///{tmp_path}/u.db")

    def work(_: Connection) -> None:
        began.set()
        released.wait(30)

    async def run() -> None:
        async with database_of(engine).transaction() as transaction:
            await transaction.call(work)

    running = asyncio.create_task(run())
    await asyncio.to_thread(began.wait)
    for _ in range(3):
        running.cancel()
        await asyncio.wait([running], timeout=0.1)
    try:
        assert not running.done()
    finally:
        released.set()
        await asyncio.wait([running])
    assert running.cancelled()
    engine.dispose()


async def test_a_cancelled_transaction_cancels_its_statement(schema_url: Callable[[], str]):
    async with user_database("psycopg", "", schema_url, pool_size=1, max_overflow=0) as database:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%INTO log%'"
        with database.inspecting.begin() as holder:
            holder.execute(text("LOCK TABLE log"))
            effects, _ = in_scope(database)
            running = asyncio.create_task(effects.call(event_at(5)))
            await until(lambda: bool(database.rows(waiting)[0][0]))
            running.cancel()
            await asyncio.wait([running], timeout=10)
            assert running.cancelled()
        await effects.call(event_at(5))
        assert database.log() == ["42@5"]


@pytest.mark.parametrize("kind", ["sqlite", "aiosqlite"])
async def test_a_cancelled_statement_leaves_no_lock_on_the_file(kind: str, tmp_path: Path):
    """SQLite kept the lock of a closed connection while the traceback had its cursor: often until the process ended."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(began()) FROM n"
    began = threading.Event()
    options: dict[str, Any] = {"connect_args": {"timeout": 0.1}}
    async with user_database(kind, str(tmp_path / "u.db"), lambda: "", **options) as database:

        def add_function(driver: Any, _: object) -> None:
            driver.create_function("began", 0, began.set)

        async def work(event: Event, tx: Transaction) -> None:
            await write_down(event, tx)
            await tx.execute(text(endless))

        event.listen(database_engine(database), "connect", add_function)
        effects, _ = in_scope(database, work)
        running = asyncio.create_task(effects.call(event_at(5)))
        await asyncio.to_thread(began.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError) as kept:
            await running
        again, _ = in_scope(database)
        await again.call(event_at(5))
        assert database.log() == ["42@5"]
        del kept


@pytest.mark.parametrize("caught", ["a statement of the connection", "a statement of the session"])
async def test_a_handler_that_goes_on_after_a_cancelled_statement_commits_nothing(caught: str, tmp_path: Path):
    """SQLite rolls back the whole transaction if a statement that writes is interrupted."""
    endless = "INSERT INTO log (value) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    async with user_database("aiosqlite", str(tmp_path / "u.db"), lambda: "") as database:

        async def go_on(event: Event, tx: Transaction) -> None:
            on = tx.session if "session" in caught else tx.connection
            await on.execute(text("INSERT INTO log (value) VALUES ('first')"))
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await on.execute(text(endless))
            await on.execute(text("INSERT INTO log (value) VALUES ('second')"))

        effects, _ = in_scope(database, go_on)
        with pytest.raises(PendingRollbackError):
            await effects.call(event_at(5))
        assert (database.log(), database.rows("SELECT * FROM headrace_position")) == ([], [])


@pytest.mark.parametrize(("kind", "stateful", "goes_on"), [("sqlite", True, False), ("psycopg", False, True)])
async def test_an_event_whose_statement_does_not_end_is_not_handled(
    kind: str, tmp_path: Path, schema_url: Callable[[], str], *, stateful: bool, goes_on: bool
):
    """The handler caught the cancellation, and the event counted as handled without its effects."""
    ended = threading.Event()
    async with user_database(kind, str(tmp_path / "u.db"), schema_url) as database:

        async def catch(event: Event, tx: Transaction) -> None:
            await write_down(event, tx)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await tx.run(lambda _: ended.wait(30))
            if goes_on:
                await write_down(event, tx)

        effects, _ = in_scope(database, catch, state=StreamState() if stateful else None)
        with pytest.raises(InvalidArgument, match="caught the cancellation of a statement that did not end"):
            await effects.call(event_at(5))
        ended.set()
        await until(lambda: not database.log())


SCRIPT = """
import asyncio, sys, threading
from sqlalchemy import create_engine
from headrace.effects.database import database_of

async def main():
    began = threading.Event()
    def work(connection):
        began.set()
        threading.Event().wait()
    async def run():
        async with database_of(create_engine(sys.argv[1])).transaction() as transaction:
            await transaction.call(work)
    running = asyncio.create_task(run())
    await asyncio.to_thread(began.wait)
    running.cancel()
    await asyncio.wait([running])
    print("over")

asyncio.run(main())
"""


@pytest.mark.long
def test_a_process_ends_while_a_statement_of_an_engine_does_not(tmp_path: Path):
    """As if the host of the database did not answer any more."""
    command = [sys.executable, "-c", SCRIPT, f"sqlite:///{tmp_path}/u.db"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("over\n", "", 0)


async def test_each_open_transaction_has_a_thread(tmp_path: Path):
    """As if all but one waited in the database for a lock that the last one releases."""
    async with user_database("sqlite", str(tmp_path / "user.db"), lambda: "", poolclass=NullPool) as database:
        opening = database_of(database.engine)
        released = threading.Event()

        async def wait() -> None:
            async with opening.transaction() as transaction:
                await transaction.call(lambda _: released.wait())

        async def release() -> None:
            async with opening.transaction() as transaction:
                await transaction.call(lambda _: released.set())

        tasks = [asyncio.create_task(work()) for work in (*[wait] * 40, release)]
        _, waiting = await asyncio.wait(tasks, timeout=30)
        released.set()
        await asyncio.gather(*tasks)
        assert not waiting


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_a_server_that_is_read_only_is_not_the_events_fault(kind: str, schema_url: Callable[[], str]):
    """As a primary is after a failover, or a standby."""
    async with user_database(kind, "", schema_url) as database:
        ((name,),) = database.rows("SELECT current_schema()")
        role = f"reading_{name}"
        database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        database.execute(f"ALTER ROLE {role} SET default_transaction_read_only = on")
        database.execute(f"GRANT USAGE ON SCHEMA {name} TO {role}")
        database.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {name} TO {role}")
        reading = make_url(database.url).set(username=role, password="x").render_as_string(hide_password=False)
        made = engine(kind, reading)
        effects, _ = in_scope(database._replace(engine=made))
        with pytest.raises(Unavailable, match="read-only transaction"):
            await effects.call(event_at(5))
        await close(made)


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_an_unknown_database_or_role_is_told_in_one_line(kind: str, schema_url: Callable[[], str]):
    async with user_database(kind, "", schema_url) as database:
        url = make_url(database.url)
        for wrong in (url.set(database="missing"), url.set(username="nobody")):
            made = engine(kind, wrong.render_as_string(hide_password=False))
            with pytest.raises(
                Unavailable, match=r"the database of the effects or the outbox is not available: .*(missing|nobody)"
            ):
                await Effects(made).check()
            await close(made)


async def test_no_gap_is_recorded_while_the_position_cannot_be_written(tmp_path: Path):
    """Otherwise the record would say that events are skipped, though they are applied later."""
    gaps: list[str] = []

    class GapRecorder:
        async def dead_letter(self, delivery: Any, events: Sequence[Event], reason: str, attempts: int) -> None: ...

        async def skipped(self, delivery: Any, events: Sequence[Event], reason: str) -> None:
            gaps.append(reason)

    async with user_database("aiosqlite", str(tmp_path / "u.db"), lambda: "") as database:
        effects, counts = in_scope(database)
        failures = PositionedFailures(GapRecorder(), effects)
        delivery: Any = None
        database.execute("ALTER TABLE headrace_position RENAME TO hidden")
        with pytest.raises(Unavailable):
            await failures.skipped(delivery, [event_at(5)], "bad")
        assert gaps == []
        database.execute("ALTER TABLE hidden RENAME TO headrace_position")
        await failures.skipped(delivery, [event_at(5)], "bad")
        assert gaps == ["bad"]
        await effects.call(event_at(5))
        assert (database.log(), counts.already_applied) == ([], 1)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@h:port/x",
        "postgresql://me:secret@[::1/x",
        "no url, secret",
        "postgresql://me:not@secret@h/x",
        "postgresql://me:not@x/secret@h/x",
        "postgresql://me:not@secret?x@h/x",
    ],
)
def test_a_text_that_is_no_url_is_refused_and_not_shown(url: str):
    with pytest.raises(InvalidArgument, match=r"the URL of the database is wrong: write postgresql://") as caught:
        engine_of(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["aiosqlite", "asyncpg", "psycopg-async", "libpq"])
async def test_a_url_of_another_kind_opens_the_same_database(kind: str, tmp_path: Path):
    drivers = {
        "aiosqlite": f"sqlite+aiosqlite:///{tmp_path}/u.db",
        "asyncpg": "postgresql+asyncpg://user:password@127.0.0.1:1/shop",
        "psycopg-async": "postgresql+psycopg_async://user:password@127.0.0.1:1/shop",
        "libpq": "postgres://user:password@127.0.0.1:1/shop",
    }
    made = engine_of(drivers[kind])
    assert not made.dialect.is_async
    given = make_url(drivers[kind])
    assert (made.url.database, made.url.password) == (given.database, given.password)
    if kind == "aiosqlite":
        with opened(drivers[kind], migrated=False) as connection:
            assert migrate(connection)
    made.dispose()


def test_the_tables_need_no_option_that_sqlalchemy_2_0_lacks():
    options = {
        name for table in metadata.sorted_tables for name in table.dialect_kwargs if name.startswith("postgresql")
    }
    assert not options


async def test_tables_in_postgresql_have_storage_parameters(schema_url: Callable[[], str]):
    async with user_database("psycopg", "", schema_url) as database:
        found = database.rows(
            "SELECT relname, reloptions FROM pg_class WHERE relnamespace = CAST(current_schema() AS regnamespace) "
            "AND relkind = 'r' AND reloptions IS NOT NULL ORDER BY relname"
        )
        assert found == [
            ("headrace_outbox", ["autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=20000"]),
            ("headrace_outbox_lane", ["fillfactor=50"]),
            ("headrace_position", ["fillfactor=70"]),
        ]


@pytest.mark.parametrize("kind", ["sqlite", "psycopg"])
@pytest.mark.parametrize("version", [1, 2])
async def test_migrated_tables_have_the_keys_of_new_ones(
    kind: str, version: int, tmp_path: Path, schema_url: Callable[[], str]
):
    async with user_database(kind, str(tmp_path / "u.db"), schema_url) as database:
        new = keys_of_the_outbox(database)
        database.make_version(version)
        assert (keys_of_the_outbox(database) == new) is (kind == "sqlite")  # SQLite keeps its key
        with database.inspecting.begin() as connection:
            assert migrate(connection)
        assert keys_of_the_outbox(database) == new


def keys_of_the_outbox(database: UserDatabase) -> tuple[Sequence[str], Mapping[str, Sequence[str | None]]]:
    found = inspect(database.inspecting)
    indexes = {str(each["name"]): each["column_names"] for each in found.get_indexes("headrace_outbox")}
    return found.get_pk_constraint("headrace_outbox")["constrained_columns"], indexes


@pytest.mark.parametrize("change", ['RENAME CONSTRAINT headrace_outbox_pkey TO "Renamed key"', ""])
async def test_a_migration_takes_the_key_by_the_name_that_it_has(change: str, schema_url: Callable[[], str]):
    async with user_database("psycopg", "", schema_url) as database:
        new = keys_of_the_outbox(database)
        database.make_version(2)
        database.execute(f"ALTER TABLE headrace_outbox {change}" if change else "DROP INDEX headrace_outbox_lanes")
        with database.inspecting.begin() as connection:
            assert migrate(connection)
        assert keys_of_the_outbox(database) == new


def test_sqlite_never_gives_the_id_of_a_deleted_row_again(tmp_path: Path):
    """A release names ids: a later row with one of them would be deleted unpublished."""
    made = create_engine(f"sqlite:///{tmp_path}/u.db")
    columns, values = "provider, lane, stream, events, batch, written_at_us", "'p', 0, 's', 1, X'', 0"
    ids: list[int] = []
    with made.begin() as connection:
        migrate(connection)
        for _ in range(2):
            connection.exec_driver_sql(f"INSERT INTO headrace_outbox ({columns}) VALUES ({values})")
            ids.append(connection.exec_driver_sql("SELECT id FROM headrace_outbox").scalar_one())
            connection.execute(text("DELETE FROM headrace_outbox"))
        assert ids == [1, 2]
    made.dispose()
