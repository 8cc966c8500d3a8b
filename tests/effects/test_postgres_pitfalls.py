"""PostgreSQL at its worst: deadlocks, backends that end, PgBouncer, roles with few permissions."""

import asyncio
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session

from benchmarks.servers import LOOPBACK, Account, PostgresServer, Server, find_program
from headrace import Effects, Event, InvalidArgument, Outbox, Provider, StreamId, Transaction, Unavailable
from headrace.adapters import ProducerSequence
from headrace.effects import administration, schema
from headrace.effects.database import database_of
from headrace.effects.mover import OutboxMover
from headrace.streams.errors import StorageError
from headrace.streams.transactions import EffectCounts, EffectScope
from tests.adapters.postgres.opening import batch, opened, received
from tests.client.consumers import until
from tests.effects.databases import UserDatabase, close, engine, prepare_insert, user_database
from tests.effects.test_outbox import RecordingQueue
from tests.effects.test_transactional_handlers import event_at, in_scope, write_down

STREAMS = [StreamId("orders", key) for key in "ab"]
OUTBOX = Outbox()
WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%INTO headrace_position%'"
"""Connections whose claim waits for a lock."""


# ---- deadlocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_a_deadlock_runs_the_handler_again(kind: str, schema_url: Callable[[], str]):
    """Two handlers lock the same rows in different orders: PostgreSQL ends one of them (40P01)."""
    async with user_database(kind, "", schema_url) as database:
        database.execute("CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER NOT NULL)")
        database.execute("INSERT INTO account VALUES ('a', 0), ('b', 0)")
        both_locked = asyncio.Barrier(2)
        calls = 0

        async def move(event: Event, tx: Transaction) -> None:
            nonlocal calls
            calls += 1
            await tx.execute(text("SET LOCAL deadlock_timeout = '20ms'"))
            assert event.stream is not None
            first, second = ("a", "b") if event.stream.key == "a" else ("b", "a")
            change = text("UPDATE account SET balance = balance + 1 WHERE id = :id")
            await tx.execute(change, {"id": first})
            if calls <= 2:
                await both_locked.wait()
            await tx.execute(change, {"id": second})

        effects, _ = in_scope(database, move)
        await asyncio.gather(*(effects.call(event_at(5, stream=stream)) for stream in STREAMS))
        assert (calls, database.rows("SELECT balance FROM account")) == (3, [(2,), (2,)])


# ---- statements that are not sent ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_a_statement_with_too_many_parameters_is_no_outage(kind: str, schema_url: Callable[[], str]):
    """Libpq refuses it, with an error that has no SQLSTATE."""
    values = {f"p{number}": number for number in range(70_000)}
    statement = text(f"SELECT 1 WHERE 1 IN ({', '.join(f':{name}' for name in values)})")

    async def ask(_: Event, tx: Transaction) -> None:
        await tx.execute(statement, values)

    async with user_database(kind, "", schema_url, hide_parameters=True) as database:
        effects, _ = in_scope(database, ask)
        with pytest.raises(DBAPIError):
            await effects.call(event_at(5))


