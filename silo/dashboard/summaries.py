"""Sums over the silos of a cluster, and the problems that the overview names. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...proto.v1.cluster_pb2 import Cluster
from ...proto.v1.observation_pb2 import LagSample, SubscriptionPart
from .calls import optional

STEP_US = 2_000_000
"""Samples of several silos within this time are one point, in microseconds."""
RATE_SAMPLES = 5
_SUMMED = (
    "delivered_events", "retries", "dead_lettered", "skipped", "in_flight", "ready", "waiting", "parked", "paused",
)  # fmt: skip
_WORST_FIRST = (
    "faulted", "blocked", "out of credit", "held", "paused", "resuming", "retrying", "behind", "running", "caught up",
    "standing by",
)  # fmt: skip
_PROBLEMS = ("faulted", "blocked", "out of credit", "held", "paused", "retrying")
LATE_MS = 60_000
"""A subscription whose oldest event is older than this is named, in milliseconds."""


def merged_parts(parts: Sequence[SubscriptionPart], unserved: Sequence[LagSample] = ()) -> dict[str, Any]:
    """Return a subscription over all silos. Its state is the worst of them. `unserved`: its lag at silos that do not
    serve it."""
    worst = min(parts, key=lambda part: _rank(part.state), default=None)
    lags = [*(part.lags[-1] for part in parts if part.lags), *unserved]
    consumers = [one for part in parts for one in part.consumers]
    return {
        "state": "not served" if worst is None else worst.state,
        "reason": "no silo has a handler for it, and no consumer is attached" if worst is None else worst.reason,
        **{field: sum(getattr(part, field) for part in parts) for field in _SUMMED},
        "lag_batches": _sum([lag.batches if lag.HasField("events") or lag.batches else None for lag in lags]),
        "lag_events": _sum([optional(lag, "events") for lag in lags]),
        "lag_ms": _largest([optional(lag, "age_ms") for lag in lags]),
        "rate": sum(_rate(part.lags) for part in parts),
        "consumer_count": len(consumers),
        "connected_count": sum(one.connected for one in consumers),
        "spark": [point["events"] for point in lag_series(parts)][-60:],
    }


def lag_series(parts: Sequence[SubscriptionPart]) -> list[dict[str, Any]]:
    """Return the lag and the rate over time, summed over the silos. Silos take samples at different times, so the last
    sample of each counts."""
    sampled = [
        {
            lag.at_us // STEP_US: (lag, _rate(part.lags[max(number - RATE_SAMPLES, 0) : number + 1]))
            for number, lag in enumerate(part.lags)
        }
        for part in parts
    ]
    last: dict[int, tuple[LagSample, float]] = {}
    series: list[dict[str, Any]] = []
    for at in sorted({at for samples in sampled for at in samples}):
        last.update({number: samples[at] for number, samples in enumerate(sampled) if at in samples})
        series.append(
            {
                "at_us": at * STEP_US,
                "events": _sum([optional(lag, "events") for lag, _ in last.values()]),
                "age_ms": _largest([optional(lag, "age_ms") for lag, _ in last.values()]),
                "rate": sum(rate for _, rate in last.values()),
            }
        )
    return series


def problems_of(
    cluster: Cluster, queues: Sequence[Mapping[str, Any]], subscriptions: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Name what needs a look, the worst first: its severity, a text, and the page about it."""
    silent = [
        _problem("bad", f"silo {silo.name} is {silo.state}", "cluster")
        for silo in cluster.silos
        if silo.state in ("dead", "unreachable")
    ]
    several = len({row["provider"] for row in (*queues, *subscriptions)}) > 1
    names = [f"{one['provider']}/{one['name']}" if several else one["name"] for one in subscriptions]
    found = [*silent, *map(_problem_of_queue, queues), *map(_problem_of_subscription, names, subscriptions)]
    problems = [problem for problem in found if problem is not None]
    return sorted(problems, key=lambda problem: problem["severity"] != "bad")


def _problem_of_queue(queue: Mapping[str, Any]) -> dict[str, Any] | None:
    if queue["state"] not in ("faulted", "unserved", "throttled", "stopped"):
        return None
    severity = "bad" if queue["state"] in ("faulted", "unserved") else "odd"
    text = f"queue {queue['provider']}/{queue['index']} is {queue['state']}"
    options = {"provider": queue["provider"], "queue": str(queue["index"])}
    return _problem(severity, _with_reason(text, queue["reason"]), "queue", options)


def _problem_of_subscription(name: str, one: Mapping[str, Any]) -> dict[str, Any] | None:
    options = {"provider": one["provider"], "name": one["name"]}
    missed = one["state"] == "not served" and one["lag_batches"]
    if one["state"] in _PROBLEMS or missed:
        severity = "bad" if one["state"] in ("faulted", "blocked", "held") else "odd"
        text = f"subscription {name} is {one['state']}"
        return _problem(severity, _with_reason(text, one["reason"]), "subscription", options)
    if (one["lag_ms"] or 0) > LATE_MS:
        text = f"subscription {name} is {one['lag_ms'] // 1000} s late"
        return _problem("odd", text, "subscription", options)
    return None


def _with_reason(text: str, reason: str) -> str:
    return f"{text}: {reason}" if reason else text


def _problem(severity: str, text: str, page: str, options: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {"severity": severity, "text": text, "page": page, "options": options or {}}


def _rank(state: str) -> int:
    return _WORST_FIRST.index(state) if state in _WORST_FIRST else 0


def _rate(samples: Sequence[LagSample]) -> float:
    """Events delivered in a second, over the last samples."""
    if len(samples) < 2:
        return 0.0
    first, last = samples[max(len(samples) - RATE_SAMPLES, 0)], samples[-1]
    seconds = (last.at_us - first.at_us) / 1e6
    return max(last.delivered_events - first.delivered_events, 0) / seconds if seconds > 0 else 0.0


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum; None if a part of it is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) and values else None


def _largest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) and values else None
