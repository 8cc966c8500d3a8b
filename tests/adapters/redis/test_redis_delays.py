"""Delayed batches in Redis: what differs from the control store, and that nothing else does."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import pytest_asyncio
from redis import Redis

from benchmarks.servers import RedisServer
from headrace import StorageError, StreamId
from headrace.adapters import AdapterContext, QueueAdapter, open_adapter
from headrace.adapters.redis import server
from headrace.adapters.redis.delay_scripts import AGAIN_PER_CLAIM
from headrace.adapters.redis.delays import SCRIPT_BATCHES, DelayKeys, RedisDelayStore
from headrace.silo.delays import DelayScheduler
from headrace.store.control_store import ControlStore
from headrace.store.delays import DelayedBacklog, DelayedCall, DelayStore, Release
from headrace.streams.errors import InvalidArgument, StorageFull
from headrace.streams.events import EventBatch, ScheduledBatch
from headrace.streams.publishing import ProducerSequence
from tests.store.delay_places import SCRIPTS, Clock, set_clock

STREAM = StreamId("orders", "42")
PREFIX = "test"
HOLD_S = 5.0
PROVIDER = "p"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """One that a test may do anything to."""
    with RedisServer(appendfsync="always") as started:
        yield started


@pytest.fixture
def url(redis: RedisServer) -> str:
    return f"redis://{redis.address}"


@pytest_asyncio.fixture
async def delays(url: str) -> AsyncIterator[RedisDelayStore]:
    async with aclosing(RedisDelayStore(url)) as delays:
        yield delays


def later(text: str, delay_s: float = 0.001) -> ScheduledBatch:
    return ScheduledBatch.of_events(STREAM, [text.encode()], timedelta(seconds=delay_s), None)


def texts(batches: Sequence[EventBatch]) -> list[str]:
    return [payload.decode() for each in batches for payload in each.payloads()]


async def claim(delays: DelayStore, holder: str = "me") -> list[Release]:
    """What is due within a moment."""
    async with asyncio.timeout(20):
        while not (found := await delays.claim(PROVIDER, holder, HOLD_S)):  # noqa: ASYNC110 (a server tells nobody)
            await asyncio.sleep(0.002)
    return found


# ---- beside the control store ----------------------------------------------------------------------------------------


class Both(NamedTuple):
    """The same batches in SQLite and in Redis, by one clock. Every call goes to both, and has one answer."""

    store: DelayStore
    redis: RedisDelayStore
    numbers: dict[tuple[int, int], int]
    """Of a queue and a release's number in SQLite, the number in Redis: those rise in other steps."""

    async def add_all(self, calls: Sequence[DelayedCall]) -> None:
        for delays in (self.store, self.redis):
            await delays.add_all(PROVIDER, calls)

    async def due_in_s(self, holder: str) -> None:
        assert await self.redis.due_in_s(PROVIDER, holder) == await self.store.due_in_s(PROVIDER, holder)

    async def backlogs(self) -> Mapping[int, DelayedBacklog]:
        waiting = await self.store.backlogs(PROVIDER)
        assert await self.redis.backlogs(PROVIDER) == waiting
        return waiting

    async def forget_calls(self) -> None:
        for delays in (self.store, self.redis):
            await delays.forget_calls(PROVIDER)

    async def claim(self, holder: str, **limits: int) -> Sequence[Release]:
        wanted = await self.store.claim(PROVIDER, holder, HOLD_S, **limits)
        found = await self.redis.claim(PROVIDER, holder, HOLD_S, **limits)
        by_queue = {release.queue: release for release in found}
        assert {each.queue: texts(each.batches) for each in found} == {
            each.queue: texts(each.batches) for each in wanted
        }
        for release in wanted:
            number = by_queue[release.queue].number
            assert self.numbers.setdefault((release.queue, release.number), number) == number
        return wanted

    async def released(self, numbers: Mapping[int, int]) -> None:
        await self.store.released(PROVIDER, numbers)
        theirs = {queue: self.numbers[queue, number] for queue, number in numbers.items()}
        await self.redis.released(PROVIDER, theirs)


