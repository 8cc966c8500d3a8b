"""Statements that the driver gets directly, without SQLAlchemy's execution, which would cost as much again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import Connection, text

from ..streams.errors import NotSupported

_PARAMETER = re.compile(r"(?<!:):(\w+)")
"""A parameter of SQLAlchemy. `::` is a cast."""


class DriverStatement:
    """A statement that returns no rows, and is executed for each event. PostgreSQL gets it from the driver directly:
    SQLAlchemy's execution would cost as much again. With psycopg, it begins the transaction if none is open."""

    def __init__(self, sql: str) -> None:
        self._statement = text(sql)
        self._compiled: dict[tuple[str, str], tuple[str, Sequence[str] | None]] = {}
        """By dialect and driver: text, and the order of parameters if it has no names."""
        self._names = list(dict.fromkeys(_PARAMETER.findall(sql)))
        """The names of parameters in the order of `$1`, `$2` and so on in `_numbered`."""
        self._numbered = _PARAMETER.sub(lambda found: f"${self._names.index(found[1]) + 1}", sql)

    def execute(self, connection: Connection, values: Mapping[str, Any]) -> int:
        """Return the number of rows that were changed. Raises the errors of SQLAlchemy, and NotSupported if the driver
        does not tell this number."""
        dialect = connection.dialect
        if dialect.driver == "psycopg":
            from .pipeline import begin_and_execute, can_begin  # noqa: PLC0415 (psycopg is optional)

            if can_begin(connection):
                numbered = [values[name] for name in self._names]
                with DriverErrors(connection, self._numbered, numbered):
                    return begin_and_execute(connection, self._numbered, numbered)
        known = self._compiled.get((dialect.name, dialect.driver))
        if known is None:
            made = cast("Any", self._statement.compile(dialect=dialect))
            known = str(made), list(made.positiontup) if made.positional else None
            self._compiled[dialect.name, dialect.driver] = known
        sql, order = known
        parameters: Any = dict(values) if order is None else tuple(values[name] for name in order)
        if dialect.name == "sqlite":  # so that observed._end_cancelled_statement is called
            changed = connection.exec_driver_sql(sql, parameters).rowcount
        else:
            changed = _rows_changed(connection, sql, parameters)
        if changed < 0:
            raise NotSupported(f"the driver {dialect.driver!r} does not tell how many rows a statement has changed")
        return changed


def _rows_changed(connection: Connection, sql: str, parameters: Any) -> int:
    with DriverErrors(connection, sql, parameters):
        cursor = connection.connection.cursor()
        try:
            cursor.execute(sql, parameters)
            return cursor.rowcount
        finally:
            cursor.close()


class DriverErrors:
    """Raises the driver's errors as SQLAlchemy does for its own statements: wraps them, and invalidates a lost
    connection. A class, because it is entered for each event: see `outages`."""

    def __init__(self, connection: Connection, sql: str | None, parameters: Any) -> None:
        self._connection = connection
        self._sql = sql
        self._parameters = parameters

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            # There is no public method; test_one_lost_connection_of_the_pool_stands_for_all finds out if it changes.
            self._connection._handle_dbapi_exception(error, self._sql, self._parameters, None, None)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
