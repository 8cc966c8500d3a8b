"""Groups under a whole manager, in virtual time, against the model in `group_world.py`: random acknowledgements,
rejections, credit, disconnections, timeouts, seeks, agents that stop, restarts and crashes, over 10,000 events a time.
A failure says its seed and kind: `simulate(seed, kind=kind)` repeats it."""

import asyncio
import math
import random
from collections.abc import Coroutine
from itertools import count
from typing import Any

import pytest

from headrace import OnFailure, RetryPolicy, Selector, StreamId
from headrace.adapters import AdapterContext
from headrace.adapters.memory import MemoryAdapter
from headrace.agents import CacheLimits
from headrace.store.control_store import ControlStore
from headrace.streams.frames import DeliveredBatch
from headrace.streams.subscriptions import Checkpoint, Mode, SubscriptionDefinition
from tests.agents.delivery.group_world import Client, GroupSimulation, Known
from tests.agents.world import check_saved
from tests.random_examples import seeds
from tests.simulation.clocks import simulated_clocks, ticking
from tests.simulation.groups import indexes
from tests.simulation.queues import SimulatedQueues
from tests.simulation.simulation import PROVIDER
from tests.simulation.virtual_time import run

PATTERNS = ("s/*", "s/*", "s/1*", "s/?")
RETRY = RetryPolicy(max_attempts=3, initial_delay_s=0.02, max_delay_s=0.5)


def simulate(seed: int, *, kind: str = "rewindable", events: int = 10_000) -> GroupSimulation:
    rng = random.Random(seed)
    latency = rng.choice((0.0, 0.0, 0.01, 0.1))
    step_s = rng.choice((0.0, 0.0003, 1.0))
    entries, turn_s = (2, 4000)[seed % 2], rng.choice((-1.0, math.inf))
    with simulated_clocks(max_entries=entries, turn_s=turn_s, clock=ticking(step_s)):
        return run(_simulate(rng, kind, events), limit_s=1_000_000, latency=lambda: latency * rng.random())


async def _simulate(rng: random.Random, kind: str, events: int) -> GroupSimulation:
    queues = rng.choice((1, 2, 5))
    adapter = (
        MemoryAdapter(AdapterContext(provider=PROVIDER, queues=queues))
        if kind == "memory"
        else SimulatedQueues(queues, rng, latency_s=rng.choice((0.0, 0.01, 0.2)), offers=rng.choice((0.0, 0.5, 1.0)))
    )
    limits = CacheLimits(max_events=rng.choice((20, 80, 1000)), max_bytes=rng.choice((20, 100, 1000)) * 1024)
    store = await ControlStore.open("memory")
    world = GroupSimulation(rng, adapter, store, queues=queues, limits=limits)
    life = RandomSteps(world, rng)
    try:
        await life.go_on(events)
        await asyncio.wait_for(life.settle(), 5000)
        await world.close()
    except TimeoutError:
        world.problem("stuck")
        for agent in world.manager.statistics():
            world.note(str(agent))
    finally:
        await life.end()
        await world.manager.aclose(0.0)
        await adapter.aclose()
        await store.aclose()
    return world