class Walk:
    """What providers may do, in any order."""

    def __init__(self, seed: int, both: Both, clock: Clock) -> None:
        self.rng = random.Random(seed)
        self.both = both
        self.clock = clock
        self.held: list[dict[int, int]] = []
        """Claims that may be finished, also late, or again."""
        self.added = 0

    async def step(self) -> None:
        step = self.rng.choice((self.delay, self.delay, self.claim, self.claim, self.release, self.move, self.look))
        await step()

    async def delay(self) -> None:
        producers = self.rng.sample("xyz", self.rng.randrange(3))
        calls = [DelayedCall(self._batches(), self._sequence(each)) for each in producers]
        if self.rng.random() < 0.5 or not calls:
            calls.append(DelayedCall(self._batches(), None))
        await self.both.add_all(calls)

    def _batches(self) -> list[tuple[int, ScheduledBatch]]:
        found: list[tuple[int, ScheduledBatch]] = []
        for _ in range(self.rng.randrange(1, 5)):
            self.added += 1
            events = [b"%d" % self.added] * self.rng.randrange(1, 3)
            delay = timedelta(microseconds=self.rng.randrange(20_000_000))
            found.append((self.rng.randrange(3), ScheduledBatch.of_events(STREAM, events, delay, None)))
        return found

    def _sequence(self, producer: str) -> ProducerSequence:
        """Mostly the next call, at times an old one, or one that takes others back."""
        previous = self.rng.randrange(6)
        return ProducerSequence(producer, previous + self.rng.randrange(1, 4), previous)

    async def claim(self) -> None:
        limits = self.rng.choice(({}, {"max_batches": 3}, {"max_bytes": 100}))
        found = await self.both.claim(self.rng.choice("ab"), **limits)
        self.held.append({release.queue: release.number for release in found})

    async def release(self) -> None:
        if self.held:
            await self.both.released(self.rng.choice(self.held[-5:]))

    async def move(self) -> None:
        self.clock.now_s += self.rng.choice((0.5, 3, 10, -2))

    async def look(self) -> None:
        await self.both.backlogs()
        await self.both.due_in_s(self.rng.choice("ab"))
        await self.both.forget_calls()


@pytest.mark.parametrize("seed", range(4))
async def test_it_does_what_the_control_store_does(redis: RedisServer, url: str, seed: int, tmp_path: Path) -> None:
    clock = Clock()
    clock.on_move = lambda: set_clock(redis, PREFIX, clock)
    clock.on_move()
    async with (
        aclosing(await ControlStore.open(str(tmp_path / "control.db"))) as control,
        aclosing(RedisDelayStore(url, prefix=PREFIX, scripts=SCRIPTS)) as delays,
    ):
        both = Both(control.delay_store(clock), delays, {})
        walk = Walk(seed, both, clock)
        for _ in range(120):
            await walk.step()
            check_agreement(redis)
        clock.now_s += 100
        while found := await both.claim("a"):
            await both.released({release.queue: release.number for release in found})
        assert await both.backlogs() == {}
        check_agreement(redis)
    with Redis(port=redis.port) as direct:
        left = {key.decode().rpartition("}")[2] for key in cast("Any", direct).keys("*")}
    assert left <= {"meta", "releases", "calls", "called"}


