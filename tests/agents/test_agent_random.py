"""The whole of agents/, in virtual time, against the model in `world.py`: random streams, subscriptions, moods, faults,
detours, restarts and crashes. A failure says its seed: `simulate(seed)` repeats it."""

import asyncio
import math
import random

import pytest

from headrace.agents import CacheLimits
from headrace.streams import Checkpoint, StreamId
from headrace.streams.store import ControlStore
from tests.agents.shelf import Shelf
from tests.agents.world import POISON, UNWANTED, World, consumer_of
from tests.virtual_time import run

PATTERNS = ("s/*", "s/*", "s/1*", "s/?", "s/2", "s/17", "s/none")


def simulate(seed: int, *, steps: int = 60) -> World:
    rng = random.Random(seed)
    latency = rng.choice((0.0, 0.0, 0.01, 0.1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.agents.delivery.TURN_S", rng.choice((-1.0, math.inf)))  # its clock is the real one
        return run(_simulate(rng, steps), limit_s=100_000, latency=lambda: latency * rng.random())


async def _simulate(rng: random.Random, steps: int) -> World:
    queues = rng.choice((1, 1, 2))
    adapter = Shelf(queues, rng, latency_s=rng.choice((0.0, 0.01, 0.2)), faults=rng.choice((0.0, 0.0, 0.01, 0.1)))
    limits = CacheLimits(max_events=rng.randint(20, 80), max_bytes=rng.choice((20, 40, 1000)) * 1024)
    store = await ControlStore.open("memory")
    world = World(rng, adapter, store, queues=queues, limits=limits)
    try:
        await _live(world, rng, steps)
        adapter.faults = 0.0
        await asyncio.wait_for(world.settle(), 600)
        await world.close()
    except TimeoutError:
        world.problem("stuck")
        for agent in world.manager.statistics():
            world.note(str(agent))
    finally:
        await world.manager.aclose(0.0)
        await store.aclose()
    return world


async def _live(world: World, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        await _step(world, rng)
        if world.problems:
            return
        if rng.random() < 0.7:
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.1, 1.0, 3.0)) * rng.random())


async def _step(world: World, rng: random.Random) -> None:
    roll = rng.random()
    idle = [c for c in world.consumers.values() if c.name not in world.manager.served]
    served = [c for c in world.consumers.values() if c.name in world.manager.served]
    if roll < 0.5:
        await _publish(world, rng)
    elif roll < 0.62 and len(world.consumers) < 6:
        consumer = consumer_of(rng, f"c{len(world.consumers)}", PATTERNS, rewindable=True)
        await world.subscribe(
            consumer, lambda first, end: Checkpoint(rng.choice((first, rng.randint(first, end), end)))
        )
    elif roll < 0.75:
        for gate in world.gates[: rng.randint(0, 3)]:
            gate.set()
    elif roll < 0.8 and served:
        await world.withdraw(rng.choice(served), rng.choice((0.0, 0.5)))
    elif roll < 0.88 and idle:
        await world.serve(rng.choice(idle))
    elif roll < 0.92 and served:
        await world.seek(
            rng.choice(served), lambda first, end: Checkpoint(rng.choice((first, rng.randint(first, end))))
        )
    elif roll < 0.95:
        world.resume()
    elif roll < 0.975:
        await world.restart(drain_s=rng.choice((0.0, 0.5)))
    else:
        await world.crash()


async def _publish(world: World, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 3, 20))):
        streams = rng.randint(1, 3)
        keys = rng.sample(range(rng.choice((3, 25))), streams)
        size = rng.choice((1, 1, 100, 2000))
        parts = [
            (StreamId("s", str(key)), [_payload(rng, size) for _ in range(rng.choice((1, 1, 2, 5, 12)))])
            for key in keys
        ]
        await world.publish(parts)


def _payload(rng: random.Random, size: int) -> bytes:
    roll = rng.random()
    return POISON if roll < 0.02 else UNWANTED if roll < 0.2 else rng.randbytes(size)


@pytest.mark.parametrize("seed", range(20))
def test_everybody_gets_everything_in_order_and_once(seed: int) -> None:
    world = simulate(seed)
    assert not world.problems, "\n".join(world.history)
