"""A provider on queues in Redis: schedules, crashes, and a server that goes away."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from benchmarks.servers import RedisServer
from headrace import (
    Client,
    Event,
    InvalidArgument,
    NotSupported,
    Provider,
    RetryPolicy,
    Selector,
    Start,
    StorageError,
    StreamId,
    SubscriptionDefinition,
)
from headrace.adapters.redis.keys import ShardKeys
from headrace.agents import checkpointer
from tests.adapters.redis.looking import check_agreement
from tests.cli.commandline import Headrace
from tests.cli.conftest import headrace
from tests.client.silos import SiloProcess

__all__ = ("headrace",)

STREAM = StreamId("orders", "1")


@asynccontextmanager
async def opened(data: Path, url: str, **options: Any) -> AsyncGenerator[Provider]:
    async with Provider.open(data, adapter="redis", queues=2, options={"url": url, **options}) as provider:
        yield provider


async def until(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (some of it is told by other processes)
            await asyncio.sleep(0.01)


def keys_of(provider: Provider) -> list[ShardKeys]:
    return [ShardKeys.of("headrace", f"{provider.name}.{queue}", "0") for queue in range(provider.queues)]


# ---- schedules -------------------------------------------------------------------------------------------------------


async def test_events_come_by_priority_and_when_they_are_due(tmp_path: Path, url: str) -> None:
    got: list[bytes] = []

    async def handle(event: Event) -> None:
        got.append(event.payload)

    async with opened(tmp_path, url) as provider:
        stream = provider.stream(STREAM)
        await provider.create_subscription(SubscriptionDefinition(name="s", selector=Selector("orders/*")))
        await stream.publish([b"plain", Event(b"later", delay=timedelta(seconds=0.3)), Event(b"urgent", priority=9)])
        await stream.publish(b"most urgent", priority=99)
        await stream.publish([Event(b"own priority", priority=10), b"of the call"], priority=5)
        await provider.subscribe("s", "orders/*", handle)
        await until(lambda: len(got) == 6)
    assert got == [b"most urgent", b"own priority", b"urgent", b"of the call", b"plain", b"later"]


@pytest.mark.parametrize("adapter", ["log", "memory"])
@pytest.mark.parametrize("schedule", [{"delay": timedelta(seconds=1)}, {"priority": 1}])
async def test_an_adapter_that_cannot_do_it_says_so_and_stores_nothing(
    tmp_path: Path, adapter: str, schedule: dict[str, Any]
) -> None:
    async with Provider.open(tmp_path, adapter=adapter, queues=1) as provider:
        before = await provider.adapter.bounds(0)
        with pytest.raises(NotSupported, match="such as redis"):
            await provider.stream(STREAM).publish([b"a", b"b"], **schedule)
        with pytest.raises(NotSupported, match="such as redis"):
            await provider.publish_many([(STREAM, b"a"), (STREAM, Event(b"b", **schedule))])
        assert await provider.adapter.bounds(0) == before


async def test_schedules_come_through_grpc_and_the_command_line(tmp_path: Path, url: str, headrace: Headrace) -> None:
    config = ['data = "d"', "[providers.plain]", "[providers.default]", 'adapter = "redis"', "queues = 2"]
    (tmp_path / "silo.toml").write_text("\n".join([*config, f'options = {{ url = "{url}" }}']))
    silo = SiloProcess(tmp_path, "silo.toml")
    address = await asyncio.to_thread(silo.start)
    try:
        async with Client(address) as client:
            async with client.subscribe("s", "orders/*") as consumer:
                await client.publish(STREAM, [b"now", Event(b"later", delay=timedelta(seconds=0.5))])
                publish = ("publish", "--server", address, "--stream", "orders/2", "--format", "raw")
                ran = await asyncio.to_thread(headrace, *publish, "--delay", "1", "--priority", "3", stdin=b"last\n")
                assert not ran.code, ran.err
                got: list[bytes] = []
                async for batch in consumer:
                    got += batch.payloads()
                    await batch.ack()
                    if len(got) == 3:
                        break
            assert sorted(got) == [b"last", b"later", b"now"]
        async with Client(address, provider="plain") as client:
            for event in (Event(b"x", delay=timedelta(seconds=1)), Event(b"x", priority=1)):
                with pytest.raises(NotSupported, match="such as redis"):
                    await client.publish(STREAM, event)
        ran = await asyncio.to_thread(headrace, *publish, "--provider", "plain", "--priority", "3", stdin=b"last\n")
        assert (ran.code, "such as redis" in ran.err) == (2, True)
    finally:
        await asyncio.to_thread(silo.stop)


async def test_failing_event_is_retried_and_ends_as_a_dead_letter_that_can_be_redriven(
    tmp_path: Path, url: str
) -> None:
    seen: list[bytes] = []
    broken = True

    async def handle(event: Event) -> None:
        seen.append(event.payload)
        if broken and event.payload == b"bad":
            raise ValueError("broken")

    async with opened(tmp_path, url) as provider:
        retry = RetryPolicy(max_attempts=3, initial_delay_s=0.01)
        subscription = await provider.subscribe("s", "orders/*", handle, retry=retry)
        await provider.stream(STREAM).publish([b"bad"], priority=5)
        await provider.stream(STREAM).publish([b"good"])
        await until(lambda: b"good" in seen)
        await subscription.caught_up()
        (letter,) = await provider.store.dead_letters("default")
        assert (letter.subscription, letter.attempts, seen.count(b"bad")) == ("s", 3, 3)
        assert "broken" in letter.reason
        async with asyncio.timeout(30):
            while (await provider.adapter.backlog(provider.queue_of(STREAM), 0)).batches:  # noqa: ASYNC110 (it is saved)
                await asyncio.sleep(0.05)
        broken = False
        assert await subscription.redrive() == 1
        await until(lambda: seen.count(b"bad") == 4)


# ---- crashes ---------------------------------------------------------------------------------------------------------


# slow: `test_redis_processes.py` kills consumers, and quickly
@pytest.mark.slow
async def test_a_process_killed_again_and_again_loses_nothing(tmp_path: Path, url: str) -> None:
    """Events acknowledged by a saved checkpoint do not come again; the others do, to the next process."""
    events, notes, rng = 400, tmp_path / "notes", random.Random(1)
    arguments = (str(tmp_path / "d"), url, str(notes))

    async def serve() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.adapters.redis.serving", *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"serving\n"
        return process

    def seen(what: bytes) -> Counter[bytes]:
        return Counter(line.split()[1] for line in notes.read_bytes().splitlines() if line.startswith(what))

    process = await serve()
    async with Provider.open(adapter="redis", queues=2, options={"url": url}) as publisher:
        for start in range(0, events, 100):
            numbers = range(start, start + 100)
            await publisher.publish_many([(StreamId("orders", str(n % 20)), b"%d" % n) for n in numbers])
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            process.kill()
            await process.wait()
            process = await serve()
        await until(lambda: len(seen(b"done")) == events, 60)
        async with asyncio.timeout(30):
            for queue in range(2):
                while (await publisher.adapter.backlog(queue, 0)).batches:  # noqa: ASYNC110 (of another process)
                    await asyncio.sleep(0.05)
    process.terminate()
    await process.wait()
    assert set(seen(b"done")) == {b"%d" % number for number in range(events)}


async def test_nothing_is_removed_before_the_checkpoint_that_says_it_is_done_is_stored(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash in between leaves a subscription that waits for events that are gone, which is a gap."""
    monkeypatch.setattr(checkpointer, "CHECKPOINT_S", 3600.0)
    got: list[bytes] = []

    async def handle(event: Event) -> None:
        got.append(event.payload)

    async with opened(tmp_path, url) as provider:
        await provider.subscribe("s", "orders/*", handle)
        await provider.stream(STREAM).publish([b"a", b"b"])
        await until(lambda: len(got) == 2)
        queue = provider.queue_of(STREAM)
        await provider.manager.acknowledger.acknowledge()
        assert (await provider.adapter.backlog(queue, 0)).batches == 1
        await provider.manager.checkpointer.save()
        await provider.manager.acknowledger.acknowledge()
        assert (await provider.adapter.backlog(queue, 0)).batches == 0


