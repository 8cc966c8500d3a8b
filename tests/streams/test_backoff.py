"""Pauses that grow with each failure."""

import random
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from headrace.streams.backoff import Backoff

FAILED, SUCCEEDED = "failed", "succeeded"


@given(
    first=st.integers(0, 1 << 12),
    maximum=st.integers(0, 1 << 20),
    factor=st.sampled_from([1, 2, 4, 1000]),
    outcomes=st.lists(st.sampled_from([FAILED] * 4 + [SUCCEEDED]), max_size=40),
)
def test_pauses_are_those_of_a_model(first: int, maximum: int, factor: int, outcomes: list[str]):
    """The model multiplies whole numbers, one failure after the other."""
    backoff = Backoff(first, maximum, factor=factor)
    following, failures = first, 0
    for outcome in outcomes:
        if outcome == SUCCEEDED:
            backoff.reset()
            following, failures = first, 0
        else:
            assert backoff.next_s() == min(following, maximum)
            following, failures = following * factor, failures + 1
        assert backoff.failures == failures
        assert backoff.after(failures + 1) == min(following, maximum)


@given(
    first=st.floats(0, 1e6, allow_subnormal=False),
    maximum=st.floats(0, 1e9, allow_subnormal=False),
    factor=st.floats(1, 1e6),
    failures=st.integers(1, 1 << 40),
    seed=st.integers(),
)
def test_a_random_part_of_up_to_half_is_taken_from_each_pause(
    first: float, maximum: float, factor: float, failures: int, seed: int
):
    whole = Backoff(first, maximum, factor=factor).after(failures)
    pause_s = Backoff(first, maximum, factor=factor, rng=random.Random(seed)).after(failures)
    assert 0 <= whole <= maximum
    assert Fraction(whole) / 2 <= Fraction(pause_s) * Fraction(1 + 1e-9)
    assert pause_s <= whole


def test_one_seed_gives_one_row_of_pauses_and_another_seed_another():
    rows = [[Backoff(1, 60, rng=rng).next_s() for _ in range(9)] for rng in map(random.Random, (1, 1, 2))]
    assert rows[0] == rows[1] != rows[2]


def test_a_thousand_failures_in_a_row_wait_for_the_longest_pause():
    backoff = Backoff(0.1, 5.0)
    assert [backoff.next_s() for _ in range(3000)][-1] == 5.0
