"""The first and the last statement of a transaction, sent together with BEGIN and COMMIT.

psycopg sends BEGIN and COMMIT alone and waits for the answer, which costs a client as much as any other statement. In
libpq's pipeline mode both go at once. `Connection.pipeline()` of psycopg does this, too, but costs more than the wait.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, cast

from psycopg import errors, generators, pq
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
        # A name that no other client has: they may share the server's connection through a pooler.
        self.name = b"headrace_%b" % secrets.token_hex(8).encode()
        self.executions = 0


def can_begin(connection: Connection) -> bool:
    """Return whether `begin_and_execute` may be called: psycopg would send a plain BEGIN before the next statement, its
    libpq has pipelines, and the connection takes UTF-8. The handler, or other users of the pool, may have changed
    that."""
    driver = cast("Any", connection.connection.driver_connection)
    if not _can_pipeline(driver, TransactionStatus.IDLE):
        return False
    return driver.isolation_level is None and driver.read_only is None and driver.deferrable is None


def _can_pipeline(driver: Any, status: TransactionStatus) -> bool:
    """Return whether this is a connection of psycopg with this status, which takes a pipeline with texts in UTF-8."""
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


def prepared_for_commit(connection: Connection, sql: str, types: Sequence[int]) -> bytes | None:
    """Return the name of the statement with parameters of these types (OIDs) if psycopg has prepared it and
    `execute_and_commit` may be called; None otherwise.

    It must be a statement that psycopg knows: psycopg may deallocate all others before the commit, and then the user's
    transaction would fail.
    """
    driver = cast("Any", connection.connection.driver_connection)
    if not _can_pipeline(driver, TransactionStatus.INTRANS):
        return None
    try:
        if driver._num_transactions or driver._tpc:  # noqa: SLF001 (psycopg refuses to commit)
            return None
        return driver._prepared._names.get((sql.encode(), tuple(types)))  # noqa: SLF001 (there is no public way)
    except AttributeError:
        return None  # another version of psycopg


def execute_and_commit(
    connection: Connection, statement: bytes, rows: Sequence[Sequence[bytes]], formats: Sequence[int]
) -> None:
    """Execute a prepared statement once for each row of parameters, and commit. psycopg's own `commit` finds no
    transaction then, and does nothing.

    Raises the errors of psycopg. Roll back then.
    """
    pgconn: PGconn = cast("Any", connection.connection.driver_connection).pgconn
    commands = [partial(pgconn.send_query_prepared, statement, values, formats) for values in rows]
    _run(connection, [*commands, partial(pgconn.send_query_params, _COMMIT, None)])


def _run(connection: Connection, commands: Sequence[Callable[[], None]]) -> PGresult:
    """Send all commands at once, and return the result of the last one. Raises the error of the first one that
    failed."""
    pooled = cast("Any", connection.connection)
    driver = pooled.driver_connection
    steps = _pipeline(driver.pgconn, commands)
    try:
        if isinstance(pooled.dbapi_connection, AdaptedConnection):
            results = pooled.dbapi_connection.run_async(lambda driver: _wait_async(driver, steps))
        else:
            with driver.lock:
                results = driver.wait(steps)
    finally:
        if driver.pgconn.pipeline_status != PipelineStatus.OFF:
            driver.pgconn.finish()  # it did not get all results, and cannot be used
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(result)
    return results[-1]


async def _wait_async(driver: Any, steps: Generator[Any, Any, list[PGresult]]) -> list[PGresult]:
    async with driver.lock:
        return await driver.wait(steps)


def _pipeline(pgconn: PGconn, commands: Sequence[Callable[[], None]]) -> Generator[Any, Any, list[PGresult]]:
    """Send commands and get their results, as a generator that psycopg waits with. Each command has one result."""
    pgconn.enter_pipeline_mode()
    for send in commands:
        send()
    pgconn.pipeline_sync()
    yield from generators.send(pgconn)
    results: list[PGresult] = []
    for _ in commands:
        results += yield from generators.fetch_many(pgconn)
    yield from generators.fetch_many(pgconn)  # that of pipeline_sync
    pgconn.exit_pipeline_mode()
    return results
