"""Queues and the outbox in PostgreSQL, one part at a time: single publishers, a backlog, movers, and retention.

The peers are what programs write by hand: calls that wait are grouped into one statement, or each has its own.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from headrace import EventBatch, Provider, Start, StreamId
from headrace.adapters import AdapterContext
from headrace.adapters.postgres import open_adapter

from .cases import IN_FLIGHT, in_flight
from .effect_cases import MOVER, measured, mover
from .harness import Job, Result, StartingGate, together
from .peers import PEERS
from .peers.cases import find
from .peers.peer import Peer
from .peers.postgres import COPY_ROWS, ORDERED_ROWS, OURS, PGMQ, url_of
from .section import Section, Target, cpu

HERE = "benchmarks.postgres_gates"
PUBLISHERS, CONNECTIONS, BATCH, STREAMS = 1000, 16, 1000, 16
STREAM = StreamId("events", "1")
INSERT_EACH = f"INSERT each, {CONNECTIONS} connections"
BY_UPDATE, BY_ROW = "claim of 1,000 rows by UPDATE", "lease and DELETE of each row"
REMOVED = "segments dropped"
MOST_WAL = 5_000_000
"""The most that a removal may write to the write-ahead log, in bytes."""


# ---- single publishers -----------------------------------------------------------------------------------------------


def provider_publishers(gate: StartingGate, *, address: str, events: int, size: int) -> None:
    asyncio.run(_provider_publishers(gate, address, events, os.urandom(size)))


async def _provider_publishers(gate: StartingGate, address: str, events: int, payload: bytes) -> None:
    async with _opened(address) as provider:
        await _publish(gate, lambda: provider.publish(STREAM, payload), events)


def grouped_publishers(gate: StartingGate, *, client: str, address: str, events: int, size: int) -> None:
    asyncio.run(_grouped_publishers(gate, client, address, events, os.urandom(size)))


async def _grouped_publishers(gate: StartingGate, client: str, address: str, events: int, payload: bytes) -> None:
    async with find(client).producer(address, batch=BATCH) as producer:
        waiting: list[asyncio.Future[None]] = []
        sending: asyncio.Task[None] | None = None

        async def send() -> None:
            while waiting:
                group, waiting[:] = list(waiting), []
                await producer.send([payload] * len(group))
                for answer in group:
                    answer.set_result(None)

        async def publish() -> None:
            nonlocal sending
            waiting.append(answer := asyncio.get_running_loop().create_future())
            if sending is None or sending.done():
                sending = asyncio.create_task(send())
            await answer

        await _publish(gate, publish, events)


def insert_each(gate: StartingGate, *, address: str, events: int, size: int) -> None:
    asyncio.run(_insert_each(gate, address, events, os.urandom(size)))


async def _insert_each(gate: StartingGate, address: str, events: int, payload: bytes) -> None:
    import psycopg  # noqa: PLC0415 (only in the process that uses it)

    free: asyncio.Queue[psycopg.AsyncConnection[Any]] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await psycopg.AsyncConnection.connect(url_of(address), autocommit=True))
    connection = free.get_nowait()
    await connection.execute("CREATE TABLE events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload bytea)")
    free.put_nowait(connection)

    async def publish() -> None:
        connection = await free.get()
        await connection.execute("INSERT INTO events (payload) VALUES (%b)", [payload])
        free.put_nowait(connection)

    await _publish(gate, publish, events)
    while not free.empty():
        await free.get_nowait().close()


async def _publish(gate: StartingGate, publish: Callable[[], Awaitable[object]], events: int) -> None:
    """Publish by 1,000 tasks, each of which waits for the answer to one event before it publishes the next."""
    await asyncio.to_thread(gate.wait)
    await in_flight((publish() for _ in range(events)), PUBLISHERS)
    gate.done()


# ---- a backlog -------------------------------------------------------------------------------------------------------


def backlog(gate: StartingGate, *, client: str, address: str, events: int, size: int) -> None:
    asyncio.run(_backlog(gate, client, address, events, [os.urandom(size)] * BATCH))


async def _backlog(gate: StartingGate, client: str, address: str, events: int, payloads: Sequence[bytes]) -> None:
    found, received = find(client), 0
    async with found.producer(address, batch=BATCH) as producer:
        for _ in range(events // BATCH):
            await producer.send(payloads)
        await producer.flush()
    await asyncio.to_thread(gate.wait)
    async with found.consumer(address, batch=BATCH) as consumer:
        while received < events:
            received += len(await consumer.receive())
        await consumer.finish()
        gate.done()


def provider_backlog(gate: StartingGate, *, address: str, events: int, size: int) -> None:
    asyncio.run(_provider_backlog(gate, address, events, [os.urandom(size)] * BATCH))


async def _provider_backlog(gate: StartingGate, address: str, events: int, payloads: Sequence[bytes]) -> None:
    received = 0

    async def handle(batch: EventBatch) -> None:
        nonlocal received
        received += len(batch.payloads())

    async with _opened(address) as provider:
        await in_flight((provider.publish(STREAM, payloads) for _ in range(events // BATCH)), IN_FLIGHT)
        await asyncio.to_thread(gate.wait)
        reading = await provider.subscribe("all", "*/*", handle, batch=True, start=Start.earliest())
        await reading.caught_up()
        gate.done()
    assert received == events, received


def _opened(address: str) -> AbstractAsyncContextManager[Provider]:
    return Provider.open(adapter="postgres", queues=1, options={"url": url_of(address), "create": True})


# ---- movers ----------------------------------------------------------------------------------------------------------


def mover_by_hand(gate: StartingGate, *, url: str, at_once: int, events: int) -> Mapping[str, Any]:
    return asyncio.run(_mover_by_hand(gate, url, at_once, events))


async def _mover_by_hand(gate: StartingGate, url: str, at_once: int, events: int) -> Mapping[str, Any]:
    """Claim rows, publish a batch for each into the log, as the mover does, and delete them, until none is left."""
    import psycopg  # noqa: PLC0415

    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(
            "CREATE TABLE box (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key int NOT NULL, payload bytea, "
            "claimed timestamptz)"
        )
        await connection.execute(
            "INSERT INTO box (key, payload) SELECT n %% %s, %b FROM generate_series(1, %s) AS n",
            [STREAMS, b"x" * 100, events],
        )
        await connection.execute("ANALYZE box")
        with tempfile.TemporaryDirectory() as data:
            async with Provider.open(data, queues=4) as provider:
                await asyncio.to_thread(gate.wait)
                moved = 0
                while moved < events:
                    cursor = await connection.execute(
                        "UPDATE box SET claimed = now() WHERE id IN (SELECT id FROM box WHERE claimed IS NULL "
                        "ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING id, key, payload",
                        [at_once],
                        binary=True,
                    )
                    rows = sorted(await cursor.fetchall())
                    batches = [EventBatch.of(StreamId("bench", str(key)), [payload]) for _, key, payload in rows]
                    await provider.publish_encoded(batches)
                    await connection.execute("DELETE FROM box WHERE id = ANY(%s)", [[row[0] for row in rows]])
                    moved += len(rows)
                gate.done()
    return {"events": moved}


# ---- retention -------------------------------------------------------------------------------------------------------


def removal(gate: StartingGate, *, url: str, events: int) -> Mapping[str, Any]:
    return asyncio.run(_removal(gate, url, events))


async def _removal(gate: StartingGate, url: str, events: int) -> Mapping[str, Any]:
    """Store events in segments of 64 MiB, and drop those of the first half at once."""
    import psycopg  # noqa: PLC0415

    context = AdapterContext(provider="default", queues=1)
    half = events // 2 * 110
    options = {"url": url, "create": True, "segment_bytes": 64 << 20, "retain_bytes": half}
    adapter = await open_adapter(context, options)
    batch = EventBatch.of(STREAM, [os.urandom(100)] * BATCH)
    for number in range(events // BATCH):
        await adapter.enqueue([(0, batch)])
        if not number % 200:
            await adapter.apply_retention({0: 0})
    end = (await adapter.bounds(0)).next
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("CHECKPOINT")
        before = await _wal(connection)
        await asyncio.to_thread(gate.wait)
        await adapter.apply_retention({0: end})
        gate.done()
        wal = await _wal(connection) - before
        assert wal <= MOST_WAL, f"{wal:,} bytes of write-ahead log"
    removed = (await adapter.bounds(0)).first * BATCH
    await adapter.aclose()
    return {"events": removed}


async def _wal(connection: Any) -> int:
    ((position,),) = await (await connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")).fetchall()
    return int(position)


# ---- what is compared ------------------------------------------------------------------------------------------------


def _of_peer(peer: Peer, function: str, **args: Any) -> Result:
    """Run one case beside the peer's server, whose CPU time counts."""
    with peer.server() as server:
        job = Job("case", f"{HERE}:{function}", {"address": server.address, **args})
        return together([job], server=server).to_result(events=args["events"], size=args["size"])


