"""The capacity gate: weighted, first come first served."""

import pytest

from headrace.adapters.memory.capacity import CapacityGate, cut


class Steps:
    """An entrant with a step for each weight; writes its steps into the shared log."""

    def __init__(self, log: list[str], name: str, *weights: int) -> None:
        self.log = log
        self.name = name
        self.weights = list(weights)

    @property
    def weight(self) -> int:
        return self.weights[0]

    def enter(self) -> bool:
        self.log.append(f"{self.name}{self.weights.pop(0)}")
        return not self.weights


@pytest.fixture
def log() -> list[str]:
    return []


def full_gate(capacity: int) -> CapacityGate[Steps]:
    gate = CapacityGate[Steps](capacity)
    assert gate.enter_nowait(Steps([], "full", capacity))
    return gate


def test_exactly_the_capacity_gets_in(log: list[str]):
    gate = CapacityGate[Steps](257)
    entered = [gate.enter_nowait(Steps(log, "x", 1)) for _ in range(32 * 32)]
    assert entered.count(True) == 257
    assert entered == [True] * 257 + [False] * (32 * 32 - 257)


def test_requests_of_any_weight_are_served_in_order(log: list[str]):
    gate = full_gate(3)
    gate.enter(Steps(log, "batch", 3))
    gate.enter(Steps(log, "single", 1))
    gate.release(1)
    assert log == []
    gate.release(2)
    assert log == ["batch3"]
    gate.release(1)
    assert log == ["batch3", "single1"]


def test_a_request_waits_while_an_earlier_one_waits(log: list[str]):
    gate = full_gate(3)
    gate.enter(Steps(log, "batch", 3))
    gate.release(2)
    assert not gate.enter_nowait(Steps(log, "single", 1))
    assert gate.free == 2


def test_withdrawing_the_first_serves_the_next(log: list[str]):
    gate = full_gate(3)
    batch = Steps(log, "batch", 3)
    gate.enter(batch)
    gate.enter(Steps(log, "single", 1))
    gate.release(1)
    gate.withdraw(batch)
    assert log == ["single1"]
    assert gate.waiting == 0


def test_withdrawing_a_request_that_does_not_wait_changes_nothing(log: list[str]):
    gate = CapacityGate[Steps](3)
    inside = Steps(log, "a", 1)
    gate.enter(inside)
    gate.withdraw(inside)
    assert gate.free == 2


def test_an_entrant_of_several_steps_stays_first_until_its_last(log: list[str]):
    gate = CapacityGate[Steps](2)
    gate.enter(Steps(log, "large", 2, 2, 1))
    gate.enter(Steps(log, "small", 1))
    assert log == ["large2"]
    gate.release(1)
    assert log == ["large2"]
    gate.release(1)
    assert log == ["large2", "large2"]
    gate.release(2)
    assert log == ["large2", "large2", "large1", "small1"]


def test_dismissing_ends_all_waiting_requests_unserved(log: list[str]):
    gate = full_gate(3)
    waiting = [Steps(log, "large", 3), Steps(log, "small", 1)]
    for entrant in waiting:
        gate.enter(entrant)
    gate.release(1)
    assert list(gate.dismiss()) == waiting
    gate.release(2)
    assert log == []


def test_without_a_bound_everyone_gets_in(log: list[str]):
    gate = CapacityGate[Steps](None)
    assert all(gate.enter_nowait(Steps(log, "x", 1_000_000)) for _ in range(10))


@pytest.mark.parametrize(
    ("weights", "capacity", "expected"),
    [
        ([1, 1, 1], 2, [[1, 1], [1]]),
        ([1, 1, 1], 3, [[1, 1, 1]]),
        ([1, 1, 1], None, [[1, 1, 1]]),
        ([3, 2, 2, 1], 4, [[3], [2, 2], [1]]),
        ([5, 1], 4, [[5], [1]]),
    ],
)
def test_slices_are_as_long_as_the_capacity_allows(weights: list[int], capacity: int | None, expected: list[list[int]]):
    assert [list(part) for part in cut(weights, int, capacity)] == expected


def test_nothing_is_one_slice_of_nothing():
    empty: list[int] = []
    assert cut(empty, int, 4) == [empty]
