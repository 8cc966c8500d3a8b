"""What a cluster costs its control store: statements per second, at rest and while a silo joins or dies.

    python -m benchmarks.control_plane --help

The silos are memberships in one process, each with a connection of its own to one SQLite file, in real time; their
agents have nothing to do. Statements are counted where SQLAlchemy hands them to the driver, without BEGIN and COMMIT.
CPU seconds are those of the process: the store's threads, SQLite's work in them, and the silos' decisions.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from sqlalchemy import Engine, event

from headrace.balancer.cluster_options import ClusterOptions
from headrace.balancer.held_leases import LeaseTerm
from headrace.balancer.membership import Membership
from headrace.store.cluster_store import ClusterStore
from headrace.store.control_store import ControlStore
from headrace.streams.cluster import ClusterView, SiloRecord

from .harness import machine, markdown

PROVIDER = "measured"
MATURITY_S = 2.0
POLL_S = 0.05


class Counts:
    """Of all silos."""

    def __init__(self) -> None:
        self.statements = Counter[str]()
        """By verb and table."""
        self.transactions = 0
        self.beats = 0

    def listen(self) -> None:
        """Count the statements of all databases of this process from now on."""

        @event.listens_for(Engine, "before_cursor_execute")
        def count(*args: Any) -> None:  # pyright: ignore[reportUnusedFunction]
            statement: str = args[2]
            if statement.startswith("BEGIN"):
                self.transactions += 1
            else:
                self.statements[statement.split(maxsplit=1)[0]] += 1


class Queues:
    """Serves whatever it gets, at no cost."""

    def __init__(self, queues: int) -> None:
        self.queues = queues
        self.served = set[int]()

    async def gain(self, queue: int, epoch: int, term: LeaseTerm) -> None:
        self.served.add(queue)

    async def lose(self, queue: int, drain_s: float) -> None:
        self.served.discard(queue)

    def cut(self, queue: int) -> None:
        self.served.discard(queue)


class CountingStore:
    """A cluster store that counts the heartbeats."""

    def __init__(self, store: ClusterStore, counts: Counts) -> None:
        self._store = store
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def beat(self, me: SiloRecord, lease_s: float) -> ClusterView:
        self._counts.beats += 1
        return await self._store.beat(me, lease_s)


class BenchmarkSilo:
    def __init__(self, name: str, store: ControlStore, cluster: Cluster) -> None:
        self.name = name
        self.queues = Queues(cluster.queues)
        self._store = store
        leases: Any = CountingStore(store.cluster(), cluster.counts)
        self.membership = Membership(
            leases, name, address=name, owners={PROVIDER: self.queues}, peers=self, options=cluster.options
        )

    async def reach(self, silo: SiloRecord) -> bool:
        return True

    async def die(self) -> None:
        """End the heartbeats without giving anything back."""
        self.membership.superseded.cancel()
        await self._store.aclose()


class Cluster:
    def __init__(self, path: Path, queues: int, options: ClusterOptions) -> None:
        self.queues = queues
        self.options = options
        self.counts = Counts()
        self.silos: list[BenchmarkSilo] = []
        self._path = path
        self.counts.listen()

    async def start(self) -> None:
        store = await ControlStore.open(self._path)
        silo = BenchmarkSilo(f"silo-{len(self.silos):02}", store, self)
        self.silos.append(silo)
        await silo.membership.join()

    async def kill(self) -> None:
        await self.silos.pop().die()

    @property
    def even(self) -> bool:
        shares = [len(silo.queues.served) for silo in self.silos]
        return sum(shares) == self.queues and max(shares) - min(shares) <= 1

    async def until_even(self) -> None:
        while not self.even:  # noqa: ASYNC110 (what is measured must not be told of)
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        for silo in list(self.silos):
            await silo.die()


class Phase(NamedTuple):
    name: str
    seconds: float
    silos: int
    statements: int
    transactions: int
    beats: int
    cpu_s: float


class Phases:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.done: list[Phase] = []

    async def measure(self, name: str, wait: Callable[[], Any]) -> None:
        counts = self._cluster.counts
        before = counts.statements.total(), counts.transactions, counts.beats
        began, cpu = time.monotonic(), time.process_time()
        await wait()
        after = counts.statements.total(), counts.transactions, counts.beats
        statements, transactions, beats = (b - a for a, b in zip(before, after, strict=True))
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        phase = Phase(name, seconds, len(self._cluster.silos), statements, transactions, beats, cpu_s)
        click.echo(f"  {name}: {statements:,} statements in {seconds:.1f} s", err=True)
        self.done.append(phase)


async def _measure(silos: int, queues: int, seconds: float) -> list[Phase]:
    options = ClusterOptions(maturity_s=MATURITY_S)
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory, "control.db"), queues, options)
        for _ in range(silos):
            await cluster.start()
        await cluster.until_even()
        await asyncio.sleep(2 * options.period_s + MATURITY_S)
        phases = Phases(cluster)
        await phases.measure("at rest", lambda: asyncio.sleep(seconds))
        await phases.measure("a silo joins, until all is even", lambda: _joins(cluster))
        await phases.measure("a silo dies, until all is served", lambda: _dies(cluster))
        await cluster.close()
    return phases.done


async def _joins(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.until_even()


async def _dies(cluster: Cluster) -> None:
    await cluster.kill()
    await cluster.until_even()


def report(phases: Sequence[Phase], queues: int) -> str:
    header = (
        "phase", "s", "statements/s", "per silo", "per queue", "transactions/s", "statements per beat",
        "CPU ms per beat",
    )  # fmt: skip
    return markdown(header, [_row(phase, queues) for phase in phases])


def _row(phase: Phase, queues: int) -> Sequence[str]:
    rate = phase.statements / phase.seconds
    return (
        phase.name,
        f"{phase.seconds:.1f}",
        f"{rate:.0f}",
        f"{rate / phase.silos:.1f}",
        f"{rate / queues:.3f}",
        f"{phase.transactions / phase.seconds:.0f}",
        f"{phase.statements / phase.beats:.1f}",
        f"{phase.cpu_s / phase.beats * 1000:.1f}",
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--silos", default=16, show_default=True)
@click.option("--queues", default=1024, show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="How long the time at rest is measured.")
def command(silos: int, queues: int, seconds: float) -> None:
    """Statements per second of a cluster; Markdown on stdout, progress on stderr."""
    logging.disable(logging.WARNING)
    phases = asyncio.run(_measure(silos, queues, seconds))
    click.echo(f"{machine(['sqlalchemy'])}\n")
    click.echo(f"## The control plane of {silos} silos and {queues:,} queues\n\n{report(phases, queues)}\n")


if __name__ == "__main__":
    command()
