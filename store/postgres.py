"""Connections to PostgreSQL that answer before a deadline, or fail. Importing this module imports psycopg.

A server that is suspended, or behind a broken network, does not answer at all. So this module ends every wait of a
transaction at its deadline. The server, too, ends transactions that take too long, because their locks would stop all
other processes if their own process is suspended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from typing import Any

import psycopg
from psycopg import Connection
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL

from ..streams.errors import InvalidArgument


class TransactionDeadline:
    """The time, by the monotonic clock, until which the current transaction must have its answer."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = math.inf

    def begin(self, timeout_s: float | None = None) -> None:
        self._at = time.monotonic() + (timeout_s or self.timeout_s)

    def has_passed(self) -> bool:
        return time.monotonic() > self._at

    def error(self) -> psycopg.OperationalError:
        return psycopg.OperationalError(f"no answer within {self.timeout_s:g} s")


class BoundedConnection(Connection[Any]):
    """A connection that fails, and is closed, if no answer comes before the deadline."""

    deadline: TransactionDeadline | None = None

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        if self.deadline is None:
            return super().wait(gen, *args, **kwargs)
        return super().wait(self._until(self.deadline, gen), *args, **kwargs)

    def _until(self, deadline: TransactionDeadline, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run the steps of `gen`. psycopg takes a step at least ten times a second, with or without an answer."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if deadline.has_passed():
                    self.pgconn.finish()
                    raise deadline.error()
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def engine(url: URL, deadline: TransactionDeadline) -> Engine:
    """Return an engine with one connection at a time, which is replaced if it is broken."""
    made = create_engine(url, pool_size=1, max_overflow=0, pool_pre_ping=True, isolation_level="READ COMMITTED")

    @event.listens_for(made, "do_connect")
    def connect(  # pyright: ignore[reportUnusedFunction]
        _dialect: object, _record: object, _args: Sequence[Any], wanted: dict[str, Any]
    ) -> BoundedConnection:
        if deadline.has_passed():  # because the connection before did not answer
            raise deadline.error()
        connection = BoundedConnection.connect(**_settings(wanted, deadline.timeout_s))
        try:
            check_encoding(connection.info.parameter_status("server_encoding"))
        except InvalidArgument:
            connection.close()
            raise
        connection.deadline = deadline
        return connection

    return made


def check_encoding(encoding: str | None) -> None:
    """Raise InvalidArgument if a database with this `server_encoding` cannot store every text."""
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise InvalidArgument(
            f"the encoding of the database is {encoding}, which lacks characters that names of streams may have: take "
            "a database with the encoding UTF8"
        )


def _settings(wanted: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return the settings of a URL, completed by defaults. The server's timeout is a little shorter than ours, so that
    its error names the reason."""
    milliseconds = round(timeout_s * 1000)
    server = f"-c statement_timeout={milliseconds * 4 // 5} -c idle_in_transaction_session_timeout={milliseconds}"
    ours = {
        "connect_timeout": max(2, math.ceil(timeout_s / 2)),  # 2 is the minimum of libpq
        "tcp_user_timeout": milliseconds,
        "keepalives_idle": 5,
        "keepalives_interval": 1,
        "keepalives_count": 3,
        "application_name": "headrace",
    }
    always = {"client_encoding": "utf8", "options": f"{server} {wanted.get('options', '')}".strip()}
    return {**ours, **wanted, **always}