def check_agreement(redis: RedisServer) -> None:
    """Every batch has its body and one place, and nothing else is left of any."""
    keys = DelayKeys.of(PREFIX, PROVIDER)
    tag = keys.meta.removesuffix("meta")
    with Redis(port=redis.port, decode_responses=True) as client:
        direct = cast("Any", client)
        places: dict[str, dict[str, list[str]]] = {"due": {}, "taken": {}, "by": {}}
        for key in direct.keys(f"{tag}*:*"):
            kind, _, name = key.removeprefix(tag).partition(":")
            places[kind][name] = direct.zrange(key, 0, -1)
        ids = [id for kind in ("due", "taken") for of in places[kind].values() for id in of]  # noqa: A001
        assert sorted(ids) == sorted(direct.hkeys(keys.body)), "in two places, or without a body"
        held = {queue for queue, _ in direct.zrange(keys.held, 0, -1, withscores=True)}
        assert set(places["taken"]) <= held
        free = {queue: direct.zrange(f"{tag}due:{queue}", 0, 0, withscores=True)[0][1] for queue in places["due"]}
        assert dict(direct.zrange(keys.next, 0, -1, withscores=True)) == {
            queue: at for queue, at in free.items() if queue not in held
        }
        events: defaultdict[str, int] = defaultdict(int)
        for kind in ("due", "taken"):
            for queue, of in places[kind].items():
                events[queue] += sum(int(id.split()[1]) for id in of)  # noqa: A001
        assert {queue: int(count) for queue, count in direct.hgetall(keys.events).items()} == events
        callers = {(f"{of.split()[0]} {of.split()[1]}", id) for id, of in direct.hgetall(keys.caller).items()}  # noqa: A001
        by = {
            (f"{producer} {each.split(' ', 1)[0]}", each.split(" ", 2)[2])
            for producer, theirs in places["by"].items()
            for each in theirs
        }
        assert by == callers
        assert {id for _, id in callers} <= {id for of in places["due"].values() for id in of}  # noqa: A001


# ---- many ------------------------------------------------------------------------------------------------------------


async def test_a_call_of_any_size_is_stored_once_and_comes_in_order(delays: RedisDelayStore) -> None:
    wanted = [str(number) for number in range(2 * SCRIPT_BATCHES + 500)]
    batches = [(0, later(text)) for text in wanted]
    for _ in range(2):
        await delays.add(PROVIDER, batches, ProducerSequence("me", 1, 0))
    got: list[str] = []
    while await delays.due_in_s(PROVIDER, "me") is not None:
        (release,) = await claim(delays)
        assert len(release.batches) <= SCRIPT_BATCHES
        got += texts(release.batches)
        await delays.released(PROVIDER, {0: release.number})
    assert got == wanted


async def test_without_a_sequence_a_large_call_is_several_scripts(delays: RedisDelayStore, redis: RedisServer) -> None:
    await delays.add(PROVIDER, [(0, later("before", 100))])
    with Redis(port=redis.port) as direct:
        before = cast("Any", direct).info("commandstats")["cmdstat_evalsha"]["calls"]
        await delays.add(PROVIDER, [(0, later("x", 100))] * (2 * SCRIPT_BATCHES + 1))
        assert cast("Any", direct).info("commandstats")["cmdstat_evalsha"]["calls"] == before + 3
    assert (await delays.backlogs(PROVIDER))[0].batches == 2 * SCRIPT_BATCHES + 2


async def test_who_takes_over_much_gets_it_in_parts_and_the_rest_next(url: str, redis: RedisServer) -> None:
    clock = Clock()
    clock.on_move = lambda: set_clock(redis, PREFIX, clock)
    clock.on_move()
    queues, batches = 5, AGAIN_PER_CLAIM // 3
    async with aclosing(RedisDelayStore(url, prefix=PREFIX, scripts=SCRIPTS)) as delays:
        for queue in range(queues):
            await delays.add(PROVIDER, [(queue, later("x", 0))] * batches)
            assert len(await delays.claim(PROVIDER, f"dead {queue}", HOLD_S)) == 1
        clock.now_s += HOLD_S
        first = await delays.claim(PROVIDER, "me", HOLD_S)
        assert len(first) == 3
        second = await delays.claim(PROVIDER, "me", HOLD_S)
        assert {release.queue for release in (*first, *second)} == set(range(queues))


# ---- the server and its data -----------------------------------------------------------------------------------------


