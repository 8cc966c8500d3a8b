"""Groups under a whole manager: cache pressure, checkpoints, seek, agents that stop and start, dead letters once more.
All in virtual time."""

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import pytest

from headrace import EventBatch, Fenced, RetryPolicy, Selector, SequenceToken, StorageError, StreamId
from headrace.adapters import AdapterContext, QueueAdapter
from headrace.adapters.memory import MemoryAdapter
from headrace.agents import CacheLimits, Edge, Group, HandlerService, PullingManager
from headrace.agents.delivery import unsent
from headrace.silo.views import provider_statistics
from headrace.store.control_store import ControlStore
from headrace.streams.handlers import Handler
from headrace.streams.subscriptions import Checkpoint, StreamBehind, SubscriptionDefinition
from tests.simulation.deliveries import NOW, Recorder, stream
from tests.simulation.groups import Consumer, payloads
from tests.simulation.queues import SimulatedQueues
from tests.simulation.virtual_time import virtual_time

PROVIDER = "p"


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")


class House:
    """A manager over `adapter`, with groups and handlers."""

    def __init__(self, adapter: QueueAdapter, store: ControlStore, queues: int, limits: CacheLimits) -> None:
        self.adapter = adapter
        self.store = store
        self.edge = Edge()
        self.queues = queues
        self.limits = limits
        self.open()

    def open(self) -> None:
        self.manager = PullingManager(PROVIDER, self.queues, self.adapter, self.store, self.limits, detach_after_s=0.25)
        self.manager.start()

    async def restart(self) -> None:
        await self.manager.aclose(0.0)
        self.open()

    async def group(
        self, name: str, *, retry: RetryPolicy = NOW, circuit_breaker: bool = True, position: int = 0
    ) -> Group:
        definition = SubscriptionDefinition(
            name=name, selector=Selector("s/*"), retry=retry, circuit_breaker=circuit_breaker
        )
        await self._create(definition, position)
        group = Group(definition, self.edge)
        await self.manager.subscriptions.serve(definition, group)
        return group

    async def handler(self, name: str) -> Recorder:
        definition, recorder = SubscriptionDefinition(name=name, selector=Selector("s/*"), retry=NOW), Recorder()
        await self._create(definition)
        await self.manager.subscriptions.serve(definition, HandlerService(Handler.of(recorder, batch=False), None, 100))
        return recorder

    async def _create(self, definition: SubscriptionDefinition, position: int = 0) -> None:
        start = {queue: Checkpoint(position) for queue in range(self.queues)}
        await self.store.create_subscription(PROVIDER, definition, start)

    async def publish(self, key: str, *texts: str, queue: int = 0) -> None:
        await self.adapter.enqueue([(queue, EventBatch.of(stream(key), [text.encode() for text in texts]))])

    async def stored(self, name: str) -> Mapping[int, Checkpoint]:
        return await self.store.checkpoints(PROVIDER, name)


@asynccontextmanager
async def house(
    queues: int = 1,
    *,
    rewindable: bool = True,
    limits: CacheLimits = CacheLimits(),  # noqa: B008 (immutable)
) -> AsyncGenerator[House]:
    store = await ControlStore.open("memory")
    adapter = SimulatedQueues(queues) if rewindable else MemoryAdapter(AdapterContext(provider=PROVIDER, queues=queues))
    built = House(adapter, store, queues, limits)
    try:
        yield built
    finally:
        await built.manager.aclose(0.0)
        await adapter.aclose()
        await store.aclose()


def connected(group: Group, name: str = "c", **options: int) -> Consumer:
    consumer = Consumer(group, name)
    consumer.connect(**options)
    return consumer


def _ignore() -> None: ...


async def rest(seconds: float = 0.3) -> None:
    await asyncio.sleep(seconds)


