"""What went wrong in queues like this one: lost answers, late commands, full memory, readers that were superseded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from benchmarks.servers import RedisServer
from headrace import Closed, Event, EventBatch, StorageError, StreamId
from headrace.adapters import AdapterContext
from headrace.adapters.redis import (
    PushedEvent,
    RedisAdapter,
    RedisOptions,
    RedisQueue,
    open_adapter,
    pusher,
    receiver,
    server,
)
from headrace.adapters.redis.keys import BAND, HIGHEST, ShardKeys, due_of, priority_of
from headrace.adapters.redis.limits import REDIS_LIMITS, RedisLimits
from headrace.adapters.redis.scripts import RETURNS_PER_STEP
from headrace.adapters.redis.shard import RedisShard
from headrace.streams.errors import HeadraceError, InvalidArgument, QueueFull, StorageFull
from tests.adapters.redis.looking import Clock, check_agreement, scripts_of_tests

ANY = 1 << 30
STREAM = StreamId("n", "k")


def batch(payload: str) -> EventBatch:
    return EventBatch.of(STREAM, [payload.encode()])


def texts(batches: Sequence[EventBatch]) -> list[str]:
    return [payload.decode() for each in batches for payload in each.payloads()]


@asynccontextmanager
async def adapter(
    url: str, prefix: str = "faults", *, limits: RedisLimits = REDIS_LIMITS, **options: Any
) -> AsyncGenerator[RedisAdapter]:
    table = {"url": url, "prefix": prefix, **options}
    opened = await open_adapter(AdapterContext(provider="p", queues=1), table, limits)
    try:
        yield opened
    finally:
        await opened.aclose()


def shard_of(opened: RedisAdapter) -> RedisShard:
    return opened.shards(0)[0]


async def take(reader: Any, count: int) -> list[EventBatch]:
    taken: list[EventBatch] = []
    async with asyncio.timeout(30):
        while len(taken) < count:
            taken += (await reader.receive(ANY, ANY)).batches
    return taken


# ---- scores ----------------------------------------------------------------------------------------------------------


def score_of(priority: int, due_ms: int) -> int:
    """As the scripts compute it."""
    return (HIGHEST - priority) * BAND + due_ms


@pytest.mark.parametrize("priority", [0, 1, 50, 98, 99])
@pytest.mark.parametrize("due_ms", [0, 1, 1_795_340_577_359, (1 << 46) - 1])
def test_a_score_holds_priority_and_time_exactly(priority: int, due_ms: int) -> None:
    score = float(score_of(priority, due_ms))
    assert (priority_of(score), due_of(score)) == (priority, due_ms)
    assert score_of(priority, due_ms) < 1 << 53


def test_a_higher_priority_sorts_first_at_any_time() -> None:
    assert score_of(99, (1 << 46) - 1) < score_of(98, 0)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a{b", "a}b", "a\n"])
async def test_names_that_would_move_a_key_to_another_slot_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is no name"):
        async with RedisQueue.open(name, RedisOptions(url="redis://127.0.0.1:1")):
            pass


def test_all_keys_of_a_shard_share_one_slot() -> None:
    keys = ShardKeys.of("headrace", "orders.3", "eu-west-1a")
    tags = {key[key.index("{") : key.index("}") + 1] for key in (*keys, keys.sent("anybody"))}
    assert tags == {"{headrace:orders.3:eu-west-1a}"}


# ---- numbers, not texts ----------------------------------------------------------------------------------------------


async def test_times_are_compared_as_numbers_not_letter_by_letter(timed: RedisQueue, clock: Clock) -> None:
    """999 ms sort behind 1000 ms as texts."""
    clock.advance(0.999 - clock.now_s)
    await timed.push(b"now")
    await timed.push(b"later", delay_s=9.002)
    (taken,) = await timed.pop(10, timeout_s=0.5)
    assert taken.body == b"now"
    clock.advance(8.999)
    assert [each.body for each in await timed.pop(10)] == [b"now"]
    clock.advance(0.003)
    assert [each.body for each in await timed.pop(10)] == [b"later"]


async def test_event_removed_meanwhile_takes_no_other_event_with_it(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"%d" % number, f"id{number}") for number in range(5)])
    await timed.remove("id2")
    assert len(await timed.pop(10)) == 4
    assert (await timed.size()).claimed == 4


async def test_many_claims_that_are_over_come_back_a_few_at_a_time(timed: RedisQueue, clock: Clock) -> None:
    """So that no single call holds up the server, and none is needed to come back."""
    events = 3 * RETURNS_PER_STEP
    await timed.push_many([PushedEvent(b"x")] * events)
    await timed.pop(events, timeout_s=1)
    clock.advance(1)
    got = [len(await timed.pop(events)) for _ in range(4)]
    assert got == [RETURNS_PER_STEP] * 3 + [0]


# ---- answers that get lost -------------------------------------------------------------------------------------------


async def test_a_push_that_is_repeated_is_stored_once(timed: RedisQueue, clock: Clock) -> None:
    shard = timed.shards[0]
    first = await shard.push([PushedEvent(b"a"), PushedEvent(b"b")], pusher="p", number=7)
    assert await shard.push([PushedEvent(b"a"), PushedEvent(b"b")], pusher="p", number=7) == first
    await shard.push([PushedEvent(b"c")], pusher="p", number=8)
    assert await shard.push([PushedEvent(b"a"), PushedEvent(b"b")], pusher="p", number=7) == [], (
        "late, and long answered"
    )
    await shard.push([PushedEvent(b"d")], pusher="another", number=7)
    assert [each.body for each in await timed.pop(10)] == [b"a", b"b", b"c", b"d"]


async def test_scripts_that_the_server_forgot_are_sent_again(queue: RedisQueue, direct: Redis) -> None:
    await queue.push(b"a")
    cast("Any", direct).script_flush()
    await queue.push(b"b")
    assert len(await queue.pop(10)) == 2


async def test_events_of_a_lost_answer_come_with_the_next_answer(redis_server: RedisServer) -> None:
    async with adapter(f"redis://{redis_server.address}", "lost") as opened:
        reader = cast("receiver.RedisReceiver", await opened.open_receiver(0))
        await opened.enqueue([(0, batch("a"))])
        (first,) = await take(reader, 1)
        await opened.enqueue([(0, batch("b")), (0, batch("c"))])
        shard_reader = reader.readers[0]
        assert shard_reader.reader is not None
        lost = await shard_reader.shard.hold(shard_reader.reader, shard_reader.next, 0, 10, ANY)
        assert lost is not None
        assert len(lost.events) == 2
        second = await take(reader, 2)
        assert texts(second) == ["b", "c"]
        assert second[0].offset > lost.events[-1][0] > first.offset
        await reader.acknowledge(second[-1].offset + 1)
        assert (await opened.backlog(0, 0)).batches == 0


async def test_more_than_one_step_of_lost_answers_comes_back(redis_server: RedisServer) -> None:
    async with adapter(f"redis://{redis_server.address}", "lost-more") as opened:
        events = 2 * RETURNS_PER_STEP + 5
        reader = cast("receiver.RedisReceiver", await opened.open_receiver(0))
        await opened.enqueue([(0, batch(str(number))) for number in range(events)])
        shard_reader = reader.readers[0]
        assert shard_reader.reader is not None
        await shard_reader.shard.hold(shard_reader.reader, 0, 0, events, ANY)
        assert sorted(texts(await take(reader, events))) == sorted(str(number) for number in range(events))


async def test_a_server_that_was_frozen_stores_a_publish_once() -> None:
    """It later carries out calls that no client waits for any more, and calls that were sent again, in any order."""
    limits = RedisLimits(command_s=0.2, block_s=0.5)
    with RedisServer() as redis:
        async with adapter(f"redis://{redis.address}", limits=limits) as opened:
            await opened.enqueue([(0, batch("before"))])
            reader = await opened.open_receiver(0)
            await take(reader, 1)
            os.kill(redis.pid, signal.SIGSTOP)
            storing = [asyncio.ensure_future(opened.enqueue([(0, batch(str(number)))])) for number in range(20)]
            await asyncio.sleep(1)
            assert not any(each.done() for each in storing)
            os.kill(redis.pid, signal.SIGCONT)
            async with asyncio.timeout(20):
                await asyncio.gather(*storing)
            got: set[str] = set()
            async with asyncio.timeout(20):
                while len(got) < 20:
                    try:
                        got.update(texts((await reader.receive(ANY, ANY)).batches))
                    except StorageError:
                        await asyncio.sleep(0.05)
            assert got == {str(number) for number in range(20)}
            size = await shard_of(opened).size()
            assert (size.waiting, size.held) == (0, 21)
            with Redis(port=redis.port) as direct:
                check_agreement(direct, shard_of(opened).keys)


@pytest.mark.long
async def test_events_that_wait_for_a_server_are_bounded_however_small() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def publish_until_it_is_refused() -> None:
        storing.extend(asyncio.ensure_future(opened.enqueue([(0, batch("x"))])) for _ in range(100_000))

    storing: list[asyncio.Future[Any]] = []
    with RedisServer() as redis:
        async with adapter(f"redis://{redis.address}", publish_timeout_s=600) as opened:
            os.kill(redis.pid, signal.SIGSTOP)
            before = resident()
            try:
                with pytest.raises(QueueFull, match="wait to be stored"):
                    publish_until_it_is_refused()
                assert resident() - before < 4 * pusher.MAX_PENDING_BYTES
            finally:
                os.kill(redis.pid, signal.SIGCONT)
            await asyncio.gather(*storing)
            await opened.enqueue([(0, batch("there is room again"))])
            assert (await shard_of(opened).size()).waiting == len(storing) + 1


@pytest.mark.parametrize(
    ("stop", "resume"),
    [
        (["REPLICAOF", "127.0.0.1", "1"], ["REPLICAOF", "NO", "ONE"]),
        (["CONFIG", "SET", "min-replicas-to-write", "1"], ["CONFIG", "SET", "min-replicas-to-write", "0"]),
    ],
)
async def test_a_server_that_may_not_write_is_waited_for(stop: list[str], resume: list[str]) -> None:
    """A replica until it takes over, or one that has too few replicas."""
    with RedisServer() as redis, Redis(port=redis.port) as direct:
        run, version = cast("Any", direct).execute_command, cast("Any", direct).info("server")["redis_version"]
        if stop[0] == "CONFIG" and version.startswith("6."):
            pytest.skip("before Redis 7 a script writes, however few the replicas are")
        async with adapter(f"redis://{redis.address}") as opened:
            reader = await opened.open_receiver(0)
            run(*stop)
            with pytest.raises(server.ServerAway):
                await shard_of(opened).push([PushedEvent(b"x")], pusher="p", number=1)
            with pytest.raises(StorageError, match="does not serve"):
                await reader.receive(ANY, ANY)
            storing = asyncio.ensure_future(opened.enqueue([(0, batch("a"))]))
            await asyncio.sleep(0)
            run(*resume)
            await storing
            assert texts(await take(reader, 1)) == ["a"]


async def test_a_server_that_another_holds_up_is_waited_for() -> None:
    def run_for_ever() -> None:
        with Redis(port=redis.port, socket_timeout=None) as other, pytest.raises(ResponseError, match="killed"):
            cast("Any", other).eval("while true do end", 0)

    with RedisServer() as redis, Redis(port=redis.port) as direct:
        client = cast("Any", direct)
        client.config_set("lua-time-limit", 50)
        async with adapter(f"redis://{redis.address}") as opened:
            holding_up = asyncio.create_task(asyncio.to_thread(run_for_ever))
            with pytest.raises(server.ServerAway, match="BUSY"):
                await until_refused(shard_of(opened))
            storing = asyncio.ensure_future(opened.enqueue([(0, batch("a"))]))
            await asyncio.sleep(0)
            client.script_kill()
            await storing
            await holding_up
            assert texts(await take(await opened.open_receiver(0), 1)) == ["a"]


async def until_refused(shard: RedisShard) -> None:
    while True:
        await shard.bounds()


# ---- steps -----------------------------------------------------------------------------------------------------------


STEPS: dict[str, Callable[[RedisQueue], Awaitable[object]]] = {
    "push": lambda queue: queue.push_many([PushedEvent(b"new", "a", 9.0), PushedEvent(b"new", "n", 0.0, 7)]),
    "pop": lambda queue: queue.pop(3),
    "remove": lambda queue: queue.remove("b"),
    "clear": lambda queue: queue.clear(),
    "acknowledge": lambda queue: queue.shards[0].acknowledge([("u", 0), ("t", 2_000_000)]),
    "release": lambda queue: queue.shards[0].release("t", 2_000_000, 5.0),
}


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_a_crash_cuts_off_is_done_whole_or_not_at_all(step: str, tmp_path: Path) -> None:
    """Whatever part of it is in the server's file: a server that starts with it has the state before it, or after."""

    def state(redis: RedisServer) -> tuple[dict[str, set[str]], object]:
        with Redis(port=redis.port) as direct:
            return check_agreement(direct, keys), cast("Any", direct).hgetall(keys.body)

    with RedisServer(appendfsync="always") as redis, Redis(port=redis.port) as direct:
        options = RedisOptions(url=f"redis://{redis.address}")
        async with RedisQueue.open("q", options, scripts=scripts_of_tests()) as queue:
            keys = queue.shards[0].keys
            Clock(direct, [keys], start_s=2)
            await queue.push_many([PushedEvent(name.encode(), name, 0.0, at) for at, name in enumerate("abctu")])
            assert [taken.claim.token for taken in await queue.pop(2)] == [2_000_000] * 2
            before, start = state(redis), written(redis.directory).stat().st_size
            await STEPS[step](queue)
            after, end = state(redis), written(redis.directory).stat().st_size
        redis.kill()
        assert before != after
        for cut in [start + (end - start) * part // 5 for part in range(1, 5)] + [end - 1, end]:
            copy = Path(shutil.copytree(redis.directory, tmp_path / str(cut)))
            os.truncate(written(copy), cut)
            with RedisServer(copy) as again:
                assert state(again) == (after if cut == end else before)
                again.kill()


def written(directory: Path) -> Path:
    """The file that a server appends to."""
    (file,) = directory.rglob("*.aof")
    return file


# ---- readers ---------------------------------------------------------------------------------------------------------


async def test_a_reader_that_was_superseded_neither_gets_nor_finishes_anything(
    redis_server: RedisServer,
) -> None:
    url = f"redis://{redis_server.address}"
    async with (
        adapter(url, "superseded", limits=RedisLimits(superseded_s=2.0)) as one,
        adapter(url, "superseded") as other,
    ):
        await one.enqueue([(0, batch("a")), (0, batch("b"))])
        old = await one.open_receiver(0)
        received = await take(old, 2)
        new = await other.open_receiver(0)
        await old.acknowledge(received[-1].offset + 1)
        await one.enqueue([(0, batch("c"))])
        with pytest.raises(StorageError, match="is read by another process"):
            await old.receive(ANY, ANY)
        assert texts(await take(new, 3)) == ["a", "b", "c"]
        error: HeadraceError | None = None
        while not isinstance(error, Closed):
            with pytest.raises(HeadraceError) as caught:
                await old.receive(ANY, ANY)
            error = caught.value
            await asyncio.sleep(0.05)
        assert "another reader" in str(error)


async def test_a_reader_goes_on_after_everything_was_lost(redis_server: RedisServer) -> None:
    async with adapter(f"redis://{redis_server.address}", "goes-on") as opened:
        reader = await opened.open_receiver(0)
        await opened.enqueue([(0, batch("a"))])
        (before,) = await take(reader, 1)
        with Redis(port=redis_server.port) as direct:
            direct.delete(*shard_of(opened).keys)
        await opened.enqueue([(0, batch("b"))])
        (after,) = await take(reader, 1)
        assert after.offset > before.offset
        await reader.acknowledge(after.offset + 1)
        assert (await opened.backlog(0, 0)).batches == 0


async def test_a_reader_from_before_a_loss_is_superseded_too(redis_server: RedisServer) -> None:
    url = f"redis://{redis_server.address}"
    async with adapter(url, "reader-lost") as one, adapter(url, "reader-lost") as other:
        old = await one.open_receiver(0)
        with Redis(port=redis_server.port) as direct:
            direct.delete(*shard_of(one).keys)
        new = await other.open_receiver(0)
        await one.enqueue([(0, batch("a"))])
        with pytest.raises(StorageError, match="is read by another process"):
            await old.receive(ANY, ANY)
        assert texts(await take(new, 1)) == ["a"]


async def test_a_reader_that_waits_is_closed_at_any_moment(redis_server: RedisServer) -> None:
    """The client of Redis may miss a cancellation; nothing waits for the end of its call then."""
    async with adapter(f"redis://{redis_server.address}", "closing") as opened:
        for turns in range(60):
            reader = await opened.open_receiver(0)
            receiving = asyncio.create_task(reader.receive(ANY, ANY))
            for _ in range(turns % 30):
                await asyncio.sleep(0)
            async with asyncio.timeout(4):
                await reader.aclose()
                await asyncio.gather(receiving, return_exceptions=True)


async def test_consumers_and_a_reader_of_one_queue_share_its_events(redis_server: RedisServer) -> None:
    async with adapter(f"redis://{redis_server.address}", "shared") as opened:
        await opened.enqueue([(0, batch("a")), (0, batch("b"))])
        shard = shard_of(opened)
        (claim,) = (await shard.pop(1, 0.2)).claims
        reader = await opened.open_receiver(0)
        assert texts(await take(reader, 1)) == ["b"]
        assert texts(await take(reader, 1)) == ["a"], "it was not acknowledged within its timeout"
        assert await shard.acknowledge([(claim.id, claim.token)]) == [False]


async def test_positions_go_on_after_everything_was_lost(redis_server: RedisServer) -> None:
    """A server that begins anew gives out none that a checkpoint has passed already."""
    async with adapter(f"redis://{redis_server.address}", "anew") as opened:
        for _ in range(2):
            await opened.enqueue([(0, batch("x"))])
        reader = await opened.open_receiver(0)
        before = (await take(reader, 2))[-1].offset
        with Redis(port=redis_server.port) as direct:
            direct.delete(*shard_of(opened).keys)
        await opened.enqueue([(0, batch("y"))])
        (received,) = await take(await opened.open_receiver(0), 1)
        assert received.offset > before


# ---- memory ----------------------------------------------------------------------------------------------------------


async def test_a_server_without_memory_says_so_and_can_be_emptied() -> None:
    with RedisServer() as redis:
        async with adapter(f"redis://{redis.address}") as opened:
            await opened.enqueue([(0, batch(str(number))) for number in range(100)])
            queue = RedisQueue([shard_of(opened)])
            with Redis(port=redis.port) as direct:
                cast("Any", direct).config_set("maxmemory", "1")
                with pytest.raises(StorageFull, match="no memory left"):
                    await opened.enqueue([(0, batch("x"))])
                taken = await queue.pop(40)
                assert await queue.acknowledge(*taken) == 40
                (one,) = await queue.pop(1)
                assert await queue.extend(one, 10)
                assert await queue.release(one)
                reader = await opened.open_receiver(0)
                received = await take(reader, 60)
                await reader.acknowledge(received[-1].offset + 1)
                assert (await opened.backlog(0, 0)).batches == 0
                assert not any(check_agreement(direct, shard_of(opened).keys).values())
            await queue.aclose()


async def test_a_server_without_memory_refuses_events_with_ids_too() -> None:
    """They may replace something, and what begins by freeing memory is let through."""
    with RedisServer() as redis, Redis(port=redis.port) as direct:
        async with RedisQueue.open("q", RedisOptions(url=f"redis://{redis.address}")) as queue:
            await queue.push(b"before", id="a")
            (taken,) = await queue.pop(1)
            await queue.release(taken)
            cast("Any", direct).config_set("maxmemory", "1mb")
            for name in "ab":
                with pytest.raises(StorageFull):
                    await queue.push(b"x" * 100_000, id=name)
            with pytest.raises(StorageFull):
                await queue.ensure(b"x" * 100_000, id="b")
            check_agreement(direct, queue.shards[0].keys)
            found = await queue.get("a")
            assert found is not None
            assert (found.body, found.attempts) == (b"before", 1), "it is not replaced, not even in part"


@pytest.mark.parametrize("key", ["meta", "waiting", "body", "bell"])
async def test_a_key_of_another_type_stores_nothing(queue: RedisQueue, direct: Redis, key: str) -> None:
    """Who publishes is told of an error: nothing may be stored then."""
    keys = queue.shards[0].keys
    direct.set(getattr(keys, key), "foreign")
    with pytest.raises(StorageError, match="WRONGTYPE"):
        await queue.push(b"x")
    direct.delete(getattr(keys, key))
    assert not any(check_agreement(direct, keys).values())


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_would_evict_queues_is_refused(policy: str) -> None:
    with RedisServer() as redis:
        with Redis(port=redis.port) as direct:
            cast("Any", direct).config_set("maxmemory", "100mb")
            cast("Any", direct).config_set("maxmemory-policy", policy)
        with pytest.raises(InvalidArgument, match=f"noeviction, not {policy}"):
            async with adapter(f"redis://{redis.address}"):
                pass


def test_without_its_client_the_adapter_names_the_extra_to_install() -> None:
    code = "import sys; sys.modules['redis'] = None; from headrace.adapters.registry import _find; _find('redis')"
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "needs the package 'redis'" in ran.stderr
    assert "pip install 'headrace[redis]'" in ran.stderr


def test_a_delivered_event_equals_the_published_one() -> None:
    event = Event(b"x", id="i", headers={"a": "b"})
    body = receiver.body_of(EventBatch.of(STREAM, [event]))
    (delivered,) = receiver.batch_of(5, body)
    assert (delivered.payload, delivered.id, delivered.headers, delivered.token) == (b"x", "i", {"a": "b"}, (5, 0))
