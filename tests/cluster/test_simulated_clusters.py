"""Clusters in virtual time: whatever happens to silos, network and store, nothing is lost, skipped or served by two.

A failure says its kind and seed: `simulate(seed, kind=kind)` repeats it exactly. `make sim` runs many more.
"""
# pyright: reportPrivateUsage=false

import asyncio
import logging
from typing import Any

import pytest

from headrace.balancer.membership import ClusterOptions, Membership
from headrace.streams import StorageError
from headrace.streams.cluster import SiloRecord
from tests.cluster.memory_store import MemoryStore
from tests.cluster.planted import BUGS, planted
from tests.cluster.simulated import KINDS, simulate
from tests.virtual_time import virtual_time

FOUND_BY = {
    "no fencing": "pauses",
    "release before drain": "planned",
    "checkpoint of the maximum": "crashes",
    "lease by the wall clock": "outages",
    "start from what was known": "crashes",
    "done when handed out": "crashes",
}


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_skipped_and_each_queue_has_one_owner(kind: str) -> None:
    for seed in range(1, 11):
        world = simulate(seed, kind=kind)
        assert not world.problems, f"{kind}/{seed}\n" + "\n".join(world.history)


@pytest.mark.parametrize("kind", ["planned", "crashes"])
def test_it_is_the_same_on_the_real_store(kind: str) -> None:
    world = simulate(1, kind=kind, real=True)
    assert not world.problems, "\n".join(world.history)


def test_a_seed_always_gives_the_same_history() -> None:
    assert simulate(7).history == simulate(7).history


@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_planted_bug_is_found(bug: str) -> None:
    """All but those that take hundreds of clusters."""
    with planted(bug):
        assert any(simulate(seed, kind=FOUND_BY[bug]).problems for seed in range(1, 100))


def test_every_bug_that_is_found_here_can_be_planted() -> None:
    assert FOUND_BY.keys() < BUGS.keys()


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

    async def join(self, *args: Any) -> SiloRecord:
        me = await self._store.join(*args)
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
    await store.bury(membership.me)
    store.losing = 2
    await asyncio.sleep(10)
    assert not membership.superseded.done()
    assert membership.held, "it serves its queue again"
    await membership.leave()
