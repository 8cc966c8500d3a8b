"""Simulate many clusters: `make sim SEEDS=10000`. A failing one is named by kind and seed, which repeat it exactly."""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from contextlib import nullcontext
from functools import partial

from tests.cluster.planted import BUGS, planted
from tests.cluster.simulated import KINDS, simulate

Case = tuple[str, int]


def problems(case: Case, *, bug: str | None = None) -> tuple[Case, list[str]]:
    kind, seed = case
    with planted(bug) if bug else nullcontext():
        return case, simulate(seed, kind=kind).problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many clusters")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this bug: then finding it is what is wanted")
    parser.add_argument("--history", metavar="KIND/SEED", help="print what happened in one of them")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.history:
        kind, seed = options.history.split("/")
        print("\n".join(simulate(int(seed), kind=kind).history))
        return 0
    cases = [(KINDS[number % len(KINDS)], options.first + number // len(KINDS)) for number in range(options.seeds)]
    return _run(cases, options.bug)


def _run(cases: list[Case], bug: str | None) -> int:
    began, found = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), logging.disable) as pool:
        for number, (case, told) in enumerate(pool.imap_unordered(partial(problems, bug=bug), cases, 8), 1):
            if told:
                found += 1
                if bug is None:
                    print(f"{case[0]}/{case[1]}: {told[0]}", flush=True)
            if number % 100 == 0:
                print(f"{number:,} of {len(cases):,} clusters, {found} with problems", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    print(f"{len(cases):,} clusters in {took:.0f} s: {found} {'find the bug' if bug else 'with problems'}")
    return 1 if bool(found) != bool(bug) else 0


if __name__ == "__main__":
    sys.exit(main())
