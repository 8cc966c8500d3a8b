"""The next steps of one silo towards the owners that the balancer wants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, cast

from headrace.balancer.desired_owners import DesiredOwners
from headrace.balancer.held_leases import HeldLease
from headrace.balancer.queue_moves import MovePlan, plan_moves
from headrace.streams.cluster import ClusterView, Lease


def lease(queue: int, owner: str = "a", home: str = "a") -> Lease:
    return Lease("p", queue, owner, incarnation=1, epoch=1, renewals=1, home=home)


def held(queue: int, *, started: bool = True, moving: bool = False) -> HeldLease:
    one = HeldLease(lease(queue), 1.0)
    one.started, one.moving = started, cast("asyncio.Task[Any]", object()) if moving else None
    return one


def plan(
    leases: Iterable[Lease], holding: Iterable[HeldLease], now: Mapping[int, str], over: Iterable[int] = ()
) -> MovePlan:
    """The plan of silo a. Each queue's home is the silo that should have it now."""
    view = ClusterView(0, [], [*leases], frozenset(("p", queue) for queue in over))
    wanted = {("p", queue): silo for queue, silo in now.items()}
    mine = {(one.provider, one.queue): one for one in view.leases if one.owner == "a"}
    return plan_moves("a", mine, holding, view, DesiredOwners(wanted, wanted))


NOTHING = MovePlan([], [], [], [], {})


def test_queues_at_their_desired_owners_stay() -> None:
    assert plan([lease(0), lease(1, "b", "b")], [held(0)], {0: "a", 1: "b"}) == NOTHING


def test_a_queue_of_another_silo_is_given_back_and_gets_its_home() -> None:
    mine = held(0)
    assert plan([lease(0)], [mine], {0: "b"}) == NOTHING._replace(give_back=[mine], homes={("p", 0): "b"})


def test_a_queue_whose_start_failed_is_started_again() -> None:
    mine = held(0, started=False)
    assert plan([lease(0)], [mine], {0: "a"}) == NOTHING._replace(start=[mine])


def test_a_move_in_progress_is_completed() -> None:
    steps = plan([lease(0), lease(1)], [held(0, moving=True), held(1, started=False, moving=True)], {0: "b", 1: "a"})
    assert (steps.give_back, steps.start) == ([], [])


def test_free_queues_are_acquired_in_order_and_others_are_not() -> None:
    leases = [lease(2, "b", "a"), lease(1, "b", "a"), lease(0, "")]
    assert plan(leases, [], {0: "a", 1: "a", 2: "a", 3: "a"}, over=[1]).acquire == [("p", 0), ("p", 1), ("p", 3)]


def test_a_lease_that_is_not_held_is_acquired_again_or_released() -> None:
    steps = plan([lease(0), lease(1)], [], {0: "a", 1: "b"})
    assert (steps.acquire, steps.release) == ([("p", 0)], [lease(1)])
