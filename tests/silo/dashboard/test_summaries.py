"""Sums over silos, and the problems that are named."""

from typing import Any

import pytest

from headrace.proto.v1.cluster_pb2 import Cluster, Queue, Silo
from headrace.proto.v1.observation_pb2 import LagSample, SubscriptionPart
from headrace.silo.dashboard.pages import queue_row
from headrace.silo.dashboard.summaries import STEP_US, lag_series, merged_parts, problems_of


def part(state: str, *lags: LagSample, **fields: Any) -> SubscriptionPart:
    return SubscriptionPart(name="s", state=state, lags=lags, **fields)


def lag(step: float, events: int, delivered: int = 0, age_ms: int = 0) -> LagSample:
    return LagSample(
        at_us=round(step * STEP_US), batches=events, events=events, age_ms=age_ms, delivered_events=delivered
    )


def test_a_subscription_is_the_sum_of_its_silos_and_as_bad_as_the_worst():
    one = part("running", lag(1, 5, age_ms=100), in_flight=2, delivered_events=10)
    other = part("paused", lag(1, 7, age_ms=900), paused=1, delivered_events=5)
    merged = merged_parts([one, other])
    assert (merged["state"], merged["lag_events"], merged["lag_ms"]) == ("paused", 12, 900)
    assert (merged["in_flight"], merged["paused"], merged["delivered_events"]) == (2, 1, 15)


def test_a_subscription_of_no_silo_is_not_served_and_its_lag_is_not_known():
    merged = merged_parts([])
    assert merged["state"] == "not served"
    assert merged["lag_events"] is None
    assert merged["lag_ms"] is None


def test_the_lag_counts_the_queues_of_silos_that_do_not_serve_the_subscription():
    nowhere = merged_parts([], [lag(1, 5, age_ms=700), lag(1, 2, age_ms=900)])
    assert (nowhere["state"], nowhere["lag_events"], nowhere["lag_ms"]) == ("not served", 7, 900)
    partly = merged_parts([part("running", lag(1, 1, age_ms=1))], [lag(1, 2, age_ms=900)])
    assert (partly["state"], partly["lag_events"], partly["lag_ms"]) == ("running", 3, 900)


def test_amounts_that_a_viewer_may_not_see_are_not_0():
    hidden = queue_row("default", "a", Queue(index=3, state="running"))
    names = ("read_offset", "end_offset", "cached_bytes", "cache_limit_bytes", "cached_events", "delayed_events")
    assert [hidden[name] for name in names] == [None] * 6
    empty = queue_row("default", "a", Queue(index=3, state="running", cache_limit_bytes=9, lag_batches=0))
    assert (empty["read_offset"], empty["end_offset"], empty["cached_bytes"], empty["delayed_events"]) == (0, 0, 0, 0)


def test_an_unknown_lag_is_not_0():
    hidden = part("running", LagSample(at_us=1))
    merged = merged_parts([hidden, part("running", lag(1, 5))])
    assert (merged["lag_batches"], merged["lag_events"], merged["lag_ms"]) == (None, None, None)


def test_the_rate_is_of_the_last_samples():
    samples = [lag(step, 0, delivered=100 * step) for step in range(10)]
    assert merged_parts([part("running", *samples)])["rate"] == pytest.approx(50)
    assert merged_parts([part("running", lag(1, 0, delivered=7))])["rate"] == 0
    restarted = [lag(1, 0, delivered=700), lag(2, 0, delivered=3)]
    assert merged_parts([part("running", *restarted)])["rate"] == 0


def test_samples_of_several_silos_at_different_times_are_one_line_without_dips():
    series = lag_series([part("running", lag(1, 5), lag(3, 6)), part("running", lag(1.2, 10), lag(2.2, 20))])
    assert [point["events"] for point in series] == [15, 25, 26]


def test_problems_are_named_the_worst_first():
    cluster = Cluster(silos=[Silo(name="a", state="running"), Silo(name="b", state="dead")])
    queues = [
        {"provider": "default", "index": 0, "state": "running", "reason": ""},
        {"provider": "default", "index": 1, "state": "throttled", "reason": "the slowest consumer"},
        {"provider": "default", "index": 2, "state": "unserved", "reason": "its silo died"},
    ]
    fine = {"provider": "default", "state": "running", "reason": "", "lag_ms": 10}
    subscriptions = [
        {**fine, "name": "fine"},
        {**fine, "name": "late", "lag_ms": 61_000},
        {**fine, "name": "held", "state": "held", "reason": "all fail"},
    ]
    assert [(one["severity"], one["text"]) for one in problems_of(cluster, queues, subscriptions)] == [
        ("bad", "silo b is dead"),
        ("bad", "queue default/2 is unserved: its silo died"),
        ("bad", "subscription held is held: all fail"),
        ("odd", "queue default/1 is throttled: the slowest consumer"),
        ("odd", "subscription late is 61 s late"),
    ]


def test_a_subscription_that_no_silo_serves_is_named_if_events_wait():
    missed = {"provider": "default", "name": "missed", **merged_parts([], [lag(1, 5, age_ms=700)])}
    idle = {"provider": "default", "name": "idle", **merged_parts([], [lag(1, 0)])}
    unknown = {"provider": "shop", "name": "unknown", **merged_parts([])}
    reason = "no silo has a handler for it, and no consumer is attached"
    (problem,) = problems_of(Cluster(), [], [missed, idle])
    assert problem["text"] == f"subscription missed is not served: {reason}"
    (problem,) = problems_of(Cluster(), [], [missed, idle, unknown])
    assert problem["text"] == f"subscription default/missed is not served: {reason}"
