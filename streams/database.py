"""Runs the control store's transactions: one thread, one connection, errors in headrace's words.

Importing this module imports SQLAlchemy; `headrace.streams` does not.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from .errors import Closed, DataDirectoryError, InvalidArgument, StorageError, StorageFull

BUSY_TIMEOUT_S = 30.0
"""How long a transaction waits for another process's, in seconds."""

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Database:
    """A database and the thread that all its work runs in.

    A transaction is one function of a connection. It is committed when the function returns and durable then; it is
    rolled back when the function raises. Cancelling the caller does not interrupt it: it happens wholly, or, where it
    had not begun, not at all.
    """

    def __init__(self, url: URL) -> None:
        self._url = url
        self._where = str(url.database or "in memory") if _is_sqlite(url) else url.render_as_string()
        self._engine: Engine | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-store")
        self._closed = False

    @classmethod
    async def open(cls, where: str | Path, prepare: Callable[[Connection], None]) -> Database:
        """Connect, and run `prepare` as the first transaction. Raises DataDirectoryError, StorageError."""
        database = cls(_url(where))
        try:
            await database._in_thread(database._connect)
            await database.write(prepare)
        except BaseException:
            await database.aclose()
            raise
        return database

    async def write(self, work: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `work` in a transaction that excludes other writers from its start."""
        return await self._in_thread(self._transact, False, work, *args, **kwargs)

    async def read(self, work: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `work`, which only reads, beside whoever writes."""
        return await self._in_thread(self._transact, True, work, *args, **kwargs)

    async def aclose(self) -> None:
        """Finish what was begun, disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)
        await asyncio.shield(closing)

    async def _in_thread(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._closed:
            raise Closed("the control store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def _connect(self) -> None:
        with self._translated():
            self._engine = _sqlite_engine(self._url) if _is_sqlite(self._url) else _server_engine(self._url)

    def _disconnect(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _transact(self, reads: bool, work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        assert self._engine is not None
        engine = self._engine.execution_options(headrace_reads=True) if reads else self._engine
        with self._translated(), engine.begin() as connection:
            return work(connection, *args, **kwargs)

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except DataDirectoryError as error:
            raise DataDirectoryError(f"{self._where}: {error}") from None
        except DBAPIError as error:
            raise _translate(error.orig, self._where) from error
        except sqlite3.Error as error:  # from a connect event
            raise _translate(error, self._where) from error
        except SQLAlchemyError as error:
            raise StorageError(f"{self._where}: {error}") from error


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _url(where: str | Path) -> URL:
    if where == "memory":
        return URL.create("sqlite")
    if isinstance(where, Path) or "://" not in where:
        return URL.create("sqlite", database=str(where))
    try:
        return make_url(where)
    except ArgumentError as error:
        raise InvalidArgument(f"{where!r} is no database URL: {error}") from None


def _server_engine(url: URL) -> Engine:
    try:
        return create_engine(url, pool_size=1, max_overflow=0, pool_pre_ping=True)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise InvalidArgument(
            f"{url.render_as_string()}: the driver of this database is not installed ({error})"
        ) from None


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, poolclass=StaticPool, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.isolation_level = None  # `begin` below says when a transaction begins
        if url.database:
            _write_ahead(connection)
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # A writer takes its lock at once: upgrading one that began as a reader can fail at any statement.
        reads = connection.get_execution_options().get("headrace_reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: sqlite3.Connection) -> None:
    # Changing the mode of a new file does not wait for other processes that are doing the same, so wait here.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


_DAMAGED = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT}
_FORBIDDEN = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}
_REFUSED_WRITES = {sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE}


def _translate(error: object, where: str) -> StorageError:
    if isinstance(error, sqlite3.Error):
        return _translate_sqlite(error, where)
    if getattr(error, "sqlstate", None) == "53100":
        return StorageFull(f"{where}: the database server has no space left; nothing was changed")
    return StorageError(f"{where}: {error}")


def _translate_sqlite(error: sqlite3.Error, where: str) -> StorageError:
    extended = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    code = extended & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(f"{where}: no space left; nothing was changed, free some and try again")
    if extended in _REFUSED_WRITES:
        return StorageFull(f"{where}: the file system refuses to let it grow (full, or a quota); nothing was changed")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageError(
            f"{where}: locked by another process for {BUSY_TIMEOUT_S:g} s; nothing was changed, try again"
        )
    if code in _DAMAGED:
        return DataDirectoryError(f"{where}: no control store of headrace, or a damaged one ({error})")
    if code in _FORBIDDEN:
        return DataDirectoryError(
            f"{where}: cannot be opened for writing ({error}); check that the directory exists and whose it is"
        )
    return StorageError(f"{where}: {error}")
