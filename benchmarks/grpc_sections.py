"""Compares headrace over gRPC with headrace in one process, and with peers that have remote consumers.

A silo serves gRPC in a process of its own; the embedded publisher writes to its data directory, the remote one to the
silo. Clients use the native protocol, except in the cases that turn it off. A run ends when the consumers have read
every payload, and acknowledged it batch by batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from . import fan_reference
from .harness import Job, Latency, Result, together
from .harness import run as run_case
from .peers import PEERS
from .runs import latency_of_two, publish, two_processes
from .section import Run, Section, Target, cpu, p50, p99
from .silo_server import SiloServer

CASES, GRPC_CASES = "benchmarks.cases", "benchmarks.grpc_cases"
REMOTE_PEERS = ("redis", "redis-always", "nats", "rabbitmq")
EMBEDDED, CONSUMER, TEN = "headrace, two processes", "consumer over gRPC", "ten consumers over gRPC"
BOTH, PUBLISHER = "publisher and consumer over gRPC", "headrace, publisher over gRPC"
NOT_NATIVE = ", native protocol off"
REFERENCE = "a server that serialises for every consumer"


def end_to_end(
    *, events: int, size: int, batch: int, consumers: int = 1, remote_publisher: bool = False, native: bool = True
) -> Result:
    """From the first publish until `consumers` consumers of one subscription have had everything."""
    with SiloServer(native=native) as silo:
        produce = {"events": events, "size": size, "batch": batch}
        consume = {"address": silo.address, "events": events, "consumers": consumers}
        jobs = [
            Job("consumer", f"{GRPC_CASES}:consume", consume),
            _producer(silo, "publish", produce, remote_publisher),
        ]
        return together(jobs, server=silo).to_result(events=events, size=size)


def publish_remotely(*, events: int, size: int, batch: int, native: bool = True) -> Result:
    with SiloServer(native=native) as silo:
        job = _producer(silo, "publish", {"events": events, "size": size, "batch": batch}, remote=True)
        return together([job], server=silo).to_result(events=events, size=size)


def latency(*, events: int, size: int, rate: int, remote_publisher: bool = False, native: bool = True) -> Result:
    with SiloServer(native=native) as silo:
        produce = {"events": events, "size": size, "rate": rate}
        consume = {"address": silo.address, "events": events}
        jobs = [
            Job("consumer", f"{GRPC_CASES}:consume_stamped", consume),
            _producer(silo, "publish_paced", produce, remote_publisher),
        ]
        outcome = together(jobs, server=silo)
    found = Latency(**outcome.reports["consumer"].result)
    return outcome.to_result(events=events, size=size, latency=found)


def fan_out(*, events: int, size: int, batch: int, subscriptions: int) -> Result:
    """A backlog to the consumers of several subscriptions; it lasts until each has had everything."""
    with SiloServer() as silo:
        run_case(f"{CASES}:publish", {"data": silo.data, "events": events, "size": size, "batch": batch})
        consume = {"address": silo.address, "events": events, "subscriptions": subscriptions}
        outcome = together([Job("consumers", f"{GRPC_CASES}:consume_each", consume)], server=silo)
    return outcome.to_result(events=events, size=size)


def _producer(silo: SiloServer, case: str, args: dict[str, int], remote: bool) -> Job:
    if remote:
        return Job("producer", f"{GRPC_CASES}:{case}", {"address": silo.address, **args})
    return Job("producer", f"{CASES}:{case}", {"data": silo.data, **args})


def sections(scale: float, peers: Sequence[str]) -> list[Section]:
    """All questions about gRPC, with event counts multiplied by `scale`."""
    remote = [peer for peer in REMOTE_PEERS if peer in peers]

    def n(events: int) -> int:
        return max(2000, int(events * scale) // 1000 * 1000)

    def beside(measure: str, **args: float) -> dict[str, Run]:
        return {PEERS[peer].name: partial(getattr(PEERS[peer], measure), **args) for peer in remote}

    def through(title: str, name: str, size: int, ours: int, theirs: int) -> Section:
        args = {"events": ours, "size": size, "batch": 1000}
        return Section(
            name=name,
            title=f"Durable publish to consumer over gRPC, {title}, batches of 1000",
            cases={
                EMBEDDED: partial(two_processes, **args),
                CONSUMER: partial(end_to_end, **args),
                TEN: partial(end_to_end, **args, consumers=10),
                BOTH: partial(end_to_end, **args, remote_publisher=True),
                BOTH + NOT_NATIVE: partial(end_to_end, **args, remote_publisher=True, native=False),
                **beside("end_to_end", events=theirs, size=size, batch=1000),
            },
            targets=(
                Target(what="≥ 0.7 × two processes without gRPC", case=CONSUMER, to=EMBEDDED, bound=0.7),
                Target(what="ten consumers: the same", case=TEN, to=EMBEDDED, bound=0.7),
                Target(what="≤ 1 CPU s per million", case=BOTH, to=None, bound=1, metric=cpu, at_most=True),
            ),
        )

    return [
        through("100 B", "grpc", 100, n(1_000_000), n(100_000)),
        through("1 KiB", "grpc-1k", 1024, n(300_000), n(100_000)),
        Section(
            name="grpc-publish",
            title="Durable publish over gRPC, 100 B, batches of 1000",
            cases={
                "headrace, embedded": partial(publish, "publish", events=n(1_000_000), size=100, batch=1000),
                PUBLISHER: partial(publish_remotely, events=n(1_000_000), size=100, batch=1000),
                PUBLISHER + NOT_NATIVE: partial(
                    publish_remotely, events=n(1_000_000), size=100, batch=1000, native=False
                ),
                **beside("publish", events=n(200_000), size=100, batch=1000),
            },
        ),
        _latency(beside("latency", rate=2000, seconds=n(10_000) / 2000, size=1024), n(10_000)),
        _fan_out(beside("fan_out", events=n(50_000), size=100, batch=1000, consumers=10), n(500_000)),
    ]


def _latency(peers: dict[str, Run], events: int) -> Section:
    args = {"events": events, "size": 1024, "rate": 2000}
    always = PEERS["redis-always"].name
    return Section(
        name="grpc-latency",
        title="Latency over gRPC at 2,000 events/s, 1 KiB, fsync before the publish returns",
        cases={
            EMBEDDED: partial(latency_of_two, **args),
            CONSUMER: partial(latency, **args),
            BOTH: partial(latency, **args, remote_publisher=True),
            BOTH + NOT_NATIVE: partial(latency, **args, remote_publisher=True, native=False),
            **peers,
        },
        targets=(
            Target(what="p50 ≤ 1.5 × Redis with AOF always", case=BOTH, to=always, bound=1.5, metric=p50, at_most=True),
            Target(what="p99 ≤ 2 × Redis with AOF always", case=BOTH, to=always, bound=2, metric=p99, at_most=True),
            Target(what="≤ 350 µs of CPU per event", case=BOTH, to=None, bound=350, metric=cpu, at_most=True),
        ),
    )


def _fan_out(peers: dict[str, Run], events: int) -> Section:
    ten = "headrace, ten subscriptions"
    return Section(
        name="grpc-fan-out",
        title="Fan-out of a backlog over gRPC to ten consumers, 100 B, batches of 1000 (deliveries/s)",
        cases={
            ten: partial(fan_out, events=events, size=100, batch=1000, subscriptions=10),
            REFERENCE: partial(fan_reference.fan_out, events=events, size=100, batch=1000, consumers=10),
            **peers,
        },
        deliveries_each=dict.fromkeys((ten, REFERENCE, *peers), 10),
        targets=(Target(what=f"≥ 3 × {REFERENCE}", case=ten, to=REFERENCE, bound=3),),
    )
