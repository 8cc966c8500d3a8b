"""Whole clusters in one process: silos with their memberships, managers and agents over one control store and one set
of queues, in virtual time, with a seed. Calls to the store take time, get lost before or after they were carried out,
and come twice; silos are killed at any step, stand still, are cut off, leave, and come back; the store fails.

The model knows which events of a stream were ever finished. It is asked whenever a handler begins: nothing is skipped,
nothing overtakes, and nobody serves a queue under an older lease once it was served under a newer one. In the end
everything is finished, and where nothing but planned moves happened, everything exactly once.
"""
# pyright: reportPrivateUsage=false

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from headrace.agents import CacheLimits, Delivery, HandlerService, PullingAgent, PullingManager
from headrace.balancer import Balancer, average, lease_count, ring
from headrace.balancer.membership import ClusterOptions, Membership
from headrace.streams import (
    Checkpoint,
    Event,
    EventBatch,
    RetryPolicy,
    Selector,
    StorageError,
    StreamId,
    SubscriptionDefinition,
)
from headrace.streams.cluster import SiloRecord
from headrace.streams.handlers import Handler
from headrace.streams.store import ControlStore
from tests.agents.shelf import Shelf
from tests.cluster.machines import Machine, MachineLoop

PROVIDER = "simulated"
RETRY = RetryPolicy(max_attempts=1_000_000, max_elapsed_s=1e9, initial_delay_s=0.05, max_delay_s=0.5)
LIMITS = CacheLimits(max_events=1000, max_bytes=1 << 20)
KINDS = ("planned", "crashes", "pauses", "network", "everything")


class FailedOnPurposeError(Exception):
    pass


class Line:
    """What a machine has instead of the store: the way there."""

    def __init__(self, world: "World", silo: "Silo", target: object) -> None:
        self._world = world
        self._silo = silo
        self._target = target

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._target, name)

        async def call(*args: Any, **options: Any) -> Any:
            world, rng = self._world, self._world.rng
            await asyncio.sleep(rng.random() * world.latency_s)
            await self._reach()
            lost, twice = rng.random() < world.loss, rng.random() < world.loss
            if lost and rng.random() < 0.5:
                raise StorageError(f"{name}: the request is lost")
            if twice:
                with suppress(Exception):
                    await method(*args, **options)
            result = await method(*args, **options)
            await asyncio.sleep(rng.random() * world.latency_s)
            await self._reach()
            if lost:
                raise StorageError(f"{name}: the answer is lost")
            return result

        return call

    async def _reach(self) -> None:
        if self._silo.machine.gone:
            raise StorageError("the process is gone")
        if self._world.outage or self._silo.cut_off:
            await asyncio.sleep(self._world.timeout_s * self._world.rng.random())
            raise StorageError("the store cannot be reached")


class SeededService(HandlerService):
    rng: random.Random

    def deliver(self, *args: Any, **options: Any) -> Delivery:
        return super().deliver(*args, rng=self.rng, **options)


class SeededManager(PullingManager):
    def __init__(self, rng: random.Random, *args: Any, **options: Any) -> None:
        self.rng = rng
        super().__init__(*args, **options)

    def _agent(self, queue: int) -> PullingAgent:
        agent = super()._agent(queue)
        agent._rng = self.rng
        return agent


class Silo:
    """A process of the cluster."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.machine = Machine(name)
        self.cut_off = False
        self.up = False
        self.leaving = asyncio.Event()
        self.manager: PullingManager
        self.membership: Membership
        self.task = self.machine.run(self._run(), f"silo {name}")
        self.task.add_done_callback(self._ended)

    async def _run(self) -> None:
        world = self.world
        store: Any = Line(world, self, world.store)
        self.manager = SeededManager(
            world.rng, PROVIDER, world.queues, world.shelf, store, LIMITS, detach_after_s=0.25, leased=True
        )
        self.membership = Membership(
            Line(world, self, world.store.cluster(world.store_us)),  # type: ignore[arg-type]
            self.name,
            address=self.name,
            owners={PROVIDER: self.manager},
            peers=self,
            options=world.options,
            rng=world.rng,
        )
        await self._until_done(self.membership.join)
        self.manager.start()
        for definition in world.definitions:
            service = SeededService(Handler.of(self._handler(definition.name), batch=False), None, 3)
            service.rng = world.rng
            await self._until_done(
                lambda definition=definition, service=service: self.manager.serve(definition, service)
            )
        self.up = True
        await self.leaving.wait()
        self.up = False
        await self.membership.leave()
        with suppress(StorageError):
            await self.manager.aclose(1.0)
        world.note(f"{self.name} has left")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self.machine.gone and not task.cancelled() and (error := task.exception()):
            self.world.problem(f"{self.name} failed: {error!r}")

    async def _until_done(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                return await call()
            except StorageError:
                await asyncio.sleep(0.1)

    async def reach(self, silo: SiloRecord) -> bool:
        """As the others' `Peers`."""
        await asyncio.sleep(self.world.rng.random() * 0.2)
        other = self.world.silos.get(silo.name)
        return not (other is None or other.machine.gone or other.machine.paused or other.cut_off or self.cut_off)

    def _handler(self, subscription: str) -> Callable[[Event], Coroutine[Any, Any, None]]:
        async def handle(event: Event) -> None:
            world, rng = self.world, self.world.rng
            assert event.stream is not None
            queue = world.queue_of(event.stream)
            epoch = (self.manager.leases or {}).get(queue, -1)
            if not self.machine.gone:
                world.begins(subscription, event.stream, int(event.payload), self, queue, epoch)
            await asyncio.sleep(rng.choice((0, 0, 0.01, 0.3)) * rng.random())
            if rng.random() < 0.02:
                raise FailedOnPurposeError
            if not self.machine.gone:
                world.finished(subscription, event.stream, int(event.payload))

        return handle


