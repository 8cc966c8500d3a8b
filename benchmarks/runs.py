"""One run of a case of headrace itself, without and with several processes."""

from __future__ import annotations

import tempfile
from typing import Any

from .harness import Job, Latency, Result, together

CASES = "benchmarks.cases"


def alone(function: str, *, events: int, size: int = 100, **args: Any) -> Result:
    """One process that makes its own data directory."""
    outcome = together([Job("process", f"{CASES}:{function}", {"events": events, "size": size, **args})])
    found = outcome.reports["process"].result
    latency = Latency(**found) if "p50_ms" in found else None
    return outcome.to_result(events=events, size=size, latency=latency)


def publish(function: str, *, events: int, size: int, **args: Any) -> Result:
    with tempfile.TemporaryDirectory() as data:
        return alone(function, events=events, size=size, data=data, **args)


def two_processes(*, events: int, size: int, batch: int, per_event: bool = False) -> Result:
    with tempfile.TemporaryDirectory() as data:
        consume = {"data": data, "events": events, "per_event": per_event}
        produce = {"data": data, "events": events, "size": size, "batch": batch}
        jobs = [Job("consumer", f"{CASES}:consume", consume), Job("producer", f"{CASES}:publish", produce)]
        return together(jobs).to_result(events=events, size=size)


def latency_of_two(*, events: int, size: int, rate: int) -> Result:
    with tempfile.TemporaryDirectory() as data:
        consume = {"data": data, "events": events}
        produce = {"data": data, "events": events, "size": size, "rate": rate}
        jobs = [
            Job("consumer", f"{CASES}:consume_stamped", consume),
            Job("producer", f"{CASES}:publish_paced", produce),
        ]
        outcome = together(jobs)
    latency = Latency(**outcome.reports["consumer"].result)
    return outcome.to_result(events=events, size=size, latency=latency)


def memory(*, events: int, size: int, cache_mb: int, policy: str) -> Result:
    job = {"events": events, "size": size, "batch": 1000, "stuck": True, "cache_mb": cache_mb, "policy": policy}
    outcome = together([Job("process", f"{CASES}:in_process", job)])
    own = outcome.reports["process"].result["own_rss_bytes"]
    result = outcome.to_result(events=events, size=size)
    return Result(events=events, seconds=result.seconds, size=size, cpu_s=result.cpu_s, peak_rss_bytes={"own": own})
