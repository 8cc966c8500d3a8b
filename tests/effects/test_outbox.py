"""Events that are published if and only if a transaction commits."""

import asyncio
import logging
import os
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from headrace import Effects, Event, InvalidArgument, Outbox, Provider, StreamId, Transaction
from headrace.adapters import ProducerSequence, Receipt
from headrace.effects.administration import engine_of
from headrace.effects.database import database_of
from headrace.effects.mover import OutboxMover
from headrace.effects.outbox_rows import lane_of
from headrace.effects.schema import migrate
from headrace.silo.outbox import COUNT_S, OutboxService
from headrace.streams.background import BackgroundTasks
from headrace.streams.errors import HeadraceError, NotFound, StorageError
from headrace.streams.events import EventBatch, ScheduledBatch
from headrace.streams.producer_ledger import LastCall
from tests.client.consumers import until
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_transactional_handlers import event_at, in_scope

STREAM = StreamId("orders", "42")
OUTBOX = Outbox()


class RecordingQueue:
    """An idempotent queue in memory, which can fail before or after it stores a call, and refuse a stream."""

    name = "default"

    def __init__(self) -> None:
        self.stored: list[tuple[StreamId, bytes]] = []
        self.delays_us: list[int] = []
        """Of each batch of each call."""
        self.last: dict[str, LastCall] = {}
        self.fail_before = self.fail_after = 0
        self.refused: StreamId | None = None
        self.calls = 0

    async def last_sequence(self, producer: str) -> int:
        await asyncio.sleep(0)
        return self.last.get(producer, LastCall()).number

    async def publish_encoded(
        self, batches: Sequence[EventBatch], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        assert sequence is not None
        self.calls += 1
        self.delays_us += [batch.delay_us if isinstance(batch, ScheduledBatch) else 0 for batch in batches]
        await asyncio.sleep(0)
        if self.fail_before:
            self.fail_before -= 1
            raise StorageError("the disk is slow")
        if any(batch.stream == self.refused for batch in batches):
            raise InvalidArgument("this stream is refused")
        last = self.last.get(sequence.producer, LastCall())
        if last.accepts(sequence):
            self.last[sequence.producer] = LastCall(sequence.number)
            self.stored += [(batch.stream, payload) for batch in batches for payload in batch.payloads()]
        else:
            last.answer(sequence, len(batches))
        if self.fail_after:
            self.fail_after -= 1
            raise StorageError("the answer is lost")
        return ()

    def payloads(self, stream: StreamId = STREAM) -> list[bytes]:
        return [payload for name, payload in self.stored if name == stream]


@pytest.fixture
async def postgres(schema_url: Callable[[], str]) -> AsyncIterator[UserDatabase]:
    async with user_database("psycopg-async", "", schema_url, pool_size=20) as made:
        yield made


async def moved(database: UserDatabase, queue: RecordingQueue | None = None) -> RecordingQueue:
    """Move everything that is committed."""
    queue = queue or RecordingQueue()
    mover = OutboxMover(database_of(database.engine), queue)
    while await mover.move():
        pass
    return queue


def rows(database: UserDatabase) -> int:
    return database.rows("SELECT COUNT(*) FROM headrace_outbox")[0][0]


# ---- publishing ------------------------------------------------------------------------------------------------------


async def test_events_leave_with_the_commit_and_not_with_a_rollback(database: UserDatabase):
    made = database.engine
    for payload, commits in ((b"a", True), (b"lost", False), (b"b", True)):
        if isinstance(made, AsyncEngine):
            async with made.connect() as connection:
                await OUTBOX.publish(STREAM, payload, connection=connection)  # the first statement
                await (connection.commit() if commits else connection.rollback())
        else:
            await asyncio.to_thread(_publish, made, payload, commits)
    assert (await moved(database)).payloads() == [b"a", b"b"]
    assert rows(database) == 0


def _publish(made: Engine, payload: bytes, commits: bool) -> None:
    with made.connect() as connection:
        OUTBOX.publish(STREAM, payload, connection=connection)
        (connection.commit if commits else connection.rollback)()


async def test_a_session_publishes_after_its_flush_when_it_commits(database: UserDatabase):
    def work() -> None:
        with Session(database.inspecting) as session, session.begin():
            OUTBOX.publish(STREAM, [b"a", b"b"], connection=session)
            assert session.execute(text("SELECT COUNT(*) FROM headrace_outbox")).scalar() == 0
        with pytest.raises(ValueError), Session(database.inspecting) as session, session.begin():  # noqa: PT012
            OUTBOX.publish(STREAM, b"lost", connection=session)
            raise ValueError

    await asyncio.to_thread(work)
    assert (await moved(database)).payloads() == [b"a", b"b"]


async def test_a_savepoint_that_is_rolled_back_takes_its_events_along(async_database: UserDatabase):
    assert isinstance(async_database.engine, AsyncEngine)
    async with AsyncSession(async_database.engine) as session, session.begin():
        OUTBOX.publish(STREAM, b"a", connection=session)
        inner = await session.begin_nested()
        OUTBOX.publish(STREAM, b"lost", connection=session)
        deeper = await session.begin_nested()
        OUTBOX.publish(STREAM, b"lost, too", connection=session)
        await deeper.commit()
        await inner.rollback()
        async with session.begin_nested():
            OUTBOX.publish(STREAM, b"b", connection=session)
    assert (await moved(async_database)).payloads() == [b"a", b"b"]


async def test_a_session_that_is_used_again_sends_nothing_of_before(async_database: UserDatabase):
    assert isinstance(async_database.engine, AsyncEngine)
    async with AsyncSession(async_database.engine) as session:
        OUTBOX.publish(STREAM, b"lost", connection=session)
        await session.rollback()
        OUTBOX.publish(STREAM, b"a", connection=session)
        await session.commit()
        await session.execute(text("SELECT 1"))
        await session.commit()
    assert (await moved(async_database)).payloads() == [b"a"]


@pytest.mark.parametrize("method", ["close", "reset"])
async def test_a_session_that_is_closed_sends_nothing_of_before(async_database: UserDatabase, method: str):
    assert isinstance(async_database.engine, AsyncEngine)
    async with AsyncSession(async_database.engine) as session:
        OUTBOX.publish(STREAM, b"lost", connection=session)
        await session.begin_nested()
        OUTBOX.publish(STREAM, b"lost, too", connection=session)
        await getattr(session, method)()
        OUTBOX.publish(STREAM, b"a", connection=session)
        await session.commit()

    def work() -> None:
        with Session(async_database.inspecting) as session:
            OUTBOX.publish(STREAM, b"lost", connection=session)
            getattr(session, method)()
            OUTBOX.publish(STREAM, b"b", connection=session)
            session.commit()

    await asyncio.to_thread(work)
    assert (await moved(async_database)).payloads() == [b"a", b"b"]


async def test_a_test_sees_the_events_in_connections_for_asyncio(async_database: UserDatabase):
    assert isinstance(async_database.engine, AsyncEngine)
    async with AsyncSession(async_database.engine) as session:
        OUTBOX.publish(STREAM, b"a", connection=session)
        assert await OUTBOX.published(connection=session) == [(STREAM, b"a")]
    async with async_database.engine.connect() as connection:
        await OUTBOX.publish(STREAM, b"b", connection=connection)
        assert await OUTBOX.published(connection=connection) == [(STREAM, b"b")]
    with pytest.raises(InvalidArgument, match=r"connection is builtins\.int: expected"):
        OUTBOX.published(connection=7)  # pyright: ignore[reportCallIssue, reportArgumentType]


async def test_connections_of_drivers(postgres: UserDatabase):
    def sync() -> None:
        with psycopg.connect(postgres.url) as connection, connection.transaction():
            OUTBOX.publish(STREAM, b"psycopg", connection=connection)
            assert OUTBOX.published(connection=connection) == [(STREAM, b"psycopg")]

    await asyncio.to_thread(sync)
    async with await psycopg.AsyncConnection.connect(postgres.url) as connection:
        await OUTBOX.publish(STREAM, b"psycopg async", connection=connection)
        assert (await OUTBOX.published(connection=connection))[1:] == [(STREAM, b"psycopg async")]
    url, _, schema = postgres.url.partition("?options=-csearch_path%3D")
    asyncpg: Any = import_module("asyncpg")  # it has no stubs
    driver = await asyncpg.connect(url, server_settings={"search_path": schema})
    try:
        async with driver.transaction():
            await OUTBOX.publish(STREAM, b"asyncpg", connection=driver)
            assert (await OUTBOX.published(connection=driver))[2:] == [(STREAM, b"asyncpg")]
        with pytest.raises(InvalidArgument, match="is in no transaction"):
            await OUTBOX.publish(STREAM, b"lost", connection=driver)
    finally:
        await driver.close()
    assert (await moved(postgres)).payloads() == [b"psycopg", b"psycopg async", b"asyncpg"]


async def test_connections_of_psycopg_with_raw_cursors(postgres: UserDatabase):
    """Their placeholders are `$1`."""

    def sync() -> None:
        with psycopg.connect(postgres.url, cursor_factory=psycopg.RawCursor) as connection:
            OUTBOX.publish(STREAM, b"a", connection=connection)
            OUTBOX.publish(STREAM, [b"b", Event(b"c", priority=1)], connection=connection)
            assert [payload for _, payload in OUTBOX.published(connection=connection)] == [b"a", b"b", b"c"]

    await asyncio.to_thread(sync)
    connect = psycopg.AsyncConnection.connect
    async with await connect(postgres.url, cursor_factory=psycopg.AsyncRawCursor) as connection:
        await OUTBOX.publish(STREAM, b"d", connection=connection)
        await OUTBOX.publish(STREAM, [b"e", Event(b"f", priority=1)], connection=connection)
        assert len(await OUTBOX.published(connection=connection)) == 6
    assert (await moved(postgres)).payloads() == [b"a", b"b", b"c", b"d", b"e", b"f"]


async def test_connections_that_commit_each_statement_are_refused(postgres: UserDatabase):
    def sync() -> None:
        with psycopg.connect(postgres.url, autocommit=True) as driver:
            with pytest.raises(InvalidArgument, match="commits each statement"):
                OUTBOX.publish(STREAM, b"lost", connection=driver)
        committing = postgres.inspecting.execution_options(isolation_level="AUTOCOMMIT")
        with committing.connect() as connection, pytest.raises(InvalidArgument, match="commits each statement"):
            OUTBOX.publish(STREAM, b"lost", connection=connection)
        with pytest.raises(InvalidArgument, match="commits each statement"), Session(committing) as session:  # noqa: PT012
            OUTBOX.publish(STREAM, b"lost", connection=session)
            session.commit()

    await asyncio.to_thread(sync)
    with pytest.raises(InvalidArgument, match="expected a connection or session"):
        OUTBOX.publish(STREAM, b"lost", connection=7)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert rows(postgres) == 0


async def test_a_pipeline_of_psycopg_needs_a_transaction_too(postgres: UserDatabase):
    """In a pipeline, psycopg does not know about a transaction before its results arrive."""

    def sync() -> None:
        with psycopg.connect(postgres.url, autocommit=True) as connection, connection.pipeline():
            connection.execute("BEGIN")
            OUTBOX.publish(STREAM, b"kept", connection=connection)
            connection.execute("COMMIT")
            with pytest.raises(InvalidArgument, match="commits each statement"):
                OUTBOX.publish(STREAM, b"lost", connection=connection)

    await asyncio.to_thread(sync)
    connect = psycopg.AsyncConnection.connect
    async with await connect(postgres.url, autocommit=True) as connection, connection.pipeline():
        await connection.execute("BEGIN")
        await OUTBOX.publish(STREAM, b"kept", connection=connection)
        await connection.execute("COMMIT")
        with pytest.raises(InvalidArgument, match="commits each statement"):
            await OUTBOX.publish(STREAM, b"lost", connection=connection)
    assert (await moved(postgres)).payloads() == [b"kept", b"kept"]


async def test_a_handler_publishes_with_its_effects(async_database: UserDatabase, tmp_path: Path):
    """The outgoing event goes to a second subscription of the same provider, once."""
    received: list[bytes] = []

    async def bill(event: Event, tx: Transaction) -> None:
        await tx.execute(text("INSERT INTO log (value) VALUES (:value)"), {"value": event.payload.decode()})
        await tx.publish(StreamId("invoices", "7"), b"due " + event.payload)
        if event.payload == b"b" and "b" not in failed:
            failed.append("b")
            raise ValueError

    async def receive(event: Event) -> None:
        received.append(event.payload)

    failed: list[str] = []
    async with Provider.open(tmp_path / "data", queues=2, outbox=async_database.url) as provider:
        billing = await provider.subscribe("billing", "orders/*", bill, effects=Effects(async_database.engine))
        await provider.subscribe("invoices", "invoices/*", receive)
        await provider.stream(STREAM).publish([b"a", b"b", b"c"])
        await billing.caught_up()
        async with asyncio.timeout(30):
            while len(received) < 3 or rows(async_database):  # noqa: ASYNC110 (the database does not tell)
                await asyncio.sleep(0.02)
        outbox = provider.statistics().outbox
        assert outbox is not None
        assert (outbox.moved_events, outbox.problem) == (3, "")
    assert received == [b"due a", b"due b", b"due c"]


# ---- moving ----------------------------------------------------------------------------------------------------------


def publish(database: UserDatabase, stream: StreamId, *payloads: bytes) -> None:
    with database.inspecting.begin() as connection:
        for payload in payloads:
            OUTBOX.publish(stream, payload, connection=connection)


async def publish_one(engine: Engine | AsyncEngine) -> None:
    if isinstance(engine, Engine):
        with Session(engine) as session, session.begin():
            OUTBOX.publish(STREAM, b"x", connection=session)
    else:
        async with engine.begin() as connection:
            await OUTBOX.publish(STREAM, b"x", connection=connection)


async def test_a_release_from_before_a_migration_is_deleted_and_the_rest_is_moved(async_database: UserDatabase):
    async_database.make_version(2)
    for number in range(3):
        publish(async_database, STREAM, b"%d" % number)
    first, lane = async_database.rows("SELECT id, lane FROM headrace_outbox ORDER BY id")[0]
    async_database.execute(
        "INSERT INTO headrace_outbox_lane (provider, lane, producer, number, ids, holder, until_us) "
        "VALUES ('default', :lane, 'before', 1, :ids, '', 0)",
        lane=lane,
        ids=f"[{first}]",
    )
    with async_database.inspecting.begin() as connection:
        migrate(connection)
    queue = RecordingQueue()
    queue.last["before"] = LastCall(1)  # the first row is in the queue, and was not deleted yet
    await moved(async_database, queue)
    assert queue.payloads() == [b"1", b"2"]
    assert rows(async_database) == 0


@pytest.mark.parametrize("kind", ["sqlite", "aiosqlite", "psycopg", "psycopg-async", "asyncpg"])
async def test_a_database_without_tables_is_named_with_the_command(
    kind: str, tmp_path: Path, schema_url: Callable[[], str], caplog: pytest.LogCaptureFixture
):
    """By a publish, and by a silo, which says it once and goes on when the tables are there."""
    async with user_database(kind, str(tmp_path / "u.db"), schema_url, migrated=False) as database:
        with pytest.raises(NotFound, match="create them with 'headrace effects migrate"):
            await publish_one(database.engine)
        queue = RecordingQueue()
        service = OutboxService(engine_of(database.url), queue)
        service.start()
        await until(lambda: bool(service.mover.problem))
        await asyncio.sleep(2 * COUNT_S)
        assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]
        assert "create them with 'headrace effects migrate" in caplog.messages[0]
        with database.inspecting.begin() as connection:
            migrate(connection)
        publish(database, STREAM, b"y")
        with caplog.at_level(logging.INFO, "headrace.effects"):
            await until(lambda: queue.payloads() == [b"y"])
            await until(lambda: caplog.messages[1:] == ["the outbox of 'default' is moved again"])
        await service.aclose()


