"""Clusters in virtual time: whatever happens to silos, network and store, nothing is lost, skipped or served by two.

A failure says its kind and seed: `simulate(seed, kind=kind)` repeats it exactly. `make sim` runs many more.
"""

import asyncio
import logging
import random
from typing import Any

import pytest

from headrace import StorageError
from headrace.balancer.cluster_options import ClusterOptions
from headrace.balancer.membership import Membership
from headrace.streams.cluster import SiloRecord
from tests.cluster.machines import MachineLoop
from tests.cluster.memory_store import MemoryStore
from tests.cluster.planted import BUGS, planted
from tests.cluster.simulated import KINDS, LONGEST_S, Incidents, SimulatedCluster, simulate
from tests.cluster.sweep import chosen, crashed, hit, recorded
from tests.random_examples import examples
from tests.simulation.virtual_time import virtual_time

FOUND_BY = {
    "no fencing": "pauses",
    "release before drain": "planned",
    "checkpoint of the maximum": "crashes",
    "lease from the answer": "answers",
    "lease by the wall clock": "outages",
    "start from what was known": "crashes",
    "done when handed out": "crashes",
    "leaving is told once": "drains",
    "lease by the clock of the store": "clocks",
    "taken unseen": "everything",
    "death by the clock of the store": "clocks",
    "moves that do not wait": "planned",
    "release after a failed save": "moves",
    "reports of an older generation count": "seeks",
    "saved before the store has it": "planned",
    "progress is saved rarely": "crashes",
}


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace")


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_skipped_and_each_queue_has_one_owner(kind: str) -> None:
    for seed in range(1, 1 + examples(25)):
        world = simulate(seed, kind=kind)
        assert not world.problems, f"{kind}/{seed}\n" + "\n".join(world.history)


@pytest.mark.parametrize("kind", ["planned", "crashes"])
def test_it_is_the_same_on_the_real_store(kind: str) -> None:
    world = simulate(1, kind=kind, real=True)
    assert not world.problems, "\n".join(world.history)


def test_a_seed_always_gives_the_same_history() -> None:
    assert simulate(7).history == simulate(7).history


def test_a_silo_is_reachable_again_after_two_late_answers_in_a_row() -> None:
    """The next late answer may begin just when the one before has come."""

    async def comes_upon_one() -> bool:
        world = SimulatedCluster(random.Random(1), "answers", real=False)
        await world.open()
        world.start("a")
        life, silo = Incidents(world), world.silos["a"]
        first = asyncio.create_task(life.pass_by("late answer", silo))
        while not silo.cut_off:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        second = asyncio.create_task(life.pass_by("late answer", silo))
        _, stuck = await asyncio.wait((first, second), timeout=LONGEST_S)
        await world.clear()
        return not stuck and not silo.cut_off

    with asyncio.Runner(loop_factory=MachineLoop) as runner:
        assert runner.run(comes_upon_one())


FINDERS = {
    "checkpoint of the maximum": 13,
    "start from what was known": 48,
    "done when handed out": 13,
    "leaving is told once": 6,
    "lease by the clock of the store": 11,
    "taken unseen": 45,
    "release after a failed save": 16,
    "reports of an older generation count": 9,
    "progress is saved rarely": 4,
}
"""Seeds that found bugs which few seeds find. They are tried first, the others only if these find nothing any more."""


@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_planted_bug_is_found(bug: str) -> None:
    seeds = (*([FINDERS[bug]] if bug in FINDERS else []), 1, 2, *FINDERS.values(), *range(3, 100))
    with planted(bug):
        assert any(simulate(seed, kind=FOUND_BY[bug]).problems for seed in seeds)


def test_every_bug_that_is_found_here_can_be_planted() -> None:
    assert FOUND_BY.keys() == BUGS.keys()


PLACES = {
    "join", "_join", "_run", "_beat", "_acquire", "_start", "_give_back", "_give_back_next", "leave", "drain",
    "_leave_store", "gain", "lose", "save_stopped", "_save_last", "save", "_stop_agent", "aclose", "detach",
}  # fmt: skip
"""Functions that gain or lose queues. A silo waits in each of them at some time."""


def test_nothing_is_lost_wherever_a_silo_is_killed() -> None:
    places = recorded("planned", 3) | recorded("pauses", 3)
    stood = hit(site for way in places.values() for site in way)
    assert {each.function for each in stood} >= PLACES
    for crash in chosen(places, examples(30, quick=15)):
        world = crashed(crash)
        assert world.crashed_at, f"{crash} kills nobody"
        assert not world.problems, f"{crash}\n" + "\n".join(world.history)


def test_with_every_step_chosen_each_is_taken_once() -> None:
    places = recorded("planned", 1)
    assert sorted(chosen(places, len(places))) == sorted(places)


def test_some_crashes_lose_unsaved_progress() -> None:
    """So the simulation measures how much progress may be lost."""
    assert any(simulate(seed, kind="crashes").unsaved_s for seed in range(1, 11))


class _Owner:
    queues = 1

    async def gain(self, queue: int, epoch: int, term: Any) -> None: ...

    async def lose(self, queue: int, drain_s: float) -> None: ...

    def cut(self, queue: int) -> None: ...


class _Nobody:
    async def reach(self, silo: SiloRecord) -> bool:
        return True


class _LosesAnswers:
    """A store that carries out `join`, and whose answer is lost as often as it should be."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.losing = 0

    async def join(self, *args: Any, **options: Any) -> SiloRecord:
        me = await self._store.join(*args, **options)
        if self.losing:
            self.losing -= 1
            raise StorageError("the answer is lost")
        return me

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@virtual_time
async def test_a_silo_that_does_not_hear_that_it_joined_again_is_not_superseded_by_itself() -> None:
    loop = asyncio.get_running_loop()
    store = _LosesAnswers(MemoryStore().cluster(lambda _: round(loop.time() * 1e6)))
    membership: Any = Membership(
        store,  # type: ignore[arg-type]
        "a",
        address="",
        owners={"p": _Owner()},
        peers=_Nobody(),
        options=ClusterOptions(),
    )
    await membership.join()
    await asyncio.sleep(3)
    await store.declare_dead(membership.me)
    store.losing = 2
    await asyncio.sleep(10)
    assert not membership.superseded.done()
    assert membership.held, "it serves its queue again"
    await membership.leave()
