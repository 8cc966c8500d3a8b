"""Events that are published if and only if a transaction of the user's database commits.

`Outbox.publish` writes them into a table, in the user's transaction. `headrace.effects.mover` publishes the committed
ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, overload
from zlib import crc32

from sqlalchemy import Connection, NestedTransaction, event, inspect, text
from sqlalchemy.exc import InvalidRequestError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from ..streams.clock import now_us
from ..streams.codecs import CodecOption, Codecs, Publishable
from ..streams.errors import InvalidArgument, StorageError
from ..streams.identity import StreamId
from ..streams.incoming import accepted
from ..streams.publishing import check_stream, encoded, listed, scheduled
from ..streams.subscriptions import check_provider_name
from .driver_state import ACTIVE, IDLE, refuse_autocommit
from .schema import check_dialect, key_of, no_tables, outbox

if TYPE_CHECKING:
    import psycopg

LANES = 16
"""Number of lanes of a provider. It is fixed: a stream must stay in its lane."""

Events = Publishable | Iterable[Publishable]
AnySession = Session | scoped_session[Any]
AnyAsyncSession = AsyncSession | async_scoped_session[Any]
OutboxRow = Mapping[str, Any]
PublishedEvents = list[tuple[StreamId, bytes]]
"""Stream and payload of each event."""

_COLUMNS = ("provider", "lane", "stream", "events", "batch", "written_at_us")
_INSERT = f"INSERT INTO headrace_outbox ({', '.join(_COLUMNS)}) VALUES "  # noqa: S608 (only names of this module)
_NAMED = text(_INSERT + f"({', '.join(f':{name}' for name in _COLUMNS)})")
_PSYCOPG = _INSERT + f"({', '.join(f'%({name})s' for name in _COLUMNS)})"
_DJANGO = _INSERT + f"({', '.join('%s' for _ in _COLUMNS)})"
_ASYNCPG = _INSERT + f"({', '.join(f'${number + 1}' for number in range(len(_COLUMNS)))})"

_PUBLISHED = text("SELECT batch FROM headrace_outbox WHERE provider = :provider ORDER BY id")
_PUBLISHED_BY_DRIVER = "SELECT batch FROM headrace_outbox WHERE provider = %s ORDER BY id"
_PUBLISHED_ASYNCPG = "SELECT batch FROM headrace_outbox WHERE provider = $1 ORDER BY id"

_UNDEFINED_TABLE, _UNTRANSLATABLE = "42P01", "22P05"
"""SQLSTATE."""
_NO_PIPELINE = 0
"""The status `PQ_PIPELINE_OFF` of libpq."""

_BUFFERED = "headrace outbox"
"""Key of `BufferedEvents` in `Session.info`."""


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


def lane_of(stream: StreamId) -> int:
    """Return the lane of a stream, the same in all processes and versions."""
    return crc32(str(stream).encode()) % LANES


def rows_of(
    provider: str,
    stream: StreamId,
    events: Events,
    codecs: Codecs,
    *,
    delay: timedelta | None = None,
    priority: int | None = None,
) -> list[OutboxRow]:
    """Return the rows of the outbox for events of one stream. Raises InvalidArgument, PayloadTooLarge."""
    check_stream(stream)
    common = {"provider": provider, "lane": lane_of(stream), "stream": key_of(stream), "written_at_us": now_us()}
    batches = encoded(stream, scheduled(listed(stream, events, codecs), delay, priority))
    return [{**common, "events": batch.count, "batch": batch.encoded} for batch in batches]


def insert(connection: Connection, rows: Sequence[OutboxRow]) -> None:
    """Write rows in the connection's transaction. Raises NotFound if the database has no outbox."""
    with _translated_errors():
        try:
            connection.execute(_NAMED, rows)
        except OperationalError as error:
            if connection.dialect.name == "sqlite" and not inspect(connection).has_table(outbox.name):
                raise no_tables(connection) from error
            raise


@contextmanager
def _translated_errors() -> Generator[None]:
    """Turn PostgreSQL's error for a missing table into NotFound, and that for a character that the encoding lacks into
    InvalidArgument, for each driver."""
    try:
        yield
    except Exception as error:
        causes = error, getattr(error, "orig", None), error.__cause__  # SQLAlchemy has `orig`, Django the cause
        states = {getattr(cause, name, None) for cause in causes for name in ("sqlstate", "pgcode")}
        if _UNDEFINED_TABLE in states:
            raise no_tables() from error
        if _UNTRANSLATABLE in states or isinstance(error, UnicodeEncodeError):
            raise InvalidArgument(
                "the encoding of the database, or of the connection, lacks a character of the stream's name: take a "
                "database with the encoding UTF8, and client_encoding = UTF8"
            ) from error
        raise


