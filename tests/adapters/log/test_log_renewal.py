"""The offsets at which a restored or renewed log goes on."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.log.renewal import renewed_start

DAY_US = 24 * 3600 * 1_000_000
JAVASCRIPT_LIMIT = 1 << 53
LOWS = st.integers(0, 1 << 40)


def microseconds(year: int) -> int:
    return round(datetime(year, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000


NOW_US = microseconds(2027)


@given(LOWS, st.integers(0, 1 << 52))
def test_a_start_is_above_the_known_offsets(low: int, now_us: int):
    assert renewed_start(low, now_us) > low


@given(LOWS, LOWS, st.integers(1, DAY_US))
def test_a_later_renewal_begins_above_the_offsets_of_an_earlier_one(low: int, other: int, later_us: int):
    """Also if both are of one backup, or if the later one is of an older backup."""
    now_us = microseconds(2090)
    assert renewed_start(low, now_us + later_us) == renewed_start(other, now_us) + later_us


@given(st.integers(0, DAY_US))
def test_a_renewal_of_a_renewed_queue_soon_after_it_depends_on_the_time_too(batches: int):
    """A backup of a queue that was just renewed, and is restored twice."""
    low = renewed_start(0, NOW_US) + batches
    first = renewed_start(low, NOW_US + batches + 1000)
    assert renewed_start(low, NOW_US + batches + 2000) == first + 1000


def test_a_clock_that_is_wrong_leaves_out_a_fixed_number_of_offsets():
    low = renewed_start(0, NOW_US)
    assert renewed_start(100, 0) == renewed_start(100, microseconds(2025)) == 100 + (1 << 32)
    assert renewed_start(low, NOW_US - DAY_US) == low + (1 << 32)


def test_offsets_are_exact_numbers_in_a_browser():
    assert renewed_start(0, microseconds(2100)) < JAVASCRIPT_LIMIT