# ---- backends that end -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["psycopg-async", "asyncpg"])
@pytest.mark.parametrize("lost", ["before the handler", "in the handler", "before the commit"])
async def test_a_connection_that_was_lost_is_opened_again(kind: str, schema_url: Callable[[], str], lost: str):
    """The user gave one AsyncConnection, and no engine."""
    async with user_database(kind, "", schema_url) as database:
        assert isinstance(database.engine, AsyncEngine)

        async def terminate() -> None:
            await asyncio.to_thread(database.execute, "SELECT pg_terminate_backend(:pid)", pid=pids[-1])

        async def handle(event: Event, tx: Transaction) -> None:
            pids.append((await tx.execute(text("SELECT pg_backend_pid()"))).scalar_one())
            if lost == "in the handler" and len(pids) == 1:
                await terminate()
            await write_down(event, tx)
            if lost == "before the commit" and len(pids) == 1:
                await terminate()

        pids: list[int] = []
        async with database.engine.connect() as connection:
            scope = EffectScope("here", "billing", 0, 1)
            scoped = Effects(connection).scoped(handle, scope, EffectCounts(), batch=False)
            if lost == "before the handler":
                await scoped.call(event_at(4))
                await terminate()
            with pytest.raises(Unavailable):
                await scoped.call(event_at(5))
            await scoped.call(event_at(5))
            await scoped.call(event_at(6))
        assert database.log() == [*(["42@4"] if lost == "before the handler" else []), "42@5", "42@6"]


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_position_that_waits_for_a_lock_is_given_up(
    kind: str, schema_url: Callable[[], str], *, cancelled: bool
):
    """The statement bypasses SQLAlchemy's execution, so its errors must be passed to SQLAlchemy."""
    async with user_database(kind, "", schema_url, pool_size=1, max_overflow=0) as database:
        effects, _ = in_scope(database)
        await effects.call(event_at(4))
        with database.inspecting.begin() as holder:
            holder.execute(text("SELECT 1 FROM headrace_position FOR UPDATE"))
            running = asyncio.create_task(effects.call(event_at(5)))
            await until(lambda: bool(database.rows(WAITING)))
            if cancelled:
                running.cancel()
            else:
                database.execute(f"SELECT pg_terminate_backend(pid) FROM ({WAITING}) AS waiting")
            with pytest.raises(asyncio.CancelledError if cancelled else Unavailable):
                await running
        await effects.call(event_at(5))
        assert database.log() == ["42@4", "42@5"]


async def test_an_event_that_is_cancelled_while_it_connects_waits_for_no_lock(schema_url: Callable[[], str]):
    """An `Engine` connects in a thread. The statement that follows there must be cancelled, too."""
    connecting, cancelled = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def connect_slowly(*_: object) -> None:
        loop.call_soon_threadsafe(connecting.set)
        cancelled.wait()

    async with user_database("psycopg", "", schema_url) as database:
        effects, _ = in_scope(database)
        await effects.call(event_at(4))
        assert isinstance(database.engine, Engine)
        database.engine.dispose()
        with database.inspecting.begin() as holder:
            holder.execute(text("SELECT 1 FROM headrace_position FOR UPDATE"))
            event.listen(database.engine, "do_connect", connect_slowly)
            running = asyncio.create_task(effects.call(event_at(5)))
            await connecting.wait()
            running.cancel()
            await asyncio.sleep(0)
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert database.rows(WAITING) == []
        await effects.call(event_at(5))
        assert database.log() == ["42@4", "42@5"]


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_one_lost_connection_of_the_pool_stands_for_all(kind: str, schema_url: Callable[[], str]):
    """Otherwise each connection of before a failover costs an attempt, and the pauses between attempts grow."""
    connections = 4
    barrier = asyncio.Barrier(connections)
    async with user_database(kind, "", schema_url, pool_size=connections) as database:

        async def wait_for_all(event: Event, tx: Transaction) -> None:
            await write_down(event, tx)
            await barrier.wait()

        first, _ = in_scope(database, wait_for_all)
        streams = [StreamId("orders", str(number)) for number in range(connections)]
        await asyncio.gather(*(first.call(event_at(1, stream=stream)) for stream in streams))
        database.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        effects, _ = in_scope(database)
        with pytest.raises(Unavailable):
            await effects.call(event_at(2))
        await effects.call(event_at(2))


async def test_backends_that_are_terminated_lose_and_repeat_nothing(tmp_path: Path, schema_url: Callable[[], str]):
    """As a failover does: all connections of the pool break, at any moment, and new ones work."""
    async with user_database("psycopg-async", "", schema_url) as database:
        name = f"victim {os.getpid()}"
        url = database.url.replace("postgresql:", "postgresql+psycopg:")
        engine = create_async_engine(url, connect_args={"application_name": name})
        terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"
        async with Provider.open(tmp_path / "data", queues=2) as provider:
            one = await provider.subscribe("billing", "orders/*", write_down, effects=Effects(engine))
            for number in range(60):
                await provider.stream("orders", str(number % 5)).publish(str(number).encode())
                if number % 10 == 9:
                    await asyncio.to_thread(database.execute, terminate, name=name)
            await one.caught_up()
            assert await provider.dead_letters() == []
        assert sorted(database.log(), key=int) == [str(number) for number in range(60)]
        await engine.dispose()


