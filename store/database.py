"""Run the control store's transactions in one thread, on one connection, and translate errors to headrace's errors.

Importing this module imports SQLAlchemy; `headrace.streams` does not.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from ..streams.errors import Closed, DataDirectoryError, InvalidArgument, StorageError, StorageFull
from ..streams.histograms import Histogram
from ..streams.open_files import OpenFile
from ..streams.private_files import make_file

if TYPE_CHECKING:
    from .postgres import TransactionDeadline

BUSY_TIMEOUT_S = 30.0
"""How long a transaction in SQLite waits for a transaction of another process, in seconds."""

SERVER_TIMEOUT_S = 5.0
"""How long a transaction on a database server may take, in seconds. Much shorter than a lease."""

PREPARE_TIMEOUT_S = 60.0
"""How long the transaction that creates or migrates the tables may take, in seconds."""

ATTEMPTS = 5
"""How often a transaction is tried if the database server aborts it because of a conflict with another one."""

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Database:
    """A database, and the thread that runs all its transactions.

    A transaction is one function of a connection. It is committed, and durable, when the function returns; it is rolled
    back when the function raises. Cancelling the caller does not interrupt a transaction: it is done as a whole, or, if
    it had not begun, not at all.
    """

    def __init__(self, url: URL, timeout_s: float | None = None, shown_as: str | None = None) -> None:
        """Errors name the database by `shown_as`; None: by its path or URL."""
        self._url = url
        self._where = shown_as or (str(url.database or "in memory") if _is_sqlite(url) else _shown(url))
        self._timeout_s = timeout_s or (BUSY_TIMEOUT_S if _is_sqlite(url) else SERVER_TIMEOUT_S)
        self._engine: Engine | None = None
        self._deadline: TransactionDeadline | None = None
        self._reading = _SQLITE_READS if _is_sqlite(url) else _SERVER_READS
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-store")
        self._closed = False
        self._files: list[OpenFile] = []
        """SQLite's files in which a transaction is stored: the database and its write-ahead log."""
        self.durations = Histogram()
        """How long transactions took, with the wait for earlier ones."""
        self.errors = Counter[str]()
        """Transactions that failed because of the database, by the code of the error."""

    @classmethod
    async def open(
        cls,
        where: str | Path,
        prepare: Callable[[Connection], None],
        *,
        timeout_s: float | None = None,
        shown_as: str | None = None,
    ) -> Database:
        """Connect, and run `prepare` as the first transaction. Raises DataDirectoryError, StorageError.

        A transaction that waits for others, or for a server, fails after `timeout_s`. The default is `BUSY_TIMEOUT_S`
        for SQLite, `SERVER_TIMEOUT_S` for a server.
        """
        database = cls(_url(where), timeout_s, shown_as)
        try:
            await database._in_thread(database._connect)
            await database._in_thread(database._prepare, prepare)
        except BaseException:
            await database.aclose()
            raise
        return database

    async def write(self, work: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `work` in a transaction. In SQLite it excludes other writers from the start. On a server other writers
        run at the same time, so `work` must lock the rows on which its decisions depend. After a conflict the
        transaction is rolled back and `work` runs again.

        In SQLite it raises DataDirectoryError if the file was deleted or replaced.
        """
        return await self._measured(False, work, *args, **kwargs)

    async def read(self, work: Callable[Concatenate[Connection, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `work`, which only reads. It sees one state of the database, and does not wait for writers."""
        return await self._measured(True, work, *args, **kwargs)

    async def _measured(self, reads: bool, work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        began = time.monotonic()
        try:
            return await self._in_thread(self._transact, reads, work, *args, **kwargs)
        except StorageError as error:
            self.errors[error.code] += 1
            raise
        finally:
            self.durations.observe(time.monotonic() - began)

    @property
    def private(self) -> bool:
        """Whether the database is in memory: no other process has it, and it ends on `aclose`."""
        return _is_sqlite(self._url) and not self._url.database

    async def aclose(self) -> None:
        """Finish pending transactions, then disconnect. Idempotent."""
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
            if _is_sqlite(self._url):
                self._engine = _sqlite_engine(self._url, self._timeout_s)
                self._note_file(self._url.database)
            else:
                self._engine, self._deadline = _server_engine(self._url, self._timeout_s)

    def _prepare(self, prepare: Callable[[Connection], None]) -> None:
        def patiently(connection: Connection) -> None:
            if self._deadline is not None:
                self._deadline.begin(PREPARE_TIMEOUT_S)
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {PREPARE_TIMEOUT_S * 1000:.0f}")
            prepare(connection)

        self._transact(False, patiently)
        if _is_sqlite(self._url) and self._url.database:
            # It is there from the first transaction on, and is not replaced while a process has the database open.
            self._note_file(f"{Path(self._url.database).resolve()}-wal")

    def _note_file(self, path: str | None) -> None:
        if path:
            with suppress(OSError):  # SQLite reports it, or the file system does not support a write-ahead log
                self._files.append(OpenFile(Path(path)))

    def _check_files(self) -> None:
        """Raise DataDirectoryError if a file was deleted or replaced. SQLite does not notice that."""
        for file in self._files:
            file.check_current()

    def _disconnect(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _transact(self, reads: bool, work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        if reads:
            return self._tried(reads, work, *args, **kwargs)
        self._check_files()
        result = self._tried(reads, work, *args, **kwargs)
        # Again after the commit: a file that was deleted before it does not have the transaction.
        self._check_files()
        return result

    def _tried(self, reads: bool, work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        with self._translated():
            for _ in range(ATTEMPTS - 1):
                try:
                    return self._once(reads, work, *args, **kwargs)
                except DBAPIError as error:
                    if getattr(error.orig, "sqlstate", None) not in _CONFLICTS:
                        raise
            return self._once(reads, work, *args, **kwargs)

    def _once(self, reads: bool, work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        assert self._engine is not None
        if self._deadline is not None:
            self._deadline.begin()
        engine = self._engine.execution_options(**self._reading) if reads else self._engine
        with engine.begin() as connection:
            return work(connection, *args, **kwargs)

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except DataDirectoryError as error:
            raise DataDirectoryError(f"{self._where}: {error}") from None
        except DataError as error:
            raise InvalidArgument(f"{self._where}: the database refuses a value ({_line(error.orig)})") from error
        except DBAPIError as error:
            raise self._translate(error.orig) from error
        except sqlite3.Error as error:  # from a connect event
            raise self._translate(error) from error
        except UnicodeDecodeError as error:  # SQLite's message quotes the damaged text of a table
            raise DataDirectoryError(f"{self._where}: {_WRONG_STORE} (the text of a table is no UTF-8)") from error
        except SQLAlchemyError as error:
            raise StorageError(f"{self._where}: {error}") from error

    def _translate(self, error: object) -> StorageError:
        if isinstance(error, sqlite3.Error):
            return _translate_sqlite(error, self._where, self._timeout_s)
        return _translate_server(error, self._where)


_SQLITE_READS: dict[str, Any] = {"headrace_reads": True}
_SERVER_READS: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
_CONFLICTS = frozenset({"40001", "40P01"})
"""SQL states after which the same transaction may succeed: serialization failure, deadlock."""


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _shown(url: URL) -> str:
    """Return a URL for messages, without the query, which may also have a password."""
    return url.set(drivername=url.drivername.replace("+psycopg", ""), query={}).render_as_string()


def _url(where: str | Path) -> URL:
    if where == "memory":
        return URL.create("sqlite")
    if isinstance(where, Path) or "://" not in where:
        return URL.create("sqlite", database=str(where))
    try:
        url = make_url(where)
    except (ArgumentError, ValueError) as error:
        shown = re.sub(r"://[^/]*@", "://***@", where.partition("?")[0])
        reason = "" if shown != where else f": {error}"
        raise InvalidArgument(f"{shown!r} is no database URL{reason}") from None
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgresql", "postgres") else url


def _server_engine(url: URL, timeout_s: float) -> tuple[Engine, TransactionDeadline]:
    if url.drivername != "postgresql+psycopg":
        raise InvalidArgument(
            f"{_shown(url)}: the driver of this database is not installed, or none that the control store can use; it "
            "takes postgresql://…"
        )
    try:
        from . import postgres  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise InvalidArgument(
            f"{_shown(url)}: the driver of this database is not installed ({error}): install headrace[postgres]"
        ) from None
    deadline = postgres.TransactionDeadline(timeout_s)
    return postgres.engine(url, deadline), deadline


def _sqlite_engine(url: URL, timeout_s: float) -> Engine:
    if url.database:
        make_file(Path(url.database))  # SQLite creates its other files with the same mode
    engine = create_engine(url, poolclass=StaticPool, connect_args={"timeout": timeout_s})

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.text_factory = _text  # one damaged row must not fail a query for others
        connection.isolation_level = None  # `begin` below begins transactions
        if url.database:
            _write_ahead(connection, timeout_s)
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # A writer takes its lock at once: a transaction that began as a reader can fail at any statement that writes.
        reads = connection.get_execution_options().get("headrace_reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _text(stored: bytes) -> str:
    return stored.decode(errors="replace")


def _write_ahead(connection: sqlite3.Connection, timeout_s: float) -> None:
    # SQLite does not wait for other processes that change the mode of a new file at the same time: so wait here.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


_WRONG_STORE = "no control store of headrace, or a damaged one"
_DAMAGED = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT}
_FORBIDDEN = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}
_REFUSED_WRITES = {sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE}


def _translate_server(error: object, where: str) -> StorageError:
    if getattr(error, "sqlstate", None) == "53100":
        return StorageFull(f"{where}: the database server has no space left; nothing was changed")
    return StorageError(f"{where}: {_line(error)}")


def _line(error: object) -> str:
    return " ".join(str(error).split())


def _translate_sqlite(error: sqlite3.Error, where: str, timeout_s: float) -> StorageError:
    extended = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    code = extended & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(f"{where}: no space left; nothing was changed, free some and try again")
    if extended in _REFUSED_WRITES:
        return StorageFull(f"{where}: the file system refuses to let it grow (full, or a quota); nothing was changed")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageError(f"{where}: locked by another process for {timeout_s:g} s; nothing was changed, try again")
    if code in _DAMAGED:
        return DataDirectoryError(f"{where}: {_WRONG_STORE} ({error})")
    if code in _FORBIDDEN:
        return DataDirectoryError(
            f"{where}: cannot be opened for writing ({error}); check that the directory exists and whose it is"
        )
    return StorageError(f"{where}: {error}")