async def test_events_done_before_a_stop_do_not_come_again(tmp_path: Path, url: str) -> None:
    """Also above a gap: offsets are the same for the next process."""
    got: list[bytes] = []
    stuck = asyncio.Event()

    async def handle(event: Event) -> None:
        if event.payload == b"a0":
            await stuck.wait()
        got.append(event.payload)

    async with opened(tmp_path, url) as provider:
        await provider.subscribe("s", "orders/*", handle)
        names = [f"{key}{number}" for key in "ab" for number in range(10)]
        await provider.publish_many([(StreamId("orders", name), name.encode()) for name in names])
        await until(lambda: len(got) == 19)
        await provider.manager.checkpointer.save()
        await provider.aclose(drain_s=0)
    assert b"a0" not in got
    got.clear()
    stuck.set()
    async with opened(tmp_path, url) as provider:
        await provider.subscribe("s", "orders/*", handle)
        await provider.stream(STREAM).publish(b"new")
        await until(lambda: b"new" in got and b"a0" in got)
    assert sorted(got) == [b"a0", b"new"]


async def test_a_subscription_that_is_not_served_holds_its_events(tmp_path: Path, url: str) -> None:
    got: dict[str, list[bytes]] = {"a": [], "b": []}

    def handler(name: str) -> Any:
        async def handle(event: Event) -> None:
            got[name].append(event.payload)

        return handle

    async with opened(tmp_path, url) as provider:
        for name in "ab":
            await provider.subscribe(name, "orders/*", handler(name))
        await provider.withdraw("b")
        await provider.stream(STREAM).publish([b"1", b"2"])
        await until(lambda: got["a"] == [b"1", b"2"])
        await provider.manager.checkpointer.save()
        await provider.stream(STREAM).publish(b"3")
        await until(lambda: len(got["a"]) == 3)
    async with opened(tmp_path, url) as provider:
        for name in "ab":
            await provider.subscribe(name, "orders/*", handler(name))
        await until(lambda: got["b"] == [b"1", b"2", b"3"])
        await until(lambda: got["a"] == [b"1", b"2", b"3"])