# ---- the cache -----------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_consumer_that_acknowledges_nothing_holds_up_no_other_subscription() -> None:
    """However much it holds: several times the cache here, and each batch a good part of it."""
    limits = CacheLimits(max_events=1000, max_bytes=200 << 10)
    async with house(limits=limits) as built:
        hoarder = connected(await built.group("hoarder"))
        quick = await built.handler("quick")
        for number in range(200):
            await built.publish(str(number), "x" * 5000)
        await rest(30)
        assert len(quick.seen) == 200
        await rest(30)
        assert len(hoarder.inbox) == 200
        for each in hoarder.take():
            assert hoarder.ack(each)
        await rest(2)
        assert await built.stored("hoarder") == {0: Checkpoint(200)}


@virtual_time
async def test_consumers_that_take_nothing_do_not_delay_one_that_catches_up_after_them() -> None:
    async with house(limits=CacheLimits(max_events=1000, max_bytes=200 << 10)) as built:
        for number in range(60):
            await built.publish(str(number), "x" * 20_000)
        await built.group("end", position=60)
        for number in range(50):
            deaf = connected(await built.group(f"deaf-{number}"))
            deaf.member.on_outbox = _ignore
        healthy = connected(await built.group("healthy"))
        await rest(0.5)
        assert healthy.inbox


@virtual_time
async def test_a_catch_up_goes_on_where_it_was_when_its_consumer_takes_events_again() -> None:
    async with house(limits=CacheLimits(max_events=1000, max_bytes=200 << 10)) as built:
        for number in range(100):
            await built.publish(str(number), "x" * 20_000)
        await built.group("end", position=100)
        consumer = connected(await built.group("behind"), events=3)
        await rest(30)
        assert len(consumer.inbox) == 3
        assert not built.manager.agents[0].statistics().deliveries[1][1]
        consumer.grant(events=97)
        async with asyncio.timeout(60):
            while len(consumer.everything) < 100:
                for each in consumer.take():
                    assert consumer.ack(each)
                await rest(0.01)


@pytest.mark.parametrize("rewindable", [True, False])
@virtual_time
async def test_a_group_that_is_slower_than_the_cache_gets_everything_in_order(rewindable: bool) -> None:
    async with house(limits=CacheLimits(max_events=40), rewindable=rewindable) as built:
        consumer = connected(await built.group("g"), events=30)

        async def work() -> None:
            while len(consumer.everything) < 200:
                await rest(0.5)
                consumer.ack_all()

        working = asyncio.create_task(work())
        for number in range(200):
            await built.publish(str(number % 3), str(number))
        await asyncio.wait_for(working, 10_000)
        for key in range(3):
            mine = [each for each in consumer.everything if each.batch.stream == stream(str(key))]
            assert payloads(mine) == [str(number) for number in range(200) if number % 3 == key]


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@virtual_time
async def test_acknowledged_events_are_saved_and_confirmed() -> None:
    async with house() as built:
        group = await built.group("g")
        consumer = connected(group)
        await built.publish("a", "0", "1", "2", "3")
        await rest()
        (batch,) = consumer.take()
        assert consumer.ack(batch, 0, 1)
        assert consumer.ack(batch, 2, 1)
        consumer.report(5)
        await rest(1.5)
        assert consumer.confirmed[0].number == 5
        assert await built.stored("g") == {
            0: Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0, 1), "", ((0, 2, 3),))})
        }


@virtual_time
async def test_a_report_that_changes_nothing_is_confirmed_after_a_quiet_hour() -> None:
    async with house() as built:
        consumer = connected(await built.group("g"))
        await rest(3600)
        consumer.report(5)
        await rest()
        assert consumer.confirmed[0].number == 5


@virtual_time
async def test_after_a_restart_exactly_the_rest_comes_also_to_a_handler() -> None:
    async with house() as built:
        consumer = connected(await built.group("g"))
        await built.publish("a", *"01234")
        await built.publish("a", *"56")
        await built.publish("b", *"xyz")
        await rest()
        for batch in consumer.take():
            assert consumer.ack(batch, 1, 1)
        await built.restart()
        again = connected(await built.group("g"))
        await rest()
        first = again.take()
        assert sorted(payloads(first)) == sorted("0234xz")
        for batch in first:
            assert again.ack(batch, 0, 1)
        await built.restart()
        recorder = await built.handler("g")
        await rest()
        assert sorted(recorder.seen) == sorted("2345z")
        await rest(2)
        assert await built.stored("g") == {0: Checkpoint(3)}


