"""Results as Markdown tables, and one line about the machine and the versions."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .results import Spread
from .rounds import Rounds


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(rounds: Rounds, *, ratio_to: str | None = None) -> str:
    """The rounds as a Markdown table, with the unavailable cases below it."""
    header = ["case", "events/s", "MB/s", "CPU s per million", "p50 ms", "p99 ms", "RSS MB", "foreign cores"]
    rows = [_row(name, rounds) for name in rounds.names]
    if ratio_to is not None and ratio_to in rounds.names:
        header.insert(2, f"× {ratio_to}")
        for row, name in zip(rows, rounds.names, strict=True):
            row.insert(2, _times(rounds.ratio(name, ratio_to, lambda result: result.events_per_s)))
    notes = [f"- {name}: not available: {why}" for name, why in rounds.not_available.items()]
    return "\n".join((markdown(header, rows), *(["", *notes] if notes else [])))


def _row(name: str, rounds: Rounds) -> list[str]:
    results = rounds.of(name)
    rate = rounds.spread(name, lambda result: result.events_per_s)
    latencies = [result.latency for result in results if result.latency]
    cpu = rounds.spread(name, lambda result: result.cpu_s_per_million)
    return [
        name,
        f"{count(rate.median)} ({count(rate.low)}–{count(rate.high)})",
        f"{rate.median * results[0].size / 1e6:,.0f}" if results[0].size else "",
        f"{cpu.median:.2f}",
        *(_percentile([latency[index] for latency in latencies]) for index in (0, 1)),
        f"{statistics.median(result.rss_bytes for result in results) / 1e6:,.0f}",
        f"{statistics.median(result.foreign_cores for result in results):.1f}",
    ]


def _percentile(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = Spread.of(values)
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def _times(spread: Spread) -> str:
    median, low, high = map(decimals, spread)
    return f"{median} ({low}–{high})"


def decimals(number: float) -> str:
    """A ratio for people: 0.987, 1.02, 12.34."""
    return f"{number:.3f}" if number < 1 else f"{number:.2f}"


def count(number: float) -> str:
    """A rate for people: 950, 12.3 k, 456 k, 1.23 M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.{max(0, 2 - len(str(int(scaled))) + (unit == 'M'))}f} {unit}"
    return f"{number:.0f}"


def machine(packages: Sequence[str] = ("headrace",)) -> str:
    """One line about the machine and the versions: processor, memory, kernel, Python, and versions of packages."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.machine()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        f"{os.cpu_count()} × {cpu}",
        f"{memory_gib:.0f} GiB",
        f"Linux {platform.release()}",
        f"Python {platform.python_version()}",
        *(_version(package) for package in packages),
    ]
    return ", ".join(parts)


def _field(path: str, name: str) -> str | None:
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} (not installed)"