class RandomSteps:
    """What happens in a world, at random."""

    def __init__(self, world: GroupSimulation, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.rewindable = world.adapter.capabilities.rewindable
        self._published = 0
        self._kept: dict[Client, list[DeliveredBatch]] = {}
        self._silent: set[Client] = set()
        self._change: asyncio.Task[None] | None = None
        self._names = count()

    async def go_on(self, events: int) -> None:
        await self._subscribe()
        while self._published < events and not self.world.problems:
            await self._step()
            for _ in range(self.rng.randint(1, 8)):
                for known in self.world.subscriptions.values():
                    self._live(known)
                check_saved(self.world.manager, self.world.problem)
                await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.1, 0.5)) * self.rng.random())

    async def settle(self) -> None:
        """Everybody gets everything."""
        world = self.world
        world.note("settle")
        await self._changed()
        await world.start_agents()
        for known in world.subscriptions.values():
            if known.name not in world.manager.served:
                await world.serve(known)
            for client in [client for client in known.clients if client.here]:
                world.leave(client)
            if known.group is not None:
                for client in [self._client(known) for _ in range(self.rng.choice((1, 3)))]:
                    world.connect(client, 1 << 30, 1 << 30)
        while not world.problems and any(self._left(known) for known in world.subscriptions.values()):
            self._resume()
            for known in world.subscriptions.values():
                for client in [client for client in known.clients if client.here]:
                    client.group.heard(client.member)
                    for each in client.take():
                        world.acknowledge(client, each, indexes(each)[0], 0)
            await asyncio.sleep(0.1)

    async def end(self) -> None:
        if self._change is not None:
            self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)

    def _left(self, known: Known) -> bool:
        return any(True for stream in self.world.streams(known) for _ in self.world.undone(known, stream))

    # ---- the silo --------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        world, rng, roll = self.world, self.rng, self.rng.random()
        served = [known for known in world.subscriptions.values() if known.name in world.manager.served]
        idle = [known for known in world.subscriptions.values() if known.name not in world.manager.served]
        if roll < 0.6:
            await self._publish()
        elif roll < 0.64 and len(world.subscriptions) < 4:
            await self._subscribe()
        elif roll < 0.7:
            self._resume()
            await world.store.request_redrive(PROVIDER, rng.choice(list(world.subscriptions)))
        elif roll < 0.73:
            await self._changed()
            await world.start_agents()
        elif roll < 0.8 and idle:
            await self._changed()
            if idle[0].name not in world.manager.served:
                await world.serve(idle[0], handler=rng.random() < 0.2)
        elif self._change is not None and not self._change.done():
            return
        elif roll < 0.82 and served:
            self._begin(world.withdraw(rng.choice(served), rng.choice((0.0, 2.0))))
        elif roll < 0.84 and served and self.rewindable:
            positions = {queue: await self._somewhere(queue) for queue in range(world.queues)}
            self._begin(world.move(rng.choice(served), positions, rng.choice((0.0, 2.0))))
        elif roll < 0.87:
            self._begin(world.stop_agents(rng.randrange(world.queues), rng.choice((0.0, 2.0))))
        elif roll < 0.88:
            await world.restart(rng.choice((0.0, 0.5)))
        elif roll < 0.89:
            await world.crash()

    def _begin(self, change: Coroutine[Any, Any, None]) -> None:
        """Start a change that continues while consumers work."""

        async def changing() -> None:
            self.world.draining = True
            await change
            self.world.draining = False

        self._change = asyncio.create_task(changing())

    async def _changed(self) -> None:
        if self._change is not None:
            await self._change

    async def _somewhere(self, queue: int) -> Checkpoint:
        first, end = await self.world.adapter.bounds(queue)
        return Checkpoint(self.rng.choice((max(first, end - 5), self.rng.randint(first, end), end)))

    async def _subscribe(self) -> None:
        rng = self.rng
        definition = SubscriptionDefinition(
            name=f"sub{len(self.world.subscriptions)}",
            selector=Selector(rng.choice(PATTERNS)),
            retry=RETRY,
            on_failure=rng.choice(list(OnFailure)),
            mode=rng.choice((Mode.SHARED, Mode.SHARED, Mode.BOUND)),
        )
        await self.world.subscribe(definition)

    async def _publish(self) -> None:
        rng = self.rng
        for _ in range(rng.choice((1, 3, 20))):
            keys = rng.sample(range(rng.choice((3, 25))), rng.randint(1, 3))
            size = rng.choice((1, 1, 100, 2000))
            parts = [
                (StreamId("s", str(key)), [rng.randbytes(size) for _ in range(rng.choice((1, 1, 2, 5, 12, 40)))])
                for key in keys
            ]
            for stream, payloads in parts:
                self.world.new_stream(stream)
                self._published += len(payloads)
            await self.world.publish(parts)

    def _resume(self) -> None:
        for served in self.world.manager.served.values():
            for delivery in served.deliveries.values():
                for stream in list(delivery.progress.cursors):
                    delivery.retries.resume(stream)

    # ---- consumers -------------------------------------------------------------------------------------------------

    def _client(self, known: Known) -> Client:
        client = Client(
            known,
            f"c{next(self._names)}",
            timeout_s=self.rng.uniform(0.5, 5.0),
            pace_s=self.rng.choice((0, 0, 0.03)),
            concurrent=self.rng.random() < 0.5,
        )
        known.clients.append(client)
        self._kept[client] = []
        return client

    def _live(self, known: Known) -> None:
        """Each of its consumers does something."""
        if known.group is None:
            return
        for client in known.clients:
            if client.gone is not None:
                client.here = False
            if client.here:
                self._do(client)
            elif self.rng.random() < 0.2:
                self._arrive(client)
        known.clients[:] = [client for client in known.clients if client.here or self.rng.random() < 0.99]
        if len(known.clients) < 4 and self.rng.random() < 0.2:
            self._arrive(self._client(known))

    def _arrive(self, client: Client) -> None:
        self._silent.discard(client)
        self.world.connect(client, *self._credit())
        if self.rng.random() < 0.5:
            self._kept[client].clear()

    def _credit(self) -> tuple[int, int]:
        rng = self.rng
        return rng.choice((0, 1, 10, 100, 1 << 30)), rng.choice((0, 100, 3000, 100_000, 1 << 30))

    def _do(self, client: Client) -> None:
        world, roll = self.world, self.rng.random()
        if client not in self._silent:
            client.group.heard(client.member)
        if roll < 0.3:
            world.grant(client, *self._credit())
        elif roll < 0.33:
            world.disconnect(client)
        elif roll < 0.34:
            self._arrive(client)
        elif roll < 0.36:
            world.leave(client)
        elif roll < 0.37:
            self._silent.add(client)
        elif roll < 0.8:
            self._work(client)

    def _work(self, client: Client) -> None:
        """Work on the events of a client, in no order."""
        rng, kept = self.rng, self._kept[client]
        kept += client.take()
        if rng.random() < 0.5:
            rng.shuffle(kept)
        mood = rng.choice(("brisk", "brisk", "odd", "cross"))
        for _ in range(min(len(kept), rng.choice((1, 5, 1000)))):
            each = kept.pop(0)
            if mood == "brisk":
                self.world.acknowledge(client, each, indexes(each)[0], 0, up_to=rng.random() < 0.2)
            elif mood == "odd":
                self._pick(client, each)
            elif rng.random() < 0.5:
                self.world.reject(
                    client, each, rng.choice(indexes(each)), rng.choice((0, 1, 3)), rng.choice((None, 0, 0.5))
                )

    def _pick(self, client: Client, each: DeliveredBatch) -> None:
        """Acknowledge some events of a batch. The others are left for later."""
        rng = self.rng
        for _ in range(rng.randint(1, 5)):
            index = rng.choice(indexes(each))
            self.world.acknowledge(client, each, index, rng.choice((0, 1, 2, 5)), up_to=rng.random() < 0.1)
        if rng.random() < 0.7:
            self._kept[client].append(each)


@pytest.mark.parametrize("kind", ["rewindable", "memory"])
@pytest.mark.parametrize("seed", seeds(4, quick=1))
def test_exactly_what_is_not_acknowledged_comes_again_in_order(seed: int, kind: str) -> None:
    world = simulate(seed, kind=kind)
    assert not world.problems, "\n".join(world.history)