@virtual_time
async def test_a_group_that_was_moved_elsewhere_ends_for_its_consumers() -> None:
    async with house() as built:
        group = await built.group("g")
        consumer = connected(group)
        await built.publish("a", "0")
        await rest()
        await built.store.seek(PROVIDER, "g", {0: Checkpoint(0)}, "elsewhere")
        assert consumer.ack(consumer.take()[0])
        await rest(2)
        assert isinstance(consumer.gone, Fenced)
        assert not group.members


@pytest.mark.parametrize("start", [0, 150])
@virtual_time
async def test_nobody_is_caught_up_before_everything_that_is_there_was_read(start: int) -> None:
    async with house(limits=CacheLimits(max_events=40)) as built:
        for number in range(200):
            await built.publish(str(number), "x")
        group = await built.group("g")
        if start:
            await built.handler("further-on")
            await built.manager.subscriptions.move("further-on", {0: Checkpoint(start)}, "", 0.0)
        consumer = connected(group)
        while not group.caught_up:
            await asyncio.sleep(0.001)
            consumer.ack_all()
        assert len(consumer.everything) == 200
        await built.publish("a", "y")
        await rest()
        assert not group.caught_up


# ---- seek, stop and start ------------------------------------------------------------------------------------------


@virtual_time
async def test_a_seek_back_while_a_parcel_is_in_flight() -> None:
    async with house() as built:
        consumer = connected(await built.group("g"))
        await built.publish("a", "0")
        await rest()
        consumer.ack_all()
        await built.publish("a", "1", "2")
        await rest()
        (old,) = consumer.take()
        moving = asyncio.create_task(built.manager.subscriptions.move("g", {0: Checkpoint(0)}, "test", 5.0))
        await rest()
        assert consumer.ack(old, 0, 1)
        await moving
        await rest()
        assert consumer.waiting == ["0", "1", "2"]
        consumer.ack_all()
        await rest(2)
        assert await built.stored("g") == {0: Checkpoint(2)}


@virtual_time
async def test_a_seek_that_cannot_be_stored_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house() as built:
        consumer = connected(await built.group("g"))
        await built.publish("a", *"0123")
        await rest()
        assert consumer.ack(consumer.take()[0], 1, 1)

        async def fails(*_: object) -> int:
            raise StorageError("no")

        monkeypatch.setattr(built.store, "seek", fails)
        with pytest.raises(StorageError):
            await built.manager.subscriptions.move("g", {0: Checkpoint(0)}, "test", 0.0)
        await rest()
        assert consumer.took() == ["0", "2", "3"]


@virtual_time
async def test_agents_stop_and_start_while_parcels_are_in_flight() -> None:
    async with house(queues=2) as built:
        consumer = connected(await built.group("g"))
        await built.publish("a", *"0123", queue=0)
        await built.publish("b", *"xyz", queue=1)
        await rest()
        one, other = sorted(consumer.take(), key=lambda each: each.queue)
        stopping = asyncio.create_task(built.manager.queue_host.stop_agents([0], 5.0))
        await rest()
        assert consumer.ack(one, 1, 2)
        await stopping
        assert not consumer.ack(one, 0, 1), "it was taken back"
        assert consumer.ack(other), "nothing happened to the other queue"
        await built.publish("b", "w", queue=1)
        await built.publish("a", "4", queue=0)
        await rest(2)
        assert consumer.took() == ["w"]
        assert (await built.stored("g"))[0] == Checkpoint(
            1, {stream("a"): StreamBehind(SequenceToken(0), "", ((0, 1, 3),))}
        )
        await built.manager.queue_host.start_agents([0])
        await rest()
        assert consumer.waiting == ["0", "3"]
        consumer.ack_all()
        await rest()
        assert consumer.took() == ["4"]


