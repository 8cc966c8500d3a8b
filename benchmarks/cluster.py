"""A cluster of silos on this machine: how long queues are not served when a silo is killed, how much several silos do
together, and how much it costs that any of them could serve a consumer.

    python -m benchmarks.cluster --help
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import click

from headrace import Client, StreamId
from headrace.store.control_store import ControlStore

from .cluster_silos import QUEUES, BenchmarkSilos, owners
from .harness import Job, Metric, Result, Rounds, Spread, interleaved, machine, run, table, together
from .section import cpu
from .servers import PostgresServer
from .worker import StartingGate

HERE = __spec__.name
"""Also where this module is the main one."""

DEFAULTS: Mapping[str, object] = {}
FAST: Mapping[str, object] = {"period_s": 0.2, "lease_s": 2.0, "dead_after_s": 1.0, "maturity_s": 1.0}
"""Times of the cluster, in seconds."""
SIZE, BATCH, STREAMS, CONSUMERS = 100, 1000, 64, 4
CASES, CLUSTER_CASES = "benchmarks.cases", "benchmarks.cluster_cases"
EACH_S = 0.01
"""How often an event of each stream is published while a silo is killed."""
PATIENCE_S = 60.0

# ---- until all queues are served again -------------------------------------------------------------------------------


def recovery(gate: StartingGate, *, postgres: bool, remote: bool, times: Mapping[str, object]) -> Mapping[str, float]:
    """From kill -9 of one of three silos until a consumer has, of each queue, something published since.

    With `remote` the other silos cannot tell whether its process lives, as if it were on another machine.
    """
    with PostgresServer() if postgres else nullcontext() as server:
        store = {"store": server.url} if server else {}
        with BenchmarkSilos(3, cluster={**times, **store}) as silos:
            gate.wait()
            if remote:
                (silos.data / "locks" / ".silos" / "silo-2.lock").unlink()
            return {"served_again_s": asyncio.run(_recovery(silos))}


async def _recovery(silos: BenchmarkSilos) -> float:
    victim = silos.silos[-1]
    others = ",".join(silos.addresses[:-1])
    latest: dict[int, float] = {}
    """Of each queue, when the newest event that came was published."""
    async with Client(others) as client, client.subscribe("bench", "bench/*", start="earliest") as consumer:

        async def consume() -> None:
            async for batch in consumer:
                latest[batch.queue] = max(latest.get(batch.queue, 0.0), *map(float, batch.payloads()))
                await batch.ack()

        async with _running(consume()), _running(_publish(client)):
            await _until(lambda: len(latest) == QUEUES)
            lost = await _queues_of(silos, "silo-2")
            killed = time.monotonic()
            victim.kill()
            await _until(lambda: all(latest[queue] > killed for queue in lost))
            return time.monotonic() - killed


async def _publish(client: Client) -> None:
    streams = [StreamId("bench", str(number)) for number in range(STREAMS)]
    while True:
        now = b"%r" % time.monotonic()
        await client.publish_many((stream, now) for stream in streams)
        await asyncio.sleep(EACH_S)


async def _queues_of(silos: BenchmarkSilos, name: str) -> Sequence[int]:
    store = await ControlStore.open(silos.control)
    try:
        return [queue for queue, owner in owners(await store.cluster().view()).items() if owner == name]
    finally:
        await store.aclose()


@asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.002)


# ---- how much --------------------------------------------------------------------------------------------------------


def to_consumers(
    silos: int, *, events: int, clustered: bool = True, consumers: int = CONSUMERS, direct: bool = True
) -> Result:
    """Durable publish, in a process of its own, to consumers of another process. Without `direct`, a silo is each
    consumer's gateway."""
    with BenchmarkSilos(silos, cluster={} if clustered else None) as running:
        addresses = [running.addresses[number % silos] for number in range(consumers)]
        args = {"addresses": addresses, "events": events, "direct": direct}
        consume = Job("consumers", f"{CLUSTER_CASES}:consume", args)
        return together([consume, _publisher(running, events)], server=running).to_result(events=events, size=SIZE)


