"""Balancers: every queue once, even, few moves, agreed upon; the golden vectors of Orleans' best fit."""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import InvalidArgument, NotFound
from headrace.balancer import (
    Balancer,
    Placement,
    average,
    balancer_names,
    best_fit_fixed,
    best_fit_live,
    find_balancer,
    homes,
    lease_count,
    ring,
    static,
)
from tests.random_examples import examples

COVERING: Sequence[Balancer] = (average, best_fit_live, lease_count, ring)
"""Those which give out every queue as long as any silo is there."""
EVEN: Sequence[Balancer] = (average, best_fit_live, lease_count)
WITHOUT_HISTORY: Sequence[Balancer] = (average, best_fit_fixed, best_fit_live, ring, static)
EVERY: Sequence[Balancer] = (*WITHOUT_HISTORY, lease_count)

few = settings(max_examples=examples(40))
NAMES = [f"silo-{number}" for number in range(12)]


def by_silo(answer: Mapping[int, str]) -> dict[str, list[int]]:
    mine: dict[str, list[int]] = {}
    for queue, silo in sorted(answer.items()):
        mine.setdefault(silo, []).append(queue)
    return mine


def in_order(expected: Mapping[str, list[int]]) -> dict[str, list[int]]:
    return {silo: sorted(queues) for silo, queues in expected.items()}


def counts(answer: Mapping[int, str], silos: Sequence[str]) -> list[int]:
    taken = Counter(answer.values())
    return [taken[silo] for silo in silos]


def moved(before: Mapping[int, str], after: Mapping[int, str]) -> set[int]:
    return {queue for queue in before if after.get(queue) != before[queue]}


