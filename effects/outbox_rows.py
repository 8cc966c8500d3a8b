"""The rows of the outbox, and how they are inserted in a transaction of SQLAlchemy."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from zlib import crc32

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import OperationalError

from ..streams.clock import now_us
from ..streams.codecs import Codecs, Publishable
from ..streams.errors import InvalidArgument
from ..streams.identity import StreamId
from ..streams.publishing import check_stream, encoded, listed, scheduled
from .driver_statement import DriverErrors
from .schema import key_of, no_tables, outbox

LANES = 16
"""Number of lanes of a provider. It is fixed: a stream must stay in its lane."""

Events = Publishable | Iterable[Publishable]
OutboxRow = Mapping[str, Any]

COLUMNS = ("provider", "lane", "stream", "events", "batch", "written_at_us")
INSERT = f"INSERT INTO headrace_outbox ({', '.join(COLUMNS)}) VALUES "  # noqa: S608 (only names of this module)
NUMBERED_INSERT = INSERT + f"({', '.join(f'${number + 1}' for number in range(len(COLUMNS)))})"
_INSERT = text(INSERT + f"({', '.join(f':{name}' for name in COLUMNS)})")

_TYPES = 0, 21, 0, 21, 17, 20
"""The OIDs that psycopg has for the parameters: unknown (text), int2, bytea, int8."""
_TEXT, _BINARY = 0, 1
_FORMATS = _BINARY, _TEXT, _BINARY, _TEXT, _BINARY, _TEXT
"""How `_parameters` has them. Text in binary format has a length, so no NUL character can end it."""
_MAX_INT2 = (1 << 15) - 1

_UNDEFINED_TABLE, _UNTRANSLATABLE = "42P01", "22P05"
"""SQLSTATE."""


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
    with translated_errors():
        try:
            connection.execute(_INSERT, rows)
        except OperationalError as error:
            if connection.dialect.name == "sqlite" and not inspect(connection).has_table(outbox.name):
                raise no_tables(connection) from error
            raise


def goes_with_commit(connection: Connection, listeners: int) -> bool:
    """Return whether `insert_and_commit` sends rows and COMMIT at once. `listeners`: how many of the outbox listen to
    the connection's commit.

    Listeners and logs of the user must see each statement in its place: then the rows have a statement of their own.
    """
    return _statement_for_commit(connection, listeners) is not None


def _statement_for_commit(connection: Connection, listeners: int) -> bytes | None:
    if connection.dialect.driver != "psycopg":
        return None
    dispatch, engine = connection.dispatch, connection.engine
    watchers = dispatch.before_execute, dispatch.before_cursor_execute, dispatch.after_cursor_execute
    if any(watchers) or dispatch.after_execute or len(list(dispatch.commit)) > listeners:
        return None
    if engine.logger.isEnabledFor(logging.INFO):
        return None
    from .pipeline import prepared_for_commit  # noqa: PLC0415 (psycopg is optional)

    return prepared_for_commit(connection, NUMBERED_INSERT, _TYPES)


def insert_and_commit(connection: Connection, rows: Sequence[OutboxRow]) -> None:
    """Write rows as the connection commits, in a listener of its commit: together with the COMMIT if possible.

    Raises NotFound if the database has no outbox, and the errors of the commit.
    """
    statement = _statement_for_commit(connection, 1)
    if statement is None or any(row["events"] > _MAX_INT2 for row in rows):
        return insert(connection, rows)
    from .pipeline import execute_and_commit  # noqa: PLC0415 (psycopg is optional)

    parameters = [_parameters(row) for row in rows]
    with translated_errors(), DriverErrors(connection, NUMBERED_INSERT, rows):
        execute_and_commit(connection, statement, parameters, _FORMATS)
    return None


def _parameters(row: OutboxRow) -> list[bytes]:
    return [value if isinstance(value, bytes) else str(value).encode() for value in (row[name] for name in COLUMNS)]


@contextmanager
def translated_errors() -> Generator[None]:
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