class Outbox:
    """Publishes in transactions of the user's database, to the provider with this name. It needs no provider in this
    process: a silo with the option `outbox` moves the events."""

    def __init__(self, provider: str = "default", *, codec: CodecOption | None = None) -> None:
        """`codec` encodes values, as that of a client: see `Client`. Raises InvalidArgument."""
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
            _publish_in_session(connection, rows)
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
        buffered = session.info.get(_BUFFERED, BufferedEvents()).rows
        waiting = [row["batch"] for row in buffered if row["provider"] == self.provider]
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
    with _translated_errors(), _psycopg_cursor(connection) as cursor:
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
    with _translated_errors(), connection.cursor() as cursor:
        try:
            cursor.executemany(_DJANGO, [[row[name] for name in _COLUMNS] for row in rows])
        except Exception as error:
            if connection.vendor == "sqlite" and outbox.name not in introspection.table_names(cursor):
                raise no_tables() from error
            raise


async def _insert_by_asyncpg(connection: AsyncpgConnection, rows: Sequence[OutboxRow]) -> None:
    with _translated_errors():
        await connection.executemany(_ASYNCPG, [[row[name] for name in _COLUMNS] for row in rows])


async def _insert_by_psycopg_async(connection: Any, rows: Sequence[OutboxRow]) -> None:
    if _hides_transaction(connection):
        async with connection.pipeline():
            pass
        _refuse_idle(connection)
    with _translated_errors():
        async with _psycopg_cursor(connection) as cursor:
            if len(rows) == 1:
                await cursor.execute(_PSYCOPG, rows[0])
            else:
                await cursor.executemany(_PSYCOPG, rows)


# ---- sessions --------------------------------------------------------------------------------------------------------


class BufferedEvents:
    """The rows that a session inserts when it commits. It is kept in `Session.info`."""

    def __init__(self) -> None:
        self.rows: list[OutboxRow] = []
        self._starts: dict[SessionTransaction, int] = {}
        """The number of rows before the first one of each open transaction or savepoint."""
        self.committing: SessionTransaction | None = None
        """Its commit has begun, and its rows are inserted: later ones are inserted at once."""
        self.committed: SessionTransaction | None = None
        self.released: SessionTransaction | None = None
        """The last savepoint that was released: at its end, its rows stay."""
        self.savepoints: dict[SessionTransaction, dict[Connection, NestedTransaction | None]] = {}
        """The savepoint in which each transaction of the session found or began a connection; None: in no savepoint."""
        self.is_prepared = False
        self.is_inserted_at_commit = False
        """Whether the commit of the connection inserts the rows, too."""
        self._listeners: list[tuple[Connection, str, Callable[..., None]]] = []

    def add(self, transaction: SessionTransaction, rows: Sequence[OutboxRow]) -> None:
        """Keep the rows of a transaction or savepoint."""
        for each in _with_parents(transaction):
            self._starts.setdefault(each, len(self.rows))
        self.rows += rows

    def end_savepoint(self, ended: SessionTransaction) -> None:
        """Drop the rows of a savepoint that is not released, and those of the savepoints in it."""
        self.savepoints.pop(ended, None)
        if ended is not self.released:
            del self.rows[self._starts.get(ended, len(self.rows)) :]
        self._starts = {each: start for each, start in self._starts.items() if ended not in _with_parents(each)}

    def listen(self, connection: Connection, name: str, listener: Callable[..., None]) -> None:
        """Listen to an event of a connection until `stop_listening`."""
        event.listen(connection, name, listener)
        self._listeners.append((connection, name, listener))

    def stop_listening(self) -> None:
        while self._listeners:
            event.remove(*self._listeners.pop())

    def note_prepared(self, *_: object) -> None:
        self.is_prepared = True

    def take(self) -> list[OutboxRow]:
        """Return the rows, and forget them."""
        rows, self.rows, self._starts = self.rows, [], {}
        return rows


