"""Consumers of a simulated cluster: processes with the real client. They acknowledge late, in parts, out of order,
reject, fall silent, and lose their connections.

There are four ways to consume: to iterate over batches, to run a handler, to pull, and, in mode broadcast, to iterate
and keep the positions.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace import Event, Fenced, HeadraceError, SubscriptionDefinition, Unavailable
from headrace.client.consumer import Consumer
from headrace.client.consuming_client import ConsumingClient
from headrace.client.management import ManagementClient
from headrace.client.plan import plan_of
from headrace.client.pulled import Pulled
from headrace.client.queue_holdings import QueueHoldings
from headrace.client.received import TAKEN, ReceivedBatch
from headrace.client.transport import StreamCall, Transport
from headrace.server.access import EVERYTHING
from headrace.store.rows import checkpoint_of_token
from headrace.streams.subscriptions import Mode, of_consumer
from tests.cluster.calls import ClientCall, Connection, ask
from tests.cluster.machines import Machine
from tests.simulation.simulation import FailedOnPurposeError

if TYPE_CHECKING:
    from tests.cluster.simulated import SimulatedCluster

PROVIDER = "simulated"
TIMEOUT_S = 5.0
"""The session timeout."""
AGAIN_S = 0.5
"""Pause after the silos refused the consumer, or a call failed."""
MOVES = 0.1
"""Share of a consumer's calls that reach another silo, as through a load balancer."""
PULL_S = 10.0
"""How long a consumer tries to pull or to acknowledge, without the wait for events."""
Position = tuple[int, int, int, int]
"""Generation, queue, offset and index of an event."""


class SimulatedTransport(Transport):
    """Calls of a consumer to the silo at `address`; to any silo without an address, as through a load balancer."""

    def __init__(self, world: "SimulatedCluster", machine: Machine, *, direct: bool, address: str = "") -> None:
        self.is_remote = direct  # type: ignore[misc]
        self._world = world
        self._machine = machine
        self._address = address
        self._unary_at = ""

    @property
    def address(self) -> str:
        return self._address

    def at(self, address: str) -> "SimulatedTransport":
        return SimulatedTransport(self._world, self._machine, direct=True, address=address)

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        """Call the same silo as before while it answers, and else any silo."""
        if self._unary_at not in self._world.silos or self._world.rng.random() < MOVES:
            self._unary_at = self._some_silo()
        try:
            return await ask(self._call(self._unary_at, method, timeout_s or 0.0), request, timeout_s)
        except Unavailable:
            self._unary_at = ""
            raise

    def stream(self, method: str) -> StreamCall:
        return self._call(self._some_silo(), method, 0.0)

    def _some_silo(self) -> str:
        silos = self._world.silos
        return self._address or (self._world.rng.choice(list(silos)) if silos else "")

    def _call(self, address: str, method: str, wait_s: float) -> ClientCall:
        silo = self._world.silos.get(address)
        if silo is not None:
            return silo.connect(self._machine, EVERYTHING, method, cut_off=lambda: False, wait_s=wait_s)
        refused = Connection(self._world, self._machine, Machine("nobody"), lambda: False, lambda: 0.0, self._address)
        refused.break_off()
        return ClientCall(refused)


