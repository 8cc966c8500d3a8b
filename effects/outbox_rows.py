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
from .observed import is_watched
from .schema import key_of, no_tables, outbox

LANES = 16
"""Number of lanes of a provider. It is fixed: a stream must stay in its lane."""

Events = Publishable | Iterable[Publishable]
OutboxRow = Mapping[str, Any]

COLUMNS = ("provider", "lane", "stream", "events", "batch", "written_at_us")
INSERT = f"INSERT INTO headrace_outbox ({', '.join(COLUMNS)}) VALUES "  # noqa: S608 (only names of this module)
NUMBERED_INSERT = INSERT + f"({', '.join(f'${number + 1}' for number in range(len(COLUMNS)))})"
_INSERT = text(INSERT + f"({', '.join(f':{name}' for name in COLUMNS)})")

_TEXT, _BINARY = 0, 1
_FORMATS = [_BINARY, _TEXT, _BINARY, _TEXT, _BINARY, _TEXT]
"""The format of each value of `_parameters`. A text in binary format is not cut at a NUL."""

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


def can_insert_with_commit(connection: Connection) -> bool:
    """Return whether `insert_and_commit` sends rows and COMMIT at once.

    Logs and listeners of the user must see each statement: for them, the rows have a statement of their own.
    """
    if connection.dialect.driver != "psycopg" or connection.engine.logger.isEnabledFor(logging.INFO):
        return False
    from .pipeline import can_commit  # noqa: PLC0415 (psycopg is optional)

    return not is_watched(connection) and can_commit(connection)


def insert_and_commit(connection: Connection, rows: Sequence[OutboxRow]) -> None:
    """Insert rows, and commit in the same message if possible. Call it from a listener of the connection's commit.

    Raises NotFound if the database has no outbox, and the errors of the commit.
    """
    is_last = len(list(connection.dispatch.commit)) == 1  # another listener may execute statements
    if not is_last or not can_insert_with_commit(connection):
        insert(connection, rows)
        return
    from .pipeline import execute_and_commit  # noqa: PLC0415 (psycopg is optional)

    with DriverErrors(connection, None, None):
        error = execute_and_commit(connection, NUMBERED_INSERT, [_parameters(row) for row in rows], _FORMATS)
    if error is not None:
        with translated_errors(), DriverErrors(connection, NUMBERED_INSERT, rows):
            raise error


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
