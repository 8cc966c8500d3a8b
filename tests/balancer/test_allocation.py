"""Average allocation: EQueue's worked examples, each queue once, shares within one; and the one that moves least."""

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import InvalidArgument
from headrace.balancer import average_allocation, sticky_allocation

Allocation = Mapping[str, Sequence[int]]

WORKED = {
    (4, 4): [1, 1, 1, 1],
    (4, 2): [2, 2],
    (4, 3): [2, 1, 1],
    (3, 2): [2, 1],
    (5, 2): [3, 2],
    (8, 3): [3, 3, 2],
    (10, 4): [3, 3, 2, 2],
    (2, 3): [1, 1, 0],
    (3, 5): [1, 1, 1, 0, 0],
    (1, 4): [1, 0, 0, 0],
    (7, 7): [1] * 7,
    (18, 3): [6, 6, 6],
    (18, 4): [5, 5, 4, 4],
    (18, 5): [4, 4, 4, 3, 3],
    (18, 16): [2, 2, *[1] * 14],
    (256, 7): [37] * 4 + [36] * 3,
    (0, 2): [0, 0],
}
SPELLED_OUT = {
    (4, 3): [[0, 1], [2], [3]],
    (5, 2): [[0, 1, 2], [3, 4]],
    (8, 3): [[0, 1, 2], [3, 4, 5], [6, 7]],
    (2, 3): [[0], [1], []],
    (3, 5): [[0], [1], [2], [], []],
    (1, 4): [[0], [], [], []],
}


def members(count: int, first: int = 0) -> list[str]:
    return [f"member-{number:02}" for number in range(first, first + count)]


def owners_of(allocation: Allocation) -> dict[int, str]:
    return {queue: member for member, queues in allocation.items() for queue in queues}


def moves(before: Mapping[int, str], after: Allocation) -> int:
    """How many queues change hands, among them those whose owner is gone."""
    return sum(before[queue] != member for queue, member in owners_of(after).items() if queue in before)


def is_fair(queues: int, allocation: Allocation) -> bool:
    """Every queue once, and shares within one."""
    sizes = [len(mine) for mine in allocation.values()]
    each_once = sorted(itertools.chain(*allocation.values())) == list(range(queues))
    return each_once and max(sizes) - min(sizes) <= 1


# -- average ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queues", "count"), WORKED)
def test_average_allocation_gives_the_worked_shares_as_consecutive_runs(queues: int, count: int):
    allocation = average_allocation(queues, members(count))
    assert list(allocation) == members(count)
    assert [len(mine) for mine in allocation.values()] == WORKED[queues, count]
    assert list(itertools.chain(*allocation.values())) == list(range(queues))


@pytest.mark.parametrize(("queues", "count"), SPELLED_OUT)
def test_average_allocation_gives_the_worked_queues(queues: int, count: int):
    assert [[*mine] for mine in average_allocation(queues, members(count)).values()] == SPELLED_OUT[queues, count]


def test_average_allocation_of_256_queues_to_7():
    runs = average_allocation(256, members(7)).values()
    expected = [(0, 36), (37, 73), (74, 110), (111, 147), (148, 183), (184, 219), (220, 255)]
    assert [(run[0], run[-1]) for run in runs] == expected


def test_average_allocation_is_fair_for_every_number_of_queues_and_members():
    for queues, count in itertools.product(range(65), range(1, 65)):
        assert is_fair(queues, average_allocation(queues, members(count))), (queues, count)


def test_order_of_members_does_not_matter():
    names = ["b", "ä", "a", "B", "10", "9"]
    allocations = [dict(average_allocation(8, order)) for order in itertools.permutations(names)]
    assert all(allocation == allocations[0] for allocation in allocations)
    assert list(allocations[0]) == ["10", "9", "B", "a", "b", "ä"]


def test_average_allocation_moves_more_than_it_must():
    """Why there is a sticky one. The numbers are those of the algorithm, measured."""
    assert moves(owners_of(average_allocation(12, members(3))), average_allocation(12, members(4))) == 6
    assert moves(owners_of(average_allocation(16, members(4))), average_allocation(16, members(5))) == 6
    assert moves(owners_of(average_allocation(16, members(4))), average_allocation(16, members(3, first=1))) == 7


# -- sticky ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queues", "before", "after", "least"),
    [
        (12, members(3), members(4), 3),
        (16, members(4), members(5), 3),
        (16, members(4), members(3, first=1), 4),
        (16, members(4), members(4, first=4), 16),
        (16, members(4), members(4), 0),
        (2, members(2), members(5), 0),
    ],
)
def test_sticky_allocation_moves_as_few_as_can_be(queues: int, before: list[str], after: list[str], least: int):
    owners = owners_of(average_allocation(queues, before))
    allocation = sticky_allocation(queues, after, owners)
    assert is_fair(queues, allocation)
    assert moves(owners, allocation) == least


def test_sticky_allocation_starts_from_nothing_as_the_average_does():
    for queues, count in itertools.product(range(20), range(1, 12)):
        sticky = sticky_allocation(queues, members(count), {})
        assert sticky == {member: (*run,) for member, run in average_allocation(queues, members(count)).items()}


names = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1)
any_owners = st.dictionaries(st.integers(0, 40), st.sampled_from("abcdefghxyz"))


@given(st.integers(0, 40), names, any_owners)
def test_sticky_allocation_is_fair_settled_and_depends_on_no_order(
    queues: int, group: list[str], owners: dict[int, str]
):
    allocation = sticky_allocation(queues, group, owners)
    assert set(allocation) == set(group)
    assert is_fair(queues, allocation)
    assert all(list(mine) == sorted(mine) for mine in allocation.values())
    assert sticky_allocation(queues, group, owners_of(allocation)) == allocation
    shuffled = dict(sorted(owners.items(), reverse=True))
    assert sticky_allocation(queues, sorted(group, reverse=True), shuffled) == allocation


@given(st.integers(0, 6), st.lists(st.sampled_from("abcd"), unique=True, min_size=1), st.data())
def test_no_fair_allocation_moves_less(queues: int, group: list[str], data: st.DataObject):
    owners = data.draw(st.dictionaries(st.integers(0, 6), st.sampled_from("abcdxy")))
    tried = (dict(enumerate(given)) for given in itertools.product(group, repeat=queues))
    fair = (a for choice in tried if is_fair(queues, a := inverse(choice, group)))
    assert moves(owners, sticky_allocation(queues, group, owners)) == min(moves(owners, a) for a in fair)


def inverse(owners: Mapping[int, str], group: Sequence[str]) -> Allocation:
    return {member: [queue for queue, owner in owners.items() if owner == member] for member in group}


def test_the_first_owners_go_before_the_later_ones():
    lent = sticky_allocation(4, ["a", "b"], {0: "a", 3: "gone"}, {0: "b", 1: "a", 2: "a", 3: "b"})
    assert lent == {"a": (0, 1), "b": (2, 3)}


# -- misuse ----------------------------------------------------------------------------------------------------------


def test_without_members_no_queue_is_assigned():
    assert average_allocation(4, []) == {}
    assert sticky_allocation(4, [], {0: "gone"}) == {}


@pytest.mark.parametrize(
    ("queues", "group", "said"), [(-1, ["a"], "-1 queues"), (4, ["b", "a", "b"], "'b' is named twice")]
)
def test_impossible_arguments_are_refused(queues: int, group: list[str], said: str):
    with pytest.raises(InvalidArgument, match=said):
        average_allocation(queues, group)
    with pytest.raises(InvalidArgument, match=said):
        sticky_allocation(queues, group, {})
