"""Consumers through lost connections, killed silos and killed consumers: nothing is lost, nothing that was acknowledged
comes again, and the user's code does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace import (
    Client,
    Closed,
    Consumer,
    Event,
    NotFound,
    ReceivedBatch,
    RetryPolicy,
    Selector,
    SessionState,
    StreamId,
    SubscriptionDefinition,
    Unavailable,
)
from headrace.silo.provider import Provider
from tests.client.consumers import PATIENCE_S, Seen, numbers, publish, take, until
from tests.client.cutting import CuttingProxy
from tests.client.silos import SiloProcess, Silos
from tests.serving import native_and_grpc, serving

__all__ = ("serving",)
pytest_generate_tests = native_and_grpc

ORDERS = "orders/*"
KEYS = "abcdefgh"


@pytest_asyncio.fixture
async def proxy(silo: SiloProcess) -> AsyncIterator[CuttingProxy]:
    async with CuttingProxy.opened(silo.address) as proxy:
        yield proxy


async def consume(consumer: Consumer, seen: Seen, rng: random.Random) -> None:
    """Take, and acknowledge late and out of order. Ends with the consumer, all acknowledged."""

    async def acknowledge(batch: ReceivedBatch) -> None:
        await asyncio.sleep(rng.random() * 0.02)
        await batch.ack()

    async with asyncio.TaskGroup() as thinking:
        async for batch in consumer:
            seen.note(batch)
            if rng.random() < 0.5:
                await batch.ack()
            else:
                thinking.create_task(acknowledge(batch))


async def reached(seen: Seen, count: int) -> None:
    await until(lambda: seen.count >= count)


async def at_least(events: list[int], count: int) -> None:
    await until(lambda: len(events) >= count)


def check_once(seen: Seen, count: int) -> None:
    assert {stream.key: events for stream, events in seen.streams.items()} == {key: list(range(count)) for key in KEYS}


async def test_lost_connections_are_not_noticed(silo: SiloProcess, proxy: CuttingProxy):
    rng, seen, count = random.Random(), Seen(), 400
    async with Client(silo.address) as publisher, Client(proxy.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest", max_events=100) as consumer:
            consuming = asyncio.create_task(consume(consumer, seen, rng))
            for first in range(0, count, 20):
                await publish(publisher, KEYS, 20, first=first, each=3)
                await reached(seen, min(seen.count + 20, 8 * (first + 20)))
                proxy.cut()
            await until(lambda: seen.count >= 8 * count)
            await until(lambda: consumer.statistics().held_events == 0)
            await consumer.saved()
            assert consumer.reconnections > 5
        await consuming
        await publisher.caught_up("s")
    check_once(seen, count)


class Fickle:
    """A user that acknowledges some events, rejects others, and checks the delivered ones."""

    def __init__(self, consumer: Consumer, rng: random.Random) -> None:
        self.consumer = consumer
        self.rng = rng
        self.seen: set[tuple[str, int]] = set()
        self.done: set[tuple[str, int]] = set()
        self.held: Counter[tuple[str, int]] = Counter()
        self.rejected = 0

    async def consume(self) -> None:
        async with asyncio.TaskGroup() as thinking:
            async for batch in self.consumer:
                events = [(batch.stream.key, number) for number in numbers([batch])]
                self.held.update(events)
                for event in events:
                    assert event not in self.done, f"{event} was acknowledged"
                    key, number = event
                    before = [(key, n) for n in range(number) if (key, n) not in self.done and not self.held[key, n]]
                    assert not before, f"{event} overtakes {before}"
                self.seen.update(events)
                thinking.create_task(self._think(batch, events))

    async def _think(self, batch: ReceivedBatch, events: list[tuple[str, int]]) -> None:
        rng = self.rng
        try:
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.02)
            for place in rng.sample(range(len(events)), len(events)):
                if rng.random() < 0.03:
                    self.rejected += 1
                    await batch.nack("not now", event=batch.events()[place])
                    break
                before = self.consumer.statistics().acknowledged_events
                noted = batch.ack(batch.events()[place])
                if self.consumer.statistics().acknowledged_events > before:  # else it was given back before
                    self.done.add(events[place])
                await noted
            else:
                return
            await batch.nack("nor this")
        finally:
            self.held.subtract(events)


@pytest.mark.mostly_native
async def test_exactly_the_unacknowledged_events_come_again_in_order(silo: SiloProcess, proxy: CuttingProxy):
    rng, count, each = random.Random(), 400, 10
    retry = RetryPolicy(max_attempts=1_000_000, initial_delay_s=0.0)
    async with Client(silo.address) as publisher, Client(proxy.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest", retry=retry, max_events=300) as consumer:
            user = Fickle(consumer, rng)
            consuming = asyncio.create_task(user.consume())
            publishing = asyncio.create_task(publish(publisher, KEYS, count, each=each))
            while len(user.done) < 8 * count and not consuming.done():
                await asyncio.sleep(rng.random() * 0.3)
                proxy.cut()
            await publishing
            assert user.seen == {(key, number) for key in KEYS for number in range(count)}
            await consumer.saved()
        await consuming
        await publisher.caught_up("s")
        assert await publisher.dead_letters("s") == []
    assert user.rejected > 10


async def test_events_held_while_the_connection_is_lost_can_be_acknowledged(silo: SiloProcess, proxy: CuttingProxy):
    async with Client(silo.address) as publisher, Client(proxy.address) as client:
        await publish(publisher, ["a", "b"], 4, each=2)
        async with client.subscribe("s", ORDERS, start="earliest") as consumer:
            one, two, three, four = await take(consumer, 8)
            await one.ack(one.events()[0])
            proxy.cut()
            await two.ack()
            await until(lambda: consumer.state is SessionState.RECONNECTING)
            await one.ack()
            await until(lambda: consumer.state is not SessionState.RECONNECTING)
            await three.ack()
            await consumer.saved()
            await four.nack("late")
            again = await take(consumer, 2)
            assert (numbers(again), again[0].stream) == (numbers([four]), four.stream)
            await again[0].ack()
        await publisher.caught_up("s")


async def test_a_redriven_event_that_was_acknowledged_before_its_silo_was_killed_does_not_come_again(silo: SiloProcess):
    async with Client(silo.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest", retry=RetryPolicy(max_attempts=1)) as consumer:
            dead = await redriven(client, consumer)
            await asyncio.to_thread(silo.kill)
            await dead.ack()
            await asyncio.to_thread(silo.start)
            await consumer.saved()
            assert await client.dead_letters("s") == []
            await publish(client, ["b"], 1, first=7)
            assert numbers(await take(consumer, 1)) == [7]


async def test_a_redriven_event_stays_with_a_consumer_whose_connection_is_lost(silo: SiloProcess, proxy: CuttingProxy):
    async with Client(silo.address) as publisher, Client(proxy.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest", retry=RetryPolicy(max_attempts=1)) as consumer:
            dead = await redriven(publisher, consumer)
            async with publisher.subscribe("s") as other:
                proxy.cut()
                await until(lambda: consumer.state is SessionState.RECONNECTING)
                await dead.ack()
                await consumer.saved()
                assert await publisher.dead_letters("s") == []
                assert other.statistics().received_events == 0
            assert consumer.statistics().recognised_events == 1


async def redriven(client: Client, consumer: Consumer) -> ReceivedBatch:
    """Return an event that became a dead letter, and is delivered once more."""
    await publish(client, ["a"], 1)
    (batch,) = await take(consumer, 1)
    await batch.nack("no")
    await consumer.caught_up()
    await publish(client, ["a"], 1, first=1)
    (later,) = await take(consumer, 1)
    await later.ack()
    await consumer.saved()  # so the stored progress passes the dead letter: else a kill brings the event again, too
    assert await client.redrive("s") == 1
    (dead,) = await take(consumer, 1)
    assert dead.redriven
    return dead


async def test_a_silent_connection_is_given_up(silo: SiloProcess, proxy: CuttingProxy):
    seen = Seen()
    async with Client(silo.address) as publisher, Client(proxy.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest", session_timeout_s=1.0) as consumer:
            consuming = asyncio.create_task(consume(consumer, seen, random.Random(1)))
            await publish(publisher, KEYS, 5)
            await until(lambda: seen.count == 40)
            await consumer.saved()
            proxy.hush()
            await publish(publisher, KEYS, 5, first=5)
            await until(lambda: seen.count == 80)
            await until(lambda: consumer.statistics().held_events == 0)
            assert consumer.reconnections >= 1
        await consuming
    check_once(seen, 10)


@pytest.mark.mostly_native
async def test_a_killed_and_restarted_silo_is_not_noticed(silo: SiloProcess):
    rng, seen, count = random.Random(), Seen(), 300
    async with Client(silo.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest", max_events=100) as consumer:
            consuming = asyncio.create_task(consume(consumer, seen, rng))
            for first in range(0, count, 100):
                publishing = asyncio.create_task(publish(client, KEYS, 100, first=first))
                await reached(seen, seen.count + rng.randrange(1, 400))
                await asyncio.to_thread(silo.kill)
                await asyncio.to_thread(silo.start)
                await publishing
            await until(lambda: seen.count >= 8 * count)
            await until(lambda: consumer.statistics().held_events == 0)
            assert consumer.reconnections == 3
        await consuming
        await client.caught_up("s")
    check_once(seen, count)


@pytest.mark.mostly_native
async def test_a_handler_does_not_notice_that_its_silo_is_killed(silo: SiloProcess):
    seen: dict[str, list[int]] = {key: [] for key in KEYS}
    failed = Counter[tuple[str, int]]()

    async def handle(event: Event) -> None:
        assert event.stream is not None
        key, number = event.stream.key, int(event.payload)
        if number % 17 == 5 and not failed[key, number]:
            failed[key, number] += 1
            raise RuntimeError(number)
        await asyncio.sleep(0.001)
        seen[key].append(number)

    retry = RetryPolicy(initial_delay_s=0.0)
    async with Client(silo.address) as client:
        subscription = await client.subscribe("s", ORDERS, handle, start="earliest", retry=retry)
        for first in (0, 50):
            publishing = asyncio.create_task(publish(client, KEYS, 50, first=first, each=5))
            await at_least(seen["a"], first + 10)
            await asyncio.to_thread(silo.kill)
            await asyncio.to_thread(silo.start)
            await publishing
        await subscription.caught_up()
        await subscription.close()
    assert seen == {key: list(range(100)) for key in KEYS}


@pytest.mark.mostly_native
async def test_a_silo_that_stops_in_order_lets_its_consumers_finish(silo: SiloProcess):
    seen = Seen()
    async with Client(silo.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest") as consumer:
            await publish(client, KEYS, 10, each=10)
            held = await take(consumer, 80)
            for batch in held:
                seen.note(batch)
            stopping = asyncio.create_task(asyncio.to_thread(silo.stop))
            for batch in held:
                await batch.ack()
            await stopping
            await until(lambda: consumer.state is SessionState.RECONNECTING)
            await asyncio.to_thread(silo.start)
            await publish(client, KEYS, 1, first=10)
            for batch in await take(consumer, 8):
                seen.note(batch)
                await batch.ack()
    check_once(seen, 11)


@pytest.mark.mostly_native
async def test_a_consumer_goes_on_if_a_cluster_takes_the_place_of_a_silo_alone_and_the_reverse(silo: SiloProcess):
    seen, cluster = Seen(), silo.folder / "cluster.toml"
    cluster.write_text('[cluster]\nname = "a"\n')
    async with Client(silo.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest") as consumer:
            consuming = asyncio.create_task(consume(consumer, seen, random.Random(1)))
            for first, flags in enumerate([[], [], [str(cluster)], []]):
                await asyncio.to_thread(silo.stop)
                await asyncio.to_thread(silo.start, *flags)
                await publish(client, KEYS, 1, first=first)
                await reached(seen, 8 * (first + 1))
            await until(lambda: consumer.statistics().held_events == 0)
        await consuming
    check_once(seen, 4)


async def test_a_consumer_that_reconnects_gets_nothing_of_a_subscription_that_was_created_anew(silo: SiloProcess):
    handled: list[bytes] = []

    async def handle(event: Event) -> None:
        handled.append(event.payload)

    async with Client(silo.address) as client, client.subscribe("a", ORDERS) as consumer:
        definition = consumer.definition
        subscription = await client.subscribe("b", ORDERS, handle)
        await asyncio.to_thread(silo.stop)
        async with Provider.open(silo.data) as provider:
            for name in "ab":
                await provider.delete_subscription(name)
                await provider.create_subscription(SubscriptionDefinition(name=name, selector=Selector("others/*")))
            await provider.publish(StreamId("others", "k"), b"not for them")
        await asyncio.to_thread(silo.start)
        with pytest.raises(NotFound, match="was deleted, and created anew with another definition"):
            await asyncio.wait_for(anext(consumer), PATIENCE_S)
        await until(lambda: subscription.consumer.error is not None or handled != [])
        assert isinstance(subscription.consumer.error, NotFound)
        assert (consumer.definition, handled) == (definition, [])


@pytest.mark.mostly_native
async def test_a_killed_consumer_loses_nothing_and_repeats_only_unsaved_events(silo: SiloProcess, tmp_path: Path):
    rng, count = random.Random(), 400
    async with Client(silo.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest"):
            pass
        await publish(client, KEYS, count)
        lives = [
            await killed_after(silo.address, tmp_path / f"{life}.txt", rng.randrange(100, 700)) for life in range(4)
        ]
        rest: list[str] = []
        async with client.subscribe("s") as consumer:
            taking = asyncio.create_task(collect(consumer, rest))
            async with asyncio.timeout(PATIENCE_S):
                await client.caught_up("s")
        await taking
    lives.append(rest)
    got = {line for lines in lives for line in lines} - {"saved"}
    assert got == {f"got {key} {number}" for key in KEYS for number in range(count)}
    for life, lines in enumerate(lives):
        saved = max((at for at, line in enumerate(lines) if line == "saved"), default=0)
        later = {line for lines in lives[life + 1 :] for line in lines} | set(lines[saved:])
        assert not (set(lines[:saved]) & later) - {"saved"}


async def collect(consumer: Consumer, lines: list[str]) -> None:
    async for batch in consumer:
        lines += [f"got {batch.stream.key} {number}" for number in numbers([batch])]
        await batch.ack()


async def killed_after(address: str, output: Path, lines: int) -> list[str]:
    """Return the lines of a consumer that was killed after `lines` lines, or a little later."""
    script = Path(__file__).parent / "killed_consumer.py"
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(sys.executable, str(script), address, stdout=file)
    try:
        await until(lambda: process.returncode is not None or output.read_bytes().count(b"\n") >= lines)
        assert process.returncode is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return _lines(output)


def _lines(output: Path) -> list[str]:
    return output.read_text().rpartition("\n")[0].splitlines()


async def test_an_outage_that_lasts_too_long_is_raised(silos: Silos):
    silo = silos()
    async with Client(silo.address, timeout_s=0.5) as client:
        async with client.subscribe("s", ORDERS, timeout_s=0.5) as consumer:
            silo.kill()
            with pytest.raises(Unavailable):
                await anext(consumer)
        assert consumer.state is SessionState.CLOSED


async def test_closing_without_a_silo_ends_in_time(silos: Silos):
    silo = silos()
    async with Client(silo.address) as client:
        consumer = await client.subscribe("s", ORDERS, start="earliest").__aenter__()
        await publish(client, ["a"], 1)
        await (await anext(consumer)).ack()
        await asyncio.to_thread(silo.kill)
        await until(lambda: consumer.state is SessionState.RECONNECTING)
        await consumer.aclose(timeout_s=0.2)
        assert consumer.state is SessionState.CLOSED
        with pytest.raises(Closed, match="may not be saved"):
            await consumer.saved()


@pytest.mark.mostly_native
async def test_acknowledgements_before_an_outage_are_saved_by_closing_after_it(silo: SiloProcess):
    async with Client(silo.address) as client:
        async with client.subscribe("s", ORDERS, start="earliest") as consumer:
            await publish(client, KEYS, 20, each=20)
            for batch in await take(consumer, 160):
                await batch.ack()
            await asyncio.to_thread(silo.kill)
            await until(lambda: consumer.state is SessionState.RECONNECTING)
            closing = asyncio.create_task(consumer.aclose(timeout_s=PATIENCE_S))
            await asyncio.to_thread(silo.start)
            await closing
        await client.caught_up("s")