def _publish_in_session(session: Session, rows: Sequence[OutboxRow]) -> None:
    """Keep the rows until the session commits. A savepoint that is rolled back takes its rows along."""
    transaction = session.get_nested_transaction() or session.get_transaction() or session.begin()
    root = session.get_transaction()
    buffered: BufferedEvents = session.info.setdefault(_BUFFERED, BufferedEvents())
    if buffered.committed is root:
        raise InvalidArgument("the session's transaction is committed: publish before its commit, not after it")
    if buffered.is_prepared:
        raise InvalidArgument("the session's transaction is prepared: publish before `session.prepare()`, not after it")
    _refuse_unknown_savepoint(buffered)
    buffered.add(transaction, rows)
    if buffered.committing is root:
        _insert_while_committing(session)


def _refuse_unknown_savepoint(buffered: BufferedEvents) -> None:
    """Raise InvalidArgument if a connection is in a savepoint that the session did not begin: its rollback would leave
    the rows in the buffer."""
    known = {pair for begun in buffered.savepoints.values() for pair in begun.items()}
    for connection, _ in known:
        current = connection.get_nested_transaction()
        if current is not None and (connection, current) not in known:
            raise InvalidArgument(
                "the connection of the session is in a savepoint that the session does not know: begin the savepoint "
                "with `session.begin_nested()`, or publish with `connection=session.connection()`"
            )


def _insert_while_committing(session: Session) -> None:
    try:
        connection = session.connection()
    except InvalidRequestError:
        return  # in `after_begin`, SQLAlchemy 2.1 allows no statement yet: the end of the flush inserts the rows
    _insert_buffered(session, connection)


def _insert_buffered(session: Session, connection: Connection) -> None:
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is not None and buffered.rows:
        refuse_autocommit(connection)
        insert(connection, buffered.take())


# Listeners for all sessions of the process: a listener that a session gets during its commit may not be called.


@event.listens_for(Session, "after_begin", insert=True)  # before the user's listeners, which may publish
def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    buffered: BufferedEvents = session.info.setdefault(_BUFFERED, BufferedEvents())
    buffered.savepoints.setdefault(transaction, {})[connection] = connection.get_nested_transaction()
    if session.twophase and transaction.parent is None:
        buffered.listen(connection, "prepare_twophase", buffered.note_prepared)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    buffered = session.info.setdefault(_BUFFERED, BufferedEvents())
    if session.get_nested_transaction() is not None:
        # Either a savepoint is released, or the transaction is committed above an open savepoint. In the second case,
        # SQLAlchemy calls no further listener of the session, so a listener of its connection inserts the rows.
        if buffered.rows:
            _insert_at_commit(session, session.connection())
        return
    if buffered.rows:
        session.flush()  # as the commit does next anyway; the flush decides in which order rows are locked
        _insert_buffered(session, session.connection())
    buffered.committing = session.get_transaction()


def _insert_at_commit(session: Session, connection: Connection) -> None:
    """Insert the rows also when the connection commits, until the session's transaction ends."""
    buffered: BufferedEvents = session.info[_BUFFERED]
    if not buffered.is_inserted_at_commit:
        buffered.is_inserted_at_commit = True
        buffered.listen(connection, "commit", partial(_insert_buffered, session))


@event.listens_for(Session, "after_flush")
def _after_flush(session: Session, _: object) -> None:
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is not None and buffered.rows and buffered.committing is session.get_transaction():
        _insert_buffered(session, session.connection())


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    """Refuse events that come too late. Rows that came too late to be inserted are an error: they must not be lost
    silently."""
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is None:
        return
    if (savepoint := session.get_nested_transaction()) is not None:
        buffered.released = savepoint
        return
    buffered.committed = session.get_transaction()
    if buffered.rows:
        raise StorageError(
            f"the session has committed without {len(buffered.take())} batches of events, which were published while "
            "it committed: publish them before, and release savepoints before the commit"
        )


@event.listens_for(Session, "after_transaction_end")
def _after_end(session: Session, ended: SessionTransaction) -> None:
    """Forget the rows of a transaction or savepoint that ends without a commit. `close` and `reset` call no listener of
    a rollback."""
    buffered: BufferedEvents | None = session.info.get(_BUFFERED)
    if buffered is None:
        return
    if ended.parent is None:
        del session.info[_BUFFERED]
        buffered.stop_listening()
    elif ended.nested:
        buffered.end_savepoint(ended)


def _with_parents(transaction: SessionTransaction) -> Iterator[SessionTransaction]:
    inner: SessionTransaction | None = transaction
    while inner is not None:
        yield inner
        inner = inner.parent