@dataclass
class World:
    rng: random.Random
    kind: str
    queues: int = 0
    latency_s: float = 0.0
    loss: float = 0.0
    timeout_s: float = 1.0
    outage: bool = False
    problems: list[str] = field(default_factory=list[str])
    history: list[str] = field(default_factory=list[str])
    silos: dict[str, Silo] = field(default_factory=dict[str, Silo])
    ever: list[Silo] = field(default_factory=list[Silo])
    published: Counter[StreamId] = field(default_factory=Counter[StreamId])
    done: Counter[tuple[str, StreamId]] = field(default_factory=Counter[tuple[str, StreamId]])
    """How many of a stream's events, from the first on, were finished at least once."""
    again: int = 0
    """Events that were finished more than once."""
    epochs: dict[int, int] = field(default_factory=dict[int, int])
    definitions: Sequence[SubscriptionDefinition] = ()

    async def open(self) -> None:
        rng = self.rng
        self.queues = rng.choice((1, 3, 6))
        self.latency_s = rng.choice((0.0, 0.01, 0.2))
        if self.kind in ("network", "everything"):
            self.loss = rng.choice((0.0, 0.02, 0.2))
        period = rng.choice((0.5, 1.0))
        balancer: Balancer = rng.choice((lease_count, ring, average))
        self.options = ClusterOptions(
            period_s=period, lease_s=rng.choice((3, 6, 15)) * period, dead_after_s=rng.choice((2, 5)) * period,
            maturity_s=rng.choice((0.0, 3.0, 30.0)), drain_s=5.0, balancer=balancer,
        )  # fmt: skip
        self.shelf = Shelf(self.queues, rng)
        self.store = await ControlStore.open("memory")
        names = ["one", "two"][: rng.choice((1, 2))]
        self.definitions = [SubscriptionDefinition(name=name, selector=Selector("s/*"), retry=RETRY) for name in names]
        start = {queue: Checkpoint(0) for queue in range(self.queues)}
        for definition in self.definitions:
            await self.store.create_subscription(PROVIDER, definition, start)

    def store_us(self, _: object) -> int:
        return round(asyncio.get_running_loop().time() * 1e6)

    def note(self, text: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time() - 1000:9.4f} {text}")

    def problem(self, text: str) -> None:
        self.note(f"PROBLEM {text}")
        self.problems.append(text)

    def queue_of(self, stream: StreamId) -> int:
        return sum(stream.key.encode()) % self.queues

    # ---- the model -------------------------------------------------------------------------------------------------

    async def publish(self, stream: StreamId, events: int) -> None:
        first = self.published[stream]
        self.published[stream] += events
        payloads = [str(first + number).encode() for number in range(events)]
        await self.shelf.enqueue([(self.queue_of(stream), EventBatch.of(stream, payloads))])

    def begins(self, subscription: str, stream: StreamId, number: int, silo: Silo, queue: int, epoch: int) -> None:
        where = f"{subscription}: {silo.name} gets {stream} {number} under epoch {epoch} of queue {queue}"
        if number > self.done[subscription, stream]:
            self.problem(f"{where}, but {self.done[subscription, stream]} is not done")
        if epoch < self.epochs.get(queue, 0):
            self.problem(f"{where}, which was served under epoch {self.epochs[queue]}")
        self.epochs[queue] = max(epoch, self.epochs.get(queue, 0))

    def finished(self, subscription: str, stream: StreamId, number: int) -> None:
        if number < self.done[subscription, stream]:
            self.again += 1
        else:
            self.done[subscription, stream] = number + 1

    @property
    def left(self) -> int:
        return sum(
            total - self.done[definition.name, stream]
            for definition in self.definitions
            for stream, total in self.published.items()
        )

    def owners(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {queue: [] for queue in range(self.queues)}
        for silo in self.silos.values():
            for queue in silo.manager.leases or {} if silo.up else ():
                found[queue].append(silo.name)
        return found

    # ---- silos come and go -----------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.note(f"start {name}")
        silo = self.silos[name] = Silo(self, name)
        self.ever.append(silo)

    def kill(self, name: str) -> None:
        self.note(f"kill {name}")
        self.silos.pop(name).machine.kill()

    async def leave(self, name: str) -> None:
        self.note(f"{name} leaves")
        silo = self.silos.pop(name)
        silo.leaving.set()
        await asyncio.wait([silo.task])
        if silo.task.exception() is not None:
            raise silo.task.exception() or AssertionError

    async def clear(self) -> None:
        """What was killed is cleared away, without any effect."""
        for silo in self.ever:
            silo.machine.bury()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[operator]
        for _ in range(5):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=10.0) if tasks else None
            tasks = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[operator]
        await self.store.aclose()


