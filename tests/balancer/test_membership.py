"""A silo's membership when answers come late and when the store fails."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from headrace import StorageError, Unavailable
from headrace.balancer.balancers import lease_count
from headrace.balancer.cluster_options import ClusterOptions
from headrace.balancer.membership import Membership
from headrace.balancer.placement import Balancer, Placement
from headrace.streams.cluster import LIVING, SiloRecord, SiloState
from tests.cluster.memory_store import MemoryStore
from tests.simulation.virtual_time import SimulatedLoop, virtual_time

QUEUES = 2


class Owner:
    """Notes which queues come and go."""

    queues = QUEUES

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []
        self.fails = False

    async def gain(self, queue: int, epoch: int, term: Any) -> None:
        self.notes.append((f"gain {epoch}", queue))

    async def lose(self, queue: int, drain_s: float) -> None:
        if self.fails:
            raise StorageError("the store is away")
        self.notes.append(("lose", queue))

    def cut(self, queue: int) -> None:
        self.notes.append(("cut", queue))


class Peers:
    async def reach(self, silo: SiloRecord) -> bool:
        return True


class Store:
    """A store whose answers to heartbeats can be held back, and whose calls fail by name."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.answers: asyncio.Event | None = None
        self.failing: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)

        async def call(*args: Any, **options: Any) -> Any:
            if name in self.failing:
                raise StorageError(f"{name}: the store is away")
            answer = await method(*args, **options)
            if name == "beat" and self.answers is not None:
                await self.answers.wait()
            return answer

        return call


class Member:
    """The only silo of a cluster, with all its queues once `joined`."""

    def __init__(self, balancer: Balancer = lease_count) -> None:
        self.loop: Any = asyncio.get_running_loop()
        self.store = Store(MemoryStore().cluster(lambda _: round(self.loop.time() * 1e6)))
        self.owner = Owner()
        self.options = ClusterOptions(drain_s=2.0, balancer=balancer)
        self.membership = Membership(
            self.store,  # type: ignore[arg-type]
            "a", address="", owners={"p": self.owner}, peers=Peers(), options=self.options,
        )  # fmt: skip

    async def joined(self) -> None:
        await self.membership.join()
        await asyncio.sleep(self.options.period_s)
        assert self.owner.notes == [("gain 1", 0), ("gain 1", 1)]
        self.owner.notes.clear()

    async def leases(self) -> list[str]:
        """The owner of each queue, as the store has it."""
        return [lease.owner for lease in (await self.store.view()).leases]

    async def state(self) -> SiloState:
        (silo,) = (await self.store.view()).silos
        return silo.state


def stand_still(seconds: float) -> None:
    """As a process that is stopped: time passes in the middle of a turn of the loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    loop.stand_still(seconds)


@virtual_time
async def test_a_lease_that_was_over_when_its_renewal_was_answered_is_cut_and_granted_anew() -> None:
    member = Member()
    await member.joined()
    member.store.answers = asyncio.Event()
    await asyncio.sleep(1.5 * member.options.period_s)  # a heartbeat waits for its answer
    (until,) = {held.until for held in member.membership.held}
    member.store.answers.set()  # from here on the answer waits for its turn
    stand_still(until + 0.01 - member.loop.time())
    await asyncio.sleep(3 * member.options.period_s)
    assert member.owner.notes == [("cut", 0), ("cut", 1), ("gain 2", 0), ("gain 2", 1)]
    await member.membership.leave()


@virtual_time
async def test_a_lease_whose_grant_was_answered_too_late_is_not_served() -> None:
    member = Member()
    acquire = member.store.target.acquire

    async def acquire_late(*args: Any) -> Any:
        granted = await acquire(*args)
        stand_still(member.options.lease_s)
        member.store.target.acquire = acquire
        return granted

    member.store.target.acquire = acquire_late
    await member.membership.join()
    await asyncio.sleep(3 * member.options.period_s)
    assert member.owner.notes == [("gain 2", 0), ("gain 2", 1)]
    await member.membership.leave()


@virtual_time
async def test_the_reasons_of_unserved_queues_cost_one_placement_and_do_not_change_with_time() -> None:
    placements: list[Placement] = []

    def counting(placement: Placement) -> Mapping[int, str]:
        placements.append(placement)
        return lease_count(placement)

    member = Member(counting)
    await member.joined()
    await asyncio.sleep(member.options.period_s)  # a heartbeat that sees the leases
    member.store.failing.add("beat")
    costs: list[int] = []
    found: list[list[str]] = []
    for queues in ([("p", 0)], [("p", 0), ("p", 1)]):
        before = len(placements)
        found.append([reason for reason, _ in member.membership.why_unserved(queues)])
        costs.append(len(placements) - before)
        stand_still(1.0)
    reason = "silo 'a' has its lease, for up to 8 s, and does not serve it"
    assert found == [[reason], [reason, reason]]
    assert costs[0] == costs[1]
    await member.membership.leave()


@pytest.mark.parametrize("call", ["leaving", "release"])
def test_a_drain_whose_calls_fail_says_so_and_is_done_later(call: str) -> None:
    @virtual_time
    async def drains() -> None:
        member = Member()
        await member.joined()
        member.store.failing = {call, "view"}
        with pytest.raises(Unavailable, match="silo 'a' is not drained: its cluster's store does not answer"):
            await member.membership.drain()
        assert not member.membership.drained
        member.store.failing = set()
        await asyncio.sleep(2 * member.options.period_s)
        assert member.membership.drained
        assert await member.leases() == ["", ""]
        assert await member.state() is SiloState.LEAVING
        await member.membership.leave()

    drains()


@virtual_time
async def test_a_silo_renews_its_leases_while_the_store_does_not_record_that_it_leaves() -> None:
    member = Member()
    await member.joined()
    member.owner.fails = True  # its queues cannot be given back yet
    member.store.failing = {"leaving"}
    with pytest.raises(Unavailable):
        await member.membership.drain()
    await asyncio.sleep(2 * member.options.lease_s)
    assert member.owner.notes == []
    assert await member.leases() == ["a", "a"]
    member.owner.fails, member.store.failing = False, set()
    await member.membership.leave()


@virtual_time
async def test_a_silo_without_queues_sends_no_heartbeat_until_the_store_has_recorded_that_it_leaves() -> None:
    """The others would give it queues."""
    member = Member()
    await member.joined()
    member.store.failing = {"leaving"}
    with pytest.raises(Unavailable):
        await member.membership.drain()
    assert not member.membership.held
    (before,) = (await member.store.view()).silos
    await asyncio.sleep(3 * member.options.period_s)
    (after,) = (await member.store.view()).silos
    assert after.heartbeats == before.heartbeats
    member.store.failing = set()
    await member.membership.leave()


@virtual_time
async def test_a_silo_that_ends_while_queues_cannot_be_saved_says_so() -> None:
    member = Member()
    await member.joined()
    member.owner.fails = True
    with pytest.raises(Unavailable, match=r"ends without having saved all progress of queues 0, 1 of 'p'"):
        await member.membership.leave()
    assert member.owner.notes == [("cut", 0), ("cut", 1)]


@virtual_time
async def test_a_silo_that_ends_while_the_store_fails_for_a_moment_tells_it_afterwards() -> None:
    member = Member()
    await member.joined()
    member.store.failing = {"leaving", "release", "view", "beat"}
    member.loop.call_later(1.0, member.store.failing.clear)
    await member.membership.leave()
    assert await member.leases() == ["", ""]
    assert await member.state() not in LIVING