@virtual_time
async def test_events_published_while_another_subscription_drains_are_not_done() -> None:
    """The queue is read on until all of its deliveries have ended."""
    async with house() as built:
        idle, busy = connected(await built.group("idle")), connected(await built.group("busy"))
        await built.publish("a", "0")
        await rest()
        idle.ack_all()
        stopping = asyncio.create_task(built.manager.queue_host.stop_agents([0], 5.0))
        await rest(2)
        await built.publish("a", "1")
        await rest(2)
        assert busy.took() == ["0"]
        assert await built.stored("idle") == {0: Checkpoint(1)}
        await stopping
        assert await built.stored("idle") == {0: Checkpoint(1)}
        await built.manager.queue_host.start_agents([0])
        await rest()
        assert idle.took() == ["1"]


@virtual_time
async def test_agents_that_are_started_while_they_stop_go_on() -> None:
    async with house() as built:
        consumer = connected(await built.group("g"))
        await built.publish("a", "0")
        await rest()
        stopping = asyncio.create_task(built.manager.queue_host.stop_agents([0], 5.0))
        await rest()
        starting = asyncio.create_task(built.manager.queue_host.start_agents([0]))
        await rest()
        consumer.ack_all()
        await asyncio.gather(stopping, starting)
        await built.publish("a", "1")
        await rest()
        assert consumer.took() == ["1"]


@pytest.mark.parametrize("way", ["withdraw", "move", "close"])
@virtual_time
async def test_who_ends_while_agents_stop_loses_no_acknowledgement(way: str) -> None:
    async with house() as built:
        consumer = connected(await built.group("g"))
        await built.publish("a", *"0123")
        await rest()
        (batch,) = consumer.take()
        stopping = asyncio.create_task(built.manager.queue_host.stop_agents([0], 5.0))
        await rest()
        if way == "withdraw":
            ending = asyncio.create_task(built.manager.subscriptions.withdraw("g", 5.0))
        elif way == "move":
            ending = asyncio.create_task(built.manager.subscriptions.move("g", {0: Checkpoint(0)}, "test", 5.0))
        else:
            ending = asyncio.create_task(built.manager.aclose(5.0))
        await rest()
        assert consumer.ack(batch, 0, 2)
        await asyncio.gather(stopping, ending)
        done = Checkpoint(0) if way == "move" else Checkpoint(1, {stream("a"): StreamBehind(SequenceToken(0, 2))})
        assert await built.stored("g") == {0: done}


@virtual_time
async def test_agents_whose_stop_was_cancelled_start_again() -> None:
    async with house() as built:
        consumer = connected(await built.group("g"))
        await built.publish("a", *"012")
        await rest()
        stopping = asyncio.create_task(built.manager.queue_host.stop_agents([0], 5.0))
        await rest()
        assert consumer.ack(consumer.take()[0], 0, 1)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        await rest(2)
        await built.manager.queue_host.start_agents([0])
        await rest()
        assert consumer.took() in (["0", "1", "2"], ["1", "2"])


@virtual_time
async def test_agents_that_were_stopped_while_nothing_could_be_stored_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house() as built:
        consumer = connected(await built.group("g"))
        other = connected(await built.group("h"))
        await built.publish("a", "0")
        await rest()
        with monkeypatch.context() as patch:

            async def fails(*_: object, **_options: object) -> list[str]:
                raise StorageError("no")

            patch.setattr(built.store, "save_checkpoints", fails)
            with pytest.raises(StorageError):
                await built.manager.queue_host.stop_agents([0], 0.0)
        consumer.take()
        other.take()
        await built.manager.queue_host.start_agents([0])
        await rest()
        assert [consumer.took(), other.took()] == [["0"], ["0"]]


# ---- dead letters --------------------------------------------------------------------------------------------------


async def _with_a_dead_letter(built: House, name: str = "g") -> tuple[Group, Consumer]:
    group = await built.group(name, retry=RetryPolicy(max_attempts=1), circuit_breaker=False)
    consumer = connected(group)
    await rest()
    for each in consumer.take():
        assert consumer.reject(each)
    await rest()
    return group, consumer


