"""Queues in PostgreSQL: headrace's adapter, rows written by `COPY` and taken by `SKIP LOCKED`, and pgmq's statements.

The server syncs each commit. headrace has eight batches on their way; the peers commit one after the other.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..servers import PostgresServer, Server
from .peer import Peer, PeerConsumer, Producer
from .provider import ProviderClient

if TYPE_CHECKING:
    from psycopg import AsyncConnection

POLL_S = 0.001
"""How often a peer asks for messages if there were none, in seconds."""


def url_of(address: str) -> str:
    return f"postgresql://{PostgresServer.user}:{PostgresServer.password}@{address}/postgres"


class PostgresQueue(Peer):
    requires = ("psycopg",)

    def __init__(self, name: str, client: str) -> None:
        self.name = name
        self.client = f"{__name__}:{client}"

    def server(self) -> Server:
        return PostgresServer(fsync=True)


class SqlQueue:
    """A table that SQL fills and empties. `statements` are one of the classes below."""

    def __init__(self, statements: CopyRows | PgmqStatements) -> None:
        self._statements = statements

    @asynccontextmanager
    async def producer(self, address: str, *, batch: int, paced: bool = False) -> AsyncGenerator[Producer]:
        async with _connected(address, self._statements.create) as connection:
            yield _SqlProducer(connection, self._statements)

    @asynccontextmanager
    async def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AsyncGenerator[PeerConsumer]:
        async with _connected(address, self._statements.create) as connection:
            yield _SqlConsumer(connection, self._statements, batch)


@asynccontextmanager
async def _connected(address: str, create: str) -> AsyncGenerator[AsyncConnection[Any]]:
    from psycopg import AsyncConnection  # noqa: PLC0415 (only in the process that uses it)

    async with await AsyncConnection.connect(url_of(address), autocommit=True) as connection:
        await connection.execute(f"BEGIN; SELECT pg_advisory_xact_lock(1); {create}; COMMIT".encode())
        yield connection


class CopyRows:
    """A row per event, written by `COPY` in binary format, taken by `DELETE` with `SKIP LOCKED`."""

    create = "CREATE TABLE IF NOT EXISTS events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload bytea)"

    async def send(self, connection: AsyncConnection[Any], payloads: Sequence[bytes]) -> None:
        rows = [b"\0\1" + len(payload).to_bytes(4, "big") + payload for payload in payloads]
        data = b"".join((b"PGCOPY\n\xff\r\n\0", bytes(8), *rows, b"\xff\xff"))
        async with connection.cursor().copy(b"COPY events (payload) FROM STDIN (FORMAT BINARY)") as copy:
            await copy.write(data)

    async def take(self, connection: AsyncConnection[Any], limit: int) -> Sequence[bytes]:
        cursor = await connection.execute(
            b"DELETE FROM events WHERE id IN (SELECT id FROM events ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED) "
            b"RETURNING payload",
            [limit],
            binary=True,
        )
        return [payload for (payload,) in await cursor.fetchall()]


class OrderedRows(CopyRows):
    """The same rows, read in order without a lock, as by one reader that keeps its position."""

    def __init__(self) -> None:
        self._last = 0

    async def take(self, connection: AsyncConnection[Any], limit: int) -> Sequence[bytes]:
        query = b"SELECT id, payload FROM events WHERE id > %s ORDER BY id LIMIT %s"
        rows = await (await connection.execute(query, [self._last, limit], binary=True)).fetchall()
        if rows:
            self._last = rows[-1][0]
        return [payload for _, payload in rows]


class PgmqStatements:
    """The statements of pgmq's functions `send_batch`, `read` and `delete`, with payloads as text in JSON."""

    create = """
        CREATE TABLE IF NOT EXISTS q_events (
            msg_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, read_ct int NOT NULL DEFAULT 0,
            enqueued_at timestamptz NOT NULL DEFAULT now(), vt timestamptz NOT NULL, message jsonb
        );
        CREATE INDEX IF NOT EXISTS q_events_vt ON q_events (vt ASC)
    """

    async def send(self, connection: AsyncConnection[Any], payloads: Sequence[bytes]) -> None:
        messages = [json.dumps({"p": base64.b64encode(payload).decode()}) for payload in payloads]
        await connection.execute(
            b"INSERT INTO q_events (vt, message) SELECT clock_timestamp(), unnest(%s::jsonb[]) RETURNING msg_id",
            [messages],
        )

    async def take(self, connection: AsyncConnection[Any], limit: int) -> Sequence[bytes]:
        cursor = await connection.execute(
            b"WITH cte AS (SELECT msg_id FROM q_events WHERE vt <= clock_timestamp() ORDER BY msg_id ASC LIMIT %s "
            b"FOR UPDATE SKIP LOCKED) UPDATE q_events m SET vt = clock_timestamp() + interval '30 s', "
            b"read_ct = read_ct + 1 FROM cte WHERE m.msg_id = cte.msg_id "
            b"RETURNING m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message",
            [limit],
        )
        rows = await cursor.fetchall()
        if rows:
            await connection.execute(b"DELETE FROM q_events WHERE msg_id = ANY(%s)", [[row[0] for row in rows]])
        return [base64.b64decode(row[4]["p"]) for row in rows]


class _SqlProducer:
    def __init__(self, connection: AsyncConnection[Any], statements: CopyRows | PgmqStatements) -> None:
        self._connection = connection
        self._statements = statements

    async def send(self, payloads: Sequence[bytes]) -> None:
        await self._statements.send(self._connection, payloads)

    async def flush(self) -> None:
        """Everything was committed when `send` returned."""


class _SqlConsumer:
    def __init__(self, connection: AsyncConnection[Any], statements: CopyRows | PgmqStatements, batch: int) -> None:
        self._connection = connection
        self._statements = statements
        self._batch = batch

    async def receive(self) -> Sequence[bytes]:
        taken = await self._statements.take(self._connection, self._batch)
        if not taken:
            await asyncio.sleep(POLL_S)
        return taken

    async def finish(self) -> None:
        """Everything was deleted when `receive` returned."""


adapter = ProviderClient("postgres", lambda address: {"url": url_of(address), "create": True})
copied = SqlQueue(CopyRows())
ordered = SqlQueue(OrderedRows())
pgmq = SqlQueue(PgmqStatements())

OURS = PostgresQueue("headrace, adapter postgres", "adapter")
COPY_ROWS = PostgresQueue("COPY rows, SKIP LOCKED", "copied")
ORDERED_ROWS = PostgresQueue("COPY rows, read in order", "ordered")
PGMQ = PostgresQueue("pgmq's statements", "pgmq")
