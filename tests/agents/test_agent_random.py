"""The whole of agents/, in virtual time, against the model in `world.py`: random streams, subscriptions, moods, faults,
detours, restarts and crashes. A failure says its seed and kind: `simulate(seed, kind=kind)` repeats it."""

import asyncio
import math
import random
from typing import Any

import pytest

from headrace import StorageError, StreamId
from headrace.adapters import AdapterContext
from headrace.adapters.memory import MemoryAdapter
from headrace.agents import CacheLimits
from headrace.store.control_store import ControlStore
from headrace.streams.subscriptions import Checkpoint
from tests.agents.world import POISON, UNWANTED, HandlerSimulation, check_saved, consumer_of
from tests.random_examples import seeds
from tests.simulation.clocks import simulated_clocks
from tests.simulation.queues import SimulatedQueues
from tests.simulation.simulation import PROVIDER
from tests.simulation.virtual_time import run

PATTERNS = ("s/*", "s/*", "s/1*", "s/?", "s/2", "s/17", "s/none")


def simulate(seed: int, *, kind: str = "rewindable", steps: int = 60) -> HandlerSimulation:
    rng = random.Random(seed)
    latency = rng.choice((0.0, 0.0, 0.01, 0.1))
    entries, turn_s = (2, 4000)[seed % 2], rng.choice((-1.0, math.inf))
    with simulated_clocks(max_entries=entries, turn_s=turn_s):
        return run(_simulate(rng, kind, steps), limit_s=100_000, latency=lambda: latency * rng.random())


async def _simulate(rng: random.Random, kind: str, steps: int) -> HandlerSimulation:
    queues = rng.choice((1, 1, 2))
    faults = rng.choice((0.0, 0.0, 0.01, 0.1))
    adapter = (
        MemoryAdapter(AdapterContext(provider=PROVIDER, queues=queues))
        if kind == "memory"
        else SimulatedQueues(
            queues,
            rng,
            latency_s=rng.choice((0.0, 0.01, 0.2)),
            faults=faults,
            offers=rng.choice((0.0, 0.5, 1.0)),
        )
    )
    limits = CacheLimits(max_events=rng.randint(20, 80), max_bytes=rng.choice((20, 40, 1000)) * 1024)
    store = await ControlStore.open("memory")
    world = HandlerSimulation(rng, adapter, store, queues=queues, limits=limits)
    life = RandomSteps(world, rng, retention=kind == "retention", store_faults=rng.choice((0.0, faults)))
    try:
        await life.go_on(steps)
        if isinstance(adapter, SimulatedQueues):
            adapter.faults = 0.0
        await asyncio.wait_for(world.settle(), 600)
        await world.close()
        await life.check_gaps()
    except TimeoutError:
        world.problem("stuck")
        for agent in world.manager.statistics():
            world.note(str(agent))
    finally:
        await world.manager.aclose(0.0)
        await adapter.aclose()
        await store.aclose()
    return world


class RandomSteps:
    """What happens in a world, at random."""

    def __init__(self, world: HandlerSimulation, rng: random.Random, *, retention: bool, store_faults: float) -> None:
        self.world = world
        self.rng = rng
        self.retention = retention
        self.rewindable = world.adapter.capabilities.rewindable
        self._store_faults = store_faults
        self._failing = False
        self._write = world.store._database.write  # pyright: ignore[reportPrivateUsage]
        world.store._database.write = self._write_or_fail  # pyright: ignore[reportPrivateUsage]

    async def go_on(self, steps: int) -> None:
        for _ in range(steps):
            await self._step()
            check_saved(self.world.manager, self.world.problem)
            if self.world.problems:
                return
            if self.rng.random() < 0.7:
                self._failing = True
                await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.1, 1.0, 3.0)) * self.rng.random())
                self._failing = False

    async def check_gaps(self) -> None:
        """Every event that retention took before it was delivered has a gap record."""
        if not self.retention:
            return
        records = await self.world.store.gaps(PROVIDER)
        for name, stream, token in self.world.missed:
            queue = self.world.queue_of(stream)
            if not any(
                (gap.subscription, gap.queue) == (name, queue)
                and gap.stream in (None, stream)
                and gap.low <= token < gap.high
                for gap in records
            ):
                self.world.problem(f"{name} missed {stream} {token}, and there is no gap record")

    async def _write_or_fail(self, *args: Any, **kwargs: Any) -> Any:
        if self._failing and self.rng.random() < self._store_faults:
            raise StorageError("the store is out for lunch")
        return await self._write(*args, **kwargs)

    async def _step(self) -> None:
        world, rng, roll = self.world, self.rng, self.rng.random()
        idle = [c for c in world.consumers.values() if c.name not in world.manager.served]
        served = [c for c in world.consumers.values() if c.name in world.manager.served]
        if roll < 0.5:
            await self._publish()
        elif roll < 0.62 and len(world.consumers) < 6:
            consumer = consumer_of(rng, f"c{len(world.consumers)}", PATTERNS, rewindable=self.rewindable)
            await world.subscribe(consumer, self._somewhere)
        elif roll < 0.75:
            for gate in world.gates[: rng.randint(0, 3)]:
                gate.set()
        elif roll < 0.8 and served:
            await world.withdraw(rng.choice(served), rng.choice((0.0, 0.5)))
        elif roll < 0.88 and idle:
            await world.serve(rng.choice(idle))
        elif roll < 0.91 and served:
            await world.seek(rng.choice(served), self._somewhere)
        elif roll < 0.92 and served and self.rewindable:
            await world.take_over(rng.choice(served), self._somewhere)
        elif roll < 0.95:
            world.resume()
        elif roll < 0.965:
            await world.restart(drain_s=rng.choice((0.0, 0.5)))
        elif roll < 0.98:
            await world.crash()
        elif self.retention:
            queue = rng.randrange(world.queues)
            first, end = await world.adapter.bounds(queue)
            world.retain(queue, rng.choice((rng.randint(first, end), end)))

    def _somewhere(self, first: int, end: int) -> Checkpoint:
        return Checkpoint(self.rng.choice((first, self.rng.randint(first, end), end)))

    async def _publish(self) -> None:
        rng = self.rng
        for _ in range(rng.choice((1, 3, 20))):
            keys = rng.sample(range(rng.choice((3, 25))), rng.randint(1, 3))
            size = rng.choice((1, 1, 100, 2000))
            parts = [
                (StreamId("s", str(key)), [_payload(rng, size) for _ in range(rng.choice((1, 1, 2, 5, 12)))])
                for key in keys
            ]
            await self.world.publish(parts)


def _payload(rng: random.Random, size: int) -> bytes:
    roll = rng.random()
    return POISON if roll < 0.02 else UNWANTED if roll < 0.2 else rng.randbytes(size)


@pytest.mark.parametrize("kind", ["rewindable", "retention", "memory"])
@pytest.mark.parametrize("seed", seeds(8, quick=2))
def test_everybody_gets_everything_in_order_and_once(seed: int, kind: str) -> None:
    world = simulate(seed, kind=kind)
    assert not world.problems, "\n".join(world.history)