@virtual_time
async def test_a_dead_letter_is_delivered_once_more_and_gone() -> None:
    async with house() as built:
        await built.publish("a", "0")
        _, consumer = await _with_a_dead_letter(built)
        await built.store.request_redrive(PROVIDER, "g")
        await rest(2)
        (letter,) = consumer.take()
        assert letter.redriven
        assert consumer.ack(letter)
        await rest(2)
        assert not await built.store.dead_letters(PROVIDER)


@virtual_time
async def test_an_acknowledged_dead_letter_is_confirmed_only_when_the_store_can_delete_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house() as built:
        await built.publish("a", "0")
        _, consumer = await _with_a_dead_letter(built)
        await built.store.request_redrive(PROVIDER, "g")
        await rest(2)
        (letter,) = consumer.take()
        with monkeypatch.context() as patch:

            async def fails(*_: object, **_options: object) -> None:
                raise StorageError("no")

            patch.setattr(built.store, "finish_redrive", fails)
            assert consumer.ack(letter)
            consumer.report(9)
            await rest(5)
            assert not consumer.inbox
            assert consumer.confirmed[0].number < 9
        await rest(20)
        assert consumer.confirmed[0].number == 9
        assert not await built.store.dead_letters(PROVIDER)
        assert not consumer.inbox


@virtual_time
async def test_a_question_about_a_dead_letter_is_answered_when_it_is_acknowledged_again() -> None:
    async with house() as built:
        await built.publish("a", "0")
        group, consumer = await _with_a_dead_letter(built)
        await built.store.request_redrive(PROVIDER, "g")
        await rest(2)
        assert consumer.took() == ["0"]
        consumer.connect(0, 0)
        consumer.unconfirmed(1, ("a", 0, 0, 1))
        await rest(5)
        assert consumer.confirmed[0].unconfirmed == 0
        consumer.grant(10, 1000)
        await rest(2)
        assert consumer.ack(consumer.take()[0])
        await rest(2)
        assert consumer.confirmed[0].unconfirmed == 1
        assert group.caught_up


@virtual_time
async def test_a_dead_letter_of_a_stream_that_is_not_selected_is_not_delivered() -> None:
    """It is of a deleted subscription that had the name."""
    async with house() as built:
        await built.publish("a", "0")
        _, consumer = await _with_a_dead_letter(built)
        (letter,) = await built.store.dead_letters(PROVIDER)
        foreign = letter._replace(stream=StreamId("another", "a"), redrive=True)
        await built.store.add_dead_letters([foreign, letter._replace(payload=b"own", redrive=True)], None)
        await rest(2)
        assert payloads(consumer.take()) == ["own"]


@virtual_time
async def test_dead_letters_that_nobody_takes_do_not_hold_up_those_of_others() -> None:
    async with house() as built:
        for number in range(120):
            await built.publish(str(number), "x")
        _, absent = await _with_a_dead_letter(built, "absent")
        _, present = await _with_a_dead_letter(built, "present")
        assert len(await built.store.dead_letters(PROVIDER, limit=1000)) == 240
        absent.disconnect()
        for name in ("absent", "present"):
            await built.store.request_redrive(PROVIDER, name)
            await rest(5)
        assert present.inbox
        assert all(each.redriven for each in present.inbox)


@virtual_time
async def test_a_dead_letter_that_was_being_delivered_comes_when_its_queue_is_served_again() -> None:
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    async with house() as built:
        await built.publish("a", "0")
        _, consumer = await _with_a_dead_letter(built)
        await built.store.request_redrive(PROVIDER, "g")
        await rest(2)
        assert len(consumer.take()) == 1
        await built.manager.queue_host.stop_agents([0], 0.0)
        await rest(2)
        assert not consumer.inbox
        gc.collect()
        assert not unheard
        await built.manager.queue_host.start_agents([0])
        await rest(2)
        assert consumer.ack(consumer.take()[0])
        await rest(2)
        assert not await built.store.dead_letters(PROVIDER)