class ConsumerProcess(ABC):
    """A process that consumes one subscription."""

    remembers = True
    """Whether the client recognises events that come again after it has acknowledged them."""
    keeps_positions = False

    def __init__(self, world: "SimulatedCluster", name: str, definition: SubscriptionDefinition) -> None:
        rng = world.rng
        self.world = world
        self.name = name
        self.definition = definition
        self.machine = Machine(name, rate=1 + rng.uniform(-0.01, 0.01), starts_at=rng.uniform(0, 10_000))
        self.vanished = False
        self.stored_as = definition.name
        """Name of the subscription that stores its position."""
        if definition.mode is Mode.BROADCAST:
            self.stored_as = of_consumer(definition, name).name
            if self.stored_as not in world.model.first:
                world.model.subscribed(self.stored_as, from_the_beginning=True)
        direct = rng.random() < 0.6
        self._transport = SimulatedTransport(world, self.machine, direct=direct)
        world.note(f"{name} is a {type(self).__name__} {'with direct sessions' if direct else 'at a gateway'}")
        self._max_events = rng.choice((3, 20, 1000))
        self._pace_s = rng.choice((0.0, 0.05, 0.5))
        self.task = self.machine.run(self._run(), f"consumer {name}")
        self.task.add_done_callback(self._ended)

    def lose_connections(self) -> None:
        self.world.losses.append(self.world.now)
        for silo in self.world.silos.values():
            for connection in silo.connections:
                if connection.client is self.machine:
                    connection.break_off()

    def stall(self, seconds: float) -> None:
        """Its event loop is blocked."""
        self.machine.pause()
        self.world.later(seconds, self.machine.resume)

    def vanish(self) -> None:
        """Fall silent, with all connections left open, like a machine that lost its power."""
        self.vanished = True
        self.world.losses.append(self.world.now)
        self.machine.kill()

    def heir(self, name: str) -> "ConsumerProcess":
        """Return the process that takes the place of one that vanished."""
        return type(self)(self.world, name, self.definition)

    @abstractmethod
    async def _run(self) -> None: ...

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self.machine.gone and not task.cancelled() and (error := task.exception()):
            self.world.problem(f"{self.name} failed: {error!r}")

    # ---- the model -------------------------------------------------------------------------------------------------

    def _gets(self, queue: int, offset: int, indexes: Iterable[int], generation: int) -> None:
        if not self.machine.gone:
            self.world.model.hands_out(self.stored_as, queue, offset, indexes, self, generation)

    def _finish(self, queue: int, offset: int, indexes: Iterable[int], generation: int) -> None:
        """The consumer has processed these events, and acknowledges them now."""
        if not self.machine.gone:
            self.world.model.finishes(self.stored_as, queue, offset, indexes, self, generation)

    def _gives_back(self, queue: int, offset: int, index: int) -> None:
        """The consumer rejects this event now."""
        if not self.machine.gone:
            self.world.model.gives_back(self.stored_as, queue, offset, index, self)


