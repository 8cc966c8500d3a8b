"""Events that are due later: how late they come, how many a second, and how much memory they take in Redis.

    python -m benchmarks.delays --help

Each run has a redis-server of its own (AOF everysec), and payloads of 100 bytes. All producers are one process, and all
consumers another.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import click

from ..harness import Metric, Result, Rounds, Spread, count, interleaved, machine, markdown
from .kinds import KINDS
from .runs import JOBS, OURS, delayed, due, throughput

Cases = Mapping[str, Callable[[], Result]]

PACKAGES = ("redis", "hiredis", "taskiq", "taskiq-redis")
DELAYS_S = (0.5, 5.0)
RECIPE = "redis-py, recipe"


class DelayLoad(NamedTuple):
    """What a kind is given to do: as much as takes some seconds."""

    kind: str
    batch: int
    events: int


LOADS = (
    *(
        DelayLoad(kind, batch, events)
        for batch, events in ((1, 50_000), (100, 300_000), (1000, 300_000))
        for kind in (*OURS, RECIPE, "redis-py, recipe, blocking client", "redis-py, list")
    ),
    DelayLoad("taskiq", 10, 10_000),
    DelayLoad("arq", 10, 10_000),
)
SLOW = {"RedisQueue": 200, "arq": 200, "taskiq": 50}
"""Events/s that the job queues can do with delays, and what headrace is given beside them."""


# ---- how late --------------------------------------------------------------------------------------------------------


def due_cases(rate: int, seconds: float, kinds: Sequence[str]) -> Cases:
    def case(kind: str, at: int) -> Callable[[], Result]:
        return partial(due, kind, rate=at, seconds=seconds, delays_s=DELAYS_S, batch=1000)

    rates = [*((kind, rate) for kind in (*OURS, RECIPE)), *SLOW.items()]
    return {f"{kind}, {at:,}/s": case(kind, at) for kind, at in rates if kind in kinds}


def due_table(found: Rounds) -> str:
    header = ["case", "events/s reached", "p50 ms", "p99 ms", "max ms", *CPU_HEADER]
    return markdown(header, [[name, rate(found, name), *late(found, name), *cpu(found, name)] for name in found.names])


def late(found: Rounds, name: str) -> list[str]:
    samples = zip(*(result.latency for result in found.of(name) if result.latency), strict=True)
    return [brackets(Spread.of(each), ".1f") for each in samples]


# ---- how many a second -----------------------------------------------------------------------------------------------


def throughputs(scale: float, kinds: Sequence[str], rounds: int) -> tuple[Rounds, Rounds]:
    """Pushing, and taking with acknowledging, in the same runs."""
    pushed: dict[str, list[Result]] = {}

    def case(name: str, load: DelayLoad) -> Result:
        push, drain = throughput(load.kind, events=scaled(load.events, scale), batch=load.batch)
        pushed.setdefault(name, []).append(push)
        return drain

    cases = {_title(load): partial(case, _title(load), load) for load in LOADS if load.kind in kinds}
    drained = interleaved(cases, rounds, on_result=progress)
    pushes = [{name: pushed[name][number] for name in drained.names} for number in range(rounds)]
    return Rounds(pushes, dict(drained.not_available)), drained


def _title(load: DelayLoad) -> str:
    return f"{load.kind}, jobs" if load.kind in JOBS else f"{load.kind}, {load.batch:,} at a time"


def throughput_table(found: Rounds) -> str:
    header = ["case", "events/s", "to the recipe", *CPU_HEADER]
    return markdown(header, [[name, rate(found, name), _ratio(found, name), *cpu(found, name)] for name in found.names])


def _ratio(found: Rounds, name: str) -> str:
    """Of as many at a time; jobs are pushed singly."""
    kind, _, each = name.rpartition(", ")
    to = f"{RECIPE}, {'1 at a time' if kind in JOBS else each}"
    return brackets(found.ratio(name, to, events_per_s), ".2f") if to in found.names else ""


# ---- memory in Redis -------------------------------------------------------------------------------------------------


def memory_cases(scale: float, kinds: Sequence[str]) -> Cases:
    def case(kind: str, events: int = 1_000_000, batch: int = 1000, *, apart: bool = True) -> Callable[[], Result]:
        return partial(delayed, kind, events=scaled(events, scale), batch=batch, apart=apart)

    every = {
        "RedisQueue": case("RedisQueue"),
        "provider, each at its own time": case("provider"),
        "provider, batches of 100": case("provider", batch=100, apart=False),
        RECIPE: case(RECIPE),
        **{kind: case(kind, 50_000, 10) for kind in JOBS},
    }
    return {name: run for name, run in every.items() if name in kinds or name.split(",")[0] in kinds}


def memory_table(found: Rounds) -> str:
    rows: list[list[str]] = []
    for name in found.names:
        spread = found.spread(name, lambda result: result.rss_bytes / result.events)
        rows.append([name, count(found.of(name)[0].events), f"{spread.median:,.0f}", brackets(spread, ".0f")])
    return markdown(["case", "delayed events", "MB per million", "bytes each"], rows)


# ---- tables ----------------------------------------------------------------------------------------------------------

CPU_HEADER = ["clients' CPU s per million", "server's", "foreign cores"]


def events_per_s(result: Result) -> float:
    return result.events_per_s


def server_cpu(result: Result) -> float:
    return result.cpu_s["server"] / result.events * 1e6


def client_cpu(result: Result) -> float:
    return result.cpu_s_per_million - server_cpu(result)


def rate(found: Rounds, name: str) -> str:
    spread = found.spread(name, events_per_s)
    return f"{count(spread.median)} ({count(spread.low)}–{count(spread.high)})"


def cpu(found: Rounds, name: str) -> list[str]:
    metrics: Sequence[Metric] = (client_cpu, server_cpu, lambda result: result.foreign_cores)
    return [f"{found.spread(name, metric).median:.1f}" for metric in metrics]


def brackets(spread: Spread, how: str) -> str:
    median, low, high = (format(value, how) for value in spread)
    return f"{median} ({low}–{high})"


def scaled(events: int, scale: float) -> int:
    return max(2000, int(events * scale) // 1000 * 1000)


def section(title: str, table: str, found: Rounds) -> str:
    notes = [f"- {name}: not available: {why}" for name, why in found.not_available.items()]
    return "\n".join([f"## {title}", "", table, *(["", *notes] if notes else []), ""])


def progress(name: str, result: Result) -> None:
    click.echo(f"  {name}: {count(result.events_per_s)}/s in {result.seconds:.1f} s", err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(["due", "throughput", "memory"]), help="Default: all.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="What to measure (default: all).")
@click.option("--rounds", default=3, show_default=True, help="Interleaved rounds; memory is measured once.")
@click.option("--scale", default=1.0, show_default=True, help="Multiplies numbers of events, and seconds.")
@click.option("--rate", "at", default=10_000, show_default=True, help="Delayed events a second.")
def command(only: Sequence[str], kinds: Sequence[str], rounds: int, scale: float, at: int) -> None:
    """Delayed events in Redis, headrace's and others'; Markdown on stdout, progress on stderr."""
    kinds = kinds or list(KINDS)
    logging.disable(logging.WARNING)
    click.echo(f"{machine(PACKAGES)}\n")
    arguments = shlex.join(["python", "-m", "benchmarks.delays", *sys.argv[1:]])
    click.echo(f"Command: `{arguments}`. Medians of {rounds} rounds.\n")
    if not only or "due" in only:
        found = interleaved(due_cases(at, 20 * scale, kinds), rounds, on_result=progress)
        title = f"How late: delays of {DELAYS_S[0]} to {DELAYS_S[1]} s"
        click.echo(section(title, due_table(found), found))
    if not only or "throughput" in only:
        pushed, drained = throughputs(scale, kinds, rounds)
        click.echo(section("Push", throughput_table(pushed), pushed))
        click.echo(section("Pop, handle, acknowledge", throughput_table(drained), drained))
    if not only or "memory" in only:
        found = interleaved(memory_cases(scale, kinds), 1, on_result=progress)
        click.echo(section("Delayed for an hour", memory_table(found), found))


if __name__ == "__main__":
    command()