def to_handlers(silos: int, *, events: int, clustered: bool = True) -> Result:
    """Durable publish, in a process of its own, until the silos' handlers have had everything and that is saved."""
    with BenchmarkSilos(silos, cluster={} if clustered else None, modules=[CLUSTER_CASES]) as running:
        args = {"control": running.control, "batches": events // BATCH}
        wait = Job("watcher", f"{CLUSTER_CASES}:until_handled", args)
        return together([wait, _publisher(running, events)], server=running).to_result(events=events, size=SIZE)


def _publisher(silos: BenchmarkSilos, events: int) -> Job:
    args = {"data": str(silos.data), "events": events, "size": SIZE, "batch": BATCH, "streams": STREAMS}
    return Job("publisher", f"{CASES}:publish", args)


ALONE = "1 silo, without [cluster]"
Cases = Mapping[str, Callable[[], Result]]


def throughput(events: int) -> Mapping[str, Cases]:
    counts = {"1 silo": 1, "2 silos": 2, "4 silos": 4}
    return {
        f"Durable publish to {CONSUMERS} consumers, {SIZE} B, batches of {BATCH:,}, {QUEUES} queues": {
            ALONE: partial(to_consumers, 1, events=events, clustered=False),
            **{name: partial(to_consumers, count, events=events) for name, count in counts.items()},
            **{
                f"{name}, each consumer through a gateway": partial(to_consumers, count, events=events, direct=False)
                for name, count in counts.items()
            },
        },
        f"Durable publish to handlers in the silos, {SIZE} B, batches of {BATCH:,}, {QUEUES} queues": {
            ALONE: partial(to_handlers, 1, events=events, clustered=False),
            **{name: partial(to_handlers, count, events=events) for name, count in counts.items()},
        },
        "One consumer at the silo that has all queues": {
            ALONE: partial(to_consumers, 1, events=events, clustered=False, consumers=1),
            "1 silo": partial(to_consumers, 1, events=events, consumers=1),
        },
    }


# ---- the command -----------------------------------------------------------------------------------------------------


def _recoveries(rounds: int) -> str:
    lines = ["| control store | times | seconds: median (lowest–highest) |", "| --- | --- | ---: |"]
    for store in ("SQLite", "PostgreSQL", "PostgreSQL, killed on another machine"):
        for name, times in (("defaults", DEFAULTS), ("fast", FAST)):
            found: list[float] = []
            for _ in range(rounds):
                args = {"postgres": store != "SQLite", "remote": "another" in store, "times": dict(times)}
                case = run(f"{HERE}:recovery", args)
                found.append(case["served_again_s"])
                click.echo(f"  {store}, {name}: {found[-1]:.2f} s", err=True)
            spread = Spread.of(found)
            lines.append(f"| {store} | {name} | {spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f}) |")
    return "\n".join(lines)


def _compared(title: str, cases: Cases, rounds: int) -> str:
    found = interleaved(cases, rounds, on_result=_progress)
    lines = [
        f"- {name}: {_ratio(found, name, events_per_s)} of the events/s, {_ratio(found, name, cpu)} of the CPU time"
        for name in cases
        if name != "1 silo"
    ]
    return "\n".join([f"## {title}", "", table(found), "", "To 1 silo, within a round:", "", *lines])


def _ratio(found: Rounds, name: str, metric: Metric) -> str:
    ratio = found.ratio(name, "1 silo", metric)
    return f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def events_per_s(result: Result) -> float:
    return result.events_per_s


def _progress(name: str, result: Result) -> None:
    click.echo(f"  {name}: {result.events_per_s:,.0f} events/s", err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=3, show_default=True)
@click.option("--events", default=1_000_000, show_default=True, help="How many are published in a run.")
@click.option("--only", type=click.Choice(["recovery", "throughput"]), help="Only this (default: both).")
def command(rounds: int, events: int, only: str | None) -> None:
    """Several silos on this machine; Markdown on stdout, progress on stderr."""
    click.echo(f"{machine(['lmdb', 'grpcio', 'protobuf'])}\n")
    if only != "throughput":
        click.echo(f"## From kill -9 until all queues are served again\n\n{_recoveries(rounds)}\n")
    if only != "recovery":
        for title, cases in throughput(events).items():
            click.echo(f"{_compared(title, cases, rounds)}\n")


if __name__ == "__main__":
    command()
