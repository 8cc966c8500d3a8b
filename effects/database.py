"""Transactions in the user's database, from an event loop.

All statements are written for a plain `Connection` of SQLAlchemy. With an `AsyncEngine` they run in a greenlet, with an
`Engine` in a thread.
"""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from traceback import clear_frames
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakSet

from sqlalchemy import Connection, Engine, ExceptionContext, event, text
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from ..streams.errors import InvalidArgument, NotSupported, Unavailable
from .driver_state import IN_ERROR, cancel_statement, is_in_transaction, reports_aborted, transaction_status
from .handler_session import SESSION_OPTIONS, HandlerSession, flush_and_close
from .schema import GRANT
from .statement_thread import StatementThread

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_TRANSACTIONS = 16
"""How many transactions run at a time if the engine's pool has no size."""
CANCEL_S = 2.0
"""How long a cancelled transaction of an `Engine` waits for the end of its statement, in seconds."""
CANCEL_AGAIN_S = 0.2
"""Pause between two attempts to cancel a statement, in seconds: the first one may come between two statements."""
CONFLICTS = ("40001", "40P01")
"""SQLSTATE of a serialization failure, and of a deadlock."""
_OUTAGES = ("08", "53", "57P", "55P03", "25006")
"""The first characters of SQLSTATEs: no connection, no resources, shutdown, no lock, a standby or read-only server."""
_NO_RIGHT = "42501"
_SQLITE_OUTAGES = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL,
)  # fmt: skip
"""The file is locked, or it or its disk cannot be used."""


