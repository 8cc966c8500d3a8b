"""The control store on PostgreSQL: the server is stopped, does not answer, or aborts a transaction."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager

import psycopg
import pytest
import pytest_asyncio
from sqlalchemy import Connection, text

from benchmarks.servers import PostgresServer, process_tree
from headrace import DataDirectoryError, InvalidArgument, NotFound, Selector, StorageError, SubscriptionDefinition
from headrace.store.control_store import ControlStore
from headrace.store.database import Database
from headrace.streams.subscriptions import Checkpoint

DEFINITION = SubscriptionDefinition(name="stats", selector=Selector("flights/*"))


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that a test may stop."""
    with PostgresServer() as server:
        yield server


@pytest_asyncio.fixture
async def store(server: PostgresServer) -> AsyncIterator[ControlStore]:
    async with opened(server.url, 1.0) as store:
        yield store


@asynccontextmanager
async def opened(url: str, timeout_s: float | None = None) -> AsyncGenerator[ControlStore]:
    store = await ControlStore.open(url, timeout_s=timeout_s)
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def connected(url: str, timeout_s: float | None = None) -> AsyncGenerator[Database]:
    def make(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE IF NOT EXISTS things (id INTEGER PRIMARY KEY, value INTEGER)"))
        connection.execute(text("INSERT INTO things VALUES (1, 0), (2, 0) ON CONFLICT DO NOTHING"))

    database = await Database.open(url, make, timeout_s=timeout_s)
    try:
        yield database
    finally:
        await database.aclose()


@contextmanager
def frozen(server: PostgresServer) -> Generator[None]:
    tree = process_tree(server.pid)
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in tree:
            os.kill(pid, signal.SIGCONT)


def add(connection: Connection, thing: int) -> int:
    change = "UPDATE things SET value = value + 1 WHERE id = :id RETURNING value"
    return connection.execute(text(change), {"id": thing}).scalar_one()


# Servers that stop


async def test_a_server_that_was_restarted_is_found_again_with_all_it_was_told(
    store: ControlStore, server: PostgresServer
):
    await store.set_value("k", "before")
    server.stop()
    for _ in range(2):
        with pytest.raises(StorageError, match="Connection refused") as caught:
            await store.set_value("k", "lost")
        assert caught.value.retryable
    server.start()
    assert await store.value("k") == "before"
    await store.set_value("k", "after")
    server.stop()
    server.start()
    assert await store.value("k") == "after"  # no call noticed the restart


async def test_the_index_of_delayed_batches_has_only_those_that_are_being_published(postgres_url: str):
    async with opened(postgres_url):
        query = """
            SELECT indexdef FROM pg_indexes WHERE indexname = 'delayed_batches_taken' AND schemaname = current_schema()
        """
        with psycopg.connect(postgres_url) as connection:
            (definition,) = connection.execute(query).fetchall()
            assert str(definition[0]).endswith("WHERE (claim > 0)")


async def test_a_server_that_does_not_answer_is_an_error_within_a_time(store: ControlStore, server: PostgresServer):
    await store.set_value("k", "1")
    with frozen(server):
        with pytest.raises(StorageError, match="no answer within 1 s") as caught:
            await store.set_value("k", "2")
        assert caught.value.retryable
        with pytest.raises(StorageError, match="connection timeout expired"):
            await store.set_value("k", "2")
    await store.set_value("k", "3")
    assert await store.value("k") == "3"


async def test_call_that_waits_for_another_s_lock_gives_up(server: PostgresServer):
    async with connected(server.url, 0.5) as database:
        with psycopg.connect(server.url) as other:
            other.execute("UPDATE things SET value = 7 WHERE id = 1")
            with pytest.raises(StorageError, match="canceling statement due to statement timeout"):
                await database.write(add, 1)
            other.rollback()
        assert await database.write(add, 1) == 1


async def test_a_process_paused_in_a_transaction_does_not_hold_up_the_others(server: PostgresServer):
    resumed, locked = threading.Event(), threading.Event()

    def pause(connection: Connection) -> None:
        add(connection, 2)
        locked.set()
        resumed.wait(30)
        add(connection, 1)

    async with connected(server.url, 0.5) as paused, connected(server.url, 10) as other:
        stuck = asyncio.ensure_future(paused.write(pause))
        await asyncio.to_thread(locked.wait, 10)
        assert await other.write(add, 2) == 1
        resumed.set()
        with pytest.raises(StorageError, match=r"idle-in-transaction timeout|no answer within"):
            await stuck
        assert await paused.write(add, 2) == 2


async def test_two_that_wait_for_each_other_both_get_through(server: PostgresServer, postgres_url: str):
    barrier = threading.Barrier(2)
    tries: list[int] = []

    def both(connection: Connection, first: int, then: int) -> None:
        tries.append(first)
        add(connection, first)
        if len(tries) <= 2:
            barrier.wait(10)
        add(connection, then)

    async with connected(postgres_url) as one, connected(postgres_url) as two:
        await asyncio.gather(one.write(both, 1, 2), two.write(both, 2, 1))
        assert await one.write(add, 1) == await two.write(add, 2) == 3
    assert len(tries) > 2


async def test_all_that_is_read_in_one_call_is_of_one_moment(postgres_url: str):
    async with connected(postgres_url) as reader, connected(postgres_url) as writer:
        loop = asyncio.get_running_loop()

        def read(connection: Connection) -> list[int]:
            values = [connection.execute(text("SELECT value FROM things WHERE id = 1")).scalar_one()]
            asyncio.run_coroutine_threadsafe(writer.write(add, 1), loop).result(10)
            return [*values, connection.execute(text("SELECT value FROM things WHERE id = 1")).scalar_one()]

        assert await reader.read(read) == [0, 0]
        assert await writer.write(add, 1) == 2


async def test_creating_deleting_and_attaching_at_once_is_done_one_after_another(postgres_url: str):
    async def comes_and_goes(store: ControlStore) -> None:
        for number in range(30):
            await store.create_subscription("p", DEFINITION, {0: Checkpoint(number)})
            try:
                attachment = await store.attach("p", "stats")
                await store.save_checkpoints("p", [("stats", attachment.epoch, {0: Checkpoint(1000)})])
                await store.delete_subscription("p", "stats")
            except NotFound:
                continue
            assert 0 in attachment.checkpoints

    async with opened(postgres_url) as one, opened(postgres_url) as two, opened(postgres_url) as three:
        await asyncio.gather(*(comes_and_goes(store) for store in (one, two, three)))
        try:
            await one.delete_subscription("p", "stats")
        except NotFound:
            pass
        assert await one.subscriptions("p") == []
        assert await one.watermarks("p") == {}


async def test_a_subscription_that_waits_for_the_deletion_of_its_namesake_has_a_later_generation(postgres_url: str):
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT%subscript%'"
    async with opened(postgres_url) as store:
        await store.create_subscription("p", DEFINITION, {})
        with psycopg.connect(postgres_url) as other:
            other.execute("DELETE FROM subscriptions")
            other.execute("INSERT INTO counters VALUES ('generation', 5)")
            creating = asyncio.ensure_future(store.create_subscription("p", DEFINITION, {}))
            with psycopg.connect(postgres_url, autocommit=True) as watching:
                while watching.execute(waiting).fetchone() == (0,):  # noqa: ASYNC110 (PostgreSQL tells nobody)
                    await asyncio.sleep(0)
        assert await creating
        assert await store.generation("p", "stats") == 5


# URLs


@pytest.mark.parametrize("how", ["//headrace:hunter2@{}/postgres", "//{}/postgres?user=headrace&password=hunter2"])
async def test_a_password_is_in_no_message(server: PostgresServer, how: str):
    with pytest.raises(StorageError, match="password authentication failed") as caught:
        await ControlStore.open("postgresql:" + how.format(server.address))
    assert "hunter2" not in str(caught.value)
    assert server.address in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["postgresql://me:hunter2@host:port/db", "://me:hunter2@host/db", "mysql://me:hunter2@host/db"]
)
async def test_a_password_is_in_no_message_of_a_wrong_url(url: str):
    with pytest.raises(InvalidArgument) as caught:
        await ControlStore.open(url)
    assert "hunter2" not in str(caught.value)
    assert "***@host" in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
async def test_urls_are_written_in_several_ways(server: PostgresServer, scheme: str):
    async with opened(server.url.replace("postgresql", scheme, 1)) as store:
        assert await store.providers() == []


async def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "headrace.store.postgres", raising=False)
    monkeypatch.delattr("headrace.store.postgres", raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InvalidArgument, match=r"//db/x: the driver .* install headrace\[postgres\]"):
        await ControlStore.open("postgresql://db/x")


async def test_a_database_with_tables_of_another_program_is_refused(postgres_url: str):
    with psycopg.connect(postgres_url) as other:
        other.execute("CREATE TABLE silos (height INTEGER)")
    with pytest.raises(DataDirectoryError, match="another program's database: it has the table 'silos'"):
        await ControlStore.open(postgres_url)


async def test_a_value_that_the_database_cannot_hold_is_a_wrong_argument(store: ControlStore):
    with pytest.raises(InvalidArgument, match="the database refuses a value"):
        await store.set_value("k", "nul \0")
