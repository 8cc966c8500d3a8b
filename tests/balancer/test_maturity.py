"""Who counts, and whole rolling restarts played through the balancers: no queue moves more than away and back."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.balancer import (
    Balancer,
    Placement,
    average,
    best_fit_fixed,
    best_fit_live,
    homes,
    lease_count,
    ring,
)
from headrace.balancer.maturity import EligibleSilos, eligible_silos
from headrace.streams.cluster import SiloRecord, SiloState
from tests.random_examples import examples

NOW_S, MATURITY_S, SILENT_S = 10_000, 30, 10


def silo(name: str, joined_s: float, seen_s: float = 0, state: SiloState = SiloState.ACTIVE, serves: str = "main"):
    """Times are seconds before now."""
    joined_us, seen_us = (int((NOW_S - ago) * 1_000_000) for ago in (joined_s, seen_s))
    return SiloRecord(name, 1, "", [serves], state, joined_us, seen_us)


def stand(*silos: SiloRecord, known: Sequence[str] = (), maturity_s: float = MATURITY_S) -> EligibleSilos:
    now_us = NOW_S * 1_000_000
    return eligible_silos(silos, "main", now_us, known=known, maturity_s=maturity_s, silent_s=SILENT_S)


def test_a_newcomer_waits_until_it_is_mature():
    assert stand(silo("a", 900), silo("b", 29)) == EligibleSilos(["a"], [], ["b"])
    assert stand(silo("a", 900), silo("b", 30)) == EligibleSilos(["a", "b"], [], [])


def test_silos_that_start_a_cluster_together_do_not_wait():
    assert stand(silo("a", 0)).members == ["a"]
    assert stand(silo("a", 20), silo("b", 1)).members == ["a", "b"]


def test_counted_silo_still_counts_when_the_first_one_is_mature():
    assert stand(silo("a", 31), silo("b", 2)).members == ["a", "b"]
    assert stand(silo("a", 31), silo("b", 1)).members == ["a"]


def test_new_silos_count_if_there_are_no_others():
    gone = silo("a", 900, 12, SiloState.DEAD)
    assert stand(gone, silo("c", 2), silo("b", 3)) == EligibleSilos(["b", "c"], ["a"], [])


def test_a_silo_that_restarts_is_no_newcomer():
    assert stand(silo("a", 900), silo("b", 2), known=["a", "b"]).members == ["a", "b"]


@pytest.mark.parametrize("state", [SiloState.LEFT, SiloState.DEAD, SiloState.LEAVING])
def test_silo_gone_for_a_short_time_is_away_and_then_forgotten(state: SiloState):
    assert stand(silo("a", 900), silo("b", 900, 29, state)) == EligibleSilos(["a"], ["b"], [])
    assert stand(silo("a", 900), silo("b", 900, 30, state)) == EligibleSilos(["a"], [], [])


def test_silo_silent_for_longer_than_a_lease_is_away_before_it_is_declared_dead():
    assert stand(silo("a", 900), silo("b", 900, 10)).members == ["a", "b"]
    assert stand(silo("a", 900), silo("b", 900, 11)) == EligibleSilos(["a"], ["b"], [])


def test_nothing_is_kept_for_a_newcomer_that_goes():
    assert stand(silo("a", 900), silo("b", 25, 5, SiloState.LEFT)) == EligibleSilos(["a"], [], [])


def test_only_silos_that_can_serve_the_provider_count():
    others = silo("b", 900, serves="other"), silo("c", 900, 12, SiloState.DEAD, serves="other")
    assert stand(silo("a", 900), *others) == EligibleSilos(["a"], [], [])


def test_without_maturity_all_silos_count_at_once():
    assert stand(silo("a", 900), silo("b", 0), maturity_s=0).members == ["a", "b"]
    assert stand(silo("a", 900), silo("b", 900, 1, SiloState.LEFT), maturity_s=0) == EligibleSilos(["a"], [], [])


# -- whole clusters --------------------------------------------------------------------------------------------------


class Cluster:
    """Silos in seconds of virtual time. What the balancer says is carried out within the second."""

    def __init__(self, balancer: Balancer, queues: int, fixed: Sequence[str]) -> None:
        self.balancer, self.queues, self.fixed = balancer, range(queues), fixed
        self.now_s, self.incarnations = 1_000, 0
        self.silos: dict[str, SiloRecord] = {}
        self.dead: set[str] = set()
        self.owners: Mapping[int, str] = {}
        self.homes: Mapping[int, str] = {}
        self.moves: Counter[int] = Counter()

    def start(self, name: str) -> None:
        self.incarnations += 1
        now_us = self.now_s * 1_000_000
        self.silos[name] = SiloRecord(name, self.incarnations, "", ["main"], SiloState.ACTIVE, now_us, now_us)
        self.dead.discard(name)

    def change(self, name: str, state: SiloState) -> None:
        self.silos[name] = self.silos[name]._replace(state=state)
        if state is SiloState.LEFT:
            self.dead.add(name)

    def kill(self, name: str) -> None:
        self.dead.add(name)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            for name in self.silos.keys() - self.dead:
                self.silos[name] = self.silos[name]._replace(heartbeat_at_us=self.now_s * 1_000_000)
            self.balance()

    def balance(self) -> None:
        now_us, known = self.now_s * 1_000_000, set(self.homes.values())
        stand = eligible_silos(
            [*self.silos.values()], "main", now_us, known=known, maturity_s=MATURITY_S, silent_s=SILENT_S
        )
        placement = Placement(
            stand.members, self.queues, self.owners, self.homes, stand.away, stand.newcomers, self.fixed
        )
        owners = {**self.owners, **self.balancer(placement)}
        self.homes = homes(self.balancer, placement)
        self.moves.update(queue for queue in self.owners if owners[queue] != self.owners[queue])
        self.owners = owners


Plan = Sequence[tuple[bool, int, int, int]]
restarts = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 28), st.integers(0, 40)), min_size=6)
"""Killed or asked to leave; how long it is leaving; for how long it is down; how long the next one waits."""
churn = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=6)


@pytest.mark.parametrize(
    "balancer", [lease_count, average, ring, best_fit_live, best_fit_fixed], ids=lambda balancer: balancer.__name__
)
@settings(max_examples=examples(20))
@given(silos=st.integers(2, 6), queues=st.integers(0, 24), before=churn, plan=restarts, listed=st.booleans())
def test_a_rolling_restart_moves_each_queue_away_and_back(
    balancer: Balancer, silos: int, queues: int, before: Sequence[tuple[str, bool]], plan: Plan, listed: bool
):
    """Whatever came before it, one silo after the other, each back before the next one goes."""
    names = [f"silo-{number}" for number in range(silos)]
    cluster = Cluster(balancer, silos + queues, [*names, "silo-9"] if listed or balancer is best_fit_fixed else ())
    for name in names:
        cluster.start(name)
        cluster.run(1)
    for name, comes in before:
        cluster.start(name) if comes or name not in cluster.silos else cluster.change(name, SiloState.LEFT)
        cluster.run(MATURITY_S + 1)
    # A silo without queues counts as new when it restarts.
    at_first, living = cluster.owners, (cluster.silos.keys() - cluster.dead) & set(cluster.homes.values())
    cluster.moves.clear()
    for name, (killed, leaving_s, down_s, pause_s) in zip(sorted(living), itertools.cycle(plan)):
        cluster.kill(name) if killed else cluster.change(name, SiloState.LEAVING)
        cluster.run(leaving_s)
        if not killed:
            cluster.change(name, SiloState.LEFT)
        cluster.run(min(down_s, MATURITY_S - 2 - (leaving_s if killed else 0)))
        cluster.start(name)
        cluster.run(1 + pause_s)
    assert max(cluster.moves.values(), default=0) <= 2
    assert cluster.owners == at_first


def test_with_maturity_too_short_for_the_restart_queues_move_more_often():
    """What the maturity is for: the same restart, but each silo stays away for longer than that."""
    cluster = Cluster(lease_count, 6, ())
    for name in "abcd":
        cluster.start(name)
    cluster.run(2 * MATURITY_S)
    for name in "abcd":
        cluster.change(name, SiloState.LEFT)
        cluster.run(MATURITY_S + 5)
        cluster.start(name)
        cluster.run(5)
    assert max(cluster.moves.values()) > 2


def test_a_silo_that_joins_takes_its_share_once_it_is_mature():
    cluster = Cluster(lease_count, 12, ())
    for name in "abc":
        cluster.start(name)
    cluster.run(2 * MATURITY_S)
    cluster.start("d")
    cluster.run(MATURITY_S - 1)
    assert not cluster.moves
    cluster.run(1)
    assert Counter(cluster.owners.values()) == dict.fromkeys("abcd", 3)
    assert cluster.moves.total() == 3


def test_the_lent_queues_of_a_silo_that_does_not_return_stay():
    cluster = Cluster(lease_count, 12, ())
    for name in "abcd":
        cluster.start(name)
    cluster.run(2 * MATURITY_S)
    cluster.kill("b")
    cluster.run(SILENT_S + 1)
    assert cluster.moves.total() == 3
    cluster.run(3 * MATURITY_S)
    assert cluster.moves.total() == 3
    assert Counter(cluster.owners.values()) == dict.fromkeys("acd", 4)
