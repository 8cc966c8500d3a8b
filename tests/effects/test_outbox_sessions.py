"""Events that listeners publish into a Session of SQLAlchemy while it flushes or commits."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from headrace import InvalidArgument, Outbox, StreamId
from headrace.effects import schema
from headrace.streams.errors import StorageError
from tests.effects.databases import prepare_insert

STREAM = StreamId("orders", "42")
OUTBOX = Outbox()
DURING_COMMIT = ("before_commit", "before_flush", "after_flush", "after_flush_postexec", "after_begin")


class Model(DeclarativeBase):
    pass


class Order(Model):
    __tablename__ = "customer_order"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture(params=["sqlite", "psycopg"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, schema_url: Callable[[], str]) -> Iterator[Engine]:
    if request.param == "sqlite":
        made = create_engine(f"sqlite:///{tmp_path}/user.db")
    else:
        made = create_engine(schema_url().replace("postgresql:", "postgresql+psycopg:"), pool_size=1)
    with made.begin() as connection:
        schema.migrate(connection)
        Model.metadata.create_all(connection)
    if request.param == "psycopg":
        prepare_insert(made)
    yield made
    made.dispose()


def asyncio_engine(engine: Engine) -> AsyncEngine:
    driver = "sqlite+aiosqlite" if engine.dialect.name == "sqlite" else "postgresql+psycopg"
    return create_async_engine(engine.url.set(drivername=driver))


def stored(engine: Engine) -> tuple[int, list[bytes]]:
    """The number of committed orders, and the committed events."""
    with engine.begin() as connection:
        orders: int = connection.execute(text("SELECT COUNT(*) FROM customer_order")).scalar_one()
        return orders, [payload for _, payload in OUTBOX.published(connection=connection)]


def publish_once(payload: bytes = b"x") -> Callable[..., None]:
    done: list[bool] = []

    def listener(session: Session, *_: Any) -> None:
        if not done:
            done.append(True)
            OUTBOX.publish(STREAM, payload, connection=session)

    return listener


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("hook", DURING_COMMIT)
def test_events_of_a_listener_are_in_the_commit(engine: Engine, hook: str, *, earlier: bool):
    with Session(engine) as session:
        event.listen(session, hook, publish_once())
        if earlier:
            OUTBOX.publish(STREAM, b"earlier", connection=session)
        session.add(Order())
        session.commit()
    assert stored(engine) == (1, [b"earlier", b"x"] if earlier else [b"x"])


@pytest.mark.parametrize("hook", DURING_COMMIT)
def test_events_of_a_listener_of_a_class_are_in_each_commit(engine: Engine, hook: str):
    maker = sessionmaker(engine)
    event.listen(maker, hook, publish_once(b"a"))
    with maker() as session:
        for _ in range(2):
            session.add(Order())
            session.commit()
        event.listen(session, hook, publish_once(b"b"))
        with session.begin():
            session.add(Order())
    assert stored(engine) == (3, [b"a", b"b"])


def test_events_of_a_listener_are_rolled_back_with_the_commit(engine: Engine):
    with Session(engine) as session:
        session.add(Order(id=1))
        session.commit()
        event.listen(session, "before_flush", publish_once(b"lost"))
        session.add(Order(id=1))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        session.add(Order(id=2))
        session.commit()
    assert stored(engine) == (2, [])


@pytest.mark.parametrize("earlier", [False, True])
def test_an_event_after_the_commit_is_refused(engine: Engine, *, earlier: bool):
    with Session(engine) as session:
        event.listen(session, "after_commit", publish_once())
        if earlier:
            OUTBOX.publish(STREAM, b"earlier", connection=session)
        session.add(Order())
        with pytest.raises(InvalidArgument, match="publish before its commit"):
            session.commit()
    assert stored(engine) == (1, [b"earlier"] if earlier else [])


def test_a_commit_above_an_open_savepoint_has_its_events(engine: Engine):
    with Session(engine) as session, session.begin():
        session.begin_nested()
        session.add(Order())
        OUTBOX.publish(STREAM, b"x", connection=session)
    assert stored(engine) == (1, [b"x"])


def test_events_that_cannot_be_written_any_more_are_an_error(engine: Engine):
    """The connection commits later, when the session has ended."""
    with engine.begin() as connection, Session(connection) as session:
        with pytest.raises(StorageError, match="has committed without 1 batches of events"), session.begin():  # noqa: PT012
            session.begin_nested()
            OUTBOX.publish(STREAM, b"lost", connection=session)
    assert stored(engine) == (0, [])


def test_an_event_that_is_published_as_the_connection_commits_is_an_error(engine: Engine):
    with Session(engine) as session:

        def late(_: Connection) -> None:
            OUTBOX.publish(STREAM, b"lost", connection=session)

        event.listen(session.connection(), "commit", late)
        with pytest.raises(StorageError, match="has committed without 1 batches of events"):
            session.commit()


def test_a_savepoint_that_is_released_keeps_events_for_the_commit(engine: Engine):
    with Session(engine) as session:
        with session.begin_nested():
            OUTBOX.publish(STREAM, b"a", connection=session)
        with session.begin_nested() as inner:
            OUTBOX.publish(STREAM, b"lost", connection=session)
            inner.rollback()
        session.rollback()
        OUTBOX.publish(STREAM, b"b", connection=session)
        session.commit()
    assert stored(engine) == (0, [b"b"])


def test_a_scoped_session_publishes_as_its_session(engine: Engine):
    scoped = scoped_session(sessionmaker(engine))
    OUTBOX.publish(STREAM, b"a", connection=scoped)
    assert OUTBOX.published(connection=scoped) == [(STREAM, b"a")]
    scoped.commit()
    OUTBOX.publish(STREAM, b"lost", connection=scoped)
    scoped.remove()
    assert stored(engine) == (0, [b"a"])


async def test_a_scoped_session_for_asyncio_publishes_as_its_session(engine: Engine):
    made = asyncio_engine(engine)
    scoped = async_scoped_session(async_sessionmaker(made), asyncio.current_task)
    OUTBOX.publish(STREAM, b"a", connection=scoped)
    assert await OUTBOX.published(connection=scoped) == [(STREAM, b"a")]
    await scoped.commit()
    await scoped.remove()
    await made.dispose()
    assert stored(engine) == (0, [b"a"])


# ---- savepoints of the connection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_a_savepoint_that_the_session_does_not_know_is_refused(engine: Engine, *, nested: bool):
    with Session(engine) as session, session.begin():
        connection = session.connection()
        OUTBOX.publish(STREAM, b"a", connection=session)
        if nested:
            session.begin_nested()  # it begins its savepoint with its first statement
        with connection.begin_nested() as savepoint:
            with pytest.raises(InvalidArgument, match=r"begin the savepoint with `session\.begin_nested\(\)`"):
                OUTBOX.publish(STREAM, b"lost", connection=session)
            OUTBOX.publish(STREAM, b"lost", connection=connection)
            savepoint.rollback()
        OUTBOX.publish(STREAM, b"b", connection=session)
        with connection.begin_nested():
            OUTBOX.publish(STREAM, b"c", connection=connection)
        OUTBOX.publish(STREAM, b"d", connection=session)
    assert stored(engine)[1] == [b"c", b"a", b"b", b"d"]


async def test_a_savepoint_that_an_asyncio_session_does_not_know_is_refused(engine: Engine):
    made = asyncio_engine(engine)
    async with AsyncSession(made) as session, session.begin():
        OUTBOX.publish(STREAM, b"a", connection=session)
        savepoint = await (await session.connection()).begin_nested()
        with pytest.raises(InvalidArgument, match="begin the savepoint with"):
            OUTBOX.publish(STREAM, b"lost", connection=session)
        await savepoint.rollback()
        async with session.begin_nested():
            await session.execute(text("SELECT 1"))
            OUTBOX.publish(STREAM, b"b", connection=session)
    await made.dispose()
    assert stored(engine) == (0, [b"a", b"b"])


@pytest.mark.parametrize("hook", ["after_begin", "after_transaction_create"])
def test_a_listener_publishes_as_a_savepoint_begins(engine: Engine, hook: str):
    with Session(engine) as session, session.begin():
        session.connection()
        event.listen(session, hook, publish_once())
        session.begin_nested()
        session.connection()
    assert stored(engine) == (0, [b"x"])


@pytest.mark.parametrize("in_savepoint", [False, True])
@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"])
def test_a_session_joins_the_transaction_of_a_connection(engine: Engine, mode: Any, *, in_savepoint: bool):
    with engine.begin() as connection:
        if in_savepoint:
            connection.begin_nested()
        with Session(connection, join_transaction_mode=mode) as session:
            session.add(Order())
            session.flush()
            OUTBOX.publish(STREAM, b"a", connection=session)
            with session.begin_nested():
                session.add(Order())
                session.flush()
                OUTBOX.publish(STREAM, b"b", connection=session)
            with connection.begin_nested(), pytest.raises(InvalidArgument, match="begin the savepoint with"):
                OUTBOX.publish(STREAM, b"lost", connection=session)
            session.commit()
        if connection.in_transaction():
            connection.commit()
    assert stored(engine) == (2, [b"a", b"b"])


# ---- the end of a savepoint ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "rollback", "commit", "leave open"])
def test_a_savepoint_that_ends_takes_its_events_along_unless_it_is_released(engine: Engine, end: str):
    with Session(engine) as session, session.begin():
        OUTBOX.publish(STREAM, b"outer", connection=session)
        savepoint = session.begin_nested()
        session.add(Order())
        session.flush()
        OUTBOX.publish(STREAM, b"inner", connection=session)
        if end != "leave open":
            getattr(savepoint, end)()
    is_kept = end in ("commit", "leave open")
    assert stored(engine) == ((1, [b"outer", b"inner"]) if is_kept else (0, [b"outer"]))


@pytest.mark.parametrize("end", ["close", "rollback"])
@pytest.mark.parametrize("inner_end", ["commit", "leave open"])
def test_events_of_a_released_savepoint_belong_to_the_outer_one(engine: Engine, end: str, inner_end: str):
    with Session(engine) as session, session.begin():
        outer = session.begin_nested()
        inner = session.begin_nested()
        session.add(Order())
        session.flush()
        OUTBOX.publish(STREAM, b"lost", connection=session)
        if inner_end == "commit":
            inner.commit()
        getattr(outer, end)()
        OUTBOX.publish(STREAM, b"kept", connection=session)
    assert stored(engine) == (0, [b"kept"])


@pytest.mark.parametrize("hook", ["before_commit", "after_commit", "after_transaction_end"])
def test_events_of_a_listener_are_kept_when_a_savepoint_is_released(engine: Engine, hook: str):
    with Session(engine) as session, session.begin():
        savepoint = session.begin_nested()
        session.add(Order())
        event.listen(session, hook, publish_once())
        savepoint.commit()
    assert stored(engine) == (1, [b"x"])


def test_a_failed_flush_leaves_no_event(engine: Engine):
    with Session(engine) as session, session.begin():
        OUTBOX.publish(STREAM, b"kept", connection=session)
        savepoint = session.begin_nested()
        OUTBOX.publish(STREAM, b"lost", connection=session)
        session.execute(text("INSERT INTO customer_order (id) VALUES (1)"))
        session.add(Order(id=1))
        with pytest.raises(IntegrityError):
            session.flush()
        savepoint.rollback()
    assert stored(engine) == (0, [b"kept"])


def test_a_savepoint_of_a_transaction_that_was_rolled_back_publishes_nothing_later(engine: Engine):
    with engine.connect() as connection:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            with connection.begin():
                with session.begin_nested():
                    OUTBOX.publish(STREAM, b"one", connection=session)
                session.rollback()
                OUTBOX.publish(STREAM, b"two", connection=session)
        with connection.begin():
            OUTBOX.publish(STREAM, b"three", connection=connection)
    assert stored(engine) == (0, [b"three"])