async def test_a_file_that_is_missing_is_named_and_not_created(tmp_path: Path):
    service = OutboxService(engine_of(f"sqlite:///{tmp_path}/no.db"), RecordingQueue())
    service.start()
    await until(lambda: service.mover.problem.startswith(f"there is no file '{tmp_path}/no.db': check its name"))
    await service.aclose()
    for url in (f"sqlite:///file:{tmp_path}/no.db?uri=true", f"sqlite+aiosqlite:///{tmp_path}/no.db"):
        with pytest.raises(NotFound, match="there is no file"):
            await asyncio.to_thread(engine_of(url).connect)
    assert await asyncio.to_thread(os.listdir, tmp_path) == []


async def test_a_file_is_found_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    await asyncio.to_thread(Path("user.db").touch)
    engine = engine_of("sqlite:///user.db")
    monkeypatch.chdir("/")
    (await asyncio.to_thread(engine.connect)).close()
    engine.dispose()


async def test_a_lane_that_always_has_rows_lets_others_begin(async_database: UserDatabase):
    other = next(
        stream for stream in (StreamId("orders", f"{i}") for i in range(100)) if lane_of(stream) != lane_of(STREAM)
    )

    class BusyQueue(RecordingQueue):
        async def publish_encoded(
            self, batches: Sequence[EventBatch], *, sequence: ProducerSequence | None = None
        ) -> Sequence[Receipt]:
            if not self.stored:
                publish(async_database, other, b"of another lane")
            publish(async_database, STREAM, b"%d" % len(self.stored))
            return await super().publish_encoded(batches, sequence=sequence)

    publish(async_database, STREAM, b"first")
    queue = BusyQueue()
    mover = OutboxMover(database_of(async_database.engine), queue)
    for _ in range(2):
        assert await asyncio.wait_for(mover.move(), 30) > 0
    assert queue.payloads(other) == [b"of another lane"]


