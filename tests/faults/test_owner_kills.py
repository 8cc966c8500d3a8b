"""The owner of a queue stands still, gets acknowledgements that it never reads, and is killed. Meanwhile another silo
confirms acknowledgements of its own queues. None is confirmed for the lost ones, and no confirmed event comes again."""

import asyncio
import random
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace import Client, Consumer, ReceivedBatch, Stream, StreamId
from headrace.balancer import StreamQueueMapper
from tests.faults.cluster_scene import PATIENCE_S, QUEUES, STREAMS, Cluster, Times, playing
from tests.faults.cluster_stores import over, rng, store
from tests.servers import postgres_server, postgres_url
from tests.silo.services.calling import batch, connecting
from tests.silo.services.sessions import begin, defined

__all__ = ("postgres_server", "postgres_url", "rng", "store")

pytestmark = pytest.mark.timeout(200)

EVENTS = 15
ROUNDS = 8
"""Events of the other silo that are confirmed while the owner stands still."""
PACE_S = 0.2
"""Pause between them, longer than between checkpoints: at times only the lost acknowledgements are not confirmed."""
SLOW = Times(period_s=1.0, lease_s=20.0, dead_after_s=15.0)
"""No lease ends while a silo stands still. After its end, its queues have no owner for some time."""


@asynccontextmanager
async def two_silos(directory: Path, store: str | None) -> AsyncGenerator[tuple[Cluster, str, str]]:
    """A cluster of the silos a and b, and a stream of each."""
    async with playing(directory, store, "ab", times=SLOW) as cluster:
        await cluster.until_shared(QUEUES // 2, QUEUES // 2)
        owners, queue_of = await cluster.owners(), StreamQueueMapper(QUEUES).queue_of
        streams = {owners[queue_of(StreamId.parse(stream))]: stream for stream in STREAMS}
        yield cluster, streams["a"], streams["b"]


async def freeze(cluster: Cluster, publish: Callable[[], Awaitable[object]]) -> int:
    """Stop silo a, but not during a transaction: on one machine no other process could write meanwhile. Return how
    often `publish` was called."""
    calls = 0
    while True:
        cluster.silos["a"].signal(signal.SIGSTOP)
        if await cluster.is_writable():
            publishing = asyncio.ensure_future(publish())
            calls += 1
            await asyncio.wait([publishing], timeout=1)
            if publishing.done():
                publishing.result()
                return calls
            cluster.silos["a"].signal(signal.SIGCONT)
            await publishing
        else:
            cluster.silos["a"].signal(signal.SIGCONT)


async def take(consumer: Consumer, events: int) -> list[ReceivedBatch]:
    """Return the next batches of a consumer, with so many events."""
    batches: list[ReceivedBatch] = []
    async with asyncio.timeout(PATIENCE_S):
        while sum(batch.count for batch in batches) < events:
            batches.append(await anext(consumer))
    return batches


@asynccontextmanager
async def traffic(consumer: Consumer, stream: Stream) -> AsyncGenerator[None]:
    """Events of the stream are published and acknowledged meanwhile."""

    async def publish() -> None:
        while True:
            await stream.publish(b"200")
            await asyncio.sleep(PACE_S)

    async def acknowledge() -> None:
        async for each in consumer:
            await each.ack()

    tasks = [asyncio.create_task(work) for work in (publish(), acknowledge())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def more_acknowledged(consumer: Consumer) -> None:
    """Return when more events are acknowledged, of which most are confirmed."""
    wanted = consumer.statistics().acknowledged_events + ROUNDS
    async with asyncio.timeout(PATIENCE_S):
        while consumer.statistics().acknowledged_events < wanted:  # noqa: ASYNC110 (a consumer does not notify)
            await asyncio.sleep(0.01)


@over("sqlite")
async def test_a_client_is_not_told_that_lost_acknowledgements_are_saved(
    tmp_path: Path, store: str | None, rng: random.Random
) -> None:
    async with (
        two_silos(tmp_path, store) as (cluster, of_a, of_b),
        Client(cluster.address("a")) as client,
        Client(cluster.address("b")) as publisher,
    ):
        a, b = (publisher.stream(*stream.split("/")) for stream in (of_a, of_b))
        async with client.subscribe(
            "s", "n/*", start="earliest", consumer="first", session_timeout_s=PATIENCE_S
        ) as consumer:
            await b.publish(b"100")  # when it is here, there is a session with each silo
            for each in await take(consumer, 1):
                await each.ack()
            await a.publish([b"%d" % number for number in range(EVENTS)])
            held = await take(consumer, EVENTS)
            await freeze(cluster, lambda: b.publish(b"100"))
            for each in held:
                await each.ack()
            saved = asyncio.create_task(consumer.saved())
            async with traffic(consumer, b):
                await more_acknowledged(consumer)
                assert not saved.done(), "acknowledgements that no silo has read count as saved"
                await cluster.silos["a"].kill()
                async with asyncio.timeout(PATIENCE_S):
                    await saved
                recognised = consumer.statistics().recognised_events
                await more_acknowledged(consumer)
                assert consumer.statistics().recognised_events == recognised, "confirmed events come again"
        await a.publish(b"300")
        async with client.subscribe("s", consumer="second") as consumer:
            got = [(str(each.stream), each.payloads()) for each in await take(consumer, 1)]
            while got[-1][0] != of_a:  # the last events of the traffic
                got += [(str(each.stream), each.payloads()) for each in await take(consumer, 1)]
            assert got[-1] == (of_a, [b"300"]), "confirmed events come again"


@pytest.mark.slow
@over("sqlite")
async def test_a_gateway_confirms_nothing_for_an_owner_that_died(
    tmp_path: Path, store: str | None, rng: random.Random
) -> None:
    async with two_silos(tmp_path, store) as (cluster, of_a, of_b), connecting(cluster.silos["b"].address) as caller:
        session = await begin(caller, definition=defined("s"), consumer="first", session_timeout_ms=60_000)
        await session.grant()
        await caller.publish(batch(of_a, *(b"%d" % number for number in range(EVENTS))))
        held = await session.take(EVENTS)
        (queue,) = {event.queue for event in held}
        rounds = ROUNDS + await freeze(cluster, lambda: caller.publish(batch(of_b, b"100")))
        number = await session.acknowledge(held)
        for _ in range(ROUNDS):
            await caller.publish(batch(of_b, b"200"))
        for _ in range(rounds):
            await session.acknowledge_saved(await session.take(1))
        assert not session.is_saved(number, [queue])
        await cluster.silos["a"].kill()
        again = await session.take(EVENTS)
        assert [event.payload for event in again] == [event.payload for event in held]
        assert {event.epoch for event in again} == {session.statuses[queue].epoch} != {held[0].epoch}
        assert not session.is_saved(number, [queue]), "events that come again were confirmed"
        await session.acknowledge_saved(again)
        await session.close()
        await caller.publish(batch(of_a, b"300"))
        second = await begin(caller, "s", consumer="second", session_timeout_ms=60_000)
        await second.grant()
        assert [event.payload for event in await second.take(1)] == [b"300"], "confirmed events come again"
        await second.acknowledge_saved(second.events)
        await second.close()
