"""Simulate many clusters: `make sim SEEDS=10000`. A failing one is named by kind and seed, which repeat it exactly."""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from tests.cluster.planted import BUGS, planted
from tests.cluster.simulated import KINDS, simulate

Case = tuple[str, int]
AT_ONCE = 8
"""Clusters that a process is given at a time."""


class Outcome(NamedTuple):
    case: Case
    problems: Sequence[str]
    handed: int
    crashed_at: frozenset[tuple[str, int]]


def outcome(case: Case, *, bug: str | None = None) -> Outcome:
    kind, seed = case
    with planted(bug) if bug else nullcontext():
        world = simulate(seed, kind=kind)
    found = Outcome(case, world.problems[:1], world.model.handed, frozenset(world.crashed_at))
    del world
    if seed % AT_ONCE == 0:
        gc.collect()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many clusters")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--bugs", action="store_true", help="plant each bug: by how many clusters it is found")
    parser.add_argument("--history", metavar="KIND/SEED", help="print what happened in one of them")
    parser.add_argument("--log", action="store_true", help="with what the library logs")
    options = parser.parse_args()
    if options.log:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    else:
        logging.disable(logging.CRITICAL)
    if options.history:
        kind, seed = options.history.split("/")
        print("\n".join(simulate(int(seed), kind=kind).history))
        return 0
    cases = [(KINDS[number % len(KINDS)], options.first + number // len(KINDS)) for number in range(options.seeds)]
    return _plant(cases) if options.bugs else _run(cases)


def _outcomes(cases: Sequence[Case], bug: str | None) -> Iterator[Outcome]:
    """With their progress on a terminal."""
    began, found = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), logging.disable) as pool:
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
    began, found, handed, sites = time.monotonic(), 0, 0, set[tuple[str, int]]()
    for one in _outcomes(cases, None):
        handed += one.handed
        sites |= one.crashed_at
        if one.problems:
            found += 1
            kind, seed = one.case
            print(f"{kind}/{seed}: {one.problems[0]}")
            print(f"  again, with its history: python -m tests.cluster.sim --history {kind}/{seed}", flush=True)
    took = time.monotonic() - began
    print(f"{len(cases):,} clusters in {took:.0f} s, {handed:,} events handed out, {found} clusters with problems")
    print(f"silos crashed at {len(sites)} places where they waited")
    return 1 if found else 0


def _plant(cases: Sequence[Case]) -> int:
    """Markdown."""
    clusters = Counter(kind for kind, _ in cases)
    print(f"| planted bug | of {len(cases):,} clusters | {' | '.join(clusters)} |")
    print(f"| --- | {' | '.join('---:' for _ in range(1 + len(clusters)))} |")
    missed = 0
    for bug in BUGS:
        found = Counter(one.case[0] for one in _outcomes(cases, bug) if one.problems)
        missed += not found
        print(f"| {bug} | {found.total():,} | {' | '.join(str(found[kind]) for kind in clusters)} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