async def test_caught_up_means_that_nothing_is_left(tmp_path: Path, url: str) -> None:
    got: list[bytes] = []

    async def handle(event: Event) -> None:
        await asyncio.sleep(0.001)
        got.append(event.payload)

    async with opened(tmp_path, url) as provider:
        subscription = await provider.subscribe("s", "orders/*", handle)
        await provider.publish_many([(StreamId("orders", str(n % 7)), b"%d" % n) for n in range(300)])
        await subscription.caught_up()
        assert len(got) == 300


async def test_lag_counts_batches_though_offsets_are_times(tmp_path: Path, url: str) -> None:
    async with opened(tmp_path, url) as provider:
        stream = provider.stream(STREAM)
        subscription = await provider.subscribe("s", "orders/*", _nothing)
        await stream.publish([b"now", Event(b"later", delay=timedelta(hours=1))])
        await subscription.caught_up()
        (delivery,) = [one for one in provider.manager.served["s"].deliveries.values() if one.progress.watermark]
        end = delivery.progress.watermark
        await subscription.close()
        assert await provider.ends(delivery.queue, [end]) == {end: end}
        await stream.publish([b"now"])
        await stream.publish([b"and now"])
        assert await provider.ends(delivery.queue, [end]) == {end: end + 2}


async def _nothing(_: Event) -> None: ...


# ---- the server goes away --------------------------------------------------------------------------------------------