def publish_by_psycopg(url: str) -> None:
    with psycopg.connect(url) as driver, driver.transaction():
        OUTBOX.publish(STREAM, b"x", connection=driver)


async def test_a_driver_s_connection_without_tables_names_the_command(schema_url: Callable[[], str]):
    async with user_database("psycopg", "", schema_url, migrated=False) as database:
        with pytest.raises(NotFound, match="'headrace effects migrate URL'"):
            publish_by_psycopg(database.url)
        async with await psycopg.AsyncConnection.connect(database.url) as driver:
            with pytest.raises(NotFound, match="'headrace effects migrate URL'"):
                await OUTBOX.publish(STREAM, b"x", connection=driver)


async def test_failures_neither_lose_nor_repeat_an_event(async_database: UserDatabase):
    queue = RecordingQueue()
    for number in range(30):
        publish(async_database, STREAM, b"%d" % number)
        queue.fail_before, queue.fail_after = number % 3 == 1, number % 3 == 2
        for _ in range(2):
            mover = OutboxMover(database_of(async_database.engine), queue)  # a process that was started again
            async_database.execute("UPDATE headrace_outbox_lane SET until_us = 0")
            try:
                await mover.move()
            except StorageError:
                continue
    await moved(async_database, queue)
    assert queue.payloads() == [b"%d" % number for number in range(30)]


