"""Which batches a generated queue has, and when: pure, so time is a number."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.generator.options import GeneratorOptions
from headrace.adapters.generator.plan import GeneratorPlan
from headrace.adapters.generator.timeline import QueueTimeline


def plan(**options: object) -> GeneratorPlan:
    return GeneratorPlan(GeneratorOptions(**{"batch": 10, "payload_bytes": 4, "start_us": 0, **options}))  # type: ignore[arg-type]


def counts(timeline: QueueTimeline, until: int) -> list[int]:
    return [timeline.batch(offset).count for offset in range(until)]


def test_without_a_rate_a_batch_is_there_when_it_is_asked_for():
    timeline = QueueTimeline(0, plan(), now_s=100.0)
    assert timeline.next(100.0) == 0
    assert timeline.due_s(5) == 100.0
    timeline.batch(5)
    assert timeline.next(100.0) == 6


def test_with_a_rate_batches_become_due_one_after_the_other():
    timeline = QueueTimeline(0, plan(rate=20.0), now_s=100.0)
    assert [timeline.due_s(offset) for offset in range(3)] == [100.5, 101.0, 101.5]
    assert [timeline.next(now_s) for now_s in (100.0, 100.4, 100.5, 101.2)] == [0, 0, 1, 2]


def test_the_last_batch_has_the_remaining_events():
    timeline = QueueTimeline(0, plan(events=25), now_s=0.0)
    assert timeline.end == 3
    assert counts(timeline, 3) == [10, 10, 5]
    assert timeline.due_s(3) == math.inf


def test_no_events_means_no_batch():
    assert QueueTimeline(0, plan(events=0), now_s=0.0).end == 0


def test_a_rate_ends_with_the_events():
    assert QueueTimeline(0, plan(events=25, rate=20.0), now_s=0.0).next(1000.0) == 3


def test_another_plan_starts_with_the_next_batch():
    timeline = QueueTimeline(0, plan(), now_s=0.0)
    before = [timeline.batch(offset) for offset in range(2)]
    timeline.change(plan(batch=3), now_s=5.0)
    assert counts(timeline, 4) == [10, 10, 3, 3]
    assert [timeline.batch(offset) for offset in range(2)] == before


def test_another_plan_keeps_events_that_were_due():
    timeline = QueueTimeline(0, plan(rate=20.0), now_s=0.0)
    assert timeline.next(1.5) == 3
    timeline.change(plan(rate=10.0), now_s=1.5)
    assert timeline.next(1.5) == 3
    assert timeline.due_s(3) == 2.5


def test_the_total_of_events_holds_over_all_plans():
    timeline = QueueTimeline(0, plan(events=25), now_s=0.0)
    timeline.batch(1)
    timeline.change(plan(events=25, batch=4), now_s=0.0)
    assert counts(timeline, int(timeline.end)) == [10, 10, 4, 1]


def test_a_lower_total_than_was_made_ends_the_queue_and_a_higher_one_goes_on():
    timeline = QueueTimeline(0, plan(events=25), now_s=0.0)
    timeline.batch(2)
    timeline.change(plan(events=5), now_s=0.0)
    assert timeline.end == 3
    timeline.change(plan(events=30), now_s=0.0)
    assert counts(timeline, int(timeline.end)) == [10, 10, 5, 5]


def test_times_follow_the_rate_and_go_on_under_another_plan():
    timeline = QueueTimeline(0, plan(rate=20.0, start_us=7), now_s=0.0)
    times = [timeline.batch(offset).timestamps_us()[0] for offset in range(3)]
    assert times == [7, 500_007, 1_000_007]
    timeline.change(plan(rate=10.0, start_us=99), now_s=0.0)
    assert [timeline.batch(offset).timestamps_us()[0] for offset in (3, 4)] == [1_500_007, 2_500_007]


@pytest.mark.parametrize(("time_us", "offset"), [(-5, 0), (0, 0), (1, 1), (500_000, 1), (500_001, 2), (10**15, 4)])
def test_a_time_is_found_by_the_first_batch_at_or_after_it(time_us: int, offset: int):
    timeline = QueueTimeline(0, plan(rate=20.0, events=35), now_s=0.0)
    assert timeline.offset_at(time_us, now_s=1000.0) == offset


def test_starting_further_on_makes_the_rate_go_on_from_there():
    timeline = QueueTimeline(0, plan(rate=20.0), now_s=0.0)
    timeline.reach(100, now_s=1.0)
    assert timeline.next(1.0) == 100
    assert timeline.due_s(100) == pytest.approx(1.5)


def test_starting_where_the_queue_already_is_changes_nothing():
    timeline = QueueTimeline(0, plan(rate=20.0), now_s=0.0)
    timeline.reach(1, now_s=10.0)
    assert timeline.next(10.0) == 20


@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.none() | st.integers(0, 60), st.none() | st.floats(0.5, 50), st.floats(0, 3)),
        min_size=1,
        max_size=5,
    )
)
def test_reconfiguring_never_takes_a_batch_back(steps: list[tuple[int, int | None, float | None, float]]):
    now_s = 0.0
    timeline = QueueTimeline(0, plan(), now_s)
    timeline.batch(1)
    seen = {offset: timeline.batch(offset) for offset in range(2)}
    for batch, events, rate, pause_s in steps:
        now_s += pause_s
        before = timeline.next(now_s)
        timeline.change(plan(batch=batch, events=events, rate=rate), now_s)
        assert timeline.next(now_s) == before
        seen |= {offset: timeline.batch(offset) for offset in range(before)}
    assert seen == {offset: timeline.batch(offset) for offset in seen}
    times = [batch.timestamps_us()[0] for batch in seen.values()]
    assert times == sorted(times)
