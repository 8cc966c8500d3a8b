"""Queues in PostgreSQL: headrace's adapter beside other ways to have a queue there, and Redis Streams."""

from __future__ import annotations

from functools import partial

from .peers import PEERS
from .peers.postgres import COPY_ROWS, OURS, PGMQ
from .section import Run, Section, Target, cpu, p50

ALL = (OURS, COPY_ROWS, PGMQ, PEERS["redis"])


def sections(scale: float) -> list[Section]:
    """Sections `postgres`, `postgres-1k`, `postgres-end-to-end` and `postgres-latency`: `--only postgres` runs all."""

    def n(events: int) -> int:
        return max(2000, int(events * scale) // 1000 * 1000)

    def cases(measure: str, **args: float) -> dict[str, Run]:
        return {peer.name: partial(getattr(peer, measure), **args) for peer in ALL}

    ours, copied, pgmq, redis = (peer.name for peer in ALL)
    asyncio_client = PEERS["redis-asyncio"]
    return [
        Section(
            name="postgres",
            title="Queues in PostgreSQL: durable publish, 100 B, batches of 1000",
            cases={
                **cases("publish", events=n(300_000), size=100, batch=1000),
                asyncio_client.name: partial(asyncio_client.publish, events=n(300_000), size=100, batch=1000),
            },
            targets=(
                Target(what="≥ 1.8 × COPY of rows", case=ours, to=copied, bound=1.8),
                Target(what="≥ 12 × pgmq's statements", case=ours, to=pgmq, bound=12),
                Target(what="≥ 10 × Redis Streams", case=ours, to=redis, bound=10),
                Target(what="≥ 10 × Redis Streams, asyncio client", case=ours, to=asyncio_client.name, bound=10),
                Target(what="≤ 1 CPU s per million", case=ours, to=None, bound=1, metric=cpu, at_most=True),
            ),
        ),
        Section(
            name="postgres-1k",
            group="postgres",
            title="Queues in PostgreSQL: durable publish, 1 KiB, batches of 1000",
            cases=cases("publish", events=n(100_000), size=1024, batch=1000),
            targets=(Target(what="≥ 0.6 × COPY of rows", case=ours, to=copied, bound=0.6),),
        ),
        Section(
            name="postgres-end-to-end",
            group="postgres",
            title="Queues in PostgreSQL: durable publish to consumer, two processes, 100 B, batches of 1000",
            cases=cases("end_to_end", events=n(200_000), size=100, batch=1000),
            targets=(
                Target(what="≥ 5 × COPY and SKIP LOCKED", case=ours, to=copied, bound=5),
                Target(what="≥ 15 × pgmq's statements", case=ours, to=pgmq, bound=15),
            ),
        ),
        Section(
            name="postgres-latency",
            group="postgres",
            title="Queues in PostgreSQL: latency at 500 events/s, 100 B; peers poll each millisecond",
            cases=cases("latency", rate=500, seconds=max(5 * scale, 1.0), size=100),
            targets=(
                Target(what="p50 ≤ 1 × COPY and polling", case=ours, to=copied, bound=1, metric=p50, at_most=True),
            ),
        ),
    ]
