"""A manager in a cluster: which queues it reads, and from which positions, with leases of some queues. In virtual
time."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace import DeadLetter, EventBatch, Selector, SequenceToken, StorageError, Unavailable
from headrace.agents import CacheLimits, Edge, Group, HandlerService, PullingManager
from headrace.agents.delivery.confirmations import Confirmed
from headrace.store.control_store import ControlStore
from headrace.streams.frames import QueueState
from headrace.streams.handlers import Handler
from headrace.streams.progress import RefusedProgress
from headrace.streams.subscriptions import Checkpoint, SubscriptionDefinition
from tests.simulation.deliveries import NOW, Recorder, stream
from tests.simulation.groups import Consumer
from tests.simulation.queues import SimulatedQueues
from tests.simulation.virtual_time import virtual_time

PROVIDER = "p"
ALWAYS_S = 1e6


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")


class Term:
    until = float("inf")


class Calls:
    """A store that notes which of its methods are called."""

    def __init__(self, store: ControlStore) -> None:
        self.names: list[str] = []
        self.failing = ""
        """This method fails."""
        self.holding: asyncio.Event | None = None
        """Checkpoints are on their way until then."""
        self.held = asyncio.Event()
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.names.append(name)
        if name == self.failing:
            raise StorageError(f"{name} fails")
        return getattr(self._store, name)

    async def save_checkpoints(
        self, provider: str, progress: Any, leases: Mapping[int, int] | None = None, *, revision: int = 0
    ) -> RefusedProgress:
        leases = leases and dict(leases)
        if self.holding is not None:
            self.held.set()
            await self.holding.wait()
        return await self.__getattr__("save_checkpoints")(provider, progress, leases, revision=revision)


class Tenant:
    """A silo of a cluster with two queues, which has the leases that it is given."""

    def __init__(self, store: ControlStore, shelf: SimulatedQueues) -> None:
        self.store = store
        self.shelf = shelf
        self.calls = Calls(store)
        through: Any = self.calls
        self.manager = PullingManager(PROVIDER, 2, shelf, through, CacheLimits(), detach_after_s=0.25, leased=True)

    async def gain(self, queue: int) -> None:
        cluster = self.store.cluster()
        me = await cluster.join(f"silo {queue}", "", [PROVIDER])
        (lease,) = await cluster.acquire(me, [(PROVIDER, queue)], ALWAYS_S)
        await self.manager.queue_host.gain(queue, lease.epoch, Term())

    async def handler(self, name: str) -> Recorder:
        definition, recorder = SubscriptionDefinition(name=name, selector=Selector("s/*"), retry=NOW), Recorder()
        await self.store.create_subscription(PROVIDER, definition, {0: Checkpoint(0), 1: Checkpoint(0)})
        await self.manager.subscriptions.serve(definition, HandlerService(Handler.of(recorder, batch=False), None, 100))
        return recorder

    async def group(self, name: str, *, stored: bool = True) -> Group:
        definition = SubscriptionDefinition(name=name, selector=Selector("s/*"), retry=NOW)
        start = {0: Checkpoint(0), 1: Checkpoint(0)}
        group = Group(definition, Edge(), stored=stored)
        if stored:
            await self.store.create_subscription(PROVIDER, definition, start)
        await self.manager.subscriptions.serve(definition, group, start)
        return group

    async def publish(self, *texts: str, queue: int = 0) -> None:
        for text in texts:
            await self.shelf.enqueue([(queue, EventBatch.of(stream("a"), [text.encode()]))])

    async def elsewhere(self, name: str, positions: Mapping[int, Checkpoint]) -> None:
        """Another silo saves progress."""
        epoch = (await self.store.attach(PROVIDER, name, exclusive=False)).epoch
        assert not await self.store.save_checkpoints(PROVIDER, [(name, epoch, positions)])


@asynccontextmanager
async def tenant() -> AsyncGenerator[Tenant]:
    store, shelf = await ControlStore.open("memory"), SimulatedQueues(2)
    built = Tenant(store, shelf)
    try:
        yield built
    finally:
        await built.manager.aclose(0.0)
        await shelf.aclose()
        await store.aclose()


def letter(number: int, queue: int) -> DeadLetter:
    token = SequenceToken(number)
    return DeadLetter(0, PROVIDER, "g", queue, stream("a"), token, b"%d" % number, {}, None, 0, "boom", 1, 0)


@virtual_time
async def test_a_queue_that_comes_is_read_from_where_each_subscription_stands_now() -> None:
    async with tenant() as silo:
        recorders = [await silo.handler(str(done)) for done in range(4)]
        for done in range(4):
            await silo.elsewhere(str(done), {0: Checkpoint(done)})
        for number in range(4):
            await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"%d" % number]))])
        silo.calls.names.clear()
        await silo.gain(0)
        assert silo.calls.names == ["checkpoints_of_queue"], "one read, however many subscriptions"
        await asyncio.sleep(1)
        for done, recorder in enumerate(recorders):
            assert recorder.seen == [str(number) for number in range(done, 4)]


@virtual_time
async def test_a_subscription_that_was_deleted_elsewhere_does_not_keep_a_queue_from_coming() -> None:
    async with tenant() as silo:
        gone, there = await silo.handler("gone"), await silo.handler("there")
        await silo.store.delete_subscription(PROVIDER, "gone")
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
        await silo.gain(0)
        await asyncio.sleep(1)
        assert (gone.seen, there.seen) == ([], ["x"])


@virtual_time
async def test_a_gap_of_a_subscription_that_was_deleted_is_not_stored() -> None:
    async with tenant() as silo:
        await silo.handler("gone")
        await silo.handler("there")
        await silo.gain(0)
        await silo.store.delete_subscription(PROVIDER, "gone")
        silo.shelf.drop(0, 2)
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"%d" % number])) for number in range(3)])
        await asyncio.sleep(1)
        await silo.manager.checkpointer.save()
        assert [(gap.subscription, gap.low, gap.high) for gap in await silo.store.gaps(PROVIDER)] == [
            ("there", SequenceToken(0), SequenceToken(2))
        ]


@virtual_time
async def test_dead_letters_of_queues_that_others_have_do_not_hold_up_those_of_one_s_own() -> None:
    async with tenant() as silo:
        recorder = await silo.handler("g")
        await silo.store.add_dead_letters([letter(number, 0) for number in range(120)], None)
        await silo.store.add_dead_letters([letter(120, 1)], None)
        await silo.store.request_redrive(PROVIDER, "g")
        silo.manager.start()
        await asyncio.sleep(5)
        assert recorder.seen == []
        await silo.gain(1)
        await asyncio.sleep(5)
        assert recorder.seen == ["120"]
        await silo.gain(0)
        await asyncio.sleep(60)
        assert len(recorder.seen) == 121
        assert not await silo.store.dead_letters(PROVIDER)


@virtual_time
async def test_progress_that_could_not_be_saved_is_saved_later_though_nothing_else_happens() -> None:
    async with tenant() as silo:
        recorder = await silo.handler("g")
        await silo.gain(0)
        silo.calls.failing = "save_checkpoints"
        silo.manager.start()
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
        await asyncio.sleep(2)
        assert recorder.seen == ["x"]
        assert (await silo.store.checkpoints(PROVIDER, "g"))[0] == Checkpoint(0)
        silo.calls.failing = ""
        await asyncio.sleep(2)
        assert (await silo.store.checkpoints(PROVIDER, "g"))[0] == Checkpoint(1)


@virtual_time
async def test_progress_of_a_queue_is_saved_when_it_is_given_back_a_second_time() -> None:
    async with tenant() as silo:
        recorder = await silo.handler("g")
        await silo.gain(0)
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
        await asyncio.sleep(1)
        silo.calls.failing = "save_checkpoints"
        with pytest.raises(StorageError):
            await silo.manager.queue_host.lose(0, 1.0)
        silo.calls.failing = ""
        await silo.manager.queue_host.lose(0, 1.0)
        assert recorder.seen == ["x"]
        assert (await silo.store.checkpoints(PROVIDER, "g"))[0] == Checkpoint(1)


@virtual_time
async def test_a_queue_that_is_not_given_back_after_all_goes_on_behind_what_was_done() -> None:
    async with tenant() as silo:
        recorder = await silo.handler("g")
        await silo.gain(0)
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
        await asyncio.sleep(1)
        silo.calls.failing = "save_checkpoints"
        with pytest.raises(StorageError):
            await silo.manager.queue_host.lose(0, 1.0)
        silo.calls.failing = ""
        assert silo.manager.leases is not None
        await silo.manager.queue_host.gain(0, silo.manager.leases[0], Term())
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"y"]))])
        await asyncio.sleep(1)
        assert recorder.seen == ["x", "y"]


@virtual_time
async def test_progress_from_before_the_end_of_a_lease_is_not_saved_later() -> None:
    async with tenant() as silo:
        recorder = await silo.handler("g")
        await silo.gain(0)
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
        await asyncio.sleep(1)
        silo.calls.failing = "save_checkpoints"
        with pytest.raises(StorageError):
            await silo.manager.queue_host.lose(0, 1.0)
        silo.calls.failing = ""
        assert silo.manager.leases is not None
        epoch = silo.manager.leases[0]
        silo.manager.queue_host.cut(0)
        await silo.manager.queue_host.gain(0, epoch + 1, Term())
        await asyncio.sleep(1)
        assert recorder.seen == ["x", "x"]


@virtual_time
async def test_progress_that_is_refused_under_an_older_lease_does_not_end_the_one_that_came_meanwhile() -> None:
    async with tenant() as silo:
        recorder, cluster = await silo.handler("g"), silo.store.cluster()
        me = await cluster.join("me", "", [PROVIDER])
        (lease,) = await cluster.acquire(me, [(PROVIDER, 0)], ALWAYS_S)
        await silo.manager.queue_host.gain(0, lease.epoch, Term())
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"x"]))])
        await asyncio.sleep(1)
        silo.calls.holding = asyncio.Event()
        saving = asyncio.create_task(silo.manager.checkpointer.save())
        await silo.calls.held.wait()
        silo.manager.queue_host.cut(0)
        (lease,) = await cluster.acquire(me, [(PROVIDER, 0)], ALWAYS_S)
        await silo.manager.queue_host.gain(0, lease.epoch, Term())
        silo.calls.holding.set()
        await saving
        await silo.shelf.enqueue([(0, EventBatch.of(stream("a"), [b"y"]))])
        await asyncio.sleep(1)
        assert silo.manager.leases == {0: lease.epoch}
        assert recorder.seen == ["x", "x", "y"]


# ---- the consumers of a group --------------------------------------------------------------------------------------


def connected(group: Group) -> Consumer:
    consumer = Consumer(group, "c")
    consumer.connect()
    return consumer


def states(consumer: Consumer) -> list[tuple[QueueState, int, int]]:
    return [(status.state, status.epoch, status.generation) for status in consumer.statuses]


@virtual_time
async def test_a_queue_that_is_given_back_is_drained_stored_and_confirmed_before_it_ends() -> None:
    async with tenant() as silo:
        consumer = connected(await silo.group("g"))
        await silo.gain(0)
        await silo.publish("0", "1")
        await asyncio.sleep(1)
        losing = asyncio.create_task(silo.manager.queue_host.lose(0, 10.0))
        await asyncio.sleep(1)
        assert states(consumer) == [(QueueState.SERVED, 1, 0), (QueueState.DRAINING, 1, 0)]
        assert silo.manager.leases == {0: 1}
        first, second = consumer.take()
        assert consumer.ack(first)
        consumer.report(1)
        assert consumer.release(second)
        await losing
        await asyncio.sleep(0)
        assert states(consumer)[2:] == [(QueueState.ENDED, 1, 0)]
        assert consumer.confirmed == {0: Confirmed(1, 1, 1)}
        assert silo.manager.leases == {}
        assert not consumer.gone
        stored = (await silo.store.checkpoints(PROVIDER, "g"))[0]
        assert stored.watermark == 1


@virtual_time
async def test_a_queue_is_not_drained_for_longer_than_its_time() -> None:
    async with tenant() as silo:
        consumer = connected(await silo.group("g"))
        await silo.gain(0)
        await silo.publish("0")
        await asyncio.sleep(1)
        await silo.manager.queue_host.lose(0, 10.0)
        await asyncio.sleep(0)
        assert states(consumer)[-1] == (QueueState.ENDED, 1, 0)
        assert not consumer.ack(consumer.take()[0])
        assert not consumer.gone


@virtual_time
async def test_nothing_is_confirmed_until_the_store_has_it_when_a_queue_is_given_back() -> None:
    async with tenant() as silo:
        consumer = connected(await silo.group("g"))
        await silo.gain(0)
        await silo.publish("0")
        await asyncio.sleep(1)
        assert consumer.ack(consumer.take()[0])
        consumer.report(1)
        silo.calls.failing = "save_checkpoints"
        with pytest.raises(StorageError):
            await silo.manager.queue_host.lose(0, 1.0)
        await asyncio.sleep(0)
        assert not consumer.confirmed
        assert states(consumer)[-1] == (QueueState.DRAINING, 1, 0)
        silo.calls.failing = ""
        await silo.manager.queue_host.lose(0, 1.0)
        await asyncio.sleep(0)
        assert consumer.confirmed == {0: Confirmed(1, 1, 1)}
        assert states(consumer)[-1] == (QueueState.ENDED, 1, 0)


@virtual_time
async def test_a_queue_that_could_not_be_given_back_is_served_again_after_it_ended() -> None:
    async with tenant() as silo:
        consumer = connected(await silo.group("g"))
        await silo.gain(0)
        silo.calls.failing = "save_checkpoints"
        await silo.publish("0")
        await asyncio.sleep(1)
        assert consumer.ack(consumer.take()[0])
        consumer.report(1)
        with pytest.raises(StorageError):
            await silo.manager.queue_host.lose(0, 1.0)
        silo.calls.failing = ""
        await silo.manager.queue_host.gain(0, 1, Term())
        await asyncio.sleep(0)
        assert consumer.confirmed == {0: Confirmed(1, 1, 1)}
        assert states(consumer)[-2:] == [(QueueState.ENDED, 1, 0), (QueueState.SERVED, 1, 0)]


@virtual_time
async def test_a_queue_whose_lease_is_lost_ends_at_once_and_confirms_nothing() -> None:
    async with tenant() as silo:
        group = await silo.group("g")
        consumer = connected(group)
        await silo.gain(0)
        await silo.publish("0")
        await asyncio.sleep(1)
        (batch,) = consumer.take()
        silo.manager.queue_host.cut(0)
        assert not group.is_current(0, 1, 0)
        await asyncio.sleep(1)
        assert states(consumer) == [(QueueState.SERVED, 1, 0), (QueueState.ENDED, 1, 0)]
        assert not consumer.ack(batch)
        await silo.manager.checkpointer.save()
        assert not consumer.confirmed
        assert not consumer.gone
        await silo.manager.queue_host.gain(0, 3, Term())
        await asyncio.sleep(1)
        assert states(consumer)[2:] == [(QueueState.SERVED, 3, 0)]
        assert len(consumer.inbox) == 1


@virtual_time
async def test_progress_that_the_store_refuses_is_not_confirmed() -> None:
    async with tenant() as silo:
        consumer = connected(await silo.group("g"))
        await silo.gain(0)
        await silo.gain(1)
        await silo.publish("0")
        await silo.publish("0", queue=1)
        await asyncio.sleep(1)
        for each in consumer.take():
            assert consumer.ack(each)
            consumer.report(7, each.queue)
        cluster = silo.store.cluster()
        other, leases = await cluster.join("other", "", [PROVIDER]), (await cluster.view()).leases
        await cluster.acquire(other, [(PROVIDER, 0)], ALWAYS_S, over=leases)
        await silo.manager.checkpointer.save()
        await asyncio.sleep(0)
        assert consumer.confirmed == {1: Confirmed(1, 7, 7)}


@virtual_time
async def test_a_seek_of_another_silo_raises_the_generation() -> None:
    async with tenant() as silo:
        silo.manager.start()
        consumer = connected(await silo.group("g"))
        await silo.gain(0)
        await silo.publish("0")
        await asyncio.sleep(1)
        assert consumer.ack(consumer.take()[0])
        await silo.store.seek(PROVIDER, "g", {0: Checkpoint(0), 1: Checkpoint(0)}, "elsewhere")
        await asyncio.sleep(5)
        raised = await silo.store.generation(PROVIDER, "g")
        assert raised > 0
        assert states(consumer)[-1] == (QueueState.SERVED, 1, raised)
        assert len(consumer.inbox) == 1
        assert not consumer.gone


@virtual_time
async def test_consumers_that_keep_positions_come_back_with_them_when_a_queue_is_gained() -> None:
    async with tenant() as silo:
        group = await silo.group("g", stored=False)
        consumer = connected(group)
        await silo.gain(0)
        assert isinstance(consumer.gone, Unavailable)
        assert "g" not in silo.manager.served
        again = connected(await silo.group("g", stored=False))
        await silo.publish("0")
        await asyncio.sleep(1)
        assert again.ack(again.take()[0])
        again.report(1)
        await silo.manager.checkpointer.save()
        await asyncio.sleep(0)
        assert again.confirmed == {0: Confirmed(1, 1, 1)}
        assert not again.gone


@virtual_time
@pytest.mark.parametrize("change", ["close", "move"])
async def test_a_queue_is_given_back_after_a_subscription_that_is_closed_or_moved(change: str) -> None:
    async with tenant() as silo:
        await silo.gain(0)
        recorder = await silo.handler("g")
        gate = recorder.hold("1")
        await silo.publish("1")
        await asyncio.sleep(1)
        subscriptions = silo.manager.subscriptions
        changing = asyncio.create_task(
            subscriptions.withdraw("g", 10.0)
            if change == "close"
            else subscriptions.move("g", {0: Checkpoint(0)}, "asked for", 10.0)
        )
        await asyncio.sleep(1)
        losing = asyncio.create_task(silo.manager.queue_host.lose(0, 10.0))
        await asyncio.sleep(1)
        assert not losing.done(), "another silo would handle the event meanwhile"
        gate.set()
        await asyncio.gather(changing, losing)
        stored = (await silo.store.checkpoints(PROVIDER, "g"))[0]
        assert stored == Checkpoint(1 if change == "close" else 0)
        assert not silo.manager.agents[0].deliveries


@virtual_time
async def test_after_a_failed_move_a_queue_that_came_meanwhile_is_read_from_where_it_stands() -> None:
    async with tenant() as silo:
        await silo.gain(1)
        recorder = await silo.handler("g")
        gate = recorder.hold("slow")
        await silo.publish("slow", queue=1)
        await silo.publish("done", "next")
        await asyncio.sleep(1)
        silo.calls.failing = "seek"
        moving = asyncio.create_task(silo.manager.subscriptions.move("g", {0: Checkpoint(0)}, "asked for", 10.0))
        await asyncio.sleep(1)
        await silo.elsewhere("g", {0: Checkpoint(1)})
        await silo.gain(0)
        gate.set()
        with pytest.raises(StorageError):
            await moving
        await asyncio.sleep(5)
        assert recorder.seen == ["slow", "next"]


@virtual_time
async def test_a_seek_that_ends_while_a_queue_is_given_back_leaves_no_delivery_there() -> None:
    async with tenant() as silo:
        await silo.gain(0)
        recorder, slow = await silo.handler("g"), await silo.handler("slow")
        gate = recorder.hold("1")
        slow.hold("1")
        await silo.publish("1")
        await asyncio.sleep(1)
        moving = asyncio.create_task(silo.manager.subscriptions.move("g", {0: Checkpoint(0)}, "asked for", 10.0))
        await asyncio.sleep(1)
        losing = asyncio.create_task(silo.manager.queue_host.lose(0, 2.0))
        await asyncio.sleep(3)  # it waits no more for the seek, and stops the queue's agent, which waits for "slow"
        gate.set()
        await moving
        assert not losing.done()
        await losing
        await silo.elsewhere("g", {0: Checkpoint(1)})
        await silo.publish("2")
        await silo.manager.queue_host.gain(0, 99, Term())
        await asyncio.sleep(5)
        assert recorder.seen == ["1", "2"]
