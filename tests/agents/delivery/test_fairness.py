"""Fair scheduling: turns by virtual time, in a world whose clock is the work itself. Times are whole milliseconds."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.agents.delivery.fairness import TURN_COST_S, Actor, FairQueue, by_virtual_time

QUOTA = 5


class Mailbox(Actor):
    __slots__ = ("done", "free_at", "items", "longest_wait", "turns")

    def __init__(self, name: str, items: Iterable[int] = ()) -> None:
        super().__init__(name)
        self.items: deque[int] = deque()
        self.items.extend(items)
        self.done = 0
        self.free_at = 0
        self.longest_wait = 0
        self.turns: list[tuple[int, int]] = []

    def served(self, since: int = 0, until: int = 1 << 60) -> int:
        return sum(end - start for start, end in self.turns if since <= start < until)


class Edge:
    """One worker that runs turns as the delivery edge does: for a quota, at least one item, none cut short."""

    def __init__(self, order: Callable[[Actor], float] = by_virtual_time) -> None:
        self.queue: FairQueue[Mailbox] = FairQueue(order)
        self.now = 0

    def add(self, name: str, items: Iterable[int]) -> Mailbox:
        actor = Mailbox(name, items)
        actor.free_at = self.now
        self.queue.schedule(actor)
        return actor

    def backlogged(self, name: str, item: int) -> Mailbox:
        return self.add(name, [item] * 20_000)

    def turn(self) -> Mailbox | None:
        actor = self.queue.next()
        if actor is None:
            return None
        start = self.now
        actor.longest_wait = max(actor.longest_wait, start - actor.free_at)
        while actor.items:
            self.now += actor.items.popleft()
            actor.done += 1
            if self.now - start >= QUOTA:
                break
        actor.turns.append((start, self.now))
        actor.free_at = self.now
        if actor.items:
            self.queue.schedule(actor)
        self.queue.done(actor, self.now - start)
        return actor

    def run(self, until: int) -> None:
        while self.now < until and self.turn():
            pass


def names(edge: Edge, turns: int) -> list[str]:
    return [actor.name for actor in itertools.islice(iter(edge.turn, None), turns) if actor]


# -- turns -----------------------------------------------------------------------------------------------------------


def test_backlogged_actors_alternate_after_each_quota():
    edge = Edge()
    first, second = edge.backlogged("first", 1), edge.backlogged("second", 1)
    edge.run(20)
    assert first.turns == [(0, 5), (10, 15)]
    assert second.turns == [(5, 10), (15, 20)]


def test_a_turn_takes_at_least_one_item_and_finishes_it():
    edge = Edge()
    slow, light = edge.backlogged("slow", 50), edge.backlogged("light", 1)
    edge.run(51)
    assert slow.turns == [(0, 50)]
    assert light.turns == [(50, 55)]


def test_the_light_one_catches_up_with_what_the_slow_one_took():
    edge = Edge()
    edge.backlogged("slow", 50)
    edge.backlogged("light", 1)
    assert names(edge, 12) == ["slow", *["light"] * 10, "slow"]


def test_equal_ones_run_in_the_order_they_came():
    edge = Edge()
    for name in "dacb":
        edge.backlogged(name, 5)
    assert names(edge, 8) == [*"dacb", *"dacb"]


def test_turns_too_short_to_measure_starve_nobody():
    queue: FairQueue[Actor] = FairQueue()
    for name in ("quick", "other"):
        queue.schedule(Actor(name))
    seen: Counter[str] = Counter()
    for cost in (0.0, -1.0) * 50:
        actor = queue.next()
        assert actor
        seen[actor.name] += 1
        queue.schedule(actor)
        queue.done(actor, cost)
    assert seen == {"quick": 50, "other": 50}


def test_nobody_waits_in_an_empty_queue():
    queue: FairQueue[Actor] = FairQueue()
    assert queue.next() is None
    assert len(queue) == queue.running == 0


def test_done_without_a_turn_is_an_error():
    queue: FairQueue[Actor] = FairQueue()
    actor = Actor("a")
    queue.schedule(actor)
    with pytest.raises(RuntimeError, match="no turn to end"):
        queue.done(actor, 1.0)


# -- one turn at a time, none lost -----------------------------------------------------------------------------------


def test_an_actor_scheduled_often_gets_one_turn():
    queue: FairQueue[Actor] = FairQueue()
    actor = Actor("a")
    assert [queue.schedule(actor) for _ in range(3)] == [True, False, False]
    assert len(queue) == 1
    assert queue.next() is actor
    assert queue.next() is None
    assert not queue.done(actor, 1.0)
    assert queue.next() is None


def test_an_actor_scheduled_while_it_runs_runs_again_and_not_at_once():
    queue: FairQueue[Actor] = FairQueue()
    actor = Actor("a")
    queue.schedule(actor)
    assert queue.next() is actor
    assert [queue.schedule(actor) for _ in range(3)] == [False, False, False]
    assert queue.next() is None
    assert queue.done(actor, 1.0)
    assert queue.next() is actor
    assert not queue.done(actor, 1.0)


def test_several_workers_run_different_actors():
    queue: FairQueue[Actor] = FairQueue()
    actors = [Actor(name) for name in "abc"]
    for actor in actors:
        queue.schedule(actor)
    assert [queue.next() for _ in range(4)] == [*actors, None]
    assert (len(queue), queue.running) == (0, 3)


def held(queue: FairQueue[Actor]) -> int:
    return len(queue._heap)  # pyright: ignore[reportPrivateUsage]


# -- forgetting ------------------------------------------------------------------------------------------------------


def test_a_forgotten_actor_never_runs():
    queue: FairQueue[Actor] = FairQueue()
    waiting, running, kept = (Actor(name) for name in ("waiting", "running", "kept"))
    for actor in (running, waiting, kept):
        queue.schedule(actor)
    assert queue.next() is running
    queue.schedule(running)
    for actor in (waiting, running):
        queue.forget(actor)
        queue.forget(actor)
    assert (len(queue), queue.running) == (1, 0)
    assert not queue.done(running, 1.0)
    assert not queue.schedule(waiting)
    assert [queue.next(), queue.next()] == [kept, None]


def test_the_queue_holds_no_actor_that_was_forgotten():
    queue: FairQueue[Actor] = FairQueue()
    kept = [Actor(f"kept {n}") for n in range(10)]
    for actor in kept:
        queue.schedule(actor)
    for n in range(1_000):
        gone = Actor(f"gone {n}")
        queue.schedule(gone)
        queue.forget(gone)
        assert held(queue) <= 2 * len(kept)
    assert [queue.next() for _ in range(11)] == [*kept, None]


# -- the orders, with the numbers that were measured for QMQ's -------------------------------------------------------


def by_least_total(actor: Actor) -> float:
    return actor.served_s


def by_last_start(actor: Actor) -> float:
    return actor.turn


def newcomer_at_ten_seconds(order: Callable[[Actor], float]) -> tuple[list[Mailbox], Mailbox, Mailbox]:
    """Four light actors and a slow one from the start, a light newcomer after 10 s, all with a backlog; until 16 s."""
    edge = Edge(order)
    light = [edge.backlogged(f"light {n}", 1) for n in range(4)]
    slow = edge.backlogged("slow", 50)
    edge.run(10_000)
    newcomer = edge.backlogged("newcomer", 1)
    edge.run(16_000)
    return light, slow, newcomer


def served_in_window(actors: Iterable[Mailbox]) -> list[int]:
    return [actor.served(10_000, 12_000) for actor in actors]


def test_by_least_total_a_newcomer_starves_everyone():
    light, slow, newcomer = newcomer_at_ten_seconds(by_least_total)
    assert served_in_window([*light, slow, newcomer]) == [0, 0, 0, 0, 0, 2000]
    assert {actor.longest_wait for actor in light} == {2065}
    assert slow.longest_wait == 2200


def test_by_last_start_the_expensive_one_takes_two_thirds():
    light, slow, newcomer = newcomer_at_ten_seconds(by_last_start)
    assert served_in_window([*light, slow, newcomer]) == [135, 135, 135, 135, 1350, 135]
    assert {actor.longest_wait for actor in [*light, newcomer]} == {70}


def test_by_virtual_time_newcomer_expensive_and_steady_ones_get_equal_shares():
    light, slow, newcomer = newcomer_at_ten_seconds(by_virtual_time)
    shares = served_in_window([*light, slow, newcomer])
    assert shares == [330, 330, 330, 330, 350, 330]
    assert all(0.9 <= share / (2000 / 6) <= 1.1 for share in shares)
    assert {actor.longest_wait for actor in [*light, newcomer]} == {70}
    assert slow.longest_wait == 250


def test_one_that_slept_has_no_claim_on_the_past():
    edge = Edge()
    sleeper, steady = edge.add("sleeper", [1]), edge.backlogged("steady", 1)
    edge.run(1_000)
    sleeper.items.extend([1] * 1_000)
    edge.queue.schedule(sleeper)
    edge.run(1_100)
    assert sleeper.served(1_000) == steady.served(1_000) == 50


def test_time_that_an_actor_took_while_no_other_waited_is_no_debt():
    edge = Edge()
    early = edge.add("early", [1] * 1_000)
    edge.run(2_000)
    edge.backlogged("other", 1)
    early.items.extend([1] * 1_000)
    edge.queue.schedule(early)
    edge.run(1_100)
    assert early.served(1_000) == 50


# -- promises for any load -------------------------------------------------------------------------------------------

item_costs = st.lists(st.integers(1, 80), min_size=1, max_size=6)


def any_backlog(edge: Edge, loads: list[list[int]], turns: int) -> list[Mailbox]:
    """An actor for each list of item costs, repeated without end; the others run on until each had its turns."""
    actors = [edge.add(str(n), itertools.islice(itertools.cycle(load), turns * QUOTA)) for n, load in enumerate(loads)]
    for _ in range(turns):
        edge.turn()
    return actors


def longest_turn(actor: Mailbox) -> int:
    return max((end - start for start, end in actor.turns), default=0)


@given(st.lists(item_costs, min_size=2, max_size=6), st.integers(20, 120))
def test_backlogged_actors_are_served_alike_to_within_a_turn_of_each(loads: list[list[int]], turns: int):
    actors = any_backlog(Edge(), loads, turns)
    for one, other in itertools.combinations(actors, 2):
        assert abs(one.served() - other.served()) <= max(longest_turn(one), longest_turn(other))


@given(st.lists(item_costs, min_size=2, max_size=6), st.integers(20, 120))
def test_a_backlogged_actor_waits_at_most_its_own_last_turn_and_a_turn_of_the_other_for_each_other_one(
    loads: list[list[int]], turns: int
):
    actors = any_backlog(Edge(), loads, turns)
    for actor in actors:
        others = sum(longest_turn(other) for other in actors if other is not actor)
        for (start, end), (following, _) in itertools.pairwise(actor.turns):
            assert following - end <= (len(actors) - 1) * (end - start) + others


@given(st.lists(item_costs, min_size=1, max_size=6), st.integers(0, 120), item_costs)
def test_a_newcomer_waits_at_most_a_turn_of_each_other_one(loads: list[list[int]], turns: int, late: list[int]):
    edge = Edge()
    actors = any_backlog(edge, loads, turns)
    newcomer = edge.add("newcomer", late)
    while not newcomer.turns:
        edge.turn()
    assert newcomer.longest_wait <= sum(longest_turn(actor) for actor in actors)
    assert newcomer.longest_wait <= len(actors) * (QUOTA + 80)


@settings(stateful_step_count=80)
class Turns(RuleBasedStateMachine):
    """Any order of calls: one turn at a time, and each wish is granted unless forgotten."""

    actors = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Actor] = FairQueue()
        self.all = [Actor(str(n)) for n in range(5)]
        self.wanted: set[Actor] = set()
        self.running: set[Actor] = set()
        self.forgotten: set[Actor] = set()
        self.now = 0.0

    def waiting(self) -> set[Actor]:
        return self.wanted - self.running

    @rule(n=actors)
    def schedule(self, n: int) -> None:
        actor = self.all[n]
        before = self.waiting()
        put = self.queue.schedule(actor)
        if actor not in self.forgotten:
            self.wanted.add(actor)
        assert put == (actor in self.waiting() - before)

    @rule()
    def next(self) -> None:
        actor = self.queue.next()
        if actor is None:
            assert not self.waiting()
            return
        assert actor in self.waiting()
        self.wanted.discard(actor)
        self.running.add(actor)

    @rule(n=actors, cost=st.sampled_from([0.0, 0.001, 0.005, 0.5]))
    def done(self, n: int, cost: float) -> None:
        actor = self.all[n]
        if actor in self.running:
            self.running.discard(actor)
            virtual = actor.virtual_s
            assert self.queue.done(actor, cost) == (actor in self.waiting())
            assert actor.virtual_s >= virtual + max(cost, TURN_COST_S)

    @rule(n=actors)
    def forget(self, n: int) -> None:
        actor = self.all[n]
        self.queue.forget(actor)
        self.forgotten.add(actor)
        self.wanted.discard(actor)
        self.running.discard(actor)

    @rule(n=actors)
    def replace(self, n: int) -> None:
        if self.all[n] in self.forgotten:
            self.forgotten.discard(self.all[n])
            self.all[n] = Actor(str(n))

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.queue) == len(self.waiting())
        assert self.queue.running == len(self.running)
        assert held(self.queue) <= 2 * len(self.all)

    @invariant()
    def the_present_never_goes_back(self) -> None:
        assert self.queue.virtual_s >= self.now
        self.now = self.queue.virtual_s

    @invariant()
    def nobody_waits_in_the_past(self) -> None:
        assert all(actor.virtual_s >= self.queue.virtual_s for actor in self.waiting())


TestTurns = Turns.TestCase
