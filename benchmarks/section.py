"""The parts of the benchmarks: sections, each with cases that run beside each other and the expected results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .harness import Metric, Result

Run = Callable[[], Result]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a ratio should at least (or at most) be: `case` to `to`, by `metric`."""

    what: str
    case: str
    to: str | None
    bound: float
    metric: Metric = lambda result: result.events_per_s
    at_most: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One question: cases that run beside each other, and the expected results."""

    name: str
    title: str
    group: str = ""
    """`--only` with this name runs all sections that have it, too."""
    cases: Mapping[str, Run]
    targets: Sequence[Target] = field(default_factory=tuple[Target, ...])
    deliveries_each: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of deliveries of an event, if it goes to several consumers."""
    ratio_to: str | None = None
    """The case to which the table shows the rate of each."""


def cpu(result: Result) -> float:
    return result.cpu_s_per_million


def p50(result: Result) -> float:
    assert result.latency is not None
    return result.latency.p50_ms


def p99(result: Result) -> float:
    assert result.latency is not None
    return result.latency.p99_ms


def own_mb(result: Result) -> float:
    return result.rss_bytes / 1e6