async def test_no_step_of_two_movers_in_sqlite_is_between_a_lane_and_its_next_release(
    tmp_path: Path, schema_url: Callable[[], str]
):
    """A mover stands still for longer than its lease, just after it has read a lane. Another one goes on meanwhile."""
    queue, steps = RecordingQueue(), 0
    async with user_database("sqlite", str(tmp_path / "user.db"), schema_url) as database:
        engine = database.engine
        assert isinstance(engine, Engine)
        other = create_engine(database.url, connect_args={"timeout": 0})
        with other.connect() as connection:  # so that a reader does not keep writers out
            assert connection.execute(text("PRAGMA journal_mode = WAL")).scalar() == "wal"
        published: list[bytes] = []

        def publish(payload: bytes) -> None:
            with other.begin() as connection:
                OUTBOX.publish(STREAM, payload, connection=connection)
            published.append(payload)

        def go_on_elsewhere() -> None:
            with other.begin() as connection:
                connection.execute(text("UPDATE headrace_outbox_lane SET until_us = 0"))
            publish(b"2")
            queue.fail_after = 1  # the other mover ends before it deletes the rows
            with suppress(StorageError):
                asyncio.run(OutboxMover(database_of(other), queue).move())
            publish(b"3")

        @event.listens_for(engine, "after_cursor_execute")
        def read(connection: Connection, cursor: object, statement: str, *_: object) -> None:  # pyright: ignore[reportUnusedFunction]
            nonlocal steps
            if "FROM headrace_outbox_lane" in statement:
                steps += 1
                if steps == 2:
                    with suppress(OperationalError):  # the file is locked
                        go_on_elsewhere()

        publish(b"1")
        await moved(database, queue)
        publish(b"4")
        database.execute("UPDATE headrace_outbox_lane SET until_us = 0")  # the lease of the first mover is over
        await moved(database, queue)
        assert (queue.payloads(), steps > 2) == (published, True)
        other.dispose()