class Stage:
    """A queue of the log, and the events that are delayed for it."""

    def __init__(self, log: QueueAdapter, delays: RedisDelayStore) -> None:
        self.log = log
        self.store = delays
        self.scheduler = DelayScheduler(PROVIDER, log, delays)

    async def come(self, count: int) -> list[str]:
        """Return the events of the queue once there are `count`."""
        receiver = await self.log.open_receiver(0, 0)
        got: list[str] = []
        async with asyncio.timeout(30), aclosing(receiver):
            while len(got) < count:
                if await self.store.due_in_s(PROVIDER, "") is not None:
                    await self.scheduler.look()
                if (await self.log.bounds(0)).next > len(got):
                    got += texts((await receiver.receive(1000, 1 << 20)).batches)
                await asyncio.sleep(0.005)
        return got


@asynccontextmanager
async def staged(directory: Path, delays: RedisDelayStore) -> AsyncGenerator[Stage]:
    context = AdapterContext(provider=PROVIDER, queues=1, directory=directory)
    async with aclosing(await open_adapter("log", context, {})) as log:
        yield Stage(log, delays)


async def test_releases_go_on_under_other_names_on_a_server_that_lost_everything(
    redis: RedisServer, delays: RedisDelayStore, tmp_path: Path
) -> None:
    await delays.add(PROVIDER, [(0, later("a"))])
    (before,) = await claim(delays)
    await delays.released(PROVIDER, {0: before.number})
    with Redis(port=redis.port) as direct:
        cast("Any", direct).flushall()
    await delays.add(PROVIDER, [(0, later("b"))])
    (after,) = await claim(delays)
    assert after.producer != before.producer
    await delays.released(PROVIDER, {0: after.number})


async def test_a_new_server_does_not_meet_the_numbers_of_the_one_before(
    redis: RedisServer, delays: RedisDelayStore, tmp_path: Path
) -> None:
    async with staged(tmp_path, delays) as stage:
        await delays.add(PROVIDER, [(0, later("a"))])
        assert await stage.come(1) == ["a"]
        with Redis(port=redis.port) as direct:
            cast("Any", direct).flushall()
        await delays.add(PROVIDER, [(0, later("b"))])
        assert await stage.come(2) == ["a", "b"]


async def test_on_a_server_that_lost_its_last_second_nothing_that_is_stored_later_is_taken_for_what_was_lost(
    redis: RedisServer, delays: RedisDelayStore, tmp_path: Path
) -> None:
    async with staged(tmp_path, delays) as stage:
        await delays.add(PROVIDER, [(0, later("a"))])
        assert await stage.come(1) == ["a"]
        with Redis(port=redis.port) as client:
            direct = cast("Any", client)
            before = {key: direct.dump(key) for key in direct.keys("*")}
            for number, text in enumerate("bcd", 2):
                await delays.add(PROVIDER, [(0, later(text))])
                assert len(await stage.come(number)) == number
            direct.flushall()
            for key, value in before.items():
                direct.restore(key, 0, value)
        await delays.add(PROVIDER, [(0, later("e"))])
        assert await stage.come(5) == list("abcde")


async def test_while_the_server_is_away_calls_fail_and_what_is_stored_comes_when_it_is_back(
    redis: RedisServer, delays: RedisDelayStore, tmp_path: Path
) -> None:
    async with staged(tmp_path, delays) as stage:
        await stage.scheduler.enqueue([(0, later("a"))])
        await asyncio.to_thread(redis.kill)
        sequence = ProducerSequence("client", 1, 0)
        for _ in range(2):
            with pytest.raises(
                StorageError, match=f"Redis at {redis.address} does not serve.*may or may not be stored"
            ):
                await stage.scheduler.enqueue([(0, later("b"))], sequence=sequence)
        await stage.scheduler.enqueue([(0, EventBatch.of(STREAM, [b"now"]))])
        with pytest.raises(StorageError, match="does not serve"):
            await stage.scheduler.look()
        await asyncio.to_thread(redis.start)
        await stage.scheduler.enqueue([(0, later("b"))], sequence=sequence)
        assert await stage.come(3) == ["now", "a", "b"]
        await stage.scheduler.aclose(0)


