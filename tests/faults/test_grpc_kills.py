"""Consumers and silos are killed, stopped and starved, as processes, while events flow.

`make chaos` does it for longer: CHAOS_ROUNDS says how often. CHAOS_SEED repeats a run.
"""

import asyncio
import os
import random
import resource
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.raw_consumer import CLOSING, ENDED, GOT, OPENED, REFUSED, SAVED, SENT
from tests.faults.scene import Scene, check_history, playing
from tests.silo.services.calling import Refused, batch, connecting

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "3"))
SEED = int(os.environ.get("CHAOS_SEED", str(random.randrange(1 << 32))))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100 + 30 * ROUNDS)]


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    print(f"CHAOS_SEED={SEED}")
    async with playing(tmp_path, random.Random(SEED)) as scene:
        yield scene


@asynccontextmanager
async def flowing(scene: Scene) -> AsyncGenerator[None]:
    """Events are published meanwhile. At the end all have been consumed, as they should."""
    async with asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(scene.publish())
        yield
        scene.enough()
        await publishing
        await scene.until_all_is_done()
    check_history([consumer.entries() for consumer in scene.consumers])


async def a_moment(scene: Scene, least: float = 0.0) -> None:
    await asyncio.sleep(scene.rng.uniform(least, least + 0.7))


async def test_consumers_are_killed_at_random_moments(scene: Scene) -> None:
    names = (f"new-{number}" for number in count())
    working = [scene.consumer(name) for name in ("a", "b", "c")]
    async with flowing(scene):
        await scene.until(lambda: all(consumer.entries(GOT) for consumer in working))
        for number in range(ROUNDS):
            victim = scene.rng.choice(working)
            await victim.kill()
            if number % 2:  # it comes back
                victim.start()
            else:
                working.remove(victim)
                working.append(scene.consumer(next(names)))
            await a_moment(scene)


async def test_the_silo_is_killed_and_started_again(scene: Scene) -> None:
    consumers = [scene.consumer(name) for name in ("a", "b")]
    async with flowing(scene):
        for _ in range(ROUNDS):
            before = {consumer: len(consumer.entries(SAVED)) for consumer in consumers}
            await scene.until(lambda b=before: all(len(c.entries(SAVED)) > n for c, n in b.items()))
            await a_moment(scene)
            await scene.silo.kill()
            await scene.silo.start()


async def test_a_consumer_that_was_frozen_finds_its_events_with_others(scene: Scene) -> None:
    frozen = scene.consumer("frozen", "--hold")
    await scene.publish(2)
    await scene.until(lambda: len(frozen.entries(GOT)) == 60)
    frozen.signal(signal.SIGSTOP)
    other = scene.consumer("other")
    await scene.until_all_is_saved()
    assert len(other.entries(SAVED)) == 60
    frozen.signal(signal.SIGUSR1)
    frozen.signal(signal.SIGCONT)
    await scene.until(lambda: bool(frozen.entries(ENDED)) and len(frozen.entries(OPENED)) == 2)
    await scene.publish(2)
    await scene.until_all_is_saved()
    assert {entry.number for entry in frozen.entries(SAVED)} <= set(range(10, 20))
    check_history([[e for e in consumer.entries() if e.what != REFUSED] for consumer in scene.consumers])


async def test_a_silo_that_was_frozen_gives_up_no_consumer(scene: Scene) -> None:
    holding = scene.consumer("holding", "--hold", "--timeout-ms", "500")
    await scene.publish(2)
    await scene.until(lambda: len(holding.entries(GOT)) == 60)
    scene.silo.signal(signal.SIGSTOP)
    await asyncio.sleep(1.5)
    holding.signal(signal.SIGUSR1)
    scene.silo.signal(signal.SIGCONT)
    await scene.until_all_is_saved()
    assert not holding.entries(ENDED)
    assert {entry.attempt for entry in holding.entries(GOT)} == {1}


async def test_a_silo_that_is_told_to_stop_lets_consumers_finish(scene: Scene) -> None:
    holding = scene.consumer("holding", "--hold", "--timeout-ms", "20000")
    await scene.publish(3)
    await scene.until(lambda: len(holding.entries(GOT)) == 90)
    scene.silo.signal(signal.SIGTERM)
    await scene.until(lambda: bool(holding.entries(CLOSING)))
    holding.signal(signal.SIGUSR1)
    assert await scene.silo.ended() == 0
    await scene.silo.start()
    await scene.publish(3)
    await scene.until(lambda: len(holding.entries(GOT)) >= 180)
    assert [entry.attempt for entry in holding.entries(GOT)] == [1] * 180
    await scene.until(lambda: len(holding.entries(SAVED)) >= 90)


async def test_consuming_goes_on_after_the_disk_was_full(scene: Scene) -> None:
    consumer = scene.consumer("a")
    async with flowing(scene):
        await scene.until(lambda: bool(consumer.entries(SAVED)))
        with full_disk(scene.silo.pid):
            async with connecting(scene.silo.address) as caller:
                with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
                    await caller.publish(batch("n/0", b"too much"))
            await asyncio.sleep(1.5)  # what was saved before is confirmed
            await scene.until(lambda: len(consumer.entries(SENT)) > len(consumer.entries(SAVED)))
            saved = len(consumer.entries(SAVED))
            await asyncio.sleep(1.5)  # longer than between two savings
            assert len(consumer.entries(SAVED)) == saved
        await scene.until(lambda: len(consumer.entries(SAVED)) > saved)


@contextmanager
def full_disk(pid: int) -> Generator[None]:
    """To the process, nothing can be written any more."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
