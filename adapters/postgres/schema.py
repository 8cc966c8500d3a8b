"""Tables of queues in PostgreSQL. They are created only on request; segments are created as queues grow.

    headrace_provider     a provider: its number in the other tables, its control store, its number of queues
    headrace_queue        a queue: the lock of its writers, and its end. `events` and `bytes` count all that was stored
    headrace_segment      the tables of blocks of a provider, and where each queue begins in them
    headrace_b_P_S        blocks of provider P in segment S, in chunks of one page each
    headrace_producer     the last call of each idempotent producer

A writer locks the rows of its queues in ascending order, and keeps the locks until it commits. So the batches of a
queue become visible in the order of their offsets, without holes. A segment is a table of its own, and not a partition:
to drop a partition, PostgreSQL waits for all readers of all partitions, and all writers wait behind it.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from psycopg import Connection, sql
from psycopg.rows import TupleRow

from ...streams.errors import DataDirectoryError, InvalidArgument
from ..seam import AdapterContext

VERSION = 1
_LOCK = 0x68657175
"""Any number that only headrace uses."""

DDL = (
    """CREATE TABLE headrace_provider (
    provider integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    owner text COLLATE "C" NOT NULL,
    identity text COLLATE "C" NOT NULL,
    queues integer NOT NULL
)""",
    """CREATE TABLE headrace_queue (
    provider integer,
    queue integer,
    segment integer NOT NULL,
    next bigint NOT NULL,
    acknowledged bigint NOT NULL,
    events bigint NOT NULL,
    bytes bigint NOT NULL,
    time_us bigint NOT NULL,
    PRIMARY KEY (provider, queue)
) WITH (fillfactor = 50)""",
    """CREATE TABLE headrace_segment (
    provider integer,
    segment integer,
    queue integer,
    first bigint NOT NULL,
    events bigint NOT NULL,
    bytes bigint NOT NULL,
    time_us bigint NOT NULL,
    PRIMARY KEY (provider, segment, queue)
)""",
    """CREATE TABLE headrace_producer (
    provider integer,
    producer bytea,
    number bigint NOT NULL,
    time_us bigint NOT NULL,
    offsets bigint[] NOT NULL,
    PRIMARY KEY (provider, producer)
) WITH (fillfactor = 70)""",
    "CREATE TABLE headrace_queues_version (id integer PRIMARY KEY, version integer NOT NULL)",
    f"INSERT INTO headrace_queues_version (id, version) VALUES (1, {VERSION})",  # noqa: S608 (a number)
)
"""Statements that create the tables."""

_SEGMENT = """
    CREATE TABLE {table} (
        queue integer, first bigint, part integer, parts integer NOT NULL, batches integer NOT NULL,
        events integer NOT NULL, time_us bigint NOT NULL, chunk bytea NOT NULL, PRIMARY KEY (queue, first, part)
    ) WITH (autovacuum_vacuum_insert_threshold = -1)
"""
COLUMNS = "queue, first, part, parts, batches, events, time_us, chunk"
"""Columns of a segment. `part` numbers the chunks of a block from 0 to `parts` - 1."""
BEGIN_SEGMENT = """
    INSERT INTO headrace_segment (provider, segment, queue, first, events, bytes, time_us)
    SELECT provider, %(segment)s, queue, next, events, bytes, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
    FROM headrace_queue WHERE provider = %(provider)s
"""
"""Notes where each queue begins in a new segment. Lock the rows of all queues before."""


class ProviderRow(NamedTuple):
    """A provider in the database."""

    provider: int
    identity: str
    queues: int

    @property
    def channel(self) -> str:
        """The channel of notifications about its queues."""
        return f"headrace_{self.identity}"


def segment_table(provider: int, segment: int) -> str:
    """Return the name of a segment's table."""
    return f"headrace_b_{provider}_{segment}"


