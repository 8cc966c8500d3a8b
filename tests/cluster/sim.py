"""Simulate many clusters: `make sim SEEDS=10000`. A failing one is named by kind and seed, which repeat it exactly."""

import argparse
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import NamedTuple

from tests.cluster.machines import Site
from tests.cluster.planted import BUGS, planted
from tests.cluster.simulated import KINDS, SimulatedCluster, simulate
from tests.cluster.sweep import KINDS as SWEPT
from tests.cluster.sweep import Crash, Way, awaits, chosen, crash_of, crashed, hit, recorded
from tests.simulation.virtual_time import NoTimePassesError

Case = tuple[str, int] | Crash
AT_ONCE = 8
"""Clusters that a process is given at a time."""
SCENARIOS = 12
"""Seeds of each kind in which silos are killed at every step."""


class Outcome(NamedTuple):
    case: Case
    problems: Sequence[str]
    handed: int
    unsaved_s: float
    crashed_at: frozenset[Site]


def outcome(case: Case, *, bug: str | None = None) -> Outcome:
    try:
        with planted(bug) if bug else nullcontext():
            world = _again(case)
    except NoTimePassesError as error:
        return Outcome(case, [str(error)], 0, 0.0, frozenset())
    found = Outcome(case, world.problems[:1], world.model.handed, world.unsaved_s, frozenset(world.crashed_at))
    del world
    if next(_outcomes_here) % AT_ONCE == 0:
        gc.collect()
    return found


_outcomes_here = count()


def _again(case: Case) -> SimulatedCluster:
    return crashed(case) if isinstance(case, Crash) else simulate(case[1], kind=case[0])


def _case(text: str) -> Case:
    kind, seed, *where = text.split("/")
    return crash_of(text) if where else (kind, int(seed))


def _shown(case: Case) -> str:
    return "/".join(map(str, case))


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order in sets of strings is a part of what a seed repeats
        os.execve(sys.executable, [*sys.orig_argv], os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many clusters")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--bugs", action="store_true", help="plant each bug: by how many clusters it is found")
    parser.add_argument("--sweep", action="store_true", help="clusters that differ in where one silo is killed")
    parser.add_argument("--history", metavar="CLUSTER", help="print what happened in one of them, such as crashes/7")
    parser.add_argument("--log", action="store_true", help="with what the library logs")
    options = parser.parse_args()
    if options.log:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    else:
        logging.disable(logging.CRITICAL)
    if options.history:
        print("\n".join(_again(_case(options.history)).history))
        return 0
    if options.sweep:
        return _sweep(options.first, options.seeds)
    cases: list[Case] = [
        (KINDS[number % len(KINDS)], options.first + number // len(KINDS)) for number in range(options.seeds)
    ]
    return _plant(cases) if options.bugs else _run(cases)


def _begins(disabled: int) -> None:
    """In a process of the pool."""
    logging.disable(disabled)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _outcomes(cases: Sequence[Case], bug: str | None) -> Iterator[Outcome]:
    """With their progress on a terminal."""
    began, found = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), _begins, (logging.CRITICAL,)) as pool:
        for number, one in enumerate(pool.imap_unordered(partial(outcome, bug=bug), cases, AT_ONCE), 1):
            found += bool(one.problems)
            if number % 20 == 0 and sys.stderr.isatty():
                left_s = (time.monotonic() - began) / number * (len(cases) - number)
                text = f"{bug or 'clusters'}: {number:,} of {len(cases):,}, {found:,} problems, {left_s:.0f} s left"
                print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
            yield one
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr)


def _run(cases: Sequence[Case]) -> int:
    began, found, handed, unsaved_s, sites = time.monotonic(), 0, 0, 0.0, set[Site]()
    ran = 0
    for one in _until_interrupted(_outcomes(cases, None)):
        ran += 1
        handed += one.handed
        unsaved_s = max(unsaved_s, one.unsaved_s)
        sites |= one.crashed_at
        if one.problems:
            found += 1
            print(f"{_shown(one.case)}: {one.problems[0]}")
            print(f"  again, with its history: python -m tests.cluster.sim --history {_shown(one.case)}", flush=True)
    took = time.monotonic() - began
    print(f"{ran:,} clusters in {took:.0f} s, {handed:,} events handed out, {found} clusters with problems")
    print(f"what came again after a crash had been done at most {unsaved_s:.3f} s before it")
    print(f"silos crashed at {len(hit(sites))} awaits")
    return 1 if found or ran < len(cases) else 0


def _until_interrupted(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """Yield outcomes. After an interrupt, the caller reports those that came so far."""
    try:
        yield from outcomes
    except KeyboardInterrupt:
        print("interrupted")


def _sweep(first: int, many: int) -> int:
    """A silo is killed at each place where one waits, and then evenly."""
    scenarios = [(kind, first + number + 1) for number in range(SCENARIOS) for kind in SWEPT]
    scenarios.append(("pauses", 0))  # on the real store
    places: dict[Crash, Way] = {}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), _begins, (logging.CRITICAL,)) as pool:
        for found in pool.starmap(recorded, scenarios):
            places |= found
    crashes = chosen(places, many)
    ways, hits = {places[crash] for crash in crashes}, hit(site for crash in crashes for site in places[crash])
    failed = _run(crashes)
    print(f"{len(crashes):,} of {len(places):,} steps of {len(scenarios)} clusters")
    print(f"{len(ways)} of {len(set(places.values()))} stacks of awaits; awaits, by file:")
    for file in sorted({found.file for found in hits}):
        every = awaits(file)
        missed = [f"{each.function}:{each.first}" for each in every if each not in hits]
        print(f"  {file}: {len(every) - len(missed)} of {len(every)}; not {', '.join(missed) or 'missing any'}")
    return failed


def _plant(cases: Sequence[Case]) -> int:
    """Markdown."""
    clusters = Counter(case[0] for case in cases)
    print(f"| planted bug | first found by cluster | of {len(cases):,} clusters | {' | '.join(clusters)} |")
    print(f"| --- | {' | '.join('---:' for _ in range(2 + len(clusters)))} |")
    missed, numbers = 0, {case: number for number, case in enumerate(cases, 1)}
    for bug in BUGS:
        finders = [one.case for one in _outcomes(cases, bug) if one.problems]
        found = Counter(str(case[0]) for case in finders)
        first = min((numbers[case] for case in finders), default=0)
        missed += not found
        counts = " | ".join(str(found[kind]) for kind in clusters)
        print(f"| {bug} | {first or '-'} | {found.total():,} | {counts} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