async def test_a_clock_that_was_set_back_does_not_stop_the_outbox(async_database: UserDatabase):
    queue = RecordingQueue()
    publish(async_database, STREAM, b"a")
    await moved(async_database, queue)
    publish(async_database, STREAM, b"b")
    await moved(async_database, queue)
    assert queue.payloads() == [b"a"]  # the process that has ended still has the lease
    async_database.execute("UPDATE headrace_outbox_lane SET until_us = until_us + 3600000000")
    await moved(async_database, queue)
    assert queue.payloads() == [b"a", b"b"]


async def test_new_events_of_a_database_that_was_restored_from_a_backup_are_moved(async_database: UserDatabase):
    queue = RecordingQueue()
    mover = OutboxMover(database_of(async_database.engine), queue)

    async def move(payload: bytes) -> None:
        publish(async_database, STREAM, payload)
        assert await mover.move() == 1

    await move(b"a")
    ((number, ids),) = async_database.rows("SELECT number, ids FROM headrace_outbox_lane")
    for payload in (b"b", b"c"):
        await move(payload)
    async_database.execute("UPDATE headrace_outbox_lane SET number = :number, ids = :ids", number=number, ids=ids)
    for payload in (b"d", b"e", b"f"):
        await move(payload)
    assert queue.payloads() == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert rows(async_database) == 0


