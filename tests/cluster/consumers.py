"""Consumers of a simulated cluster: processes with the real client. They acknowledge late, in parts, out of order,
reject, fall silent, and lose their connections."""

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from headrace import HeadraceError, SubscriptionDefinition
from headrace.client.consumer import Consumer
from headrace.client.management import ManagementClient
from headrace.client.plan import plan_of
from headrace.client.queue_holdings import QueueHoldings
from headrace.client.received import TAKEN, ReceivedBatch
from headrace.client.transport import StreamCall, Transport
from headrace.server.access import EVERYTHING
from headrace.streams.subscriptions import Mode, of_consumer
from tests.cluster.calls import ClientCall, Connection
from tests.cluster.machines import Machine

if TYPE_CHECKING:
    from tests.cluster.simulated import SimulatedCluster

PROVIDER = "simulated"
TIMEOUT_S = 5.0
"""The session timeout."""
AGAIN_S = 0.5
"""Pause after the silos refused the consumer."""
Position = tuple[int, int, int, int]
"""Generation, queue, offset and index of an event."""


class SimulatedTransport(Transport):
    """Calls of a consumer to the silo at `address`; to any silo without an address, as through a load balancer."""

    def __init__(self, world: "SimulatedCluster", machine: Machine, *, direct: bool, address: str = "") -> None:
        self.is_remote = direct  # type: ignore[misc]
        self._world = world
        self._machine = machine
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    def at(self, address: str) -> "SimulatedTransport":
        return SimulatedTransport(self._world, self._machine, direct=True, address=address)

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        raise NotImplementedError(method)

    def stream(self, method: str) -> StreamCall:
        world = self._world
        silos = world.silos
        address = self._address or (world.rng.choice(list(silos)) if silos else "")
        silo = silos.get(address)
        if silo is not None:
            return silo.connect(self._machine, EVERYTHING, cut_off=lambda: False)
        refused = Connection(world, self._machine, Machine("nobody"), lambda: False, 0.0, self._address)
        refused.break_off()
        return ClientCall(refused)


class ConsumerProcess:
    """A process that consumes one subscription."""

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
            world.model.subscribed(self.stored_as, from_the_beginning=True)
        self._transport = SimulatedTransport(world, self.machine, direct=rng.random() < 0.6)
        self._max_events = rng.choice((3, 20, 1000))
        self._pace_s = rng.choice((0.0, 0.05, 0.5))
        self._acknowledged: list[Position] = []
        self._asking: asyncio.Task[None] | None = None
        self.task = self.machine.run(self._run(), f"consumer {name}")

    def lose_connections(self) -> None:
        self.world.losses.append(self.world.now)
        for silo in self.world.silos.values():
            for connection in silo.connections:
                if connection.client is self.machine:
                    connection.break_off()

    def vanish(self) -> None:
        """Fall silent, with all connections left open, like a machine that lost its power."""
        self.vanished = True
        self.world.losses.append(self.world.now)
        self.machine.kill()

    async def _run(self) -> None:
        while True:
            plan = plan_of(
                "consumer",
                self.definition.name,
                None,
                {"consumer": self.name, "session_timeout_s": TIMEOUT_S, "max_events": self._max_events},
            )
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
        if not self.machine.gone:
            self.world.model.hands_out(self.stored_as, batch.queue, batch.offset, batch.indexes, self, generation)
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
                self._finish(batch, (batch.indexes[place],), generation)
                await batch.ack(events[place])
            self.world.model.gives_back(self.stored_as, batch.queue, batch.offset, batch.indexes[at], self)
            await batch.nack("on purpose", event=events[at], delay=timedelta(seconds=rng.choice((0.0, 0.3))))
        elif rng.random() < 0.3:
            for place in rng.sample(range(batch.count), batch.count):
                await asyncio.sleep(self._pace_s * rng.random() / batch.count)
                if batch.state != TAKEN:
                    return
                self._finish(batch, (batch.indexes[place],), generation)
                await batch.ack(events[place])
        else:
            self._finish(batch, batch.indexes, generation)
            await batch.ack()
        if rng.random() < 0.2 and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(consumer), name=f"{self.name} asks what is saved")
            self._asking.add_done_callback(_look_at)

    def _finish(self, batch: ReceivedBatch, indexes: Iterable[int], generation: int) -> None:
        """The consumer has processed these events, and acknowledges them now."""
        if not self.machine.gone:
            indexes = list(indexes)
            self.world.model.finishes(self.stored_as, batch.queue, batch.offset, indexes, self, generation)
            self._acknowledged += [(generation, batch.queue, batch.offset, index) for index in indexes]

    async def _ask(self, consumer: Consumer) -> None:
        """Whatever is confirmed as saved is stored."""
        acknowledged, self._acknowledged = self._acknowledged, []
        try:
            await consumer.saved()
        except HeadraceError:
            return
        if not self.machine.gone:
            self.world.model.check_saved(self.stored_as, acknowledged, self.name)


def _generation(batch: ReceivedBatch) -> int:
    """The generation of the subscription under which the batch was delivered."""
    assert isinstance(batch.holder, QueueHoldings)
    return batch.holder.generation or 0


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()
