"""The state of a connection to the user's database, as its driver reports it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from sqlalchemy import Connection

from ..streams.errors import InvalidArgument

IDLE, ACTIVE, IN_ERROR = 0, 1, 3
"""The transaction states `PQTRANS_IDLE`, `PQTRANS_ACTIVE` and `PQTRANS_INERROR` of libpq."""
CANCEL_S = 2.0
"""How long a cancelled transaction waits for the end of its statement, in seconds."""
CANCEL_AGAIN_S = 0.2
"""Pause between two attempts to cancel a statement, in seconds: the first one may come between two statements."""


def libpq_of(connection: Connection) -> Any:
    """Return the object with libpq's `transaction_status`; None if the driver is not psycopg."""
    driver = connection.connection.driver_connection
    libpq = getattr(driver, "pgconn", None) or getattr(driver, "info", None)  # psycopg, psycopg2
    return libpq if hasattr(libpq, "transaction_status") else None


def is_in_transaction(connection: Connection) -> bool | None:
    """Return whether asyncpg or SQLite has a transaction open; None if the driver does not report it. For psycopg:
    `libpq_of`."""
    driver = connection.connection.driver_connection
    asks = getattr(driver, "is_in_transaction", None)  # asyncpg
    state = asks() if callable(asks) else getattr(driver, "in_transaction", None)  # sqlite3 and aiosqlite
    return state if isinstance(state, bool) else None


def begin_writing(connection: Connection) -> None:
    """Begin a transaction of SQLite that writes. By itself, Python's driver begins it only at the first INSERT, UPDATE
    or DELETE: reads before that may be stale, and a CREATE is committed at once."""
    if getattr(connection.connection.dbapi_connection, "isolation_level", "") is None:
        connection.exec_driver_sql("SELECT 1")  # a listener of the user may begin the transaction
    if is_in_transaction(connection) is False:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def has_running_statement(connection: Connection) -> bool:
    """Return whether psycopg executes a statement, or one waits for psycopg's lock. asyncpg refuses a COMMIT then, and
    a statement that fails in SQLite does not undo the others."""
    lock = getattr(connection.connection.driver_connection, "lock", None)
    # A lock that is free may have waiters: they come before the COMMIT.
    is_used = isinstance(lock, asyncio.Lock) and (lock.locked() or bool(getattr(lock, "_waiters", None)))
    libpq = libpq_of(connection)
    return is_used or (libpq is not None and libpq.transaction_status == ACTIVE)


def refuse_autocommit(connection: Connection) -> None:
    """Raise InvalidArgument if the engine commits each statement."""
    driver = cast("Any", connection.connection.dbapi_connection)
    commits = getattr(driver, "autocommit", False) is True
    if not commits and connection.dialect.name == "sqlite" and getattr(driver, "isolation_level", "") is None:
        # A listener of the user may begin the transactions: it is called before the first statement.
        connection.exec_driver_sql("SELECT 1")
        commits = is_in_transaction(connection) is False
    if commits:
        raise InvalidArgument("this engine commits each statement (AUTOCOMMIT): effects need transactions")


def cancel_statement(connection: Connection) -> None:
    """Cancel the statement that another thread executes on a connection of psycopg or SQLite."""
    driver = connection.connection.driver_connection
    for name in ("cancel_safe", "cancel", "interrupt"):
        cancel = getattr(driver, name, None)
        if callable(cancel):
            cancel()
            return