@virtual_time
async def test_counters_do_not_fall_when_agents_stop_and_start() -> None:
    """A monitoring server takes a counter that falls for one that began anew, and counts events that never were."""
    async with house() as built:
        consumer = connected(await built.group("s"))
        for number in range(30):
            await built.publish(str(number), str(number))
        await rest()
        consumer.ack_all()
        await rest()
        before = provider_statistics(built.manager, 0, 0)
        assert before.subscriptions[0].delivered_events == 30
        everything = range(built.manager.state.queues)
        await built.manager.queue_host.stop_agents(everything, 0.0)
        stopped = provider_statistics(built.manager, 0, 0)
        await built.manager.queue_host.start_agents(everything)
        await rest()
        after = provider_statistics(built.manager, 0, 0)
        for later in (stopped, after):
            assert later.subscriptions[0].delivered_events == 30
            assert later.subscriptions[0].delivered_batches == before.subscriptions[0].delivered_batches
            assert [queue.received_events for queue in later.queues] == [
                queue.received_events for queue in before.queues
            ]


@virtual_time
async def test_counters_of_a_broadcast_consumer_are_dropped_when_it_leaves() -> None:
    async with house() as built:
        for name in ("s", "b", "b~one"):
            connected(await built.group(name))
            await built.manager.subscriptions.withdraw(name, 0.0)
        assert built.manager.state.counts("s")
        assert not built.manager.state.counts("b~one")


# ---- more than one consumer may hold -------------------------------------------------------------------------------


@virtual_time
async def test_a_subscription_whose_consumer_holds_the_most_it_may_says_so_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unsent, "MAX_BATCHES", 50)
    async with house(limits=CacheLimits(max_events=40)) as built:
        deaf_group = await built.group("deaf")
        deaf, healthy = connected(deaf_group), connected(await built.group("healthy"))
        for number in range(200):
            await built.publish(str(number), str(number))
        async with asyncio.timeout(30):
            while len(healthy.everything) < 200:
                healthy.ack_all()
                await rest(0.01)
        healthy.ack_all()
        deaf_group.tick()  # what the healthy one held may go to the deaf one
        await rest()
        assert 16 <= (held := len(deaf.everything)) <= 20
        states = {each.name: each for each in provider_statistics(built.manager, 0, 0).subscriptions}
        assert states["deaf"].state == "blocked", held
        assert f"consumer c gets no events: it holds {held} batches" in states["deaf"].reason
        assert states["healthy"].state == "caught up"
    # Closed while a catch-up waits for the consumer: that must not keep the loop busy.


@virtual_time
async def test_a_consumer_that_held_the_most_it_may_goes_on_when_it_acknowledges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unsent, "MAX_BATCHES", 50)
    async with house(limits=CacheLimits(max_events=40)) as built:
        consumer = connected(await built.group("s"))
        for number in range(200):
            await built.publish(str(number), str(number))
        await rest()
        assert len(consumer.everything) == 20
        async with asyncio.timeout(30):
            while len(consumer.everything) < 200:
                consumer.ack_all()
                await rest(0.01)
        consumer.ack_all()
        (state,) = provider_statistics(built.manager, 0, 0).subscriptions
        assert state.state != "blocked"


@virtual_time
async def test_a_catch_up_asks_for_the_credit_it_waits_for() -> None:
    """Another silo divides the credit, and gives some only if events wait for it."""
    async with house(limits=CacheLimits(max_events=40)) as built:
        for number in range(200):
            await built.publish(str(number), str(number))
        handler = await built.handler("live")
        await rest()
        assert len(handler.seen) == 200
        group = await built.group("s")
        consumer = Consumer(group, "c", divides_credit=True)
        consumer.connect(0, 0)
        await rest()
        assert consumer.member.waiting
        consumer.grant(1, 1000)
        await rest()
        assert len(consumer.everything) == 1
