"""Events that are published if and only if a transaction of the user's database commits.

`Outbox.publish` writes them into a table, in the user's transaction. `headrace.effects.mover` publishes the committed
ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast, overload

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from ..streams.clock import now_us
from ..streams.codecs import CodecOption, Codecs
from ..streams.errors import InvalidArgument
from ..streams.identity import StreamId
from ..streams.incoming import accepted
from ..streams.subscriptions import check_provider_name
from .driver_state import ACTIVE, IDLE, refuse_autocommit
from .outbox_rows import COLUMNS, INSERT, NUMBERED_INSERT, Events, OutboxRow, insert, rows_of, translated_errors
from .outbox_sessions import publish_in_session, waiting_rows
from .schema import check_dialect, no_tables, outbox

if TYPE_CHECKING:
    import psycopg

AnySession = Session | scoped_session[Any]
AnyAsyncSession = AsyncSession | async_scoped_session[Any]
PublishedEvents = list[tuple[StreamId, bytes]]
"""Stream and payload of each event."""

_PSYCOPG = INSERT + f"({', '.join(f'%({name})s' for name in COLUMNS)})"
_DJANGO = INSERT + f"({', '.join('%s' for _ in COLUMNS)})"

_PUBLISHED = text("SELECT batch FROM headrace_outbox WHERE provider = :provider ORDER BY id")
_PUBLISHED_BY_DRIVER = "SELECT batch FROM headrace_outbox WHERE provider = %s ORDER BY id"
_PUBLISHED_ASYNCPG = "SELECT batch FROM headrace_outbox WHERE provider = $1 ORDER BY id"

_NO_PIPELINE = 0
"""The status `PQ_PIPELINE_OFF` of libpq."""


class AsyncpgConnection(Protocol):
    """A connection of asyncpg."""

    def is_in_transaction(self) -> bool: ...

    async def executemany(self, command: str, args: Iterable[Sequence[Any]], /) -> None: ...


class DjangoConnection(Protocol):
    """`django.db.connection`, or one of `django.db.connections`."""

    @property
    def vendor(self) -> str: ...

    @property
    def in_atomic_block(self) -> bool: ...

    def get_autocommit(self) -> bool: ...

    def cursor(self) -> Any: ...


class Outbox:
    """Publishes in transactions of the user's database, to the provider with this name. It needs no provider in this
    process: a silo with the option `outbox` moves the events."""

    def __init__(self, provider: str = "default", *, codec: CodecOption | None = None) -> None:
        """`codec` encodes values, as that of a client: see `Client`. Raises InvalidArgument."""
        if "://" in str(provider):  # the text of `check_provider_name` would have the password
            raise InvalidArgument(
                "Outbox takes the name of a provider, such as 'default', and no URL: `publish` gets the connection"
            )
        self.provider = check_provider_name(provider)
        self._codecs = Codecs(codec)

    @overload
    def publish(
        self,
        stream: StreamId,
        events: Events,
        *,
        connection: Connection | AnySession | AnyAsyncSession | psycopg.Connection[Any] | DjangoConnection,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> None: ...
    @overload
    def publish(
        self,
        stream: StreamId,
        events: Events,
        *,
        connection: AsyncConnection | psycopg.AsyncConnection[Any] | AsyncpgConnection,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> Awaitable[None]: ...
    def publish(
        self,
        stream: StreamId,
        events: Events,
        *,
        connection: Any,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> Awaitable[None] | None:
        """Publish to one stream when the connection's transaction commits. Nothing is flushed or committed by this.

        `connection` is a Connection, AsyncConnection, Session or AsyncSession of SQLAlchemy, a connection of psycopg or
        asyncpg, or `django.db.connection` in a transaction. A session may be scoped. With an AsyncConnection of
        SQLAlchemy or psycopg, and with asyncpg, await the result. Events of a session are written when it commits,
        after its flush; those that a listener of the session publishes later in the commit, at once. Events of a
        connection are written at once.

        Events of one stream keep the order of their transactions if one commits before the next one publishes.
        Transactions that overlap are in any order. If order matters, lock a row for each stream, and publish after it.

        Raises InvalidArgument for other objects, for wrong events, for a connection that commits each statement, for a
        session that is prepared or has committed (`after_commit`), and for one whose connection has a savepoint that
        the session did not begin; PayloadTooLarge; NotFound if the database has no outbox.
        """
        rows = rows_of(self.provider, stream, events, self._codecs, delay=delay, priority=priority)
        connection = _of_scope(connection)
        if isinstance(connection, AsyncSession):
            connection = connection.sync_session
        if isinstance(connection, Session):
            publish_in_session(connection, rows)
            return None
        if isinstance(connection, Connection):
            refuse_autocommit(connection)
            return insert(connection, rows)
        if isinstance(connection, AsyncConnection):
            return _insert_async(connection, rows)
        return _insert_by_driver(connection, rows)

    @overload
    def published(
        self, *, connection: Connection | AnySession | psycopg.Connection[Any] | DjangoConnection
    ) -> PublishedEvents: ...
    @overload
    def published(
        self, *, connection: AsyncConnection | AnyAsyncSession | psycopg.AsyncConnection[Any] | AsyncpgConnection
    ) -> Awaitable[PublishedEvents]: ...
    def published(self, *, connection: Any) -> PublishedEvents | Awaitable[PublishedEvents]:
        """Return stream and payload of each event in the outbox that this transaction sees, in order. It is for tests:
        in a transaction that a test rolls back, no silo ever sees the events.

        `connection` is one that `publish` takes. With an AsyncSession, and with those for which `publish` is awaited,
        await the result. Raises InvalidArgument for other objects.
        """
        connection = _of_scope(connection)
        if isinstance(connection, Session):
            return self._in_session(connection)
        if isinstance(connection, AsyncSession):
            return connection.run_sync(self._in_session)
        if isinstance(connection, Connection):
            return self._in_connection(connection)
        if isinstance(connection, AsyncConnection):
            return connection.run_sync(self._in_connection)
        return self._by_driver(connection)

    def _by_driver(self, connection: Any) -> PublishedEvents | Awaitable[PublishedEvents]:
        if callable(getattr(connection, "is_in_transaction", None)):
            return self._in_asyncpg(connection)
        if hasattr(connection, "in_atomic_block"):
            with connection.cursor() as cursor:
                cursor.execute(_PUBLISHED_BY_DRIVER, [self.provider])
                return _events_of(batch for (batch,) in cursor.fetchall())
        if not hasattr(connection, "pgconn"):
            raise _unknown_connection(connection)
        return self._in_psycopg_async(connection) if hasattr(connection, "__aenter__") else self._in_psycopg(connection)

    def _in_session(self, session: Session) -> PublishedEvents:
        waiting = [row["batch"] for row in waiting_rows(session) if row["provider"] == self.provider]
        return [*self._in_connection(session.connection()), *_events_of(waiting)]

    def _in_connection(self, connection: Connection) -> PublishedEvents:
        return _events_of(connection.execute(_PUBLISHED, {"provider": self.provider}).scalars().all())

    def _in_psycopg(self, connection: psycopg.Connection[Any]) -> PublishedEvents:
        from psycopg.rows import scalar_row  # noqa: PLC0415 (the driver is optional)

        with _psycopg_cursor(connection, row_factory=scalar_row) as cursor:
            return _events_of(cursor.execute(_PUBLISHED_BY_DRIVER, [self.provider]).fetchall())

    async def _in_psycopg_async(self, connection: psycopg.AsyncConnection[Any]) -> PublishedEvents:
        from psycopg.rows import scalar_row  # noqa: PLC0415 (the driver is optional)

        async with _psycopg_cursor(connection, row_factory=scalar_row) as cursor:
            await cursor.execute(_PUBLISHED_BY_DRIVER, [self.provider])
            return _events_of(await cursor.fetchall())

    async def _in_asyncpg(self, connection: Any) -> PublishedEvents:
        return _events_of(row[0] for row in await connection.fetch(_PUBLISHED_ASYNCPG, self.provider))


def _events_of(batches: Iterable[bytes]) -> PublishedEvents:
    """Return the events of rows of the outbox."""
    return [
        (batch.stream, payload)
        for batch in (accepted(bytes(each), now_us()) for each in batches)
        for payload in batch.payloads()
    ]


def _of_scope(connection: Any) -> Any:
    """Return the session of a scoped session; anything else as it is."""
    if isinstance(connection, scoped_session | async_scoped_session):
        return cast("Any", connection)()
    return connection


def _unknown_connection(connection: object) -> InvalidArgument:
    return InvalidArgument(
        f"connection is {_kind_of(connection)}: expected a connection or session of SQLAlchemy, or a connection of "
        "psycopg, asyncpg or Django"
    )


def _kind_of(connection: object) -> str:
    return f"{type(connection).__module__}.{type(connection).__qualname__}"


async def _insert_async(connection: AsyncConnection, rows: Sequence[OutboxRow]) -> None:
    await connection.run_sync(refuse_autocommit)
    await connection.run_sync(insert, rows)


def _insert_by_driver(connection: Any, rows: Sequence[OutboxRow]) -> Awaitable[None] | None:
    kind = _kind_of(connection)
    if callable(getattr(connection, "is_in_transaction", None)):
        if not connection.is_in_transaction():
            raise InvalidArgument(f"{kind} is in no transaction: publish inside of `connection.transaction()`")
        return _insert_by_asyncpg(connection, rows)
    if hasattr(connection, "in_atomic_block"):
        return _insert_by_django(connection, rows)
    if not hasattr(connection, "pgconn"):
        raise _unknown_connection(connection)
    _refuse_idle(connection)
    if hasattr(connection, "__aenter__"):
        return _insert_by_psycopg_async(connection, rows)
    if _hides_transaction(connection):
        with connection.pipeline():
            pass  # leaving it waits for all results
        _refuse_idle(connection)
    with translated_errors(), _psycopg_cursor(connection) as cursor:
        if len(rows) == 1:  # `executemany` begins a pipeline, which costs two more messages
            cursor.execute(_PSYCOPG, rows[0])
        else:
            cursor.executemany(_PSYCOPG, rows)
    return None


def _refuse_idle(connection: Any) -> None:
    """Raise InvalidArgument for a connection of psycopg that commits each statement, and shows no open transaction."""
    if connection.autocommit and connection.info.transaction_status == IDLE:
        raise InvalidArgument(
            f"{_kind_of(connection)} commits each statement: publish inside of `with connection.transaction()`"
        )


def _hides_transaction(connection: Any) -> bool:
    """Return whether psycopg's pipeline mode has results to wait for. Only they show if a transaction is open."""
    is_piped = connection.pgconn.pipeline_status != _NO_PIPELINE
    return is_piped and connection.autocommit and connection.info.transaction_status == ACTIVE


