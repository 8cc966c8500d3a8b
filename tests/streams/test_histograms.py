"""Histograms, compared with counts that are made by looking at each bound."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from headrace.streams.histograms import BOUNDS, Histogram

DURATIONS = st.lists(st.one_of(st.floats(-1, 1000), st.sampled_from([0.0, *BOUNDS])))


@given(DURATIONS)
def test_a_duration_counts_in_the_first_bucket_whose_bound_is_not_below_it(durations: list[float]) -> None:
    histogram = Histogram()
    for seconds in durations:
        histogram.observe(seconds)
    for bound, count in histogram.buckets():
        assert count == sum(seconds <= bound for seconds in durations)
    assert histogram.count == len(durations)
    assert abs(histogram.sum_s - sum(max(seconds, 0.0) for seconds in durations)) < 1e-6


@given(DURATIONS, DURATIONS)
def test_the_sum_of_histograms_has_the_durations_of_all(one: list[float], other: list[float]) -> None:
    parts = Histogram(), Histogram()
    both = Histogram()
    for part, durations in zip(parts, (one, other), strict=True):
        for seconds in durations:
            part.observe(seconds)
            both.observe(seconds)
    total = Histogram.sum_of(parts)
    assert total.buckets() == both.buckets()
    assert abs(total.sum_s - both.sum_s) < 1e-6


def test_the_bounds_rise_from_half_a_millisecond_to_a_minute() -> None:
    assert list(BOUNDS) == sorted(BOUNDS)
    assert (BOUNDS[0], BOUNDS[-1]) == (2**-11, 64)
    assert bisect_left(BOUNDS, 1.0) == 11
