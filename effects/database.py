"""Transactions in the user's database, from an event loop.

All statements are written for a plain `Connection` of SQLAlchemy. With an `AsyncEngine` they run in a greenlet, with an
`Engine` in a thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from ..streams.errors import InvalidArgument, NotSupported
from .driver_state import CANCEL_AGAIN_S, CANCEL_S, cancel_statement, has_running_statement
from .handler_session import SESSION_OPTIONS, HandlerSession, flush_and_close
from .observed import ObservedTransaction, observe_errors_and_statements
from .outages import ABORTED, outages, sqlstate
from .statement_thread import StatementThread

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_TRANSACTIONS = 16
"""How many transactions run at a time if the engine's pool has no size."""


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
        observe_errors_and_statements(engine)

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[EffectTransaction]:
        """Open a transaction for the length of an `async with`, and commit it at the end; roll it back after an error.

        Raises Unavailable if the database cannot be reached, or if it is not known whether the commit succeeded.
        """


# ---- AsyncEngine -----------------------------------------------------------------------------------------------------


class AsyncEffectDatabase(EffectDatabase):
    """A database with an `AsyncEngine`."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine.sync_engine)
        self._engine = engine

    def transaction(self) -> AbstractAsyncContextManager[EffectTransaction]:
        return _ConnectedTransaction(self._engine)


class _ConnectedTransaction(AbstractAsyncContextManager[EffectTransaction]):
    """A transaction on a connection of the engine. Entering raises Unavailable if there is none. A class, because it is
    entered for each event: see `outages`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._connection = engine.connect()

    async def __aenter__(self) -> EffectTransaction:
        with outages:
            connection = await self._connection.__aenter__()
        self._transaction = _transaction_on(connection)
        try:
            return await self._transaction.__aenter__()
        except BaseException:
            await self._connection.__aexit__(None, None, None)
            raise

    async def __aexit__(self, *error: Any) -> bool | None:  # noqa: PYI036 (passed on)
        try:
            return await self._transaction.__aexit__(*error)
        finally:
            await self._connection.__aexit__(None, None, None)


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
    with outages:
        root = await connection.begin()
    opened = _GreenletTransaction(connection)
    try:
        try:
            yield opened
        finally:
            opened.is_over = True
        opened.note_running()  # the next statements wait for it
        await opened.flush()
        if not opened.observed.is_abort_visible:
            await _refuse_aborted(connection, opened.observed)
        opened.refuse_running()  # right before the COMMIT, with no pause in which another task may run
        opened.observed.stop()
        with outages:
            await root.commit()
    except Exception as error:
        opened.observed.raise_if_lost(error)
        raise
    finally:
        opened.observed.stop()
        if connection.get_transaction() is not None:  # perhaps one that the handler has begun, or a lost connection's
            await connection.rollback()


async def _refuse_aborted(connection: AsyncConnection, observed: ObservedTransaction) -> None:
    """Raise InvalidArgument if PostgreSQL has aborted the transaction."""
    try:
        await connection.execute(text("SELECT 1"))
    except DBAPIError as error:
        if sqlstate(error) == ABORTED:
            raise InvalidArgument(observed.aborted) from error
        raise


class _GreenletTransaction(EffectTransaction):
    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self.observed = ObservedTransaction.begun_on(
            _sync_connection(connection), "tx.connection.begin_nested() or tx.session.begin_nested()"
        )
        self._session: AsyncSession | None = None
        self._running = 0
        """Statements that the handler has begun by `call` and `call_session`."""
        self._had_running = False
        self.is_over = False

    async def call(self, function: Callable[Concatenate[Connection, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._begin_statement()
        try:
            return await self._connection.run_sync(function, *args, **kwargs)
        finally:
            self._end_statement()

    async def call_session(
        self, function: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self._begin_statement()
        try:
            return await self.session.run_sync(function, *args, **kwargs)
        finally:
            self._end_statement()

    def _begin_statement(self) -> None:
        _check_not_over(is_over=self.is_over)
        self.observed.refuse_ended()
        self._running += 1

    def _end_statement(self) -> None:
        self._running -= 1
        self.observed.after_statement()

    def note_running(self) -> None:
        """Note whether a statement still runs, for `refuse_running`."""
        connection = _sync_connection(self._connection)
        is_usable = not (connection.closed or connection.invalidated)
        self._had_running |= bool(self._running) or (is_usable and has_running_statement(connection))

    def refuse_running(self) -> None:
        """Raise InvalidArgument if a statement still runs, or did so at `note_running`. If it failed now, PostgreSQL
        would answer the COMMIT by a rollback, which psycopg does not report."""
        self.note_running()
        if self._had_running:
            raise InvalidArgument(
                "a statement still runs when the handler returns: await all statements, also those of tasks"
            )

    async def flush(self) -> None:
        self.observed.check()
        session, self._session = self._session, None
        if session is not None:
            await session.run_sync(flush_and_close)
            self.observed.check()  # a listener of the flush may have caught an error

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
            with outages:
                await opened.end(commit=True)
        except Exception as error:
            if opened.observed is not None:
                opened.observed.raise_if_lost(error)
            raise
        finally:
            opened.stop_observing()
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
        self.observed: ObservedTransaction | None = None
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
        canceller: StatementThread | None = None
        steps = [running]
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + CANCEL_S
        while not all(step.done() for step in steps) and loop.time() < ends_at:
            # The thread may still connect. A commit is not cancelled: it would be in doubt.
            connection = None if self._is_over else self._opened
            if connection is not None and all(step.done() for step in steps[1:]):
                canceller = canceller or StatementThread("headrace effects cancel")
                steps = [running, canceller.submit(partial(cancel_statement, connection))]
                steps[1].add_done_callback(_retrieve)
            with suppress(asyncio.CancelledError):  # the first one is raised in the end
                await asyncio.wait(steps, timeout=min(CANCEL_AGAIN_S, ends_at - loop.time()))
        self.is_abandoned |= not all(step.done() for step in steps)
        running.add_done_callback(_retrieve)

    def _connect(self) -> Connection:
        if self._opened is None:
            with outages:
                self._opened = self._engine.connect()
                self._opened.begin()
            self.observed = ObservedTransaction.begun_on(
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
        if self.observed is not None:
            self.observed.refuse_ended()
        try:
            return function()
        finally:
            if self.observed is not None:
                self.observed.after_statement()

    def _session_in_transaction(self) -> Session:
        if self._session is None:
            self._session = HandlerSession(self._connect(), **SESSION_OPTIONS)
        return self._session

    async def flush(self) -> None:
        self._refuse_abandoned()
        if self.observed is not None:
            await self._in_thread(self._end_session)

    def _end_session(self) -> None:
        if self.observed is not None:
            self.observed.check()
        session, self._session = self._session, None
        if session is not None:
            flush_and_close(session)
            if self.observed is not None:
                self.observed.check()  # a listener of the flush may have caught an error

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
                if self.observed is None or not self.observed.is_abort_visible:
                    connection.execute(text("SELECT 1"))  # fails if PostgreSQL has aborted the transaction
                self.stop_observing()
                connection.commit()
            self.stop_observing()

    def stop_observing(self) -> None:
        if self.observed is not None:
            self.observed.stop()

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


def _check_not_over(*, is_over: bool) -> None:
    """Raise InvalidArgument for the use of a transaction whose handler has returned."""
    if is_over:
        raise InvalidArgument("the transaction is over: await all statements before the handler returns")


def _sync_connection(connection: AsyncConnection) -> Connection:
    plain = connection.sync_connection
    assert plain is not None
    return plain
