"""The outbox inside of transactions of Django."""

import asyncio
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from sqlalchemy import make_url

from headrace import InvalidArgument, NotFound, NotSupported, Outbox, StreamId
from headrace.effects.database import database_of
from headrace.effects.mover import OutboxMover
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_outbox import RecordingQueue

settings: Any = import_module("django.conf").settings
connections: Any = import_module("django.db").connections
transaction: Any = import_module("django.db.transaction")

STREAM = StreamId("orders", "42")
OUTBOX = Outbox()
INSERT = "INSERT INTO log (value) VALUES (%s)"


def use(url: str) -> None:
    """Let Django's default connection be to this database."""
    if not settings.configured:
        settings.configure(USE_TZ=True)
        import_module("django").setup()
    parsed = make_url(url)
    options: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": parsed.database}
    if parsed.get_backend_name() == "postgresql":
        options = {
            "ENGINE": "django.db.backends.postgresql", "NAME": parsed.database, "USER": parsed.username,
            "PASSWORD": parsed.password,
            "HOST": parsed.host, "PORT": parsed.port, "OPTIONS": {"options": unquote(str(parsed.query["options"]))},
        }  # fmt: skip
    connections.settings = connections.configure_settings({"default": options})


def in_django(url: str, work: Callable[[Any], None]) -> None:
    """Call `work` with Django's connection, and close it."""
    use(url)
    try:
        work(connections["default"])
    finally:
        connections["default"].close()
        del connections["default"]


def publish_and_fail(connection: Any) -> None:
    with transaction.atomic():
        OUTBOX.publish(STREAM, b"lost", connection=connection)
        _ = 1 / 0


@pytest.fixture(params=["sqlite", "psycopg"])
async def database(
    request: pytest.FixtureRequest, tmp_path: Path, schema_url: Callable[[], str]
) -> AsyncIterator[UserDatabase]:
    async with user_database(request.param, str(tmp_path / "user.db"), schema_url) as made:
        yield made


@pytest.mark.parametrize("kind", ["sqlite", "psycopg"])
async def test_a_database_without_tables_is_named_with_the_command(
    kind: str, tmp_path: Path, schema_url: Callable[[], str]
):
    def work(connection: Any) -> None:
        with pytest.raises(NotFound, match="'headrace effects migrate URL'"), transaction.atomic():
            OUTBOX.publish(STREAM, b"x", connection=connection)

    async with user_database(kind, str(tmp_path / "u.db"), schema_url, migrated=False) as database:
        await asyncio.to_thread(in_django, database.url, work)


async def test_events_leave_with_the_commit_and_not_with_a_rollback(database: UserDatabase):
    def work(connection: Any) -> None:
        with transaction.atomic():
            OUTBOX.publish(STREAM, [b"a", b"b"], connection=connection)
            with connection.cursor() as cursor:
                cursor.execute(INSERT, ["x"])
        with pytest.raises(ZeroDivisionError):
            publish_and_fail(connection)

    await asyncio.to_thread(in_django, database.url, work)
    queue = RecordingQueue()
    await OutboxMover(database_of(database.engine), queue).move()
    assert (queue.stored, database.log()) == ([(STREAM, b"a"), (STREAM, b"b")], ["x"])


async def test_a_savepoint_that_is_rolled_back_takes_its_events_along(database: UserDatabase):
    def work(connection: Any) -> None:
        with transaction.atomic():
            OUTBOX.publish(STREAM, b"first", connection=connection)
            with pytest.raises(ZeroDivisionError):
                publish_and_fail(connection)
            OUTBOX.publish(STREAM, b"last", connection=connection)

    await asyncio.to_thread(in_django, database.url, work)
    queue = RecordingQueue()
    await OutboxMover(database_of(database.engine), queue).move()
    assert queue.stored == [(STREAM, b"first"), (STREAM, b"last")]


async def test_a_publish_outside_of_atomic_is_refused(database: UserDatabase):
    def work(connection: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"publish inside of `with transaction.atomic"):
            OUTBOX.publish(STREAM, b"a", connection=connection)

    await asyncio.to_thread(in_django, database.url, work)
    assert database.rows("SELECT * FROM headrace_outbox") == []


async def test_a_connection_that_commits_at_commit_needs_no_atomic(database: UserDatabase):
    def work(connection: Any) -> None:
        transaction.set_autocommit(False)
        OUTBOX.publish(STREAM, b"a", connection=connection)
        transaction.commit()
        OUTBOX.publish(STREAM, b"lost", connection=connection)
        transaction.rollback()

    await asyncio.to_thread(in_django, database.url, work)
    queue = RecordingQueue()
    await OutboxMover(database_of(database.engine), queue).move()
    assert queue.stored == [(STREAM, b"a")]


@pytest.mark.long
async def test_a_test_that_rolls_all_back_sees_the_published_events(database: UserDatabase):
    """As Django's `TestCase` does. A silo never sees these events."""

    def work(connection: Any) -> None:
        with transaction.atomic():
            OUTBOX.publish(STREAM, [b"a", b"b"], connection=connection)
            Outbox("other").publish(STREAM, b"c", connection=connection)
            assert OUTBOX.published(connection=connection) == [(STREAM, b"a"), (STREAM, b"b")]
            transaction.set_rollback(True)

    await asyncio.to_thread(in_django, database.url, work)
    assert database.rows("SELECT * FROM headrace_outbox") == []


def test_another_database_is_refused():
    class MySQL:
        vendor, in_atomic_block = "mysql", True

        def cursor(self) -> None: ...
        def get_autocommit(self) -> bool: ...

    with pytest.raises(NotSupported, match="the engine is for mysql"):
        OUTBOX.publish(STREAM, b"a", connection=MySQL())
