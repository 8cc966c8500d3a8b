"""Events that are published if and only if a transaction of the user's database commits.

`Outbox.publish` writes them into a table, in the user's transaction. `headrace.effects.mover` publishes the committed
ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast, overload
from weakref import WeakSet
from zlib import crc32

from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from ..streams.arguments import check_text
from ..streams.codecs import CodecOption, Codecs, Publishable
from ..streams.errors import InvalidArgument
from ..streams.identity import StreamId
from ..streams.incoming import accepted
from ..streams.publishing import check_stream, encoded, listed, scheduled
from .clock import now_us
from .database import check_transactions
from .schema import check_dialect, key_of

if TYPE_CHECKING:
    import psycopg

LANES = 16
"""Number of lanes of a provider. It is fixed: a stream must stay in its lane."""

Events = Publishable | Iterable[Publishable]
OutboxRow = Mapping[str, Any]

_COLUMNS = ("provider", "lane", "stream", "events", "batch", "written_at_us")
_INSERT = f"INSERT INTO headrace_outbox ({', '.join(_COLUMNS)}) VALUES "  # noqa: S608 (only names of this module)
_NAMED = text(_INSERT + f"({', '.join(f':{name}' for name in _COLUMNS)})")
_PSYCOPG = _INSERT + f"({', '.join(f'%({name})s' for name in _COLUMNS)})"
_DJANGO = _INSERT + f"({', '.join('%s' for _ in _COLUMNS)})"
_ASYNCPG = _INSERT + f"({', '.join(f'${number + 1}' for number in range(len(_COLUMNS)))})"

_PUBLISHED = text("SELECT batch FROM headrace_outbox WHERE provider = :provider ORDER BY id")
_PUBLISHED_DJANGO = "SELECT batch FROM headrace_outbox WHERE provider = %s ORDER BY id"

_WAITING = "headrace outbox"
"""Key in `Session.info`: the rows that are inserted when the session commits."""
_heard: WeakSet[Session] = WeakSet()


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
    """Write rows in the connection's transaction."""
    connection.execute(_NAMED, rows)


