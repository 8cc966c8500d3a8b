"""The first statement of a transaction, sent together with BEGIN.

psycopg sends BEGIN alone and waits for the answer, which costs a client as much as any other statement. In libpq's
pipeline mode both go at once. `Connection.pipeline()` of psycopg does this, too, but costs more than the wait.
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
_BEGIN, _ROLLBACK = b"BEGIN", b"ROLLBACK"
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
    pgconn: PGconn | None = getattr(driver, "pgconn", None)
    if pgconn is None or pgconn.transaction_status != TransactionStatus.IDLE or driver.autocommit:
        return False
    if pgconn.parameter_status(b"client_encoding") != b"UTF8":
        return False
    has_options = driver.isolation_level is not None or driver.read_only is not None or driver.deferrable is not None
    return not has_options and pgconn.pipeline_status == PipelineStatus.OFF and pq.version() >= _MIN_LIBPQ


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