def each(balancers: Sequence[Balancer]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("balancer", balancers, ids=lambda balancer: balancer.__name__)


@st.composite
def placements(draw: st.DrawFn, *, with_list: bool = True) -> Placement:
    """Some silos there, some away, some new. Any queue may have had any owner: a silo there or away, or a stranger.

    All members are on the list.
    """
    silos = draw(st.permutations(NAMES))
    there, away, new = draw(st.integers(1, 6)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    queues = draw(st.lists(st.integers(0, 80), unique=True, max_size=40))
    anybody = st.dictionaries(st.sampled_from(queues or [0]), st.sampled_from([*silos[: there + away], "stranger"]))
    return Placement(
        members=silos[:there],
        queues=queues,
        owners=draw(anybody),
        homes=draw(anybody),
        away=silos[there : there + away],
        newcomers=silos[there + away : there + away + new],
        fixed=silos[: draw(st.integers(there, len(silos)))] if with_list and draw(st.booleans()) else (),
        mapping=draw(anybody),
    )


# -- what all promise ------------------------------------------------------------------------------------------------


@each(EVERY)
@few
@given(placement=placements())
def test_only_silos_that_are_there_get_queues_and_only_queues_there_are(balancer: Balancer, placement: Placement):
    answer = balancer(placement)
    assert set(answer) <= set(placement.queues)
    assert set(answer.values()) <= {*placement.members, *placement.newcomers}


@each(COVERING)
@few
@given(placement=placements())
def test_every_queue_has_an_owner(balancer: Balancer, placement: Placement):
    assert set(balancer(placement)) == set(placement.queues)


@each(COVERING)
@few
@given(placement=placements(with_list=False))
def test_newcomers_take_nothing_over(balancer: Balancer, placement: Placement):
    assert set(balancer(placement).values()) <= set(placement.members)


@each(EVEN)
@few
@given(placement=placements())
def test_shares_are_within_one(balancer: Balancer, placement: Placement):
    mine = counts(balancer(placement._replace(newcomers=())), placement.members)
    assert max(mine) - min(mine) <= 1


@each(EVERY)
@few
@given(placement=placements(), random=st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_named_does_not_matter(balancer: Balancer, placement: Placement, random: Random):
    def shuffled(names: Sequence[Any]) -> Any:
        return random.sample(names, len(names))

    def reordered(given: Mapping[int, str]) -> dict[int, str]:
        return dict(shuffled(list(given.items())))

    other = Placement(
        members=shuffled(placement.members),
        queues=shuffled(placement.queues),
        owners=reordered(placement.owners),
        homes=reordered(placement.homes),
        away=shuffled(placement.away),
        newcomers=shuffled(placement.newcomers),
        fixed=shuffled(placement.fixed),
        mapping=reordered(placement.mapping),
    )
    assert balancer(other) == balancer(placement)


@each(WITHOUT_HISTORY)
@few
@given(placement=placements(), other=placements())
def test_former_owners_do_not_matter(balancer: Balancer, placement: Placement, other: Placement):
    assert balancer(placement._replace(owners=other.owners, homes=other.homes)) == balancer(placement)


@each(EVERY)
@few
@given(placement=placements())
def test_the_answer_once_carried_out_is_the_answer_again(balancer: Balancer, placement: Placement):
    answer, at_home = balancer(placement), homes(balancer, placement)
    settled = placement._replace(owners=answer, homes=at_home)
    assert balancer(settled) == answer
    assert homes(balancer, settled) == at_home


@each(EVERY)
@few
@given(placement=placements())
def test_while_a_silo_is_away_only_its_queues_are_elsewhere(balancer: Balancer, placement: Placement):
    at_home = homes(balancer, placement)
    answer = balancer(placement._replace(owners=at_home, homes=at_home))
    assert {at_home[queue] for queue in moved(at_home, answer)} <= set(placement.away)


@each(EVERY)
@few
@given(placement=placements(with_list=False))
def test_lent_queue_returns(balancer: Balancer, placement: Placement):
    at_home = homes(balancer, placement)
    lent = placement._replace(owners=at_home, homes=at_home)
    back = lent._replace(members=[*placement.members, *placement.away], away=(), owners=balancer(lent))
    assert balancer(back) == at_home


@each(EVERY)
def test_without_silos_no_queue_has_an_owner(balancer: Balancer):
    assert balancer(Placement([], range(8), mapping={0: "gone"}, fixed=["gone"], away=["gone"])) == {}
    assert balancer(Placement([], range(8))) == {}


@each((average, lease_count))
def test_a_silo_named_twice_is_refused(balancer: Balancer):
    with pytest.raises(InvalidArgument, match="'a' is named twice"):
        balancer(Placement(["a", "b"], range(4), away=["a"]))


# -- lease count -----------------------------------------------------------------------------------------------------


def fewest_moves(placement: Placement) -> int:
    """With any even shares: the larger ones go to silos that have too many."""
    held = counts({q: s for q, s in placement.owners.items() if q in placement.queues}, placement.members)
    least, more = divmod(len(placement.queues), len(placement.members))
    kept = sum(min(mine, least) for mine in held) + min(more, sum(mine > least for mine in held))
    return len(placement.queues) - kept


@few
@given(placements())
def test_lease_count_moves_as_few_as_can_be(placement: Placement):
    placement = placement._replace(homes={}, away=())
    before = {queue: placement.owners.get(queue, "") for queue in placement.queues}
    assert len(moved(before, lease_count(placement))) == fewest_moves(placement)


@given(st.integers(0, 64), st.integers(1, 8))
def test_lease_count_moves_one_share_when_a_silo_joins_or_leaves(queues: int, silos: int):
    few, many = NAMES[:silos], NAMES[: silos + 1]
    before = lease_count(Placement(few, range(queues)))
    after = lease_count(Placement(many, range(queues), before))
    assert {after[queue] for queue in moved(before, after)} <= {many[-1]}
    assert len(moved(before, after)) == queues // (silos + 1)
    again = lease_count(Placement(few, range(queues), after))
    assert {after[queue] for queue in moved(after, again)} <= {many[-1]}


def test_lease_count_plays_orleans_cluster_of_six_queues():
    """4 silos: 1 to 2 each; one stops: 2 each; another: 3 each; one starts: 2 each."""
    owners: Mapping[int, str] = {}
    for silos, expected in (("abcd", [2, 2, 1, 1]), ("bcd", [2, 2, 2]), ("cd", [3, 3]), ("cde", [2, 2, 2])):
        owners = lease_count(Placement([*silos], range(6), owners))
        assert counts(owners, [*silos]) == expected


@few
@given(placements())
def test_queue_that_lease_count_lent_stays_with_its_silo(placement: Placement):
    """Unless that makes a silo's share too large."""
    at_home = homes(lease_count, placement)
    lent = lease_count(placement._replace(owners=at_home, homes=at_home))
    gone = placement._replace(owners=lent, homes=at_home, away=())
    assert moved(lent, lease_count(gone)) == set()


@few
@given(placement=placements(with_list=False))
def test_queue_that_lease_count_lent_stays_with_its_silo_when_another_goes(placement: Placement):
    at_home = homes(lease_count, placement)
    settled = placement._replace(owners=at_home, homes=at_home)
    lent = lease_count(settled)
    goer, *others = placement.members
    fewer = settled._replace(members=others, away=[*placement.away, goer], owners=lent)
    if others:
        assert {lent[queue] for queue in moved(lent, lease_count(fewer))} <= {goer}


# -- ring ------------------------------------------------------------------------------------------------------------


def spot(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def unbounded(queues: Sequence[int], silos: Sequence[str]) -> dict[int, str]:
    points = sorted((spot(f"{silo}-{point}"), silo) for silo in silos for point in range(256))
    spots = [at for at, _ in points]
    return {queue: points[bisect_right(spots, spot(f"queue {queue}")) % len(points)][1] for queue in queues}


ring_members = st.lists(st.sampled_from([f"{kind}-{n}" for kind in "ab" for n in range(12)]), unique=True, min_size=2)


@few
@given(ring_members)
def test_no_silo_has_more_than_the_bound_at_64_queues(silos: Sequence[str]):
    mean = 64 / len(silos)
    most = max(counts(ring(Placement(silos, range(64))), silos))
    assert most <= 1.25 * mean or most == -(-64 // len(silos))


@few
@given(ring_members, st.integers(1, 64))
def test_the_bound_holds_while_silos_are_away(silos: Sequence[str], queues: int):
    there, away = silos[::2], silos[1::2]
    most = max(counts(ring(Placement(there, range(queues), away=away)), there))
    assert most <= 1.25 * queues / len(there) or most == -(-queues // len(there))


@few
@given(ring_members, st.integers(0, 64))
def test_a_ring_moves_the_queues_of_the_changed_silo_and_the_overflow(silos: Sequence[str], queues: int):
    few, leaver = silos[1:], silos[0]
    many_plain, few_plain = unbounded(range(queues), silos), unbounded(range(queues), few)
    many, fewer = ring(Placement(silos, range(queues))), ring(Placement(few, range(queues)))
    overflow = moved(many_plain, many) | moved(few_plain, fewer)
    its_own = {queue for queue in many if many[queue] == leaver}
    assert moved(many, fewer) <= its_own | overflow


def test_a_ring_moves_few_on_average():
    """64 queues, one of 8 silos leaves: 8 must move. On average 9.4 do; with average allocation 29."""
    rings = ((ring(Placement(s, range(64))), ring(Placement(s[1:], range(64)))) for s in crowds(50))
    moves = [len(moved(many, few)) for many, few in rings]
    assert sum(moves) / len(moves) < 12


def crowds(count: int) -> list[list[str]]:
    return [[f"crowd-{crowd}-silo-{number}" for number in range(8)] for crowd in range(count)]


def test_the_ring_is_the_same_in_every_version():
    """Silos of two versions must agree during a rolling upgrade: these never change."""
    assert by_silo(ring(Placement(["a", "b", "c", "d"], range(16)))) == GOLDEN_RING


GOLDEN_RING = {"a": [0, 3, 4, 5, 6], "b": [9, 15], "c": [8, 10, 11, 12], "d": [1, 2, 7, 13, 14]}


# -- best fit --------------------------------------------------------------------------------------------------------

BEST_FIT = [
    (8, "ABCD", "AB", {"A": [0, 1, 4, 6], "B": [2, 3, 5, 7]}),
    (8, "ABCD", "ABC", {"A": [0, 1, 6], "B": [2, 3, 7], "C": [4, 5]}),
    (8, "ABCD", "ACD", {"A": [0, 1, 2], "C": [4, 5, 3], "D": [6, 7]}),
    (8, "ABCD", "D", {"D": [6, 7, 0, 1, 2, 3, 4, 5]}),
    (6, "ABCD", "BCD", {"B": [2, 3], "C": [4, 0], "D": [5, 1]}),
    (6, "ABCD", "CD", {"C": [4, 0, 2], "D": [5, 1, 3]}),
    (9, "ABCD", "CD", {"C": [5, 6, 0, 2, 4], "D": [7, 8, 1, 3]}),
    (3, "ABCDE", "ABCDE", {"A": [0], "B": [1], "C": [2]}),
]


@pytest.mark.parametrize(("queues", "listed", "there", "expected"), BEST_FIT)
def test_best_fit_over_live_members_gives_the_golden_vectors(
    queues: int, listed: str, there: str, expected: dict[str, list[int]]
):
    assert by_silo(best_fit_live(Placement([*there], range(queues), fixed=[*listed]))) == in_order(expected)


@pytest.mark.parametrize(("queues", "listed", "there", "expected"), BEST_FIT)
def test_without_a_list_the_silos_away_are_the_missing_ones(
    queues: int, listed: str, there: str, expected: dict[str, list[int]]
):
    away = [silo for silo in listed if silo not in there]
    for balancer in (average, best_fit_live):
        assert by_silo(balancer(Placement([*there], range(queues), away=away))) == in_order(expected)


def test_best_fit_with_half_of_the_list_there():
    listed = [f"silo-{number:02}" for number in range(10)]
    answer = best_fit_live(Placement(listed[:5], range(99), fixed=listed))
    assert counts(answer, listed[:5]) == [20, 20, 20, 20, 19]


@pytest.mark.parametrize(("queues", "silos"), [(99, 10), (100, 30), (10, 99), (30, 100), (100, 100), (100, 10)])
def test_best_fit_is_ideal_when_all_are_there(queues: int, silos: int):
    listed = [f"silo-{number:03}" for number in range(silos)]
    mine = counts(best_fit_fixed(Placement(listed, range(queues), fixed=listed)), listed)
    assert sum(mine) == queues
    assert set(mine) <= {queues // silos, queues // silos + 1}


def test_best_fit_over_a_fixed_list_leaves_the_queues_of_the_missing_alone():
    placement = Placement(["A", "C"], range(8), fixed=[*"ABCD"], newcomers=["D", "E"])
    assert by_silo(best_fit_fixed(placement)) == {"A": [0, 1], "C": [4, 5], "D": [6, 7]}


def test_a_new_silo_on_the_list_gets_only_its_reserved_queues():
    """Orleans: 8 queues, a list of 4, 2 are there: 4 each. The other 2 join: 2 each at once, and so it stays."""
    listed = [*"ABCD"]
    two = best_fit_live(Placement(["A", "B"], range(8), fixed=listed))
    joining = best_fit_live(Placement(["A", "B"], range(8), fixed=listed, newcomers=["C", "D"]))
    later = best_fit_live(Placement(listed, range(8), fixed=listed))
    assert counts(two, ["A", "B"]) == [4, 4]
    assert counts(joining, listed) == counts(later, listed) == [2, 2, 2, 2]
    one = best_fit_live(Placement(["A"], range(8), fixed=listed, newcomers=["C"]))
    assert by_silo(one) == {"A": [0, 1, 2, 3, 6, 7], "C": [4, 5]}


def test_silos_that_are_not_on_the_list_get_nothing():
    assert set(best_fit_live(Placement(["A", "X"], range(8), fixed=["A", "B"])).values()) == {"A"}


# -- average and static ----------------------------------------------------------------------------------------------


def test_average_gives_runs_in_the_order_of_names():
    assert by_silo(average(Placement(["c", "a", "b"], range(8)))) == {"a": [0, 1, 2], "b": [3, 4, 5], "c": [6, 7]}


def test_static_assigns_the_configured_queues_to_living_silos():
    placement = Placement(["a"], range(4), mapping={0: "a", 1: "b", 2: "c", 9: "a"}, away=["b"], newcomers=["c"])
    assert static(placement) == {0: "a", 2: "c"}


# -- finding one -----------------------------------------------------------------------------------------------------

CUSTOM = """
def first(placement):
    return {queue: min(placement.members) for queue in placement.queues}

def wrong(placement):
    return {0: "nobody"}
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package with two balancers, as pip would leave it."""
    (tmp_path / "ours_balancers.py").write_text(CUSTOM)
    info = tmp_path / "ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    entries = "[headrace.balancers]\nfirst = ours_balancers:first\nwrong = ours_balancers:wrong\n"
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("ours_balancers", None)


def test_the_default_is_lease_count():
    assert find_balancer() is lease_count
    assert find_balancer("best-fit-live") is best_fit_live


@pytest.mark.usefixtures("installed")
def test_an_installed_balancer_is_found_by_its_name():
    assert {"first", "wrong", "ring"} <= set(balancer_names())
    assert find_balancer("first")(Placement(["b", "a"], range(2))) == {0: "a", 1: "a"}


@pytest.mark.usefixtures("installed")
def test_an_installed_balancer_that_gives_queues_to_strangers_is_refused():
    with pytest.raises(InvalidArgument, match=r"balancer 'wrong' assigned queue 0 to silo 'nobody'"):
        find_balancer("wrong")(Placement(["a"], range(2)))


def test_an_unknown_balancer_is_refused_with_the_names_there_are():
    with pytest.raises(NotFound, match=r"no balancer 'rign'; installed are: average, .*, static"):
        find_balancer("rign")
