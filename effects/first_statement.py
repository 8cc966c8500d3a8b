"""The first statement of a transaction, sent together with BEGIN.

psycopg sends BEGIN alone and waits for the answer, which costs a client as much as any other statement. In libpq's
pipeline mode both go at once. `Connection.pipeline()` of psycopg does this, too, but costs more than it saves.
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

_PIPELINES = 140_000
"""The first version of libpq that has pipelines."""
_BEGIN, _ROLLBACK = b"BEGIN", b"ROLLBACK"
_UNPREPARED = b""
"""The name of a statement that is parsed each time."""
_NAMES = "headrace: names of prepared statements"
"""Key of the names in `Connection.info`, which ends with the driver's connection."""


def can_begin(connection: Connection) -> bool:
    """Return whether `begin_and_execute` may be called: the driver is psycopg, and begins a transaction with the next
    statement, by a BEGIN without options."""
    driver = cast("Any", connection.connection.driver_connection)
    pgconn: PGconn | None = getattr(driver, "pgconn", None)
    if pgconn is None or pgconn.transaction_status != TransactionStatus.IDLE or driver.autocommit:
        return False
    has_options = driver.isolation_level is not None or driver.read_only is not None or driver.deferrable is not None
    return not has_options and pgconn.pipeline_status == PipelineStatus.OFF and pq.version() >= _PIPELINES


def begin_and_execute(connection: Connection, sql: str, parameters: Sequence[str | int]) -> int:
    """Begin the transaction, execute a statement with the parameters `$1`, `$2` and so on, and return how many rows it
    has changed. The statement is prepared, unless psycopg may not prepare any on this connection.

    Raises the errors of psycopg.
    """
    driver = cast("Any", connection.connection.driver_connection)
    pgconn: PGconn = driver.pgconn
    names: dict[str, bytes] = connection.info.setdefault(_NAMES, {})
    name = _UNPREPARED if driver.prepare_threshold is None else names.get(sql)
    values = [str(value).encode() for value in parameters]
    unprepared = partial(pgconn.send_query_params, sql.encode(), values)
    begin = partial(pgconn.send_query_params, _BEGIN, None)
    if name is None:
        # A name that no other client has: they may share the server's connection through a pooler.
        name = b"headrace_%b" % secrets.token_hex(8).encode()
        prepare = partial(pgconn.send_prepare, name, sql.encode())
        result = _run(connection, [begin, prepare, partial(pgconn.send_query_prepared, name, values)])
        names[sql] = name
    elif name == _UNPREPARED:
        result = _run(connection, [begin, unprepared])
    else:
        try:
            result = _run(connection, [begin, partial(pgconn.send_query_prepared, name, values)])
        except errors.InvalidSqlStatementName:
            names[sql] = _UNPREPARED  # the pool or the user has deallocated it, and will do so again
            result = _run(connection, [partial(pgconn.send_query_params, _ROLLBACK, None), begin, unprepared])
    return result.command_tuples or 0


def _run(connection: Connection, commands: Sequence[Callable[[], None]]) -> PGresult:
    """Send all commands at once, and return the result of the last one. Raises the error of the first one that
    failed."""
    pooled = cast("Any", connection.connection)
    driver = pooled.driver_connection
    steps = _steps(driver.pgconn, commands)
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


def _steps(pgconn: PGconn, commands: Sequence[Callable[[], None]]) -> Generator[Any, Any, list[PGresult]]:
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
