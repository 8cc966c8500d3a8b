"""Clusters in virtual time: whatever happens to silos, network and store, nothing is lost, skipped or served by two.

A failure says its kind and seed: `simulate(seed, kind=kind)` repeats it exactly. `make sim` runs many more.
"""

import asyncio
import logging
import os
import random
import subprocess
import sys
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
    "no fencing": ("pauses", 1),
    "release before drain": ("planned", 2),
    "checkpoint of the maximum": ("planned", 1),
    "lease from the answer": ("answers", 16),
    "lease by the wall clock": ("blocks", 1),
    "start from what was known": ("planned", 1),
    "done when handed out": ("planned", 1),
    "leaving is told once": ("everything", 13),
    "lease by the clock of the store": ("clocks", 15),
    "taken unseen": ("answers", 21),
    "death by the clock of the store": ("clocks", 1),
    "moves that do not wait": ("planned", 7),
    "release after a failed save": ("moves", 7),
    "reports of an older generation count": ("seeks", 1),
    "saved before the store has it": ("drains", 3),
    "progress is saved rarely": ("crashes", 4),
    "reports of an older epoch count": ("pauses", 23),
    "acknowledgements end with the session": ("crashes", 1),
    "owners are learned once": ("drains", 20),
    "former owners are believed": ("late", 5),
    "gateways confirm what they sent": ("planned", 6),
    "gateways report to the owner they know": ("moves", 5),
    "bound queues go at once": ("everything", 4),
    "broadcast is shared": ("outages", 2),
    "releases are tried once": ("drains", 11),
    "the time of leases is not checked": ("clocks", 44),
    "pulled events are kept for ever": ("consumers", 12),
    "handled before the handler ends": ("planned", 1),
    "confirmations without positions": ("blocks", 1),
    "positions leave streams out": ("blocks", 1),
}
"""A kind of clusters that finds each bug, and a seed that does. It is tried first, the others only if it does not any
more."""


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace")


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_skipped_and_each_queue_has_one_owner(kind: str) -> None:
    for seed in range(1, 1 + examples(25, quick=2)):
        world = simulate(seed, kind=kind)
        assert not world.problems, f"{kind}/{seed}\n" + "\n".join(world.history)


@pytest.mark.parametrize("kind", ["planned", "crashes"])
def test_it_is_the_same_on_the_real_store(kind: str) -> None:
    world = simulate(1, kind=kind, real=True)
    assert not world.problems, "\n".join(world.history)


def test_a_seed_always_gives_the_same_history() -> None:
    assert simulate(7).history == simulate(7).history


@pytest.mark.long
def test_a_seed_gives_the_same_history_in_processes_with_other_orders_in_sets() -> None:
    command = [sys.executable, "-m", "tests.cluster.sim", "--history", "pauses/6"]
    first, second = (
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    )
    assert first == second


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


@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_planted_bug_is_found(bug: str) -> None:
    kind, first = FOUND_BY[bug]
    with planted(bug):
        assert any(simulate(seed, kind=kind).problems for seed in (first, *range(1, 100)))


def test_every_bug_that_is_found_here_can_be_planted() -> None:
    assert FOUND_BY.keys() == BUGS.keys()


PLACES = {
    "join", "_join", "_run", "_beat", "_acquire", "_start", "_give_back", "_give_back_next", "leave", "drain",
    "_leave_store", "gain", "lose", "save_stopped", "_save_last", "save", "_stop_agent", "aclose", "detach",
}  # fmt: skip
"""Functions that gain or lose queues. A silo waits in each of them at some time."""


@pytest.mark.long
@pytest.mark.hypothesis
def test_nothing_is_lost_wherever_a_silo_is_killed() -> None:
    places = recorded("planned", 11) | recorded("pauses", 3)
    stood = hit(site for way in places.values() for site in way)
    assert {each.function for each in stood} >= PLACES
    for crash in chosen(places, examples(30, quick=6)):
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
