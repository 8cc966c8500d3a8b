"""Queues over several servers, in zones, and in a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.servers import LOOPBACK, RedisServer, find_program, free_port
from headrace import Event, EventBatch, InvalidArgument, Provider, StorageError, StreamId
from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.conformance import (
    ConformsToDelay,
    ConformsToDurable,
    ConformsToIdempotent,
    ConformsToPriority,
    ConformsToQueueAdapter,
)
from headrace.adapters.redis import PushedEvent, RedisAdapter, RedisOptions, RedisQueue, ShardOptions
from headrace.adapters.redis import open_adapter as open_redis
from headrace.adapters.redis.keys import ranked
from headrace.adapters.redis.limits import REDIS_LIMITS, RedisLimits
from headrace.streams.publishing import ProducerSequence

ANY = 1 << 30


@pytest.fixture
def two() -> Iterator[list[RedisServer]]:
    with RedisServer() as one, RedisServer() as other:
        yield [one, other]


def shards(servers: Sequence[RedisServer]) -> list[dict[str, str]]:
    """One in each zone: a, b …"""
    return [{"name": z, "zone": z, "url": f"redis://{s.address}"} for z, s in zip("ab", servers, strict=True)]


@asynccontextmanager
async def adapter(
    servers: Sequence[RedisServer], *, limits: RedisLimits = REDIS_LIMITS, **options: Any
) -> AsyncGenerator[QueueAdapter]:
    table = {"shards": shards(servers), **options}
    opened = await open_redis(AdapterContext(provider="p", queues=1), table, limits)
    try:
        yield opened
    finally:
        await opened.aclose()


@asynccontextmanager
async def queues(
    servers: Sequence[RedisServer], *zones: str, limits: RedisLimits = REDIS_LIMITS
) -> AsyncGenerator[list[RedisQueue]]:
    given = tuple(ShardOptions(name=s["name"], url=s["url"], zone=s["zone"]) for s in shards(servers))
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(RedisQueue.open("q", RedisOptions(shards=given, zone=zone), limits=limits))
            for zone in zones
        ]


def batch(payload: str) -> EventBatch:
    return EventBatch.of(StreamId("n", payload), [payload.encode()])


async def take(receiver: Any, count: int) -> list[EventBatch]:
    taken: list[EventBatch] = []
    async with asyncio.timeout(30):
        while len(taken) < count:
            taken += (await receiver.receive(ANY, ANY)).batches
    offsets = [each.offset for each in taken]
    assert offsets == sorted(set(offsets)), "offsets strictly increase, whatever the shard"
    return taken


def texts(batches: Sequence[EventBatch]) -> list[str]:
    return sorted(payload.decode() for each in batches for payload in each.payloads())


# ---- competing consumers ---------------------------------------------------------------------------------------------


async def test_pushed_events_go_to_the_shards_in_turn(two: list[RedisServer]) -> None:
    async with queues(two, "a") as (queue,):
        for number in range(10):
            await queue.push(b"%d" % number)
        assert [(await shard.size()).ready for shard in queue.shards] == [5, 5]
        assert (await queue.size()).ready == 10


async def test_one_id_is_in_one_shard_only(two: list[RedisServer]) -> None:
    async with queues(two, "a", "b") as (one, other):
        for queue in (one, other, one):
            await queue.push(b"x", id="x")
        assert not await other.ensure(b"y", id="x")
        assert (await one.size()).ready == 1
        assert await other.remove("x")


async def test_pop_takes_events_of_its_own_zone_first(two: list[RedisServer]) -> None:
    async with queues(two, "a", "b") as (of_a, of_b):
        assert [queue.shards[0].name for queue in (of_a, of_b)] == ["a", "b"]
        for number in range(10):
            await of_a.push(b"%d" % number)
        mine, theirs = await of_a.pop(100), await of_b.pop(100)
        assert {taken.shard.name for taken in mine} == {"a"}
        assert {taken.shard.name for taken in theirs} == {"b"}


async def test_the_shard_of_a_zone_without_consumers_is_taken_over(two: list[RedisServer]) -> None:
    async with queues(two, "a") as (queue,):
        for number in range(10):
            await queue.push(b"%d" % number)
        got: list[bytes] = []
        while taken := await queue.pop(3):
            got += [one.body for one in taken]
            await queue.acknowledge(*taken)
        assert sorted(got) == [b"%d" % number for number in range(10)]


async def test_pop_returns_events_of_any_shard_and_waits_only_if_all_are_empty(two: list[RedisServer]) -> None:
    async with queues(two, "a") as (queue,):
        for number in range(6):
            await queue.push(b"%d" % number)
        async with asyncio.timeout(10):
            for _ in two:
                assert len(await queue.pop(5, wait_s=3600)) == 3
        began = asyncio.get_running_loop().time()
        assert await queue.pop(1, wait_s=0.3) == []
        assert asyncio.get_running_loop().time() - began >= 0.3


async def test_waiting_pop_is_woken_by_any_shard(two: list[RedisServer]) -> None:
    async with queues(two, "a", "a") as (waiting, pushing):
        for _ in range(4):
            popping = asyncio.create_task(waiting.pop(1, wait_s=60))
            await asyncio.sleep(0)
            await pushing.push(b"x")
            async with asyncio.timeout(4):
                assert len(await popping) == 1


async def test_a_server_that_is_away_stops_neither_push_nor_pop(two: list[RedisServer]) -> None:
    async with queues(two, "a") as (queue,):
        await queue.push_many([PushedEvent(b"before")] * 4)
        await asyncio.to_thread(two[1].kill)
        for number in range(6):
            await queue.push(b"%d" % number)
        got = [taken.body for taken in await queue.pop(100, wait_s=1)]
        assert sorted(got) == [*(b"%d" % number for number in range(6)), b"before", b"before"]
        await asyncio.to_thread(two[0].kill)
        with pytest.raises(StorageError, match="does not serve"):
            await queue.pop(1)
        with pytest.raises(StorageError, match="does not serve"):
            await queue.push(b"x")


# ---- the adapter -----------------------------------------------------------------------------------------------------


async def test_a_queue_is_read_from_all_its_shards_under_offsets_that_grow(two: list[RedisServer]) -> None:
    async with adapter(two) as opened:
        for number in range(40):
            await opened.enqueue([(0, batch(str(number)))])
        receiver = await opened.open_receiver(0)
        first = await take(receiver, 40)
        assert texts(first) == sorted(str(number) for number in range(40))
        bounds = await opened.bounds(0)
        assert bounds.first <= first[0].offset
        assert first[-1].offset < bounds.next
        middle = first[20].offset
        await receiver.acknowledge(middle)
        assert await take(await opened.open_receiver(0), 20) == first[20:], "the next reader gets the same offsets"


async def test_a_new_subscription_gets_later_events(two: list[RedisServer]) -> None:
    """No shard gives out a position below the end that it was told, whatever the clocks of the servers say."""
    async with adapter(two) as opened:
        receiver = await opened.open_receiver(0)
        for number in range(6):
            await opened.enqueue([(0, batch(str(number)))])
            end = (await opened.bounds(0)).next
            assert (await opened.bounds(0)).next == end
            (received,) = await take(receiver, 1)
            assert received.offset >= end


async def test_the_shard_of_the_own_zone_is_read_first(two: list[RedisServer]) -> None:
    async with adapter(two, zone="b") as opened:
        for number in range(8):
            await opened.enqueue([(0, batch(str(number)))])
        receiver = await opened.open_receiver(0)
        own = (await receiver.receive(ANY, ANY)).batches
        others = (await receiver.receive(ANY, ANY)).batches
        assert (len(own), len(others)) == (4, 4)
        await opened.enqueue([(0, batch("x")), (0, batch("y"))])


async def test_a_busy_shard_does_not_starve_another(two: list[RedisServer]) -> None:
    async with adapter(two, zone="a") as opened:
        for number in range(60):
            await opened.enqueue([(0, batch(str(number)))])
        receiver = await opened.open_receiver(0)
        received: list[EventBatch] = []
        for _ in range(20):
            received += (await receiver.receive(1, ANY)).batches
        numbers = {int(each.payloads()[0]) % 2 for each in received}
        assert numbers == {0, 1}


async def test_a_server_away_holds_up_nothing_and_loses_nothing(two: list[RedisServer]) -> None:
    async with adapter(two, publish_timeout_s=20) as opened:
        for number in range(20):
            await opened.enqueue([(0, batch(str(number)))])
        receiver = await opened.open_receiver(0)
        first = await take(receiver, 20)
        await asyncio.to_thread(two[1].kill)
        async with asyncio.timeout(15):
            for number in range(20, 30):
                await opened.enqueue([(0, batch(str(number)))])
        second = await take(receiver, 10)
        assert texts([*first, *second]) == sorted(str(number) for number in range(30))
        with pytest.raises(StorageError):
            await receiver.acknowledge(second[-1].offset + 1)
        await asyncio.to_thread(two[1].start)
        await asyncio.sleep(0)
        await receiver.acknowledge(second[-1].offset + 1)
        assert (await opened.backlog(0, 0)).batches == 0
        again = await opened.open_receiver(0)
        await opened.enqueue([(0, batch("x")), (0, batch("y"))])
        assert texts(await take(again, 2)) == ["x", "y"]


async def test_events_of_a_shard_that_was_away_at_opening_come_when_it_is_back(two: list[RedisServer]) -> None:
    async with adapter(two) as opened:
        for number in range(10):
            await opened.enqueue([(0, batch(str(number)))])
        first = await take(await opened.open_receiver(0), 10)
        await asyncio.to_thread(two[1].kill)
        second = await opened.open_receiver(0)
        there = await take(second, 5)
        assert all(each in first for each in there)
        waiting = asyncio.create_task(take(second, 5))
        await asyncio.to_thread(two[1].start)
        came = await waiting
        assert texts([*there, *came]) == texts(first)
        assert min(each.offset for each in came) > max(each.offset for each in there)


async def test_a_producers_call_is_stored_once_whichever_shard_it_goes_to(two: list[RedisServer]) -> None:
    async with adapter(two) as opened, adapter(two, zone="b") as other:
        for number in range(1, 9):
            sequence = ProducerSequence("p", number, number - 1)
            (receipt,) = await opened.enqueue([(0, batch(str(number)))], sequence=sequence)
            (again,) = await other.enqueue([(0, batch(str(number)))], sequence=sequence)
            assert again.token == receipt.token
        assert len(await take(await opened.open_receiver(0), 8)) == 8
        assert (await opened.backlog(0, 0)).batches == 8


async def test_a_producer_needs_only_the_server_with_its_ledger(two: list[RedisServer]) -> None:
    """With the other one away, all its calls are stored."""
    producers = [f"p{number}" for number in range(8)]
    async with adapter(two, publish_timeout_s=20) as opened:
        for producer in producers:
            await opened.enqueue([(0, batch(producer))], sequence=ProducerSequence(producer, 1, 0))
        await asyncio.to_thread(two[1].kill)
        at_the_other = [each for each in producers if ranked(["a", "b"], each)[0] == "a"]
        async with asyncio.timeout(15):
            for producer in at_the_other:
                for number in range(2, 12):
                    await opened.enqueue([(0, batch("x"))], sequence=ProducerSequence(producer, number, number - 1))
        assert 0 < len(at_the_other) < len(producers)


async def test_agents_take_over_all_shards(two: list[RedisServer], tmp_path: Path) -> None:
    got: Counter[bytes] = Counter()

    async def handle(event: Event) -> None:
        got[event.payload] += 1

    options = {"shards": shards(two), "zone": "a"}
    async with Provider.open(tmp_path, adapter="redis", queues=2, options=options) as provider:
        subscription = await provider.subscribe("s", "n/*", handle)
        for number in range(50):
            await provider.publish(StreamId("n", str(number)), b"%d" % number)
        await subscription.caught_up()
    assert got == {b"%d" % number: 1 for number in range(50)}


async def test_a_frozen_server_holds_up_neither_producers_nor_readers(
    two: list[RedisServer],
) -> None:
    """Only the first command that it leaves without an answer is waited for."""
    async with adapter(two, zone="a", limits=RedisLimits(command_s=2.0)) as opened:
        receiver = await opened.open_receiver(0)
        frozen = cast("RedisAdapter", opened).shards(0)[0]
        os.kill(two[0].pid, signal.SIGSTOP)
        async with asyncio.timeout(90):
            for number in range(100):
                await opened.enqueue([(0, batch(str(number)))])
                (received,) = (await receiver.receive(ANY, ANY)).batches
                assert texts([received]) == [str(number)]
            assert (await opened.backlog(0, 0)).batches == 100
        os.kill(two[0].pid, signal.SIGCONT)

        async def goes_there_again() -> bool:
            await opened.enqueue([(0, batch("after")), (0, batch("after"))])
            await receiver.receive(ANY, ANY)
            return (await frozen.size()).held > 1

        await until(goes_there_again)


async def test_a_frozen_server_stops_neither_push_nor_pop(two: list[RedisServer]) -> None:
    async with queues(two, "a", limits=RedisLimits(command_s=2.0)) as (queue,):
        os.kill(two[0].pid, signal.SIGSTOP)
        async with asyncio.timeout(90):
            for number in range(100):
                await queue.push(b"%d" % number)
                (taken,) = await queue.pop(100)
                assert taken.body == b"%d" % number
        os.kill(two[0].pid, signal.SIGCONT)

        async def goes_there_again() -> bool:
            await queue.push(b"after")
            return (await queue.shards[0].size()).waiting > 1

        await until(goes_there_again)


async def test_provider_that_starts_while_a_server_is_away_misses_nothing_and_sees_no_gap(
    two: list[RedisServer], tmp_path: Path
) -> None:
    """The end of the queue may be there."""
    got: list[bytes] = []

    async def handle(event: Event) -> None:
        got.append(event.payload)

    @asynccontextmanager
    async def subscribed() -> AsyncGenerator[Provider]:
        async with Provider.open(tmp_path, adapter="redis", queues=1, options={"shards": shards(two)}) as provider:
            await provider.subscribe("s", "n/*", handle)
            yield provider

    async def delivered() -> bool:
        return len(got) == len(set(got)) == expected

    async with subscribed() as provider:
        for expected in range(1, 10):
            await provider.publish(StreamId("n", "1"), b"%d" % expected)
            await until(delivered)
        ends = [(await each.bounds())[1] for each in cast("RedisAdapter", provider.adapter).shards(0)]
    await asyncio.to_thread(two[ends.index(max(ends))].kill)
    async with subscribed() as provider:
        for expected in range(10, 20):
            await provider.publish(StreamId("n", "1"), b"%d" % expected)
            await until(delivered)
        assert await provider.store.gaps(provider.name) == []


async def test_a_queue_continues_above_a_checkpoint_whose_server_is_unavailable(two: list[RedisServer]) -> None:
    """Its clock may have been ahead."""
    async with adapter(two) as opened:
        end = (await opened.bounds(0)).next
        ahead = end + 3600 * 1_000_000
        assert await opened.resume_at(0, ahead) == end
        await asyncio.to_thread(two[0].kill)
        assert await opened.resume_at(0, ahead) == ahead
        await opened.enqueue([(0, batch("x"))])
        (received,) = await take(await opened.open_receiver(0), 1)
        assert received.offset >= ahead


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 (servers tell it)
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_done_events_leave_the_servers_that_answer_in_every_queue(two: list[RedisServer], tmp_path: Path) -> None:
    got: list[bytes] = []

    async def handle(event: Event) -> None:
        got.append(event.payload)

    async with Provider.open(tmp_path, adapter="redis", queues=4, options={"shards": shards(two)}) as provider:
        await provider.subscribe("s", "n/*", handle)
        there = [shard for queue in range(4) for shard in cast("RedisAdapter", provider.adapter).shards(queue)[:1]]

        async def empty() -> bool:
            sizes = [await shard.size() for shard in there]
            return not any(size.held + size.waiting for size in sizes)

        for number in range(80):
            await provider.publish(StreamId("n", str(number)), b"x")
        await until(empty)
        assert all(agent.main is not None for agent in provider.manager.agents)
        await asyncio.to_thread(two[1].kill)
        for number in range(80):
            await provider.publish(StreamId("n", str(number)), b"x")
        await until(empty)
        assert len(got) >= 120


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either url"),
        ({"url": "redis://h", "shards": [{"name": "a", "url": "redis://h"}]}, "give either url"),
        (
            {"shards": [{"name": "a", "url": "redis://h"}, {"name": "a", "url": "redis://i"}]},
            "have one name",
        ),
        ({"shards": [{"name": "a b", "url": "redis://h"}]}, "is no name"),
        ({"url": "http://h"}, "the url of a Redis is"),
        ({"url": "redis://h", "when_unavailable": "maybe"}, 'when_unavailable = "maybe": expected "fail" or "wait"'),
        ({"url": "redis://h", "visibility": 3}, "visibility: unknown option; accepted are url"),
    ],
)
async def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await open_adapter("redis", AdapterContext(provider="p", queues=1), options)


# ---- Redis Cluster ---------------------------------------------------------------------------------------------------


class ClusterNode(RedisServer):
    def command(self) -> Sequence[str]:
        return (*super().command(), "--cluster-enabled", "yes")

    def prepare(self) -> None:
        """The nodes of a cluster talk on a port that is 10,000 above, and before Redis 7 on no other."""
        while not _is_free(self.port + 10_000):
            self.port = free_port()


def _is_free(port: int) -> bool:
    if port >= 1 << 16:
        return False
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a node of a cluster of three."""
    with ClusterNode() as one, ClusterNode() as two, ClusterNode() as three:
        program = find_program("redis-cli", debian_package="redis-tools")
        nodes = [node.address for node in (one, two, three)]
        made = subprocess.run(
            [program, "--cluster", "create", *nodes, "--cluster-yes"], check=False, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stdout + made.stderr
        host, port = one.address.split(":")
        deadline = time.monotonic() + 60
        while "cluster_state:ok" not in _asked(program, host, port) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield one.address


def _asked(program: str, host: str, port: str) -> str:
    asked = [program, "-h", host, "-p", port, "cluster", "info"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


class TestRedisCluster(
    ConformsToQueueAdapter, ConformsToDurable, ConformsToIdempotent, ConformsToDelay, ConformsToPriority
):
    """Every script finds all its keys in one slot."""

    @pytest.fixture(autouse=True)
    def server(self, cluster: str) -> None:
        self.address = cluster

    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        options = {"url": f"redis://{self.address}", "cluster": True, "prefix": "".join(directory.parts[1:])}
        return await open_adapter("redis", context, options)