class IteratingConsumer(ConsumerProcess):
    """It takes batches one after the other, and asks from time to time what is saved."""

    def __init__(self, world: "SimulatedCluster", name: str, definition: SubscriptionDefinition) -> None:
        self._acknowledged: list[Position] = []
        self._asking: asyncio.Task[None] | None = None
        super().__init__(world, name, definition)

    def _options(self) -> dict[str, object]:
        return {"consumer": self.name, "session_timeout_s": TIMEOUT_S, "max_events": self._max_events}

    async def _run(self) -> None:
        while True:
            plan = plan_of("consumer", self.definition.name, None, self._options())
            consumer = Consumer(ManagementClient(self._transport, PROVIDER, 30.0), plan)
            try:
                async for batch in consumer:
                    await self._take(consumer, batch)
            except HeadraceError as error:
                self.world.problem(f"{self.name} was refused: {error}")
            finally:
                await consumer.aclose()
            await asyncio.sleep(AGAIN_S)

    async def _take(self, consumer: Consumer, batch: ReceivedBatch) -> None:
        """Process a batch, at once or while the next ones are taken."""
        generation = _generation(batch)
        self._gets(batch.queue, batch.offset, batch.indexes, generation)
        if self.world.rng.random() < 0.2:
            processing = asyncio.create_task(self._process(consumer, batch, generation), name=f"{self.name} processes")
            processing.add_done_callback(_look_at)
        else:
            await self._process(consumer, batch, generation)

    async def _process(self, consumer: Consumer, batch: ReceivedBatch, generation: int) -> None:
        rng = self.world.rng
        await asyncio.sleep(self._pace_s * rng.random())
        if batch.state != TAKEN:
            return  # given back, with a rejected event before it
        events = list(batch.events())
        if rng.random() < 0.03:
            at = rng.randrange(batch.count)
            for place in range(at):
                self._acknowledge(batch, (batch.indexes[place],), generation)
                await batch.ack(events[place])
            self._gives_back(batch.queue, batch.offset, batch.indexes[at])
            await batch.nack("on purpose", event=events[at], delay=timedelta(seconds=rng.choice((0.0, 0.3))))
        elif rng.random() < 0.3:
            for place in rng.sample(range(batch.count), batch.count):
                await asyncio.sleep(self._pace_s * rng.random() / batch.count)
                if batch.state != TAKEN:
                    return
                self._acknowledge(batch, (batch.indexes[place],), generation)
                await batch.ack(events[place])
        else:
            self._acknowledge(batch, batch.indexes, generation)
            await batch.ack()
        if rng.random() < 0.2 and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(consumer), name=f"{self.name} asks what is saved")
            self._asking.add_done_callback(_look_at)

    def _acknowledge(self, batch: ReceivedBatch, indexes: Iterable[int], generation: int) -> None:
        if not self.machine.gone:
            indexes = list(indexes)
            self._finish(batch.queue, batch.offset, indexes, generation)
            self._acknowledged += [(generation, batch.queue, batch.offset, index) for index in indexes]

    async def _ask(self, consumer: Consumer) -> None:
        """Whatever is confirmed as saved is stored."""
        acknowledged, self._acknowledged = self._acknowledged, []
        try:
            await consumer.saved()
        except HeadraceError:
            return
        if not self.machine.gone:
            self._store(consumer)
            self.world.model.check_saved(self.stored_as, acknowledged, self.name)

    def _store(self, consumer: Consumer) -> None:
        """All earlier acknowledgements are saved."""


class KeepingConsumer(IteratingConsumer):
    """Mode broadcast: it stores its positions itself. When it vanishes, another process goes on from them."""

    keeps_positions = True

    def __init__(
        self,
        world: "SimulatedCluster",
        name: str,
        definition: SubscriptionDefinition,
        kept: dict[int, bytes] | None = None,
    ) -> None:
        self.kept: dict[int, bytes] = dict(kept or {})
        """The positions on its disk."""
        super().__init__(world, name, definition)

    def heir(self, name: str) -> ConsumerProcess:
        return KeepingConsumer(self.world, self.name, self.definition, self.kept)

    def _options(self) -> dict[str, object]:
        return {**super()._options(), "keeps_positions": True, "positions": dict(self.kept)}

    def _store(self, consumer: Consumer) -> None:
        self.kept = dict(consumer.positions)
        for queue, token in self.kept.items():
            self.world.model.stores(self.stored_as, queue, checkpoint_of_token(token))


class HandlingConsumer(ConsumerProcess):
    """It has a handler, of events or of batches."""

    def __init__(self, world: "SimulatedCluster", name: str, definition: SubscriptionDefinition) -> None:
        # After a seek, events do not tell from which generation they are.
        self._of_batches = world.kind == "seeks" or world.rng.random() < 0.3
        self._concurrency = world.rng.choice((1, 3))
        super().__init__(world, name, definition)

    async def _run(self) -> None:
        subscribe: Any = ConsumingClient(self._transport, PROVIDER, 30.0).subscribe
        handler = self._handle_batch if self._of_batches else self._handle_event
        while True:
            try:
                subscription = await subscribe(
                    self.definition.name, None, handler, batch=self._of_batches, concurrency=self._concurrency,
                    consumer=self.name, session_timeout_s=TIMEOUT_S, max_events=self._max_events,
                )  # fmt: skip
                await subscription.ended()
            except HeadraceError as error:
                self.world.problem(f"{self.name} was refused: {error}")
            await asyncio.sleep(AGAIN_S)

    async def _handle_event(self, event: Event) -> None:
        assert event.stream is not None
        assert event.token is not None
        queue, (offset, index) = self.world.queue_of(event.stream), event.token
        self._gets(queue, offset, (index,), 0)
        await self._work()
        if self.world.rng.random() < 0.02:
            self._gives_back(queue, offset, index)
            raise FailedOnPurposeError
        self._finish(queue, offset, (index,), 0)

    async def _handle_batch(self, batch: ReceivedBatch) -> None:
        generation, indexes = _generation(batch), list(batch.indexes)
        self._gets(batch.queue, batch.offset, indexes, generation)
        await self._work()
        if self.world.rng.random() < 0.02:
            self._gives_back(batch.queue, batch.offset, indexes[0])
            raise FailedOnPurposeError
        self._finish(batch.queue, batch.offset, indexes, generation)

    async def _work(self) -> None:
        await asyncio.sleep(self._pace_s * self.world.rng.choice((0, 0.1, 1)) * self.world.rng.random())