async def test_what_a_frozen_server_stores_later_it_stores_once(
    redis: RedisServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "COMMAND_S", 0.2)
    async with aclosing(RedisDelayStore(url)) as delays, staged(tmp_path, delays) as stage:
        await stage.scheduler.enqueue([(0, later("a"))])
        assert await stage.come(1) == ["a"]
        sequence = ProducerSequence("client", 1, 0)
        os.kill(redis.pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(StorageError, match="does not serve"):
                await stage.scheduler.enqueue([(0, later("b"))], sequence=sequence)
        os.kill(redis.pid, signal.SIGCONT)
        async with asyncio.timeout(20):
            while True:
                try:
                    await stage.scheduler.enqueue([(0, later("b"))], sequence=sequence)
                    break
                except StorageError:  # it is still busy with those before
                    pass
        assert await stage.come(2) == ["a", "b"]
        assert await delays.backlogs(PROVIDER) == {}
        await stage.scheduler.aclose(0)


async def test_a_server_without_memory_says_so_and_can_be_emptied(redis: RedisServer, delays: RedisDelayStore) -> None:
    await delays.add(PROVIDER, [(0, later(str(number))) for number in range(100)], ProducerSequence("me", 1, 0))
    with Redis(port=redis.port) as direct:
        cast("Any", direct).config_set("maxmemory", "1")
        with pytest.raises(StorageFull, match="no memory left"):
            await delays.add(PROVIDER, [(0, later("x"))])
        (release,) = await claim(delays)
        assert len(release.batches) == 100
        assert await claim(delays) == [release]
        await delays.released(PROVIDER, {0: release.number})
        await delays.forget_calls(PROVIDER)
        assert await delays.backlogs(PROVIDER) == {}


async def test_a_server_that_would_evict_what_is_stored_is_refused(redis: RedisServer, delays: RedisDelayStore) -> None:
    with Redis(port=redis.port) as direct:
        cast("Any", direct).config_set("maxmemory", "100mb")
        cast("Any", direct).config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(InvalidArgument, match="noeviction"):
        await delays.check(PROVIDER)


async def test_a_provider_of_the_same_name_does_not_get_what_another_stored(url: str) -> None:
    async with (
        aclosing(RedisDelayStore(url, owner="one")) as one,
        aclosing(RedisDelayStore(url, owner="other")) as other,
    ):
        await one.check(PROVIDER)
        await one.add(PROVIDER, [(0, later("a"))])
        for refused in (
            other.check(PROVIDER),
            other.add(PROVIDER, [(0, later("b"))]),
            other.claim(PROVIDER, "me", HOLD_S),
        ):
            with pytest.raises(InvalidArgument, match="delayed events of another provider 'p'"):
                await refused
        (release,) = await claim(one)
        assert texts(release.batches) == ["a"]
        await other.add("q", [(0, later("b"))])


async def test_a_damaged_batch_is_said_to_be_one(redis: RedisServer, delays: RedisDelayStore) -> None:
    await delays.add(PROVIDER, [(0, later("a"))])
    with Redis(port=redis.port) as client:
        direct = cast("Any", client)
        body = DelayKeys.of("headrace", PROVIDER).body
        (id,) = direct.hkeys(body)  # noqa: A001
        direct.hset(body, id, b"\xc1")
    (release,) = await claim(delays)
    assert release.batches == []
    assert release.damage.startswith(f"a delayed batch in Redis at {redis.address} is damaged")


def test_without_its_client_it_is_said_what_to_install() -> None:
    code = "import sys; sys.modules['redis'] = None; from headrace.silo import delays; delays._redis_delay_store()"
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "delays in Redis need the package 'redis'" in ran.stderr
    assert "pip install 'headrace[redis]'" in ran.stderr