class Outbox:
    """Publishes in transactions of the user's database, to the provider with this name. It needs no provider in this
    process: a silo with the option `outbox` moves the events."""

    def __init__(self, provider: str = "default", *, codec: CodecOption | None = None) -> None:
        """`codec` encodes values, as that of a client: see `Client`. Raises InvalidArgument."""
        self.provider = check_text("provider", provider)
        self._codecs = Codecs(codec)

    @overload
    def publish(
        self,
        stream: StreamId,
        events: Events,
        *,
        connection: Connection | Session | AsyncSession | psycopg.Connection[Any] | DjangoConnection,
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
        asyncpg, or `django.db.connection` inside of `transaction.atomic()`. With an AsyncConnection of SQLAlchemy or
        psycopg, and with asyncpg, await the result. Events of a session are written when it commits, after its flush.
        Events of a connection are written at once.

        Events of one stream are delivered in the order in which their transactions wrote them. If transactions lock a
        row for each stream, publish after that.

        Raises InvalidArgument for other objects, for wrong events, and for a connection that commits each statement;
        PayloadTooLarge.
        """
        rows = rows_of(self.provider, stream, events, self._codecs, delay=delay, priority=priority)
        if isinstance(connection, AsyncSession):
            connection = connection.sync_session
        if isinstance(connection, Session):
            _buffer(connection, rows)
            return None
        if isinstance(connection, Connection):
            check_transactions(connection)
            return insert(connection, rows)
        if isinstance(connection, AsyncConnection):
            return _insert_async(connection, rows)
        return _insert_by_driver(connection, rows)

    def published(self, *, connection: Connection | Session | DjangoConnection) -> list[tuple[StreamId, bytes]]:
        """Return stream and payload of each event in the outbox that this transaction sees, in order. It is for tests:
        in a transaction that a test rolls back, no silo ever sees the events.

        Raises InvalidArgument for other objects.
        """
        if isinstance(connection, Session):
            waiting = [row["batch"] for _, row in connection.info.get(_WAITING, []) if row["provider"] == self.provider]
            stored = connection.connection().execute(_PUBLISHED, {"provider": self.provider}).scalars().all()
            batches = [*stored, *waiting]
        elif isinstance(connection, Connection):
            batches = connection.execute(_PUBLISHED, {"provider": self.provider}).scalars().all()
        elif hasattr(connection, "in_atomic_block"):
            with connection.cursor() as cursor:
                cursor.execute(_PUBLISHED_DJANGO, [self.provider])
                batches = [batch for (batch,) in cursor.fetchall()]
        else:
            raise InvalidArgument("connection: expected a Connection or Session of SQLAlchemy, or one of Django")
        return [
            (batch.stream, payload)
            for batch in (accepted(bytes(each), now_us()) for each in batches)
            for payload in batch.payloads()
        ]


async def _insert_async(connection: AsyncConnection, rows: Sequence[OutboxRow]) -> None:
    await connection.run_sync(check_transactions)
    await connection.run_sync(insert, rows)


def _insert_by_driver(connection: Any, rows: Sequence[OutboxRow]) -> Awaitable[None] | None:
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    if callable(getattr(connection, "is_in_transaction", None)):
        if not connection.is_in_transaction():
            raise InvalidArgument(f"{kind} is in no transaction: publish inside of `connection.transaction()`")
        answer = connection.executemany(_ASYNCPG, [[row[name] for name in _COLUMNS] for row in rows])
        return cast("Awaitable[None]", answer)
    if hasattr(connection, "in_atomic_block"):
        return _insert_by_django(connection, rows)
    if not hasattr(connection, "pgconn"):
        raise InvalidArgument(
            f"connection is {kind}: expected a connection or session of SQLAlchemy, or a connection of psycopg, "
            "asyncpg or Django"
        )
    if connection.autocommit and connection.info.transaction_status == 0:  # 0 is IDLE: no transaction is open
        raise InvalidArgument(f"{kind} commits each statement: publish inside of `with connection.transaction()`")
    if hasattr(connection, "__aenter__"):
        return _execute_async(connection, rows)
    with connection.cursor() as cursor:
        if len(rows) == 1:  # `executemany` begins a pipeline, which costs two more messages
            cursor.execute(_PSYCOPG, rows[0])
        else:
            cursor.executemany(_PSYCOPG, rows)
    return None


def _insert_by_django(connection: DjangoConnection, rows: Sequence[OutboxRow]) -> None:
    check_dialect(connection.vendor)
    if not connection.in_atomic_block:
        raise InvalidArgument("Django commits each statement: publish inside of `with transaction.atomic()`")
    with connection.cursor() as cursor:
        cursor.executemany(_DJANGO, [[row[name] for name in _COLUMNS] for row in rows])


async def _execute_async(connection: Any, rows: Sequence[OutboxRow]) -> None:
    async with connection.cursor() as cursor:
        if len(rows) == 1:
            await cursor.execute(_PSYCOPG, rows[0])
        else:
            await cursor.executemany(_PSYCOPG, rows)


# ---- sessions --------------------------------------------------------------------------------------------------------


def _buffer(session: Session, rows: Sequence[OutboxRow]) -> None:
    """Keep the rows until the session commits. A savepoint that is rolled back takes its rows along."""
    transaction = session.get_nested_transaction() or session.get_transaction() or session.begin()
    if session not in _heard:
        _heard.add(session)
        event.listen(session, "before_commit", _before_commit)
        event.listen(session, "after_soft_rollback", _after_rollback)
        event.listen(session, "after_transaction_end", _after_end)
    session.info.setdefault(_WAITING, []).extend((transaction, row) for row in rows)


def _before_commit(session: Session) -> None:
    if session.get_nested_transaction() is not None or not session.info.get(_WAITING):
        return
    session.flush()  # as the commit does next anyway; the flush decides in which order rows are locked
    connection = session.connection()
    check_transactions(connection)
    insert(connection, [row for _, row in session.info.pop(_WAITING)])


def _after_rollback(session: Session, ended: SessionTransaction) -> None:
    waiting = session.info.pop(_WAITING, [])
    kept = [(transaction, row) for transaction, row in waiting if not _is_within(transaction, ended)]
    if kept:
        session.info[_WAITING] = kept


def _after_end(session: Session, ended: SessionTransaction) -> None:
    """After a commit, nothing waits. `close` and `reset` end the transaction without a commit or a rollback."""
    if ended.parent is None:
        session.info.pop(_WAITING, None)


def _is_within(transaction: SessionTransaction | None, outer: SessionTransaction) -> bool:
    while transaction is not None:
        if transaction is outer:
            return True
        transaction = transaction.parent
    return False