# ---- transactions that stay open -------------------------------------------------------------------------------------


async def test_a_transaction_that_stays_open_holds_up_no_other_one(postgres: UserDatabase):
    engine = postgres.engine
    assert isinstance(engine, AsyncEngine)
    queue = RecordingQueue()
    mover = OutboxMover(database_of(engine), queue)
    async with engine.connect() as held:
        await OUTBOX.publish(STREAMS[0], b"late", connection=held)
        for payload in (b"1", b"2"):
            async with engine.begin() as connection:
                await OUTBOX.publish(STREAMS[0], payload, connection=connection)
            await mover.move()
        assert [payload for _, payload in queue.stored] == [b"1", b"2"]
        await held.commit()
    await mover.move()
    assert [payload for _, payload in queue.stored] == [b"1", b"2", b"late"]


class PreparingServer(PostgresServer):
    """A server that keeps prepared transactions, which outlive their connection."""

    def command(self) -> Sequence[str]:
        return (*super().command(), "-c", "max_prepared_transactions=2")


@pytest.mark.long
async def test_a_prepared_transaction_holds_up_no_other_one_and_is_moved_when_it_commits():
    def prepare() -> None:
        with psycopg.connect(server.url) as driver:
            OUTBOX.publish(STREAMS[0], b"late", connection=driver)
            driver.execute("PREPARE TRANSACTION 'late'")

    def commit() -> None:
        with psycopg.connect(server.url, autocommit=True) as driver:
            driver.execute("COMMIT PREPARED 'late'")

    with PreparingServer() as server:
        async with user_database("psycopg-async", "", lambda: server.url) as database:
            queue = RecordingQueue()
            mover = OutboxMover(database_of(database.engine), queue)
            await asyncio.to_thread(prepare)
            for payload in (b"1", b"2"):
                assert isinstance(database.engine, AsyncEngine)
                async with database.engine.begin() as connection:
                    await OUTBOX.publish(STREAMS[0], payload, connection=connection)
                await mover.move()
            assert [payload for _, payload in queue.stored] == [b"1", b"2"]
            await asyncio.to_thread(commit)
            await mover.move()
            assert [payload for _, payload in queue.stored] == [b"1", b"2", b"late"]


@pytest.mark.long
def test_a_publish_after_the_prepare_of_a_session_is_refused():
    with PreparingServer() as server:
        made = create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"))
        with made.begin() as connection:
            schema.migrate(connection)
        prepare_insert(made)
        with Session(made, twophase=True) as session:
            session.execute(text("SELECT 1"))
            OUTBOX.publish(STREAMS[0], b"a", connection=session)
            session.prepare()
            with pytest.raises(InvalidArgument, match=r"before `session\.prepare\(\)`"):
                OUTBOX.publish(STREAMS[0], b"lost", connection=session)
            session.commit()
            OUTBOX.publish(STREAMS[0], b"b", connection=session)
            session.commit()
        with made.connect() as connection:
            assert [payload for _, payload in OUTBOX.published(connection=connection)] == [b"a", b"b"]
        made.dispose()


@pytest.mark.long
async def test_ids_of_the_outbox_are_given_out_one_by_one(postgres: UserDatabase):
    """With a cache, a session would give out ids that are lower than those of earlier commits."""
    assert postgres.rows("SELECT cache_size FROM pg_sequences WHERE sequencename LIKE 'headrace_outbox_id%'")[0] == (1,)


@pytest.fixture
async def postgres(schema_url: Callable[[], str]) -> Any:
    async with user_database("psycopg-async", "", schema_url) as made:
        yield made


# ---- permissions -----------------------------------------------------------------------------------------------------


