"""Opens queues on a server, and looks into their tables."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from headrace.adapters import AdapterContext, QueueReceiver, Received
from headrace.adapters.postgres import PostgresAdapter, PostgresLimits, open_adapter
from headrace.streams.events import EventBatch
from headrace.streams.identity import StreamId

ANY = 1 << 30
QUICK = PostgresLimits(request_s=2.0, acknowledge_s=0.05)


@asynccontextmanager
async def opened(
    url: str, *, queues: int = 1, limits: PostgresLimits = QUICK, **options: Any
) -> AsyncGenerator[PostgresAdapter]:
    """Open queues. Keyword arguments are options of the adapter, or fields of its context."""
    fields = {name: options.pop(name) for name in ("provider", "owner", "used_before", "location") if name in options}
    context = AdapterContext(provider=fields.pop("provider", "tests"), queues=queues, **fields)
    adapter = await open_adapter(context, {"url": url, "create": True, **options}, limits)
    try:
        yield adapter
    finally:
        await adapter.aclose()


def batch(text: str, key: str = "s") -> EventBatch:
    return EventBatch.of(StreamId("tests", key), [text.encode()])


def texts(batches: Sequence[EventBatch]) -> list[str]:
    return [payload.decode() for each in batches for payload in each.payloads()]


async def received(receiver: QueueReceiver, count: int) -> list[str]:
    """Return the payloads of the next batches, at least this many. There must be no gap before."""
    found: list[str] = []
    while len(found) < count:
        result: Received = await receiver.receive(ANY, ANY)
        assert result.gap is None
        found += texts(result.batches)
    return found


def ask(url: str, statement: str, *values: object) -> list[Any]:
    """Run a statement as another program would. Return its rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), values or None)
        return cursor.fetchall() if cursor.description else []


def tables(url: str) -> list[str]:
    """Return the names of the tables of segments."""
    query = "SELECT relname FROM pg_class WHERE relname LIKE 'headrace\\_b\\_%' AND relkind = 'r' AND "
    visible = "pg_table_is_visible(oid) ORDER BY relname"
    return [row[0] for row in ask(url, query + visible)]


def replace_end(url: str, first: int) -> None:
    """Remove the batches from offset `first` on, as a standby that was behind, or a backup."""
    (table,) = tables(url)
    ask(url, f"DELETE FROM {table} WHERE first >= {first}")
    query = f"UPDATE headrace_queue SET next = {first}, time_us = (SELECT max(time_us) FROM {table})"
    ask(url, query)
