"""Errors of the database of effects: which of them are outages, and no failures of the event."""

from __future__ import annotations

import sqlite3
from weakref import WeakSet

from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..streams.errors import InvalidArgument, Unavailable
from .schema import GRANT

CONFLICTS = ("40001", "40P01")
"""SQLSTATE of a serialization failure, and of a deadlock."""
_OUTAGES = ("08", "53", "57P", "55P03", "25006")
"""The first characters of SQLSTATEs: no connection, no resources, shutdown, no lock, a standby or read-only server."""
_REFUSED_CONNECTIONS = ("28", "3D")
"""A refused role, an unknown database."""
ABORTED, _NO_RIGHT, _NO_LOCK = "25P02", "42501", "55P03"
_SQLITE_OUTAGES = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL,
)  # fmt: skip
"""The file is locked, or it or its disk cannot be used."""


_errors_of_effects = WeakSet[BaseException]()
"""Errors of the databases of effects. Others come from databases that a handler uses besides."""


def note_error_of_effects(error: BaseException) -> None:
    """Note that an error comes from the database of effects."""
    _errors_of_effects.add(error)


class _Outages:
    """Turns an error that says that the database cannot be reached into Unavailable, and a missing right into
    InvalidArgument. Use `with outages:` only around headrace's own statements.

    A class, because a generator with `contextmanager` takes five times as long, and each event enters this several
    times.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, (SQLAlchemyError, OSError)):
            return
        state = sqlstate(error) if isinstance(error, DBAPIError) else ""
        if isinstance(error, OSError) or tells_outage(error) or state.startswith(_REFUSED_CONNECTIONS):
            raise unavailable(error) from error
        if state == _NO_RIGHT:
            raise InvalidArgument(f"the database of the effects or the outbox: {first_line(error)}: {GRANT}") from error


outages = _Outages()


def unavailable(error: BaseException) -> Unavailable:
    """Return the error for a database that is not to be used now. Its text has no statement and no parameters."""
    if tells_lock(error):
        return Unavailable(f"a lock in the database of the effects or the outbox was not free: {first_line(error)}")
    return unavailable_because(first_line(error))


def unavailable_because(reason: str) -> Unavailable:
    return Unavailable(f"the database of the effects or the outbox is not available: {reason}")


def first_line(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def is_outage(error: BaseException) -> bool:
    """Whether the database of the effects is to blame for the error, and neither the statement nor another database
    that the handler uses."""
    return error in _errors_of_effects and tells_outage(error)


def tells_outage(error: BaseException) -> bool:
    """Whether a database is to blame for the error, and not the statement."""
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
    return error in _errors_of_effects and isinstance(error, DBAPIError) and sqlstate(error) in CONFLICTS


def tells_lock(error: BaseException) -> bool:
    """Whether another transaction has a lock for too long."""
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return sqlstate(error) == _NO_LOCK


def sqlstate(error: DBAPIError) -> str:
    """The SQLSTATE of a driver's error, "" if it has none."""
    for name in ("sqlstate", "pgcode"):
        state = getattr(error.orig, name, None)
        if isinstance(state, str):
            return state
    return ""