class EffectTransaction(ABC):
    """A transaction that is open."""

    @abstractmethod
    async def call(self, function: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `function(connection, ...)`."""

    @abstractmethod
    async def call_session(
        self, function: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return `function(session, ...)`. The session is the same one during the transaction."""

    @abstractmethod
    async def flush(self) -> None:
        """Flush the session, and end it. Raises InvalidArgument if the handler has ended the transaction."""

    @property
    @abstractmethod
    def connection(self) -> AsyncConnection: ...

    @property
    @abstractmethod
    def session(self) -> AsyncSession: ...


class EffectDatabase(ABC):
    """A database in which effects are applied. Raises InvalidArgument for one in memory."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        size = getattr(engine.pool, "size", None)
        pooled = size() if callable(size) else 0
        self.transactions = (pooled if isinstance(pooled, int) else 0) or DEFAULT_TRANSACTIONS
        """How many transactions should run at a time."""
        if engine.dialect.name == "sqlite":
            if engine.url.database in (None, "", ":memory:"):
                raise InvalidArgument("effects in SQLite need a file: a database in memory ends with its connection")
            self.transactions = 1
            for name, listener in (("savepoint", _begin_before_savepoint), ("handle_error", _end_cancelled_statement)):
                if not event.contains(engine, name, listener):
                    event.listen(engine, name, listener)

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[EffectTransaction]:
        """Open a transaction for the length of an `async with`, and commit it at the end; roll it back after an error.

        Raises Unavailable if the database cannot be reached, or if it is not known whether the commit succeeded.
        """


class DriverStatement:
    """A statement that returns no rows, and is executed for each event. In PostgreSQL it bypasses SQLAlchemy's
    execution, which costs as much as the driver's."""

    def __init__(self, sql: str) -> None:
        self._statement = text(sql)
        self._compiled: dict[tuple[str, str], tuple[str, Sequence[str] | None]] = {}
        """By dialect and driver: text, and the order of parameters if it has no names."""

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> int:
        """Return the number of rows that were changed. Raises the errors of SQLAlchemy, and NotSupported if the driver
        does not tell this number."""
        dialect = connection.dialect
        known = self._compiled.get((dialect.name, dialect.driver))
        if known is None:
            made = cast("Any", self._statement.compile(dialect=dialect))
            known = str(made), list(made.positiontup) if made.positional else None
            self._compiled[dialect.name, dialect.driver] = known
        sql, order = known
        parameters: Any = dict(values) if order is None else tuple(values[name] for name in order)
        if dialect.name == "sqlite":  # SQLAlchemy's own way ends cancelled statements: see _end_cancelled_statement
            changed = connection.exec_driver_sql(sql, parameters).rowcount
        else:
            changed = _rows_changed(connection, sql, parameters)
        if changed < 0:
            raise NotSupported(f"the driver {dialect.driver!r} does not tell how many rows a statement has changed")
        return changed


def _rows_changed(connection: Connection, sql: str, parameters: Any) -> int:
    pooled, cursor = connection.connection, None
    try:
        cursor = pooled.cursor()
        cursor.execute(sql, parameters)
        return cursor.rowcount
    except BaseException as error:  # noqa: BLE001 (it is raised again)
        # Wraps the error and invalidates a lost connection, as for SQLAlchemy's own statements. There is no public
        # method; test_one_lost_connection_of_the_pool_stands_for_all finds out if this one changes.
        connection._handle_dbapi_exception(error, sql, parameters, cursor, None)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    finally:
        if cursor is not None:
            cursor.close()


# ---- AsyncEngine -----------------------------------------------------------------------------------------------------


class AsyncEffectDatabase(EffectDatabase):
    """A database with an `AsyncEngine`."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine.sync_engine)
        self._engine = engine

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[EffectTransaction]:
        async with AsyncExitStack() as stack:
            with outages():
                connection = await stack.enter_async_context(self._engine.connect())
            yield await stack.enter_async_context(_transaction_on(connection))


class ConnectionEffectDatabase(EffectDatabase):
    """A database with one `AsyncConnection`, which stays open."""

    def __init__(self, connection: AsyncConnection) -> None:
        super().__init__(connection.engine.sync_engine)
        self._connection = connection
        self.transactions = 1

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[EffectTransaction]:
        if self._connection.in_transaction():
            raise InvalidArgument(
                "the connection is in a transaction: give one that is in none, because headrace begins and commits"
            )
        async with _transaction_on(self._connection) as opened:
            yield opened


@asynccontextmanager
async def _transaction_on(connection: AsyncConnection) -> AsyncGenerator[EffectTransaction]:
    _connections_of_effects.add(_sync_connection(connection))
    with outages():
        root = await connection.begin()
    opened = _GreenletTransaction(connection)
    try:
        try:
            yield opened
        finally:
            opened.is_over = True
        await opened.flush()
        if not reports_aborted(_sync_connection(connection)):
            await connection.execute(text("SELECT 1"))  # fails if PostgreSQL has aborted the transaction
        with outages():
            await root.commit()
    finally:
        if connection.get_transaction() is not None:  # perhaps one that the handler has begun, or a lost connection's
            await connection.rollback()


class _GreenletTransaction(EffectTransaction):
    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._observed = ObservedTransaction(
            _sync_connection(connection), "tx.connection.begin_nested() or tx.session.begin_nested()"
        )
        self._session: AsyncSession | None = None
        self.is_over = False

    async def call(self, function: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        _check_not_over(is_over=self.is_over)
        self._observed.refuse_ended()
        try:
            return await self._connection.run_sync(function, *args, **kwargs)
        finally:
            self._observed.observe()

    async def call_session(
        self, function: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        _check_not_over(is_over=self.is_over)
        self._observed.refuse_ended()
        try:
            return await self.session.run_sync(function, *args, **kwargs)
        finally:
            self._observed.observe()

    async def flush(self) -> None:
        self._observed.check()
        session, self._session = self._session, None
        if session is not None:
            await session.run_sync(flush_and_close)

    @property
    def connection(self) -> AsyncConnection:
        _check_not_over(is_over=self.is_over)
        return self._connection

    @property
    def session(self) -> AsyncSession:
        _check_not_over(is_over=self.is_over)
        if self._session is None:
            self._session = AsyncSession(self._connection, sync_session_class=HandlerSession, **SESSION_OPTIONS)
        return self._session


# ---- Engine ----------------------------------------------------------------------------------------------------------


class ThreadedEffectDatabase(EffectDatabase):
    """A database with an `Engine`. Each open transaction has a thread for its statements: with fewer threads, all of
    them could wait in the database for a lock of a transaction that gets no thread."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._idle_threads: list[StatementThread] = []
        """For the next transactions."""

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[EffectTransaction]:
        try:
            thread = self._idle_threads.pop()
        except IndexError:
            thread = StatementThread("headrace effects")
        opened = _ThreadedTransaction(self.engine, thread)
        try:
            try:
                yield opened
            except BaseException:
                await opened.end(commit=False)
                raise
            with outages():
                await opened.end(commit=True)
        finally:
            if not opened.is_abandoned:
                self._idle_threads.append(thread)


class _ThreadedTransaction(EffectTransaction):
    """Connects with the first statement: each step is a hop to a thread and back."""

    def __init__(self, engine: Engine, thread: StatementThread) -> None:
        self._engine = engine
        self._thread = thread
        self._is_over = False
        self.is_abandoned = False
        """A statement did not end after its cancellation. The thread closes the connection when it ends."""
        self._opened: Connection | None = None
        self._observed: ObservedTransaction | None = None
        self._session: HandlerSession | None = None

    async def _in_thread(self, function: Callable[[], R]) -> R:
        """Run a function in the thread. If the caller is cancelled, cancel the statement that runs, and wait until the
        function has ended, at most `CANCEL_S`. Then raise: the transaction is abandoned if it has not."""
        running = self._thread.submit(function)
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            await self._cancel(running)
            raise
        return running.result()

    async def _cancel(self, running: asyncio.Future[Any]) -> None:
        connection = None if self._is_over else self._opened  # a commit is not cancelled: it would be in doubt
        canceller = None if connection is None else StatementThread("headrace effects cancel")
        steps = [running]
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + CANCEL_S
        while not all(step.done() for step in steps) and loop.time() < ends_at:
            if canceller is not None and connection is not None and all(step.done() for step in steps[1:]):
                steps = [running, canceller.submit(partial(cancel_statement, connection))]
                steps[1].add_done_callback(_retrieve)
            with suppress(asyncio.CancelledError):  # the first one is raised in the end
                await asyncio.wait(steps, timeout=min(CANCEL_AGAIN_S, ends_at - loop.time()))
        self.is_abandoned |= not all(step.done() for step in steps)
        running.add_done_callback(_retrieve)

    def _connect(self) -> Connection:
        if self._opened is None:
            with outages():
                self._opened = self._engine.connect()
                _connections_of_effects.add(self._opened)
                self._opened.begin()
            self._observed = ObservedTransaction(
                self._opened, "session.begin_nested() in a function that tx.run() calls"
            )
        return self._opened

    async def call(self, function: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        _check_not_over(is_over=self._is_over)
        self._refuse_abandoned()
        return await self._in_thread(lambda: self._observing(lambda: function(self._connect(), *args, **kwargs)))

    async def call_session(
        self, function: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        _check_not_over(is_over=self._is_over)
        self._refuse_abandoned()
        return await self._in_thread(
            lambda: self._observing(lambda: function(self._session_in_transaction(), *args, **kwargs))
        )

    def _observing(self, function: Callable[[], R]) -> R:
        if self._observed is not None:
            self._observed.refuse_ended()
        try:
            return function()
        finally:
            if self._observed is not None:
                self._observed.observe()

    def _session_in_transaction(self) -> Session:
        if self._session is None:
            self._session = HandlerSession(self._connect(), **SESSION_OPTIONS)
        return self._session

    async def flush(self) -> None:
        self._refuse_abandoned()
        if self._observed is not None:
            await self._in_thread(self._end_session)

    def _end_session(self) -> None:
        if self._observed is not None:
            self._observed.check()
        session, self._session = self._session, None
        if session is not None:
            flush_and_close(session)

    async def end(self, *, commit: bool) -> None:
        self._is_over = True
        if not self.is_abandoned:
            await self._in_thread(lambda: self._end(commit=commit))
            return
        self._thread.submit(self._discard).add_done_callback(_retrieve)
        if commit:
            self._refuse_abandoned()

    def _refuse_abandoned(self) -> None:
        """Raise InvalidArgument if a statement did not end: others would wait for it."""
        if self.is_abandoned:
            raise InvalidArgument(
                "the handler caught the cancellation of a statement that did not end, so its transaction is rolled "
                "back: let CancelledError and TimeoutError pass"
            )

    def _discard(self) -> None:
        connection, self._opened = self._opened, None
        if connection is not None:
            connection.invalidate()
            connection.close()

    def _end(self, *, commit: bool) -> None:
        connection, self._opened = self._opened, None
        if connection is None:
            return
        with connection:
            if commit:
                self._end_session()
                if not reports_aborted(connection):
                    connection.execute(text("SELECT 1"))  # fails if PostgreSQL has aborted the transaction
                connection.commit()

    @property
    def connection(self) -> AsyncConnection:
        raise _only_async("connection")

    @property
    def session(self) -> AsyncSession:
        raise _only_async("session")


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Ask for the error: asyncio warns of those that are never asked for."""
    if not future.cancelled():
        future.exception()


def _only_async(name: str) -> NotSupported:
    return NotSupported(
        f"tx.{name} needs an AsyncEngine, and this engine is an Engine: use tx.execute(statement), or "
        "tx.run(function) with a function of a Session"
    )


# ---- both kinds of engine --------------------------------------------------------------------------------------------


def database_of(engine: Engine | AsyncEngine | AsyncConnection) -> EffectDatabase:
    """Return the database of an engine or a connection. Raises InvalidArgument for another object."""
    given = cast("object", engine)
    if isinstance(given, AsyncEngine):
        return AsyncEffectDatabase(given)
    if isinstance(given, AsyncConnection):
        return ConnectionEffectDatabase(given)
    if isinstance(given, Engine):
        return ThreadedEffectDatabase(given)
    raise InvalidArgument(f"Effects needs an Engine or an AsyncEngine of SQLAlchemy, not {type(given).__name__}")


_connections_of_effects = WeakSet[Connection]()
"""A savepoint begins a transaction in these only. Other connections of the user's engine keep the behaviour of their
driver."""


def _begin_before_savepoint(connection: Connection, _name: str) -> None:
    """The drivers of SQLite begin a transaction only with a statement that writes: a savepoint before it would be the
    transaction, and its end would commit."""
    if connection in _connections_of_effects and is_in_transaction(connection) is False:
        connection.exec_driver_sql("BEGIN")


def _end_cancelled_statement(context: ExceptionContext) -> None:
    """End a statement of aiosqlite that was cancelled, and its transaction, before SQLAlchemy closes the connection.

    SQLite keeps a closed connection and its locks while a cursor is open. The traceback of the cancellation and
    SQLAlchemy's cursor both hold the driver's cursor."""
    error, connection = context.original_exception, context.connection
    if isinstance(error, Exception) or connection is None:
        return
    cursor = getattr(getattr(context.execution_context, "cursor", None), "_cursor", None)

    async def end(driver: Any) -> None:
        steps = [] if cursor is None else [cursor.close()]
        ending = asyncio.gather(*steps, driver.rollback(), return_exceptions=True)
        ends_at = asyncio.get_running_loop().time() + CANCEL_S
        while not ending.done() and asyncio.get_running_loop().time() < ends_at:
            await driver.interrupt()
            await asyncio.wait([ending], timeout=CANCEL_AGAIN_S)

    def shielded(driver: Any) -> asyncio.Future[None]:
        return asyncio.shield(end(driver))

    with suppress(Exception, asyncio.CancelledError):  # SQLAlchemy closes the connection, and raises the first error
        adapted = cast("Any", connection.connection.dbapi_connection)
        if hasattr(adapted, "run_async"):  # connections of an Engine have none
            clear_frames(error.__traceback__)
            adapted.run_async(shielded)


def _check_not_over(*, is_over: bool) -> None:
    """Raise InvalidArgument for the use of a transaction whose handler has returned."""
    if is_over:
        raise InvalidArgument("the transaction is over: await all statements before the handler returns")


def _sync_connection(connection: AsyncConnection) -> Connection:
    plain = connection.sync_connection
    assert plain is not None
    return plain


class ObservedTransaction:
    """The transaction that is open on a connection, as its driver sees it. The handler must not end it: statements that
    follow would be in another one, without the position of the stream."""

    def __init__(self, connection: Connection, begin_nested: str) -> None:
        """`begin_nested` tells the user how to begin a savepoint."""
        self._connection = connection
        self._begin_nested = begin_nested
        self._root = connection.get_transaction()
        self._is_open = False
        """SQLAlchemy and the drivers begin late: in SQLite, only with the first statement that writes."""
        self._was_ended = False

    def observe(self) -> None:
        """Look at the state of the driver's connection after statements of the handler."""
        if self._connection.closed or self._connection.invalidated:
            return
        is_open = is_in_transaction(self._connection)
        self._was_ended |= self._is_open and is_open is False
        self._is_open |= is_open is True

    def refuse_ended(self) -> None:
        """Raise InvalidArgument if the handler has ended the transaction. Some drivers commit each statement then."""
        if self._root is None or not self._root.is_active or self._was_ended:
            raise InvalidArgument(
                "the handler ended its transaction, which belongs to headrace: return to commit, raise to roll back"
            )

    def check(self) -> None:
        """Raise InvalidArgument if the handler has ended the transaction. Raise it, too, if PostgreSQL has aborted the
        transaction and the driver reports this: a COMMIT would roll back, and drivers do not report that."""
        self.observe()
        self.refuse_ended()
        if transaction_status(self._connection) == IN_ERROR:
            raise InvalidArgument(
                "the handler caught the error of a statement, and PostgreSQL has aborted the transaction: use "
                f"{self._begin_nested} around such a statement"
            )


@contextmanager
def outages() -> Generator[None]:
    """Turn errors that say that the database cannot be reached into Unavailable, and missing rights into
    InvalidArgument. Only for statements of headrace's own."""
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        if isinstance(error, OSError) or is_outage(error):
            raise unavailable(error) from error
        if isinstance(error, DBAPIError) and sqlstate(error) == _NO_RIGHT:
            raise InvalidArgument(f"the database of the effects: {_first_line(error)}: {GRANT}") from error
        raise


def unavailable(error: BaseException) -> Unavailable:
    """Return the error for a database that is not to be used now. Its text has no statement and no parameters."""
    return Unavailable(f"the database of the effects is not available: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def is_outage(error: BaseException) -> bool:
    """Whether the database is to blame for the error, and not the statement."""
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _SQLITE_OUTAGES
    if state := sqlstate(error):
        return state.startswith(_OUTAGES)
    # The error has a statement if the driver refuses to send it, for example because it has too many parameters.
    return isinstance(error, OperationalError) and error.statement is None


def is_conflict(error: BaseException) -> bool:
    """Whether the transaction collided with another one, and may succeed the next time."""
    return isinstance(error, DBAPIError) and sqlstate(error) in CONFLICTS


def sqlstate(error: DBAPIError) -> str:
    """The SQLSTATE of a driver's error, "" if it has none."""
    for name in ("sqlstate", "pgcode"):
        state = getattr(error.orig, name, None)
        if isinstance(state, str):
            return state
    return ""