async def test_a_role_that_may_not_create_tables_applies_effects(
    postgres_server: PostgresServer, schema_url: Callable[[], str]
):
    async with user_database("psycopg-async", "", schema_url) as database:
        (found,) = database.rows("SELECT current_schema()")
        role = f"limited_{found[0]}"
        database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        database.execute(f"GRANT USAGE ON SCHEMA {found[0]} TO {role}")
        database.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {found[0]} TO {role}")
        database.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {found[0]} TO {role}")
        limited = make_url(database.url).set(username=role, password="x")
        engine = create_async_engine(limited.set(drivername="postgresql+psycopg"))
        effects, _ = in_scope(database._replace(engine=engine), write_down)
        await Effects(engine).check()
        await effects.call(event_at(5))
        assert database.log() == ["42@5"]
        await engine.dispose()
        database.execute("DROP TABLE headrace_effects_version")
        with (
            pytest.raises(StorageError, match="permission denied for schema"),
            administration.opened(limited.render_as_string(hide_password=False), migrated=False) as connection,
        ):
            schema.migrate(connection)


# ---- PgBouncer -------------------------------------------------------------------------------------------------------


class PgBouncer(Server):
    """PgBouncer in transaction mode, before a PostgreSQL server. Each transaction may be on another connection."""

    name = "pgbouncer"

    def __init__(self, postgres: PostgresServer) -> None:
        super().__init__()
        self._postgres = postgres

    def account(self) -> Account:
        return self._postgres.account()  # it refuses to run as root

    def prepare(self) -> None:
        server = self._postgres
        target = f"host={LOOPBACK} port={server.port} user={server.user} password={server.password}"
        (self.directory / "pgbouncer.ini").write_text(
            f"[databases]\n* = {target}\n[pgbouncer]\nlisten_addr = {LOOPBACK}\nlisten_port = {self.port}\n"
            "auth_type = any\npool_mode = transaction\ndefault_pool_size = 4\nunix_socket_dir =\n"
        )
        for path in (self.directory, self.directory / "pgbouncer.ini"):
            os.chown(path, self.account().get("user", -1), self.account().get("group", -1))

    def command(self) -> Sequence[str]:
        program = find_program("pgbouncer", debian_package="pgbouncer", folders=["/usr/sbin"])
        return (program, "-q", str(self.directory / "pgbouncer.ini"))

    def ping(self) -> bool:
        with socket.create_connection((LOOPBACK, self.port), timeout=1):
            return True