def _psycopg_cursor(connection: Any, **options: Any) -> Any:
    """Return a cursor with the placeholders of `_PSYCOPG`. A raw cursor has others."""
    import psycopg  # noqa: PLC0415 (the driver is optional)

    cursor = connection.cursor(**options)
    if isinstance(cursor, psycopg.RawCursor):
        return psycopg.Cursor(connection, **options)
    return psycopg.AsyncCursor(connection, **options) if isinstance(cursor, psycopg.AsyncRawCursor) else cursor


def _insert_by_django(connection: DjangoConnection, rows: Sequence[OutboxRow]) -> None:
    check_dialect(connection.vendor)
    if not connection.in_atomic_block and connection.get_autocommit():
        raise InvalidArgument("Django commits each statement: publish inside of `with transaction.atomic()`")
    introspection = cast("Any", connection).introspection
    with translated_errors(), connection.cursor() as cursor:
        try:
            cursor.executemany(_DJANGO, [[row[name] for name in COLUMNS] for row in rows])
        except Exception as error:
            if connection.vendor == "sqlite" and outbox.name not in introspection.table_names(cursor):
                raise no_tables() from error
            raise


async def _insert_by_asyncpg(connection: AsyncpgConnection, rows: Sequence[OutboxRow]) -> None:
    with translated_errors():
        await connection.executemany(NUMBERED_INSERT, [[row[name] for name in COLUMNS] for row in rows])


async def _insert_by_psycopg_async(connection: Any, rows: Sequence[OutboxRow]) -> None:
    if _hides_transaction(connection):
        async with connection.pipeline():
            pass
        _refuse_idle(connection)
    with translated_errors():
        async with _psycopg_cursor(connection) as cursor:
            if len(rows) == 1:
                await cursor.execute(_PSYCOPG, rows[0])
            else:
                await cursor.executemany(_PSYCOPG, rows)
