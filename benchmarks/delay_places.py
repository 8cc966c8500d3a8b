"""How many events a second are stored and, when they are due, published: with each database of the control store.

    python -m benchmarks.delay_places [--events N] [--waiting N] [--publishers N] [--payload BYTES]

Queues of the log, in one process. Every event is a call of its own, of which `--publishers` are under way at a time.
All are due at one time, so that storing and publishing are measured one after the other. Before that, `--waiting`
events are stored with a delay of a day. The servers are started for it, with data on this machine's disk.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from headrace import Provider, StreamId
from headrace.silo.options import ProviderOptions

from .servers import PostgresServer

PLACES = ("SQLite", "PostgreSQL")
FIRST_LEAD_S = 5.0
AT_ONCE = 1000


class Load(NamedTuple):
    events: int
    waiting: int
    publishers: int
    payload: bytes


class Rates(NamedTuple):
    """Events a second."""

    stored: float
    published: float


@contextmanager
def place(name: str) -> Generator[str | None]:
    """URL of the control store, None for that of the data directory."""
    if name == "SQLite":
        yield None
    else:
        with PostgresServer(fsync=True) as postgres:
            yield postgres.url


async def measure(control: str | None, load: Load) -> Rates:
    with tempfile.TemporaryDirectory(prefix="headrace-delays-") as directory:
        options = ProviderOptions(queues=8, delays="store")
        async with aclosing(await Provider.start(Path(directory), options, control=control)) as provider:
            await _publish(provider, load, load.waiting, lambda: timedelta(days=1))
            lead_s = FIRST_LEAD_S + load.events / 500
            due = time.monotonic() + lead_s
            began = time.monotonic()
            await _publish(provider, load, load.events, lambda: timedelta(seconds=max(due - time.monotonic(), 0)))
            stored_s = time.monotonic() - began
            if stored_s > lead_s:
                raise SystemExit("storing took so long that the first were due meanwhile: measure fewer events")
            await asyncio.sleep(due - time.monotonic())
            while provider.statistics().released_events < load.events:  # noqa: ASYNC110 (it tells nobody)
                await asyncio.sleep(0.005)
            return Rates(load.events / stored_s, load.events / (time.monotonic() - due))


async def _publish(provider: Provider, load: Load, events: int, delay: Callable[[], timedelta]) -> None:
    numbers = iter(range(events))

    async def publisher() -> None:
        for number in numbers:
            await provider.stream(StreamId("n", str(number % AT_ONCE))).publish(load.payload, delay=delay())

    await asyncio.gather(*(publisher() for _ in range(load.publishers)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--publishers", type=int, default=200)
    parser.add_argument("--payload", type=int, default=100)
    parser.add_argument("--places", nargs="*", choices=PLACES, default=PLACES)
    given = parser.parse_args(arguments)
    load = Load(given.events, given.waiting, given.publishers, b"x" * given.payload)
    print("| | stored/s | published/s |\n|---|---:|---:|")
    for name in given.places:
        with place(name) as control:
            rates = asyncio.run(measure(control, load))
        print(f"| {name} | {rates.stored:,.0f} | {rates.published:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
