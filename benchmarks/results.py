"""What a run of a benchmark case found out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Latency(NamedTuple):
    """Milliseconds from just before publishing to the handler."""

    p50_ms: float
    p99_ms: float
    max_ms: float = 0.0

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Latency:
        """Raises ValueError for fewer than 100 samples: they have no 99th percentile."""
        if len(samples_ms) < 100:
            raise ValueError(f"{len(samples_ms)} samples are too few for a 99th percentile: run longer")
        percentiles = statistics.quantiles(samples_ms, n=100, method="inclusive")
        return cls(percentiles[49], percentiles[98], max(samples_ms))


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one run of one case found out. `cpu_s` and `peak_rss_bytes` go by process: `producer`, `server`, …"""

    events: int
    seconds: float
    size: int = 0
    """Payload bytes of one event, 0 where they vary."""
    cpu_s: Mapping[str, float] = field(default_factory=dict[str, float])
    peak_rss_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    foreign_cores: float = 0.0
    """Cores that others used meanwhile: a run with more than a third of one is not quiet."""
    latency: Latency | None = None

    @property
    def events_per_s(self) -> float:
        return self.events / self.seconds

    @property
    def cpu_s_per_million(self) -> float:
        """CPU seconds of all processes, per million events."""
        return sum(self.cpu_s.values()) / self.events * 1e6

    @property
    def rss_bytes(self) -> int:
        """Highest resident memory of all processes, added up."""
        return sum(self.peak_rss_bytes.values())


class Spread(NamedTuple):
    """Median, lowest and highest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))