async def test_agents_go_on_by_themselves_when_the_server_is_back(tmp_path: Path) -> None:
    got: Counter[bytes] = Counter()

    async def handle(event: Event) -> None:
        got[event.payload] += 1

    with RedisServer(appendfsync="always") as server:
        async with opened(tmp_path, f"redis://{server.address}") as provider:
            await provider.subscribe("s", "orders/*", handle)
            stream = provider.stream(STREAM)
            await stream.publish([b"before", Event(b"delayed", delay=timedelta(seconds=0.5))])
            await until(lambda: got[b"before"])
            await asyncio.to_thread(server.kill)
            waiting = asyncio.ensure_future(stream.publish(b"while it is away"))
            await until(lambda: any(one.state == "faulted" for one in provider.manager.statistics()))
            assert not waiting.done()
            await asyncio.to_thread(server.start)
            await waiting
            await until(lambda: got.keys() == {b"before", b"delayed", b"while it is away"})
            await until(lambda: all(one.state == "running" for one in provider.manager.statistics()))
            with Redis(port=server.port) as direct:
                for keys in keys_of(provider):
                    check_agreement(direct, keys)
    assert set(got.values()) == {1}


async def test_a_publish_fails_at_once_where_it_is_to(tmp_path: Path) -> None:
    with RedisServer() as server:
        async with opened(tmp_path, f"redis://{server.address}", when_unavailable="fail") as provider:
            await provider.stream(STREAM).publish(b"x")
            await asyncio.to_thread(server.kill)
            with pytest.raises(StorageError, match=f"Redis at {server.address} does not serve"):
                await provider.stream(STREAM).publish(b"x")


async def test_a_publish_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    with RedisServer() as server:
        async with opened(tmp_path, f"redis://{server.address}", publish_timeout_s=0.3) as provider:
            await provider.stream(STREAM).publish(b"x")
            await asyncio.to_thread(server.kill)
            with pytest.raises(StorageError, match="publish them again"):
                await provider.stream(STREAM).publish(b"x")


async def test_a_provider_of_the_same_name_with_other_control_data_is_refused(tmp_path: Path, url: str) -> None:
    """Else each would finish events that the other has not seen."""
    async with opened(tmp_path / "one", url):
        with pytest.raises(InvalidArgument, match="the queues of another provider 'default', with other control data"):
            await opened(tmp_path / "two", url).__aenter__()
        async with opened(tmp_path / "two", url, prefix="other"):
            pass
    async with opened(tmp_path / "one", url), Provider.open(adapter="redis", queues=2, options={"url": url}):
        pass


async def test_another_number_of_queues_is_refused(tmp_path: Path, url: str) -> None:
    async with opened(tmp_path, url):
        with pytest.raises(InvalidArgument, match=r"'default' has 2 queues in Redis at .*, not 4"):
            await Provider.open(adapter="redis", queues=4, options={"url": url}).__aenter__()


async def test_a_provider_without_a_server_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"Redis at 127\.0\.0\.1:1 does not serve"):
        async with opened(tmp_path, "redis://user:secret@127.0.0.1:1"):
            pass


class LoadsSlowly(RedisServer):
    """From its second start on it needs seconds, and says so to every client that asks."""

    def command(self) -> Sequence[str]:
        return (*super().command(), "--key-load-delay", "100")


async def test_a_server_that_still_loads_is_waited_for(tmp_path: Path) -> None:
    got: list[bytes] = []
    reasons: list[str] = []

    async def handle(event: Event) -> None:
        got.append(event.payload)

    with LoadsSlowly(appendfsync="always") as server:
        with Redis(port=server.port) as direct:
            filling = cast("Any", direct).pipeline(transaction=False)
            for number in range(10_000):
                filling.set("other", number)
            filling.execute()
        async with opened(tmp_path, f"redis://{server.address}") as provider:
            await provider.subscribe("s", "orders/*", handle)
            stream = provider.stream(STREAM)
            await stream.publish(b"before")
            await until(lambda: got)
            await asyncio.to_thread(server.kill)
            starting = asyncio.create_task(asyncio.to_thread(server.start))
            waiting = asyncio.ensure_future(stream.publish(b"while it loads"))
            while not starting.done():
                reasons += [one.reason for one in provider.manager.statistics() if one.reason]
                await asyncio.sleep(0.01)
            assert any("loading the dataset" in reason for reason in reasons)
            await starting
            await waiting
            await until(lambda: got == [b"before", b"while it loads"])


