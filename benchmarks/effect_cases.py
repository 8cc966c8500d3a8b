"""Handlers whose effect is one UPDATE for each event in PostgreSQL, and the outbox.

The events go to 16 streams, and are stored before the run. Up to 16 transactions run at a time. Other ways to handle
them:
- *No position*: the same transaction, at least once.
- *Dedupe table*: a row for each event, written by hand in the same transaction.
- *DBOS*: a workflow for each event, with one step in a transaction. The events are in memory, without a queue.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from headrace import Effects, Event, EventBatch, Outbox, Provider, Start, StreamId, Transaction
from headrace.effects import administration, schema
from headrace.effects.database import database_of
from headrace.effects.mover import OutboxMover
from headrace.effects.outbox_rows import rows_of
from headrace.streams.codecs import Codecs

from .harness import Job, Result, StartingGate, together
from .section import Section, Target
from .servers import PostgresServer

HERE = "benchmarks.effect_cases"
STREAMS, CLIENTS, BATCH = 16, 16, 100
EVENT, BATCHED, SENT_BATCHED = "commit per event", "commit per 100 events", "commit per 100, one executemany"
NO_POSITION, BY_HAND, DBOS = "no position (at least once)", "dedupe table", "DBOS 3, a workflow per event"
HEADRACE, MOVER = "headrace", "outbox to the log"
PLAIN, PUBLISHING = "transactions without the outbox", "transactions with one event in the outbox"
SELECTING = "transactions with one `SELECT 1` more"
EXTRAS = (PLAIN, PUBLISHING, SELECTING)
SENT_TOGETHER = "transactions with one event in the outbox, INSERT and COMMIT in one message"
BY_PGBENCH, BY_SESSION = "{}, by pgbench", "{}, by sessions"


# ---- handlers --------------------------------------------------------------------------------------------------------


def handlers(gate: StartingGate, *, url: str, way: str, commit: str, events: int) -> Mapping[str, Any]:
    return asyncio.run(_handlers(gate, url, way, commit, events))


async def _handlers(gate: StartingGate, url: str, way: str, commit: str, events: int) -> Mapping[str, Any]:
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415

    await asyncio.to_thread(_create_tables, url)
    engine = create_async_engine(_driver(url), pool_size=CLIENTS, max_overflow=0)
    options: dict[str, Any] = {"batch": commit != EVENT, "concurrency": CLIENTS, "start": Start.earliest()}
    with tempfile.TemporaryDirectory() as data:
        async with Provider.open(data, queues=1) as provider:
            for first in range(0, events // STREAMS, BATCH):
                payloads = [str(number).encode() for number in range(first, first + BATCH)]
                await asyncio.gather(
                    *(provider.publish(StreamId("bench", str(key)), payloads) for key in range(STREAMS))
                )
            handle = _handler(way, commit, engine)
            if way == HEADRACE:
                options["effects"] = Effects(engine)
            await asyncio.to_thread(gate.wait)
            subscribe: Any = provider.subscribe
            one = await subscribe("effects", "bench/*", handle, **options)
            await one.caught_up()
            gate.done()
            await one.close()
    await engine.dispose()
    handled = await asyncio.to_thread(_handled, url)
    assert handled == events // STREAMS // BATCH * BATCH * STREAMS, handled
    return {"events": handled}


def _handler(way: str, commit: str, engine: Any) -> Any:
    one = partial(_with_effects if way == HEADRACE else _by_hand, Statements(engine, way, commit))
    if way == HEADRACE:

        async def with_effects(delivered: Any, tx: Transaction) -> None:
            await one(delivered, tx)

        return with_effects

    async def of_event(event: Event) -> None:
        await one(event)

    async def of_batch(batch: EventBatch) -> None:
        await one(batch)

    return of_event if commit == EVENT else of_batch


class Statements:
    """The statements of a handler."""

    def __init__(self, engine: Any, way: str, commit: str) -> None:
        from sqlalchemy import text  # noqa: PLC0415

        self.engine = engine
        self.dedupes = way == BY_HAND
        self._together = commit == SENT_BATCHED
        self._update = text("UPDATE account SET handled = handled + 1 WHERE id = :id")
        self._seen = text("INSERT INTO seen (id) VALUES (:id) ON CONFLICT DO NOTHING")

    async def apply(self, execute: Any, events: Sequence[Event]) -> None:
        rows = [{"id": cast("StreamId", event.stream).key} for event in events]
        for part in [rows] if self._together else rows:
            await execute(self._update, part)

    async def is_new(self, execute: Any, event: Event) -> bool:
        return bool((await execute(self._seen, {"id": event.idempotency_key})).rowcount)


async def _with_effects(statements: Statements, delivered: Event | EventBatch, tx: Transaction) -> None:
    await statements.apply(tx.execute, [delivered] if isinstance(delivered, Event) else delivered.events())


async def _by_hand(statements: Statements, delivered: Event | EventBatch) -> None:
    events = [delivered] if isinstance(delivered, Event) else delivered.events()
    async with statements.engine.begin() as connection:
        if statements.dedupes:
            events = [event for event in events if await statements.is_new(connection.execute, event)]
        await statements.apply(connection.execute, events)


def dbos(gate: StartingGate, *, url: str, events: int) -> Mapping[str, Any]:
    from dbos import DBOS as System  # noqa: N811, PLC0415
    from dbos import SetWorkflowID, SQLAlchemyDatasource  # noqa: PLC0415
    from sqlalchemy import text  # noqa: PLC0415

    _create_tables(url)
    config: Any = {"name": "bench", "system_database_url": _driver(url), "log_level": "ERROR"}
    System(config=config)
    source: Any = SQLAlchemyDatasource.create(_driver(url))
    update = text("UPDATE account SET handled = handled + 1 WHERE id = :id")

    @source.transaction(isolation_level="READ COMMITTED")
    def apply(key: str) -> None:
        source.sql_session().execute(update, {"id": key})

    @System.workflow()
    def handle(key: str) -> None:
        apply(key)

    System.launch()
    source.run_migrations()

    def stream(key: str, number: int) -> None:
        for event in range(number):
            with SetWorkflowID(f"{key}/{event}"):
                handle(key)

    gate.wait()
    with ThreadPoolExecutor(STREAMS) as threads:
        for done in [threads.submit(stream, str(key), events // STREAMS) for key in range(STREAMS)]:
            done.result()
    gate.done()
    System.destroy()
    handled = _handled(url)
    assert handled == events // STREAMS * STREAMS, handled
    return {"events": handled}


# ---- the outbox ------------------------------------------------------------------------------------------------------


def mover(gate: StartingGate, *, url: str, events: int) -> Mapping[str, Any]:
    return asyncio.run(_mover(gate, url, events))


async def _mover(gate: StartingGate, url: str, events: int) -> Mapping[str, Any]:
    await asyncio.to_thread(_create_tables, url)
    await asyncio.to_thread(_fill, url, events)
    engine = administration.engine_of(url)
    with tempfile.TemporaryDirectory() as data:
        async with Provider.open(data, queues=4) as provider:
            moving = OutboxMover(database_of(engine), provider)
            await asyncio.to_thread(gate.wait)
            while await moving.move():
                pass
            gate.done()
            assert moving.moved_events == events, moving.moved_events
    engine.dispose()
    return {"events": events}


def _fill(url: str, events: int) -> None:
    from sqlalchemy import create_engine  # noqa: PLC0415

    outbox, engine = Outbox(), create_engine(_driver(url))
    with engine.begin() as connection:
        for number in range(events):
            outbox.publish(StreamId("bench", str(number % STREAMS)), b"x" * 100, connection=connection)
    engine.dispose()


def transactions(gate: StartingGate, *, url: str, more: str, seconds: float) -> Mapping[str, Any]:
    """Transactions of 16 clients in one process, with psycopg. `more`: what each does besides its UPDATE."""
    _create_tables(url)
    return asyncio.run(_transactions(gate, url, more, seconds))


async def _transactions(gate: StartingGate, url: str, more: str, seconds: float) -> Mapping[str, Any]:
    import psycopg  # noqa: PLC0415

    outbox, number = Outbox(), 0
    connections = [await psycopg.AsyncConnection.connect(url) for _ in range(CLIENTS)]
    await asyncio.to_thread(gate.wait)
    end = time.monotonic() + seconds

    async def client(key: str, connection: Any) -> None:
        nonlocal number
        while time.monotonic() < end:
            async with connection.transaction():
                await connection.execute("UPDATE account SET handled = handled + 1 WHERE id = %s", [key])
                if more == SELECTING:
                    await connection.execute("SELECT 1")
                if more == PUBLISHING:
                    await outbox.publish(StreamId("bench", key), b"x" * 100, connection=connection)
            number += 1

    await asyncio.gather(*(client(str(key), connection) for key, connection in enumerate(connections)))
    gate.done()
    for connection in connections:
        await connection.close()
    return {"events": number}


def transactions_by_sessions(gate: StartingGate, *, url: str, more: str, seconds: float) -> Mapping[str, Any]:
    """The same transactions of 16 clients in one process, with sessions of SQLAlchemy and psycopg."""
    _create_tables(url)
    return asyncio.run(_transactions_by_sessions(gate, url, more, seconds))


async def _transactions_by_sessions(gate: StartingGate, url: str, more: str, seconds: float) -> Mapping[str, Any]:
    from sqlalchemy import text  # noqa: PLC0415
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine  # noqa: PLC0415

    outbox, number = Outbox(), 0
    update = text("UPDATE account SET handled = handled + 1 WHERE id = :key")
    engine = create_async_engine(_driver(url), pool_size=CLIENTS)
    await asyncio.to_thread(gate.wait)
    end = time.monotonic() + seconds

    async def client(key: str) -> None:
        nonlocal number
        while time.monotonic() < end:
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(update, {"key": key})
                if more == PUBLISHING:
                    outbox.publish(StreamId("bench", key), b"x" * 100, connection=session)
            number += 1

    await asyncio.gather(*(client(str(key)) for key in range(CLIENTS)))
    gate.done()
    await engine.dispose()
    return {"events": number}


def transactions_by_pgbench(gate: StartingGate, *, url: str, more: str, seconds: float) -> Mapping[str, Any]:
    """The same transactions by PostgreSQL's own benchmark: its clients cost little, so the server's work counts."""
    _create_tables(url)
    (row,) = rows_of("default", StreamId("bench", "0"), b"x" * 100, Codecs(None))
    columns = "provider, lane, stream, events, batch, written_at_us"
    batch = f"decode('{row['batch'].hex()}', 'hex')"
    values = f"'default', :client_id, 'bench/' || :client_id, 1, {batch}, {row['written_at_us']}"
    insert = f"INSERT INTO headrace_outbox ({columns}) VALUES ({values});"
    ends = {
        PLAIN: ["COMMIT;"],
        SELECTING: ["SELECT 1;", "COMMIT;"],
        PUBLISHING: [insert, "COMMIT;"],
        SENT_TOGETHER: ["\\startpipeline", insert, "COMMIT;", "\\endpipeline"],
    }
    update = "UPDATE account SET handled = handled + 1 WHERE id = (:client_id)::text;"
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write("".join(f"{each}\n" for each in ("BEGIN;", update, *ends[more])))
        script.flush()
        options = f"--no-vacuum --protocol prepared --client {CLIENTS} --jobs 2 --time {max(round(seconds), 1)}"
        gate.wait()
        ended = subprocess.run(
            (PostgresServer.pgbench(), *options.split(), "--file", script.name, url),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        gate.done()
    counted = re.search(r"actually processed: (\d+)", ended.stdout)
    assert counted, ended.stderr
    return {"events": int(counted[1])}


# ---- what all need ---------------------------------------------------------------------------------------------------


def _driver(url: str) -> str:
    return url.replace("postgresql:", "postgresql+psycopg:")


def _create_tables(url: str) -> None:
    import psycopg  # noqa: PLC0415

    with administration.opened(url, migrated=False) as connection:
        schema.migrate(connection)
    with psycopg.connect(url) as made:
        made.execute("CREATE TABLE account (id TEXT PRIMARY KEY, handled BIGINT NOT NULL) WITH (fillfactor = 50)")
        made.execute("CREATE TABLE seen (id TEXT PRIMARY KEY)")
        made.cursor().executemany("INSERT INTO account VALUES (%s, 0)", [(str(key),) for key in range(STREAMS)])


def _handled(url: str) -> int:
    import psycopg  # noqa: PLC0415

    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT SUM(handled) FROM account").fetchone()
    return int(row[0]) if row else 0


def measured(function: str, *, module: str = HERE, **args: Any) -> Result:
    """Run one case beside a new server, with fsync. The server's CPU time counts."""
    with PostgresServer(fsync=True) as server:
        outcome = together([Job("handlers", f"{module}:{function}", {"url": server.url, **args})], server=server)
        return outcome.to_result(events=outcome.reports["handlers"].result["events"])