@pytest.mark.parametrize(
    ("waited", "least", "most"),
    [
        (timedelta(minutes=-5), timedelta(hours=1), timedelta(hours=1)),  # the clocks of the processes differ
        (timedelta(minutes=20), timedelta(), timedelta(minutes=40)),
        (timedelta(hours=2), timedelta(microseconds=1), timedelta(microseconds=1)),
    ],
)
async def test_a_delay_begins_when_the_event_is_published(
    async_database: UserDatabase, waited: timedelta, least: timedelta, most: timedelta
):
    def publish() -> None:
        with async_database.inspecting.begin() as connection:
            OUTBOX.publish(STREAM, b"now", connection=connection)
            OUTBOX.publish(STREAM, b"later", connection=connection, delay=timedelta(hours=1))

    await asyncio.to_thread(publish)
    async_database.execute("UPDATE headrace_outbox SET written_at_us = written_at_us - :by", by=in_us(waited))
    queue = RecordingQueue()
    queue.fail_before = 1
    mover = OutboxMover(database_of(async_database.engine), queue)
    with pytest.raises(StorageError):
        await mover.move()
    await mover.move()
    first, failed, second, repeated = queue.delays_us
    assert (first, second) == (0, 0)
    assert in_us(least) <= repeated <= failed <= in_us(most)
    assert queue.payloads() == [b"now", b"later"]


def in_us(time: timedelta) -> int:
    return time // timedelta(microseconds=1)


async def test_two_queues_that_divide_an_outbox_are_told(
    async_database: UserDatabase, caplog: pytest.LogCaptureFixture
):
    """As two processes with data directories of their own have them. One queue alone is told nothing."""
    movers = [OutboxMover(database_of(async_database.engine), RecordingQueue()) for _ in range(2)]
    for mover in (movers[0], movers[0], movers[1], movers[0]):
        assert "was moved into another queue" not in caplog.text
        async_database.execute("UPDATE headrace_outbox_lane SET holder = ''")  # its lease is over
        publish(async_database, STREAM, b"a")
        assert await mover.move() == 1
    assert caplog.text.count("was moved into another queue, too") == 1


async def test_after_any_error_of_the_database_the_mover_goes_on(async_database: UserDatabase):
    queue = RecordingQueue()
    publish(async_database, STREAM, b"a")
    async_database.execute("ALTER TABLE headrace_outbox_lane RENAME TO hidden")  # an error that is no outage
    mover = OutboxMover(database_of(async_database.engine), queue)
    async with BackgroundTasks() as tasks:
        running = tasks.start(mover.run(), "mover")
        await until(lambda: bool(mover.problem) or running.done())
        assert "headrace_outbox_lane" in mover.problem
        async_database.execute("ALTER TABLE hidden RENAME TO headrace_outbox_lane")
        await until(lambda: queue.payloads() == [b"a"] and not mover.problem)