class Snapshots(RedisServer):
    """Keeps its data only when it is told to."""

    def command(self) -> Sequence[str]:
        return (*super().command(), "--appendonly", "no")


async def test_subscriptions_continue_with_a_server_that_lost_the_writes_after_its_snapshot(tmp_path: Path) -> None:
    got: list[Event] = []

    async def handle(event: Event) -> None:
        got.append(event)

    with Snapshots() as server:
        async with opened(tmp_path, f"redis://{server.address}") as provider:
            await provider.subscribe("s", "orders/*", handle)
            stream = provider.stream(STREAM)
            await stream.publish([b"kept", Event(b"kept, later", delay=timedelta(seconds=1))])
            await until(lambda: got)
            with Redis(port=server.port) as direct:
                cast("Any", direct).save()
            await stream.publish([b"delivered and forgotten", Event(b"forgotten", delay=timedelta(seconds=1))])
            await until(lambda: any(event.payload == b"delivered and forgotten" for event in got))
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await stream.publish(b"after")
            await until(lambda: {b"after", b"kept, later"} <= {event.payload for event in got})
            with Redis(port=server.port) as direct:
                for keys in keys_of(provider):
                    check_agreement(direct, keys)
    tokens = {event.payload: event.token for event in got if event.token}
    assert tokens.keys() == {b"kept", b"delivered and forgotten", b"after", b"kept, later"}
    assert tokens[b"after"] > tokens[b"delivered and forgotten"]


@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
async def test_a_server_killed_under_load_keeps_acknowledged_writes(tmp_path: Path, appendfsync: str) -> None:
    """kill -9 at any point leaves no event in two places, or in none. With `everysec`, an event that is acknowledged
    while the server syncs its file may not be in it yet."""
    got: Counter[bytes] = Counter()

    async def handle(event: Event) -> None:
        got[event.payload] += 1

    with RedisServer(appendfsync=appendfsync) as server:
        async with opened(tmp_path, f"redis://{server.address}") as provider:
            await provider.subscribe("s", "orders/*", handle, start=Start.earliest())
            published: set[bytes] = set()
            may_be_lost: set[bytes] = set()

            async def publish(key: int) -> None:
                for number in range(60):
                    payload = b"%d.%d" % (key, number)
                    await provider.publish(StreamId("orders", str(key)), payload)
                    published.add(payload)

            publishing = [asyncio.create_task(publish(key)) for key in range(20)]
            for _ in range(3):
                await asyncio.sleep(0.15)
                await asyncio.to_thread(server.kill)
                if appendfsync == "everysec":
                    may_be_lost = set(published)
                await asyncio.to_thread(server.start)
                with Redis(port=server.port) as direct:
                    for keys in keys_of(provider):
                        check_agreement(direct, keys)
            await asyncio.gather(*publishing)
            await until(lambda: got.keys() >= published - may_be_lost, 60)
    assert len(published) == 1200


async def test_one_process_serves_all_subscriptions_and_another_takes_over_all(tmp_path: Path, url: str) -> None:
    """Each queue has one reader: two processes would take the queues from one another."""
    got: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}

    def handler(name: str) -> Any:
        async def handle(event: Event) -> None:
            got[name].append(event.payload)

        return handle

    async with opened(tmp_path, url) as second:
        async with opened(tmp_path, url) as first:
            await first.subscribe("a", "orders/*", handler("a"))
            for name in "bc":
                await second.subscribe(name, "orders/*", handler(name))
            assert sorted(second.standby.waiting) == ["b", "c"]
            await second.stream(STREAM).publish(b"1")
            await until(lambda: got["a"] == [b"1"])
        await until(lambda: (got["b"], got["c"]) == ([b"1"], [b"1"]))