class PullingConsumer(ConsumerProcess):
    """It pulls, processes all events, and acknowledges them with a call of its own or with the next pull."""

    remembers = False

    def __init__(self, world: "SimulatedCluster", name: str, definition: SubscriptionDefinition) -> None:
        self.reports_within_s = 0.0
        """The longest duration of a call that reported results."""
        super().__init__(world, name, definition)

    async def _run(self) -> None:
        client, rng = ConsumingClient(self._transport, PROVIDER, PULL_S), self.world.rng
        done: Pulled | None = None
        while True:
            began = self.world.now
            try:
                pulled = await client.pull(
                    self.definition.name, self.name, max_events=min(self._max_events, 20),
                    wait_s=rng.choice((0.0, 0.5, 3.0)), session_timeout_s=TIMEOUT_S, after=done,
                )  # fmt: skip
                if done is not None:
                    self._reported(began)
                done = await self._process(client, pulled)
            except HeadraceError as error:
                done = None
                if not (error.retryable or isinstance(error, Fenced)):  # the gateway before may still begin a session
                    self.world.problem(f"{self.name} was refused: {error}")
                await asyncio.sleep(AGAIN_S)

    async def _process(self, client: ConsumingClient, pulled: Pulled) -> Pulled | None:
        """Process the batches. Return them if they are not acknowledged yet."""
        for batch in pulled:
            self._gets(batch.queue, batch.offset, batch.indexes, _generation(batch))
        pace_s = 0.0 if self.world.settling else 2 * self._pace_s
        await asyncio.sleep(pace_s * self.world.rng.random())
        for batch in pulled:
            if batch.state == TAKEN:
                self._settle(batch)
        if self.world.rng.random() < 0.5:
            return pulled
        began = self.world.now
        await client.acknowledge(pulled)
        self._reported(began)
        return None

    def _reported(self, began: float) -> None:
        self.reports_within_s = max(self.reports_within_s, self.world.now - began)

    def _settle(self, batch: ReceivedBatch) -> None:
        if self.world.rng.random() < 0.03:
            self._gives_back(batch.queue, batch.offset, batch.indexes[0])
            batch.nack("on purpose")
        else:
            self._finish(batch.queue, batch.offset, batch.indexes, _generation(batch))
            batch.ack()


def consumer_of(world: "SimulatedCluster", name: str, definition: SubscriptionDefinition) -> ConsumerProcess:
    """Return a process that consumes in a random way."""
    ways = [IteratingConsumer, IteratingConsumer, HandlingConsumer, PullingConsumer]
    if world.kind == "late":  # a pulling consumer knows no former owners
        ways = [IteratingConsumer, HandlingConsumer]
    if definition.mode is Mode.BROADCAST:
        ways.append(KeepingConsumer)
    return world.rng.choice(ways)(world, name, definition)


def _generation(batch: ReceivedBatch) -> int:
    """The generation of the subscription under which the batch was delivered."""
    assert isinstance(batch.holder, QueueHoldings)
    return batch.holder.generation or 0


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()