class HalfFailingQueue(RecordingQueue):
    """Fails the first call, and holds up all others until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.running = 0
        self.failed = False

    async def publish_encoded(
        self, batches: Sequence[EventBatch], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        if not self.failed:
            self.failed = True
            raise StorageError("the disk is slow")
        self.running += 1
        try:
            await self.released.wait()
            return await super().publish_encoded(batches, sequence=sequence)
        finally:
            self.running -= 1


@pytest.mark.parametrize("cancelled", [False, True])
async def test_no_lane_goes_on_after_the_move_has_ended(async_database: UserDatabase, *, cancelled: bool):
    queue = HalfFailingQueue()
    for number in range(40):
        publish(async_database, StreamId("orders", str(number)), b"x")
    async with BackgroundTasks() as tasks:
        moving = tasks.hold(OutboxMover(database_of(async_database.engine), queue).move(), "move")
        await until(lambda: queue.running > 0)
        if cancelled:
            moving.cancel()
        else:
            queue.released.set()
        await asyncio.wait([moving])
        assert not queue.running
        assert moving.cancelled() == cancelled
        assert cancelled or isinstance(moving.exception(), StorageError)
    assert bool(queue.stored) is not cancelled


async def test_a_stream_that_is_refused_holds_up_that_stream_alone(async_database: UserDatabase):
    others = [StreamId("orders", str(number)) for number in range(100, 150)]
    queue = RecordingQueue()
    queue.refused = STREAM
    publish(async_database, STREAM, b"first")
    for other in others:
        publish(async_database, other, b"x")
    publish(async_database, STREAM, b"second")
    await moved(async_database, queue)
    assert {stream for stream, _ in queue.stored} == set(others)
    mover = OutboxMover(database_of(async_database.engine), queue)
    backlog = await mover.backlog()
    assert (backlog.batches, backlog.refused) == (2, 1)
    async_database.execute("UPDATE headrace_outbox SET problem = NULL")
    async_database.execute("UPDATE headrace_outbox_lane SET until_us = 0")  # the lease of the first mover is over
    queue.refused = None
    await moved(async_database, queue)
    assert queue.payloads() == [b"first", b"second"]


async def test_a_batch_that_cannot_be_read_holds_up_its_stream_alone(async_database: UserDatabase):
    """It is damaged, or a newer headrace has written it."""
    others = [StreamId("orders", str(number)) for number in range(100, 150)]
    for stream in (*others, STREAM):
        publish(async_database, stream, b"first", b"second", b"third")
    ((first,),) = async_database.rows("SELECT MIN(id) FROM headrace_outbox WHERE stream = :stream", stream=str(STREAM))
    async_database.execute("UPDATE headrace_outbox SET batch = :batch WHERE id = :id", batch=b"\xff\xff", id=first + 1)
    queue = RecordingQueue()
    mover = OutboxMover(database_of(async_database.engine), queue)
    while await mover.move():
        pass
    backlog = await mover.backlog()
    assert (backlog.batches, backlog.refused) == (2, 1)
    assert queue.payloads(STREAM) == [b"first"]
    assert all(queue.payloads(other) == [b"first", b"second", b"third"] for other in others)
    problems = async_database.rows("SELECT id, problem FROM headrace_outbox ORDER BY id")
    assert [problem is not None for _, problem in problems] == [True, False]


async def test_many_batches_that_cannot_be_read_take_few_reads(postgres: UserDatabase):
    """If the silo is older than the publishers, these are all rows. A read for each would hold up all other streams."""
    for number in range(50):
        publish(postgres, StreamId("orders", str(number)), b"x")
    postgres.execute("UPDATE headrace_outbox SET batch = :batch, lane = 3", batch=b"\xff\xff")
    engine = engine_of(postgres.url)
    reads: list[str] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        if "string_agg(batch" in statement or statement.startswith("SELECT id, stream"):
            reads.append(statement)

    event.listen(engine, "after_cursor_execute", note)
    mover = OutboxMover(database_of(engine), RecordingQueue())
    while await mover.move():
        pass
    assert (await mover.backlog()).refused == 50
    assert len(reads) <= 4
    engine.dispose()


async def test_a_call_that_may_be_stored_in_part_is_repeated_as_it_is(async_database: UserDatabase):
    """No smaller call may follow under the same number: its other batches would be stored twice."""
    publish(async_database, STREAM, b"a", b"b", b"c")
    calls: list[tuple[int, int]] = []

    class PartlyFailingQueue(RecordingQueue):
        async def publish_encoded(
            self, batches: Sequence[EventBatch], *, sequence: ProducerSequence | None = None
        ) -> Sequence[Receipt]:
            assert sequence is not None
            calls.append((sequence.number, len(batches)))
            return await super().publish_encoded(batches, sequence=sequence)

    queue = PartlyFailingQueue()
    queue.fail_before = 2
    mover = OutboxMover(database_of(async_database.engine), queue)
    for _ in range(2):
        with pytest.raises(StorageError):
            await mover.move()
    await mover.move()
    assert calls == [(1, 3)] * 3
    assert queue.payloads() == [b"a", b"b", b"c"]


async def test_a_step_reads_no_more_batches_than_it_releases(postgres: UserDatabase):
    """All batches of a lane may be larger than the memory."""
    large = b"x" * (1 << 20)
    publish(postgres, STREAM, *[large] * 20)
    engine = engine_of(postgres.url)
    read: list[int] = []

    def note(_: object, cursor: Any, statement: str, *__: object) -> None:
        if "string_agg(batch" in statement:
            read.append(len(cursor.pgresult.get_value(0, 3) or b"") // 2 >> 20)  # two digits for each byte

    event.listen(engine, "after_cursor_execute", note)
    queue = RecordingQueue()
    mover = OutboxMover(database_of(engine), queue)
    while await mover.move():
        pass
    assert (len(queue.stored), max(read), sum(read)) == (20, 7, 20)  # MiB
    engine.dispose()


async def test_a_batch_above_the_bytes_of_a_release_is_released_alone(async_database: UserDatabase):
    publish(async_database, STREAM, *[b"x" * 900_000] * 12, b"y")
    queue = await moved(async_database)
    assert [len(payload) for payload in queue.payloads()] == [900_000] * 12 + [1]
    assert queue.calls == 2


async def test_a_provider_of_another_name_gets_its_events_alone(async_database: UserDatabase):
    with async_database.inspecting.begin() as connection:
        Outbox("other").publish(STREAM, b"for other", connection=connection)
        OUTBOX.publish(STREAM, b"for default", connection=connection)
    assert (await moved(async_database)).payloads() == [b"for default"]


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "n" * 129, "a b"])
async def test_a_name_that_no_provider_has_is_refused(tmp_path: Path, schema_url: Callable[[], str], name: str):
    with pytest.raises(InvalidArgument, match="is not a provider name"):
        Outbox(name)

    async def publish(_: Event, tx: Transaction) -> None:
        await tx.publish(STREAM, b"lost", provider=name)

    async with user_database("aiosqlite", str(tmp_path / "user.db"), schema_url) as database:
        effects, _ = in_scope(database, publish)
        with pytest.raises(InvalidArgument, match="is not a provider name"):
            await effects.call(event_at(5))


def test_a_url_in_place_of_the_provider_is_not_repeated():
    with pytest.raises(InvalidArgument, match="takes the name of a provider") as caught:
        Outbox("postgresql://shop:secret@localhost/shop")
    assert "secret" not in str(caught.value)


async def test_more_rows_than_one_release_has(async_database: UserDatabase):
    publish(async_database, STREAM, *(b"%d" % number for number in range(2500)))
    queue = await moved(async_database)
    assert queue.payloads() == [b"%d" % number for number in range(2500)]
    assert queue.calls == 3


async def test_the_lanes_share_the_connections_that_a_pool_keeps(postgres: UserDatabase):
    """Connections above the size of a pool are opened for one transaction each."""
    opened: list[object] = []
    engine = engine_of(postgres.url)

    def note(connection: object, _: object) -> None:
        opened.append(connection)

    event.listen(engine, "connect", note)
    for number in range(60):
        publish(postgres, StreamId("orders", str(number)), b"x")
    queue = RecordingQueue()
    await OutboxMover(database_of(engine), queue).move()
    assert (len(queue.stored), queue.calls) == (60, 16)
    assert len(opened) <= 5
    engine.dispose()


# ---- the storm -------------------------------------------------------------------------------------------------------

WRITERS, STREAMS, TRANSACTIONS = 16, 8, 25


async def storm(database: UserDatabase) -> dict[StreamId, list[bytes]]:
    """16 writers with random delays and rollbacks. Each locks a row for its stream, so the order is known: return what
    each stream has to get."""
    rng = random.Random(7)
    expected: dict[StreamId, list[bytes]] = defaultdict(list)
    made: Any = database.engine
    for number in range(STREAMS):
        database.execute("INSERT INTO log (id, value) VALUES (:id, :value)", id=number, value=f"0 {number}")
    lock = text("UPDATE log SET value = value WHERE id = :id")

    async def write(writer: int) -> None:
        for number in range(TRANSACTIONS):
            key, payload = rng.randrange(STREAMS), b"%d.%d" % (writer, number)
            stream = StreamId("orders", str(key))
            async with made.connect() as connection:
                await connection.execute(lock, {"id": key})
                await OUTBOX.publish(stream, payload, connection=connection)
                await asyncio.sleep(rng.uniform(0, 0.01))
                if rng.random() < 0.2:
                    await connection.rollback()
                else:
                    expected[stream].append(payload)  # before the commit: it still has the lock
                    await connection.commit()

    await asyncio.gather(*map(write, range(WRITERS)))
    return expected


async def test_a_storm_of_writers_loses_nothing_and_keeps_the_order(postgres: UserDatabase):
    queue, slow = RecordingQueue(), StreamId("orders", "slow")
    movers = [OutboxMover(database_of(postgres.engine), queue) for _ in range(2)]
    running = [asyncio.create_task(mover.run()) for mover in movers]
    made: Any = postgres.engine
    async with made.connect() as held:  # it has the lowest id, and commits last
        await OUTBOX.publish(slow, b"late", connection=held)
        expected = await storm(postgres)
        async with asyncio.timeout(60):
            while rows(postgres):  # noqa: ASYNC110 (the open transaction holds up no other)
                await asyncio.sleep(0.02)
        await held.commit()
    async with asyncio.timeout(60):
        while not queue.payloads(slow):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert queue.payloads(slow) == [b"late"]
    assert {stream: queue.payloads(stream) for stream in expected} == dict(expected)


async def test_the_storm_finds_a_cursor_over_ids(postgres: UserDatabase):
    """A planted bug: a reader that goes on after the highest id."""
    seen: list[int] = []

    async def read() -> None:
        last = 0
        while True:
            ids = [each for (each,) in postgres.rows("SELECT id FROM headrace_outbox WHERE id > :last", last=last)]
            seen.extend(ids)
            last = max([last, *ids])
            await asyncio.sleep(0.002)

    reader = asyncio.create_task(read())
    expected = await storm(postgres)
    await asyncio.sleep(0.05)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert len(seen) < sum(map(len, expected.values())) == rows(postgres)


@pytest.mark.parametrize("url", ["shop.db", "mysql://a/b"])
async def test_a_wrong_url_of_an_outbox_names_the_option(tmp_path: Path, url: str):
    with pytest.raises(HeadraceError, match=r"^outbox: provider 'default': "):
        async with Provider.open(tmp_path, outbox=url):
            pass
