"""Send the first statement of a transaction together with BEGIN, and the last ones together with COMMIT.

psycopg sends BEGIN and COMMIT alone and waits for the answer, which costs a client as much as any other statement. The
pipeline mode of libpq sends them and the statements at once. `Connection.pipeline()` of psycopg does this, too, but
costs more than the wait.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, cast

from psycopg import AsyncCursor, Cursor, errors, generators, pq
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from sqlalchemy import AdaptedConnection, Connection

_MIN_LIBPQ = 140_000
"""The first version of libpq that has pipelines."""
_BEGIN, _COMMIT, _ROLLBACK = b"BEGIN", b"COMMIT", b"ROLLBACK"
_UNPREPARED = b""
"""The name of a statement that is parsed each time."""
_PREPARED = "headrace: prepared statements"
"""Key of the prepared statements in `Connection.info`, which lives as long as the driver's connection."""
_WORTH_PREPARING = 20
"""A prepared statement that is lost after fewer executions is not prepared again on this connection."""


class _PreparedStatement:
    __slots__ = ("executions", "name")

    def __init__(self) -> None:
        self.name = _new_name()
        self.executions = 0


def _new_name() -> bytes:
    """Return a name that no other client has: they may share the server's connection through a pooler."""
    return b"headrace_%b" % secrets.token_hex(8).encode()


def can_begin(connection: Connection) -> bool:
    """Return whether `begin_and_execute` may be called: psycopg would send a plain BEGIN before the next statement, its
    libpq has pipelines, and the connection takes UTF-8. The handler, or other users of the pool, may have changed
    that."""
    driver = cast("Any", connection.connection.driver_connection)
    if not _can_pipeline(driver, TransactionStatus.IDLE):
        return False
    return driver.isolation_level is None and driver.read_only is None and driver.deferrable is None


def can_commit(connection: Connection) -> bool:
    """Return whether `execute_and_commit` may be called: psycopg would send a plain COMMIT, no cursor of the user must
    see the statements, and `_can_pipeline`."""
    driver = cast("Any", connection.connection.driver_connection)
    if not _can_pipeline(driver, TransactionStatus.INTRANS):
        return False
    # psycopg refuses to commit within its own `transaction()` and `tpc_begin()`. It does not tell these in public.
    refuses = getattr(driver, "_num_transactions", True) or getattr(driver, "_tpc", True)
    return not refuses and driver.cursor_factory in (Cursor, AsyncCursor)


def _can_pipeline(driver: Any, status: TransactionStatus) -> bool:
    """Return whether this is a connection of psycopg that has this transaction status, uses UTF-8, and can enter the
    pipeline mode."""
    pgconn: PGconn | None = getattr(driver, "pgconn", None)
    if pgconn is None or pgconn.transaction_status != status or driver.autocommit:
        return False
    if pgconn.parameter_status(b"client_encoding") != b"UTF8":
        return False
    return pgconn.pipeline_status == PipelineStatus.OFF and pq.version() >= _MIN_LIBPQ


def begin_and_execute(connection: Connection, sql: str, parameters: Sequence[str | int | None]) -> int:
    """Begin the transaction, execute a statement with the parameters `$1`, `$2` and so on, and return how many rows it
    has changed. The statement is prepared, unless psycopg may not prepare any on this connection.

    Raises the errors of psycopg.
    """
    driver = cast("Any", connection.connection.driver_connection)
    pgconn: PGconn = driver.pgconn
    prepared: dict[str, _PreparedStatement] = connection.info.setdefault(_PREPARED, {})
    known = prepared.get(sql)
    encoded = sql.encode()
    values = [None if value is None else str(value).encode() for value in parameters]
    begin = partial(pgconn.send_query_params, _BEGIN, None)
    unprepared = partial(pgconn.send_query_params, encoded, values)
    if driver.prepare_threshold is None or (known is not None and known.name == _UNPREPARED):
        result = _run(connection, [begin, unprepared])
    elif known is None:
        known = prepared[sql] = _PreparedStatement()
        prepare = partial(pgconn.send_prepare, known.name, encoded)
        result = _run(connection, [begin, prepare, partial(pgconn.send_query_prepared, known.name, values)])
    else:
        try:
            result = _run(connection, [begin, partial(pgconn.send_query_prepared, known.name, values)])
            known.executions += 1
        except errors.InvalidSqlStatementName:
            # psycopg deallocates all prepared statements after a rollback, and a pool or the user may do so, too.
            if known.executions < _WORTH_PREPARING:
                known.name = _UNPREPARED
            else:
                del prepared[sql]
            result = _run(connection, [partial(pgconn.send_query_params, _ROLLBACK, None), begin, unprepared])
    return result.command_tuples or 0


