"""Connections to the database of a provider, checks of its server, and its errors as headrace's errors."""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection, IsolationLevel
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow

from ...store.postgres import BoundedConnection, TransactionDeadline
from ...streams.errors import HeadraceError, InvalidArgument, StorageError, StorageFull
from .limits import PostgresLimits
from .options import PostgresOptions, check_url

LOST_CONNECTION = psycopg.OperationalError, psycopg.InterfaceError
_OLDEST_VERSION = 140000
_DISK_FULL, _NO_PRIVILEGE = "53100", "42501"
"""SQL states."""
_SERVER = """
    SELECT pg_is_in_recovery(), current_setting('transaction_read_only'), current_setting('synchronous_commit'),
    current_setting('fsync')
"""


class UnsafeServerError(StorageError):
    """The server, or the role, has settings by which confirmed events can be lost. The message has the remedy."""


class DatabasePlace:
    """The address of a database, and how to connect to it."""

    def __init__(self, options: PostgresOptions, limits: PostgresLimits) -> None:
        """Raises InvalidArgument if the URL is wrong."""
        self.pooler = options.pooler
        self.limits = limits
        self.syncs = True
        """Whether the server's storage survives a crash of its machine, by its settings."""
        try:
            self._given = conninfo_to_dict(check_url(options.url))
        except (psycopg.ProgrammingError, UnicodeDecodeError):
            raise InvalidArgument(
                "adapter 'postgres': url: libpq cannot read it; write postgresql://user@host:port/database, and "
                "percent-encode other characters than letters and digits",
                option="options",
            ) from None
        host = self._given.get("host") or os.environ.get("PGHOST", "localhost")
        port = self._given.get("port") or os.environ.get("PGPORT", "5432")
        self.shown = f"PostgreSQL at {host}:{port}/{self._given.get('dbname', '')}"

    def open(self) -> Connection[TupleRow]:
        """Return the first connection. Raises psycopg.Error, InvalidArgument if the server could lose events."""
        try:
            return self.connect()
        except UnsafeServerError as error:
            raise InvalidArgument(str(error), option="options") from None

    def connect(self, timeout_s: float | None = None) -> Connection[TupleRow]:
        """Return a connection that a thread uses, and that fails if an answer takes longer than its deadline.

        Raises psycopg.Error, UnsafeServerError.
        """
        deadline = TransactionDeadline(self.limits.request_s)
        connection = BoundedConnection.connect(**self._settings(timeout_s), autocommit=True, prepare_threshold=None)
        connection.isolation_level = IsolationLevel.READ_COMMITTED
        try:
            connection.deadline = deadline
            deadline.begin()
            self._check(connection.info.server_version, connection.execute(_SERVER).fetchone())
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, version: int, settings: TupleRow | None) -> None:
        if problem := self._problem(version, settings):
            raise UnsafeServerError(problem)

    def _problem(self, version: int, settings: TupleRow | None) -> str:
        """Return why the server cannot store events safely, with the remedy; "" if it can. `settings` answers
        `_SERVER`."""
        if version < _OLDEST_VERSION:
            return f"{self.shown} has a version below 14: use a newer one"
        assert settings is not None
        standby, read_only, synchronous_commit, fsync = settings
        if standby:
            return (
                f"{self.shown} is a standby, which is read-only: give the url of the primary, or list all "
                "hosts in the url"
            )
        if read_only == "on":
            return f"{self.shown} is read-only for this role: set default_transaction_read_only = off"
        if synchronous_commit == "off":
            return (
                f"{self.shown} has synchronous_commit = off, which loses confirmed events in a crash: set "
                "synchronous_commit = on for this role"
            )
        self.syncs = fsync == "on"
        return ""

    async def connect_async(self) -> AsyncConnection[TupleRow]:
        """Return a connection that the event loop uses. Raises psycopg.Error, UnsafeServerError.

        A standby is refused here, too: it may lag, and the connection would stay on it after the primary is back.
        """
        threshold = None if self.pooler else 5
        connection = await AsyncConnection.connect(**self._settings(None), autocommit=True, prepare_threshold=threshold)
        try:
            await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
            settings = await (await connection.execute(_SERVER)).fetchone()
            self._check(connection.info.server_version, settings)
        except BaseException:
            connection.pgconn.finish()
            raise
        return connection

    def _settings(self, timeout_s: float | None) -> dict[str, Any]:
        request_s = self.limits.request_s
        connect_s = request_s if timeout_s is None else min(request_s, timeout_s)
        ours: dict[str, Any] = {
            "connect_timeout": max(2, math.ceil(connect_s)),  # 2 is the minimum of libpq
            "tcp_user_timeout": round(request_s * 1000),
            "keepalives_idle": 5,
            "keepalives_interval": 1,
            "keepalives_count": 3,
            "application_name": "headrace",
        }
        if "," in f"{self._given.get('host', '')}{self._given.get('hostaddr', '')}":
            ours["target_session_attrs"] = "primary"  # else libpq stays at the first host that answers
        settings = {**ours, **self._given, "client_encoding": "utf8"}  # else the database's settings decide
        if not self.pooler:  # a pooler refuses them
            settings["options"] = f"{timeout_options(request_s)} {settings.get('options', '')}".strip()
        return settings

    @contextmanager
    def translated(self) -> Generator[None]:
        """Raise StorageError, StorageFull or InvalidArgument for errors of psycopg."""
        try:
            yield
        except (psycopg.Error, TimeoutError) as error:
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> HeadraceError:
        """Return headrace's error for an error of psycopg. An error of headrace stays."""
        if isinstance(error, HeadraceError):
            return error
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, TimeoutError):
            text = f"no answer within {self.limits.request_s:g} s"
        state = getattr(error, "sqlstate", None)
        if state == _DISK_FULL:
            return StorageFull(f"{self.shown}: {text}")
        if state == _NO_PRIVILEGE:
            return StorageError(
                f"{self.shown}: {text}: grant this role CREATE on the schema, and all rights on headrace's tables in it"
            )
        return StorageError(f"{self.shown}: {text}")


def timeout_options(request_s: float) -> str:
    """Return the timeouts as options of a connection. They are a little shorter than ours, so that the
    server's error names the reason, and a process that stands still holds locks for that time only."""
    return " ".join(f"-c {name}={value}" for name, value in timeouts_ms(request_s).items())


def timeouts_ms(request_s: float) -> dict[str, int]:
    """Return the server's timeouts by name, in milliseconds."""
    milliseconds = round(request_s * 1000)
    return {"statement_timeout": milliseconds * 4 // 5, "idle_in_transaction_session_timeout": milliseconds}