@pytest.fixture
def bouncer_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A new database behind PgBouncer: it refuses the option `search_path` of the other tests."""
    name = f"bounced{os.getpid()}"
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        with PgBouncer(postgres_server) as bouncer:
            yield f"postgresql://{postgres_server.user}@{bouncer.address}/{name}"
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_effects_and_outbox_work_behind_pgbouncer(kind: str, tmp_path: Path, bouncer_url: str):
    plain = create_engine(bouncer_url.replace("postgresql:", "postgresql+psycopg:"), connect_args=_args("psycopg"))
    with administration.opened(bouncer_url, migrated=False) as connection:
        schema.migrate(connection)
        connection.execute(text("CREATE TABLE log (id BIGSERIAL PRIMARY KEY, value TEXT NOT NULL UNIQUE)"))
    engine: Any = _engine(kind, bouncer_url)
    database = UserDatabase(kind, bouncer_url, engine, plain)

    async def handle(event: Event, tx: Transaction) -> None:
        await write_down(event, tx)
        await tx.publish(StreamId("invoices", "1"), event.payload)

    seen: list[bytes] = []

    async def see(event: Event) -> None:
        seen.append(event.payload)

    async with Provider.open(tmp_path / "data", queues=2, outbox=bouncer_url) as provider:
        one = await provider.subscribe("billing", "orders/*", handle, effects=Effects(engine))
        await provider.subscribe("invoices", "invoices/*", see)
        expected = [str(number).encode() for number in range(40)]
        for number, payload in enumerate(expected):
            await provider.stream("orders", str(number % 8)).publish(payload)
        await one.caught_up()
        async with asyncio.timeout(30):
            while len(seen) < len(expected):  # noqa: ASYNC110 (a handler counts)
                await asyncio.sleep(0.05)
        assert await provider.dead_letters() == []
    assert sorted(database.log(), key=int) == [payload.decode() for payload in expected]
    assert sorted(seen, key=int) == expected
    await close(engine)
    plain.dispose()


async def test_queues_work_behind_pgbouncer(bouncer_url: str):
    async with opened(bouncer_url, queues=2, pooler=True) as one, opened(bouncer_url, queues=2, pooler=True) as two:
        receivers = [await two.open_receiver(queue) for queue in range(2)]
        for number in range(20):  # more executions than psycopg waits for before it prepares a statement
            call = [(queue, batch(f"{queue}.{number}")) for queue in range(2)]
            receipts = await one.enqueue(call, sequence=ProducerSequence("p", number + 1, number))
            again = await two.enqueue(call, sequence=ProducerSequence("p", number + 1, number))
            assert [each.duplicate for each in (*receipts, *again)] == [False, False, True, True]
        for queue, receiver in enumerate(receivers):
            assert await received(receiver, 20) == [f"{queue}.{number}" for number in range(20)]
            assert (await one.bounds(queue)).next == 20


def _args(kind: str) -> dict[str, Any]:
    """A prepared statement would be on the connection of another transaction."""
    if kind == "asyncpg":
        return {"statement_cache_size": 0, "prepared_statement_name_func": lambda: ""}
    return {"prepare_threshold": None}


def _engine(kind: str, url: str) -> Any:
    driver = "asyncpg" if kind == "asyncpg" else "psycopg"
    make: Any = create_engine if kind == "psycopg" else create_async_engine
    return make(url.replace("postgresql:", f"postgresql+{driver}:"), connect_args=_args(kind))


# ---- rights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_a_role_without_the_rights_is_refused_with_the_table(
    kind: str, schema_url: Callable[[], str], tmp_path: Path
):
    async def nothing(_: Event, __: Transaction) -> None: ...

    async def subscribe() -> None:
        async with Provider.open(tmp_path / "data") as provider:
            await provider.subscribe("s", "orders/*", nothing, effects=Effects(weak))

    async with user_database(kind, "", schema_url) as database:
        role = f"weak_{uuid.uuid4().hex}"
        place = make_url(database.url)
        weak = engine(kind, place.set(username=role, password="x").render_as_string(hide_password=False))
        namespace = database.rows("SELECT current_schema()")[0][0]
        database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        database.execute(f'GRANT USAGE ON SCHEMA "{namespace}" TO {role}')
        try:
            with pytest.raises(InvalidArgument, match="permission denied for table headrace_effects_version: grant"):
                await subscribe()
            mover = OutboxMover(database_of(weak), RecordingQueue())
            with pytest.raises(
                InvalidArgument, match=r"permission denied .*: grant this role the rights .*effects\.md"
            ):
                await mover.move()
            database.execute(f"GRANT SELECT ON headrace_effects_version, headrace_position TO {role}")
            with pytest.raises(InvalidArgument, match="no right to INSERT on table headrace_position: grant"):
                await subscribe()
            database.execute(f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "{namespace}" TO {role}')
            await subscribe()
            assert await mover.move() == 0
        finally:
            await close(weak)
            database.execute(f"DROP OWNED BY {role}")
            database.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("rights", [("a publish",), ("a publish", "outbox.published")])
async def test_a_publisher_needs_the_rights_that_the_page_lists(rights: Sequence[str], schema_url: Callable[[], str]):
    page = (Path(__file__).parents[2] / "docs" / "effects.md").read_text()
    async with user_database("psycopg-async", "", schema_url) as database:
        role = f"publisher_{uuid.uuid4().hex}"
        place = make_url(database.url).set(drivername="postgresql+psycopg", username=role, password="x")
        weak = create_engine(place)
        namespace = database.rows("SELECT current_schema()")[0][0]
        database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        database.execute(f'GRANT USAGE ON SCHEMA "{namespace}" TO {role}')
        for each in rights:
            (right,) = re.findall(rf"^\| .*{each}.* \| (\w+) on `headrace_outbox` \|$", page, re.MULTILINE)
            database.execute(f"GRANT {right} ON headrace_outbox TO {role}")
        try:
            with weak.connect() as connection:
                Outbox().publish(StreamId("orders", "42"), b"a", connection=connection)
                if len(rights) == 1:
                    with pytest.raises(DBAPIError, match="permission denied for table headrace_outbox"):
                        Outbox().published(connection=connection)
                else:
                    assert len(Outbox().published(connection=connection)) == 1
        finally:
            weak.dispose()
            database.execute(f"DROP OWNED BY {role}")
            database.execute(f"DROP ROLE {role}")