def migrate(connection: Connection[Any]) -> bool:
    """Create the tables, in one transaction. Return False if they were there. Raises DataDirectoryError if they have
    another version, psycopg.Error."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if version(connection) is not None:
            return False
        for statement in DDL:
            connection.execute(statement.encode())
    return True


def version(connection: Connection[Any]) -> int | None:
    """Return the version of the tables, None if there are none. Raises DataDirectoryError if it is another one."""
    if _value(connection, "SELECT to_regclass('headrace_queues_version')") is None:
        return None
    found = _value(connection, "SELECT version FROM headrace_queues_version")
    if found != VERSION:
        raise DataDirectoryError(
            f"the tables for queues have version {found}, and this headrace needs version {VERSION}: use the headrace "
            "that wrote them"
        )
    return found


def register(connection: Connection[TupleRow], context: AdapterContext, *, create: bool) -> ProviderRow:
    """Return the provider's row. Create it, with empty queues, if the provider is new.

    Raises InvalidArgument if there are no tables, or if the provider is another one, DataDirectoryError if its queues
    are gone.
    """
    if create:
        migrate(connection)
    elif version(connection) is None:
        raise InvalidArgument(
            "the database has no tables for queues: run `headrace postgres migrate URL`, or add the option "
            "create = true",
            option="options",
        )
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        query = "SELECT provider, identity, queues, owner FROM headrace_provider WHERE name = %s"
        found = connection.execute(query, [context.provider]).fetchone()
        if found is None:
            return _create(connection, context)
        row, owner = ProviderRow(*found[:3]), found[3]
        _check(context, row, owner)
        if not owner and context.owner:
            connection.execute(
                "UPDATE headrace_provider SET owner = %s WHERE provider = %s", [context.owner, row.provider]
            )
        return row


def _check(context: AdapterContext, row: ProviderRow, owner: str) -> None:
    if owner and context.owner and owner != context.owner:
        raise InvalidArgument(
            f"provider {context.provider!r} in this database belongs to another control store: choose another name, or "
            "another schema by ?options=-csearch_path%3DSCHEMA in the url",
            option="options",
        )
    if row.queues != context.queues:
        raise InvalidArgument(
            f"provider {context.provider!r} has {row.queues} queues in this database, not {context.queues}: open it "
            f"with queues = {row.queues}",
            option="queues",
        )


def _create(connection: Connection[TupleRow], context: AdapterContext) -> ProviderRow:
    if context.used_before:
        raise DataDirectoryError(
            f"provider {context.provider!r} was used before, and this database does not have its queues: give the url "
            "of their database, or restore a backup of it"
        )
    identity = uuid.uuid4().hex
    query = """
        INSERT INTO headrace_provider (name, owner, identity, queues) VALUES (%s, %s, %s, %s) RETURNING provider
    """
    provider = int(_value(connection, query, context.provider, context.owner, identity, context.queues))
    connection.execute(
        """
        INSERT INTO headrace_queue (provider, queue, segment, next, acknowledged, events, bytes, time_us)
        SELECT %s, queue, 0, 0, 0, 0, 0, 0 FROM generate_series(0, %s) AS queue
        """,
        [provider, context.queues - 1],
    )
    for statement in segment_statements(provider, 0):
        connection.execute(statement)
    connection.execute(BEGIN_SEGMENT, {"provider": provider, "segment": 0})
    return ProviderRow(provider, identity, context.queues)


def segment_statements(provider: int, segment: int) -> list[sql.Composed]:
    """Return the statements that create the table of a segment. Chunks are neither compressed nor moved elsewhere."""
    table = sql.Identifier(segment_table(provider, segment))
    storage = "ALTER TABLE {table} ALTER chunk SET STORAGE PLAIN"
    return [sql.SQL(_SEGMENT).format(table=table), sql.SQL(storage).format(table=table)]


def _value(connection: Connection[Any], query: str, *values: object) -> Any:
    row = connection.execute(query.encode(), values or None).fetchone()
    return None if row is None else row[0]