class Life:
    """What happens, at random."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self._names = count()
        self._down: list[str] = []
        self._healing: list[asyncio.Task[None]] = []

    async def go_on(self, steps: int) -> None:
        for _ in range(self.rng.choice((1, 2, 4))):
            self.world.start(f"silo-{next(self._names)}")
        for _ in range(steps):
            await self._publish()
            if self.rng.random() < 0.3:
                await self._happen()
            await asyncio.sleep(self.rng.choice((0.0, 0.2, 2.0)) * self.rng.random())

    async def _publish(self) -> None:
        for _ in range(self.rng.choice((1, 3))):
            stream = StreamId("s", str(self.rng.randrange(self.rng.choice((2, 12)))))
            await self.world.publish(stream, self.rng.choice((1, 1, 3, 10)))

    async def _happen(self) -> None:
        world, rng, kind = self.world, self.rng, self.world.kind
        name = rng.choice(list(world.silos)) if world.silos else ""
        what = rng.choice(_HAPPENINGS[kind])
        if what == "start" or not name:
            if len(world.silos) < 5:
                world.start(self._down.pop() if self._down and rng.random() < 0.7 else f"silo-{next(self._names)}")
        elif what == "leave" and len(world.silos) > 1 and world.silos[name].up:
            self._down.append(name)
            await world.leave(name)
        elif what == "kill":
            self._down.append(name)
            world.kill(name)
        elif what in ("pause", "cut off", "outage"):
            self._begin(what, name)

    def _begin(self, what: str, name: str) -> None:
        world = self.world
        seconds = self.rng.choice((0.5, 1.2, 3.0)) * self.rng.random() * world.options.lease_s
        world.note(f"{what} {name} for {seconds:.2f} s")
        silo = world.silos[name]

        async def passes() -> None:
            if what == "pause":
                silo.machine.pause()
            elif what == "cut off":
                silo.cut_off = True
            else:
                world.outage = True
            await asyncio.sleep(seconds)
            world.note(f"{what} {name} is over")
            if what == "outage":
                world.outage = False
            silo.cut_off = False
            if silo.machine.paused and not silo.machine.dead:
                silo.machine.resume()

        self._healing.append(asyncio.create_task(passes()))

    async def settle(self) -> None:
        """Left in peace, everything is done, and every queue has one owner."""
        world = self.world
        if self._healing:
            await asyncio.wait(self._healing)
        world.loss, world.outage = 0.0, False
        if not world.silos:
            world.start(f"silo-{next(self._names)}")
        world.note("settle")
        for _ in range(3000):
            if not world.left or world.problems:
                break
            await asyncio.sleep(0.1)
        if world.left and not world.problems:
            world.problem(f"{world.left} events are never finished; owners {world.owners()}")
        await asyncio.sleep(2 * world.options.maturity_s + 2 * world.options.lease_s)
        owners = world.owners()
        if not world.problems and any(len(names) != 1 for names in owners.values()):
            world.problem(f"at rest the owners are {owners}")
        held = Counter(name for names in owners.values() for name in names)
        shares = [held[name] for name in world.silos]
        even = max(shares) - min(shares) <= 1
        if not world.problems and world.options.balancer is not ring and not even:
            world.problem(f"at rest the queues are spread as {dict(held)}")
        if world.kind == "planned" and world.again:
            world.problem(f"{world.again} events came twice, and all moves were planned")


_HAPPENINGS: dict[str, Sequence[str]] = {
    "planned": ("start", "leave"),
    "crashes": ("start", "start", "leave", "kill"),
    "pauses": ("start", "leave", "pause", "pause"),
    "network": ("start", "leave", "cut off", "outage"),
    "everything": ("start", "start", "leave", "kill", "pause", "cut off", "outage"),
}


async def _simulate(rng: random.Random, kind: str, steps: int) -> World:
    world = World(rng, kind)
    await world.open()
    life = Life(world)
    try:
        async with asyncio.timeout(100_000):
            await life.go_on(steps)
            await life.settle()
    except TimeoutError:
        world.problem("stuck")
    finally:
        await world.clear()
    return world


def simulate(seed: int, *, kind: str = "everything", steps: int = 30) -> World:
    rng = random.Random(f"{kind}/{seed}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.agents.manager.CHECKPOINT_S", 1.0)  # so that crashes find more that is not saved
        patch.setattr("headrace.agents.handling.TURN_S", math.inf)  # these clocks are real ones
        patch.setattr("headrace.agents.feed.monotonic", lambda: 0.0)
        return _run(rng, kind, steps)


def _run(rng: random.Random, kind: str, steps: int) -> World:
    with asyncio.Runner(loop_factory=MachineLoop) as runner:
        return runner.run(_simulate(rng, kind, steps))