_measured = partial(measured, module=HERE)


def sections(scale: float) -> list[Section]:
    """Sections `postgres-singles`, `postgres-backlog`, `postgres-movers` and `postgres-removal`: `--only
    postgres-parts` runs all."""

    def n(events: int) -> int:
        return max(2 * BATCH, int(events * scale) // BATCH * BATCH)

    redis = PEERS["redis-asyncio"]
    of_group = partial(_of_peer, function="grouped_publishers", events=n(100_000), size=100)
    grouped = {
        f"{peer.name}, grouped": partial(of_group, peer, client=peer.client) for peer in (COPY_ROWS, PGMQ, redis)
    }
    copied, pgmq, redis_grouped = grouped
    backlogs = {
        peer.name: partial(_of_peer, peer, "backlog", client=peer.client, events=n(events), size=100)
        for peer, events in ((COPY_ROWS, 200_000), (PGMQ, 50_000), (ORDERED_ROWS, 1_000_000))
    }
    return [
        Section(
            name="postgres-singles",
            group="postgres-parts",
            title="Queues in PostgreSQL: 1,000 publishers, each waits for its event of 100 B",
            cases={
                OURS.name: partial(_of_peer, OURS, "provider_publishers", events=n(100_000), size=100),
                **grouped,
                INSERT_EACH: partial(_of_peer, COPY_ROWS, "insert_each", events=n(20_000), size=100),
            },
            targets=(
                Target(what="≥ 0.7 × grouped COPY", case=OURS.name, to=copied, bound=0.7),
                Target(what="≥ 1 × grouped COPY (aim)", case=OURS.name, to=copied, bound=1),
                Target(what="≥ 10 × INSERT each", case=OURS.name, to=INSERT_EACH, bound=10),
                Target(what="≥ 1.3 × Redis pipeline", case=OURS.name, to=redis_grouped, bound=1.3),
                Target(what="≥ 2 × pgmq batch", case=OURS.name, to=pgmq, bound=2),
            ),
        ),
        Section(
            name="postgres-backlog",
            group="postgres-parts",
            title="Queues in PostgreSQL: one process reads a backlog of 100 B, batches of 1000",
            cases={OURS.name: partial(_of_peer, OURS, "provider_backlog", events=n(2_000_000), size=100), **backlogs},
            targets=(
                Target(what="≥ 5 × COPY and SKIP LOCKED", case=OURS.name, to=COPY_ROWS.name, bound=5),
                Target(what="≥ 10 × COPY and SKIP LOCKED (aim)", case=OURS.name, to=COPY_ROWS.name, bound=10),
                Target(what="≥ 15 × pgmq's statements", case=OURS.name, to=PGMQ.name, bound=15),
                Target(what="≥ 1.2 × rows in order", case=OURS.name, to=ORDERED_ROWS.name, bound=1.2),
            ),
        ),
        Section(
            name="postgres-movers",
            group="postgres-parts",
            title="Outbox: rows of 100 B moved into the log",
            cases={
                MOVER: partial(measured, mover.__name__, events=n(100_000)),
                BY_UPDATE: partial(_measured, "mover_by_hand", at_once=BATCH, events=n(100_000)),
                BY_ROW: partial(_measured, "mover_by_hand", at_once=1, events=n(5_000)),
            },
            targets=(
                Target(what="≥ 1.3 × claim by UPDATE", case=MOVER, to=BY_UPDATE, bound=1.3),
                Target(what="≥ 20 × per row", case=MOVER, to=BY_ROW, bound=20),
            ),
        ),
        Section(
            name="postgres-removal",
            group="postgres-parts",
            title="Queues in PostgreSQL: the first half of the events removed, segments of 64 MiB",
            cases={REMOVED: partial(_measured, "removal", events=n(10_000_000))},
            targets=(
                Target(what="≤ 0.05 CPU s per million", case=REMOVED, to=None, bound=0.05, metric=cpu, at_most=True),
            ),
        ),
    ]