def execute_and_commit(
    connection: Connection, sql: str, rows: Sequence[Sequence[bytes]], formats: list[int]
) -> errors.Error | None:
    """Execute a statement once for each row of its parameters `$1`, `$2` and so on, and commit. psycopg's own `commit`
    finds no transaction then, and does nothing.

    Return the error of the statement, None if there is none. Raises that of COMMIT. Roll back after an error.
    """
    driver = cast("Any", connection.connection.driver_connection)
    pgconn: PGconn = driver.pgconn
    encoded = sql.encode()
    key = encoded, ()  # psycopg's own keys have the type of each parameter
    names = _prepared_by_psycopg(driver)
    name = _UNPREPARED if names is None else names.get(key)
    commands: list[Callable[[], None]] = []
    if not name:
        name = _UNPREPARED if names is None else _new_name()
        commands.append(partial(pgconn.send_prepare, name, encoded))
    commands += [partial(pgconn.send_query_prepared, name, values, formats) for values in rows]
    results = _send(connection, [*commands, partial(pgconn.send_query_params, _COMMIT, None)])
    if names is not None and results and results[0].status == ExecStatus.COMMAND_OK:
        names[key] = name
        names.move_to_end(key)  # psycopg deallocates those that were not used for long
    for result in results[: len(commands)]:
        if result.status == ExecStatus.FATAL_ERROR:
            return errors.error_from_result(result)
    _check(results)
    if len(results) <= len(commands) or results[-1].command_status != _COMMIT:
        raise errors.OperationalError("the server did not confirm the COMMIT")
    return None


def _prepared_by_psycopg(driver: Any) -> OrderedDict[Any, bytes] | None:
    """Return the names of the statements that psycopg has prepared, None if it may not prepare any.

    A statement must be among them to be used in a transaction of the user: psycopg deallocates all statements of the
    connection after a rollback, and the transaction would fail at one that is unknown.
    """
    prepared = getattr(driver, "_prepared", None)  # there is no public way
    names = getattr(prepared, "_names", None)
    may_prepare = driver.prepare_threshold is not None and isinstance(names, OrderedDict)
    is_deallocating = bool(getattr(prepared, "_to_flush", True))
    return cast("OrderedDict[Any, bytes]", names) if may_prepare and not is_deallocating else None


def _run(connection: Connection, commands: Sequence[Callable[[], None]]) -> PGresult:
    """Send all commands at once, and return the result of the last one. Raises the error of the first one that
    failed."""
    results = _send(connection, commands)
    _check(results)
    return results[-1]


def _check(results: Sequence[PGresult]) -> None:
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(result)


def _send(connection: Connection, commands: Sequence[Callable[[], None]]) -> list[PGresult]:
    """Send all commands at once, and return their results. After an error, those of later ones have no effect."""
    pooled = cast("Any", connection.connection)
    driver = pooled.driver_connection
    steps = _pipeline(driver.pgconn, commands)
    try:
        if isinstance(pooled.dbapi_connection, AdaptedConnection):
            return pooled.dbapi_connection.run_async(lambda driver: _wait_async(driver, steps))
        with driver.lock:
            return driver.wait(steps)
    finally:
        if driver.pgconn.pipeline_status != PipelineStatus.OFF:
            driver.pgconn.finish()  # it did not get all results, and cannot be used


async def _wait_async(driver: Any, steps: Generator[Any, Any, list[PGresult]]) -> list[PGresult]:
    async with driver.lock:
        return await driver.wait(steps)


def _pipeline(pgconn: PGconn, commands: Sequence[Callable[[], None]]) -> Generator[Any, Any, list[PGresult]]:
    """Send commands and get their results, as a generator that psycopg waits with. Each command has one result."""
    pgconn.enter_pipeline_mode()
    for send in commands:
        send()
    pgconn.pipeline_sync()
    results: list[PGresult] = []
    try:
        yield from generators.send(pgconn)
        for _ in commands:
            results += yield from generators.fetch_many(pgconn)
        yield from generators.fetch_many(pgconn)  # that of pipeline_sync
    except errors.Error:
        # The server may have sent its reason before it closed the connection.
        if not any(result.status == ExecStatus.FATAL_ERROR for result in results):
            raise
    else:
        pgconn.exit_pipeline_mode()
    return results