def sections(scale: float) -> list[Section]:
    """Handlers, and the outbox."""

    def n(events: int) -> int:
        return max(STREAMS * BATCH, int(events * scale))

    def case(way: str, commit: str, events: int) -> Any:
        return partial(measured, "handlers", way=way, commit=commit, events=n(events))

    one, many = f"{HEADRACE}, {EVENT}", f"{HEADRACE}, {BATCHED}"
    sent, bare = f"{HEADRACE}, {SENT_BATCHED}", f"{NO_POSITION}, {EVENT}"
    seconds = max(8 * scale, 0.5)
    ways = {each: partial(measured, transactions.__name__, more=each, seconds=seconds) for each in EXTRAS}
    ways |= {
        BY_PGBENCH.format(each): partial(measured, transactions_by_pgbench.__name__, more=each, seconds=seconds)
        for each in (*EXTRAS, SENT_TOGETHER)
    }
    ways |= {
        BY_SESSION.format(each): partial(measured, transactions_by_sessions.__name__, more=each, seconds=seconds)
        for each in (PLAIN, PUBLISHING)
    }
    sent_together, fast, fast_plain = (BY_PGBENCH.format(each) for each in (SENT_TOGETHER, PUBLISHING, PLAIN))
    session, session_plain = BY_SESSION.format(PUBLISHING), BY_SESSION.format(PLAIN)
    return [
        Section(
            name="effects",
            title="Effects: one UPDATE per event in PostgreSQL with fsync, 16 streams. CPU with that of the server",
            cases={
                one: case(HEADRACE, EVENT, 16_000),
                many: case(HEADRACE, BATCHED, 64_000),
                sent: case(HEADRACE, SENT_BATCHED, 64_000),
                bare: case(NO_POSITION, EVENT, 16_000),
                f"{BY_HAND}, {EVENT}": case(BY_HAND, EVENT, 16_000),
                f"{BY_HAND}, {BATCHED}": case(BY_HAND, BATCHED, 64_000),
                DBOS: partial(measured, "dbos", events=n(8_000)),
            },
            targets=(
                Target(what="per event ≥ 0.65 × without a position", case=one, to=bare, bound=0.65),
                Target(what="per event ≥ 0.8 × without a position (aim)", case=one, to=bare, bound=0.8),
                Target(what="per 100 ≥ 3 × per event", case=many, to=one, bound=3),
                Target(what="per 100, executemany ≥ 8 × per event (aim)", case=sent, to=one, bound=8),
                Target(what="per event ≥ 1 × a dedupe table", case=one, to=f"{BY_HAND}, {EVENT}", bound=1),
                Target(what="per event ≥ 1 × DBOS", case=one, to=DBOS, bound=1),
            ),
            ratio_to=one,
        ),
        Section(
            name="outbox",
            title="Outbox: events of 100 B in rows of their own, moved into the log; transactions of 16 clients",
            cases={
                MOVER: partial(measured, "mover", events=n(100_000)),
                **ways,
            },
            targets=(
                Target(what="mover ≥ 50,000 events/s", case=MOVER, to=None, bound=50_000),
                Target(what="mover ≥ 120,000 events/s (aim)", case=MOVER, to=None, bound=120_000),
                Target(
                    what="pgbench, INSERT with COMMIT: ≥ 0.75 × without an event",
                    case=sent_together,
                    to=fast_plain,
                    bound=0.75,
                ),
                Target(what="pgbench, INSERT with COMMIT: ≥ 0.85 (aim)", case=sent_together, to=fast_plain, bound=0.85),
                Target(what="pgbench, a statement of its own: ≥ 0.75", case=fast, to=fast_plain, bound=0.75),
                Target(what="sessions: ≥ 0.75 × without an event", case=session, to=session_plain, bound=0.75),
                Target(what="psycopg: transactions with it ≥ 0.75 × without", case=PUBLISHING, to=PLAIN, bound=0.75),
                Target(what="psycopg: ≥ 0.9 × one with `SELECT 1`", case=PUBLISHING, to=SELECTING, bound=0.9),
            ),
        ),
    ]
