"""A subscription with many consumers and a big backlog beside one with a single consumer: how long that one's events
take, alone, beside the others in fair turns, and beside them first come, first served.

    python -m benchmarks.fairness --help

A silo with gRPC, the single consumer, the publisher of its events and the crowd are a process each. The crowd's has
only the processor time that no other process wants, and the silo's comes after the publisher's and the single
consumer's: they all would be on other machines, and the silo's order is measured, not that of the kernel. All else is
as everywhere: events are durable before they are delivered, and latency is from just before publishing.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import click

from headrace import Provider, StreamId
from headrace.agents.delivery.edge import DeliveryActor, Edge
from headrace.agents.delivery.fairness import FairQueue
from headrace.proto.v1 import consumer_pb2 as pb
from headrace.silo.tuning import tune_interpreter
from headrace.streams import frames

from .cases import STAMP, WARM_UP, fill
from .harness import Job, Latency, Result, Rounds, count, interleaved, machine, markdown, run, together
from .results import Spread
from .servers import LOOPBACK, Server
from .worker import StartingGate

HERE = __spec__.name
"""Also where this module is the main one."""
RATE = 200
"""Events per second for the single consumer."""
SIZE, CROWD_SIZE, CROWD_BATCH = 1024, 256, 50
CROWD_STREAMS = 400
"""More than consumers: of each stream one parcel is in flight."""
CROWD_CREDIT = 100
"""Events that each of the crowd lets come at a time."""
CONNECTIONS = 8
FOR_EVER = 1 << 30


def first_come(_: DeliveryActor) -> float:
    """All are equal, so the first that asked is next."""
    return 0.0


def edges() -> Mapping[str, Callable[[], Edge]]:
    """The orders that are compared. First come, first served means that each consumer gets all that it asks for."""
    unordered = partial(FairQueue[DeliveryActor], first_come)
    return {
        "fair": Edge,
        "first-come": lambda: Edge(fair=unordered(), window=FOR_EVER, quota_s=FOR_EVER, modest_s=0),
    }


# ---- processes -------------------------------------------------------------------------------------------------------


class EdgeServer(Server):
    """What a silo serves over gRPC to consumers, with an edge of choice."""

    name = "silo"

    def __init__(self, order: str) -> None:
        super().__init__()
        self._order = order

    @property
    def data(self) -> str:
        return str(self.directory / "data")

    def command(self) -> Sequence[str]:
        return (sys.executable, "-m", HERE, "--serve", self.data, str(self.port), self._order)

    def ping(self) -> bool:
        return b"serving" in (self.directory / "server.log").read_bytes()


async def _serve(data: str, port: int, order: str) -> None:
    os.nice(5)
    # The gRPC server of a silo is imported only in its own process.
    from headrace.server.access import NoTokens  # noqa: PLC0415
    from headrace.server.config import GrpcConfig  # noqa: PLC0415
    from headrace.server.grpc_server import serving  # noqa: PLC0415
    from headrace.silo.consumer_groups import ConsumerGroups  # noqa: PLC0415
    from headrace.silo.services.consumer import ConsumerService  # noqa: PLC0415
    from headrace.silo.services.visible import VisibleBounds  # noqa: PLC0415

    async with Provider.open(data) as provider, ConsumerGroups.opened(provider, 10.0, edges()[order]()) as consumers:
        methods = ConsumerService({provider.name: provider}, {provider.name: consumers}, VisibleBounds()).methods()
        config = GrpcConfig(host=LOOPBACK, port=port)
        async with serving(config, NoTokens(), lambda _: methods, drain_s=1.0):
            tune_interpreter()
            print("serving", flush=True)
            await asyncio.Event().wait()


def backlog(gate: StartingGate, *, data: str, events: int) -> None:
    """Store what waits for the crowd."""
    asyncio.run(_backlog(gate, data, events))


async def _backlog(gate: StartingGate, data: str, events: int) -> None:
    async with Provider.open(data) as provider:
        gate.wait()
        streams = [StreamId("crowd", str(number)) for number in range(CROWD_STREAMS)]
        await fill(provider, events, CROWD_SIZE, CROWD_BATCH, streams)
    await asyncio.to_thread(os.sync)  # a backlog is old: the disk is not busy with it


def single(gate: StartingGate, *, address: str, events: int) -> dict[str, float]:
    """The single consumer: its latency."""
    return asyncio.run(_single(gate, address, events))._asdict()


async def _single(gate: StartingGate, address: str, events: int) -> Latency:
    samples_ms: list[float] = []
    async with _channels(address, 1) as (channel,):
        consumer = await GrpcConsumer.attached(channel, name="single", selector="bench/*", start="latest")
        gate.wait()
        await consumer.grant(1000, 4 << 20)
        while len(samples_ms) < events:
            for delivered in await consumer.receive():
                now_ns = time.monotonic_ns()
                samples_ms += [(now_ns - STAMP.unpack_from(one)[0]) / 1e6 for one in delivered.batch.payloads()]
        gate.done()
    return Latency.of(samples_ms[int(WARM_UP * events) :])


def crowd(gate: StartingGate, *, address: str, consumers: int, seconds: float) -> dict[str, float]:
    """The many consumers: how much each of their connections had, for so long."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return asyncio.run(_crowd(gate, address, consumers, seconds))


async def _crowd(gate: StartingGate, address: str, consumers: int, seconds: float) -> dict[str, float]:
    async with _channels(address, CONNECTIONS) as channels:
        attaching = (
            GrpcConsumer.attached(channels[number % CONNECTIONS], name="crowd", selector="crowd/*", start="earliest")
            for number in range(consumers)
        )
        members = await asyncio.gather(*attaching)
        gate.wait()
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(member.consume(began + seconds))
        gate.done()
    events, messages = (sum(counts) for counts in zip(*((m.events, m.messages) for m in members), strict=True))
    return {"events_per_s": events / seconds, "messages_per_s": messages / seconds, "events": events}


class GrpcConsumer:
    """A consumer of a subscription that does nothing but acknowledge, and grant as much again."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._statuses: dict[int, pb.QueueStatus] = {}
        self.events = 0
        self.messages = 0

    @classmethod
    async def attached(cls, channel: Any, *, name: str, selector: str, start: str) -> GrpcConsumer:
        """Without credit. Returns when the silo has taken it in."""
        call = channel.stream_stream("/headrace.v1.ConsumerService/Subscribe")()
        request = pb.SubscribeRequest()
        request.open.definition.name = name
        request.open.definition.selector = selector
        setattr(request.open.definition.start, start, True)
        await call.write(request.SerializeToString())
        consumer = cls(call)
        await consumer.receive()
        return consumer

    async def grant(self, events: int, size: int) -> None:
        await self._call.write(pb.SubscribeRequest(credit=pb.Credit(events=events, bytes=size)).SerializeToString())

    async def receive(self) -> list[frames.DeliveredBatch]:
        """Return the batches of the next response. They are acknowledged."""
        message = await self._call.read()
        delivered, rest = frames.split(message)
        if rest:
            self._statuses |= {status.queue: status for status in pb.SubscribeResponse.FromString(rest).queues}
        if delivered:
            events = sum(one.batch.count for one in delivered)
            credit = pb.Credit(events=events, bytes=len(message) - len(rest))
            request = pb.SubscribeRequest(reports=self._reports(delivered), credit=credit)
            await self._call.write(request.SerializeToString())
            self.events += events
            self.messages += 1
        return delivered

    def _reports(self, delivered: Sequence[frames.DeliveredBatch]) -> Sequence[pb.QueueReport]:
        reports: dict[int, pb.QueueReport] = {}
        for one in delivered:
            if (report := reports.get(one.queue)) is None:
                status = self._statuses[one.queue]
                report = pb.QueueReport(queue=one.queue, epoch=status.epoch, generation=status.generation)
                reports[one.queue] = report
            report.acknowledgements.add(offset=one.batch.offset)
        return list(reports.values())

    async def consume(self, until: float) -> None:
        await self.grant(CROWD_CREDIT, 1 << 20)
        while time.monotonic() < until:
            await self.receive()


@asynccontextmanager
async def _channels(address: str, number: int) -> AsyncGenerator[Sequence[Any]]:
    import grpc.aio  # noqa: PLC0415 (only in the process that uses it)

    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(number)]
    try:
        yield channels
    finally:
        for channel in channels:
            await channel.close()


# ---- the comparison --------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    seconds: float
    consumers: int
    backlog: int
    """Events that wait for the crowd."""


Crowds = dict[str, list[Mapping[str, float]]]
"""What the crowd had, by case and round."""


def measure(setting: Setting, order: str, crowds: list[Mapping[str, float]] | None) -> Result:
    """One run, with a crowd if there is a list for its results."""
    events = int(RATE * setting.seconds)
    with EdgeServer(order) as server:
        if crowds is not None:
            run(f"{HERE}:backlog", {"data": server.data, "events": setting.backlog})
        paced = {"data": server.data, "events": events, "size": SIZE, "rate": RATE}
        jobs = [
            Job("single", f"{HERE}:single", {"address": server.address, "events": events}),
            Job("publisher", "benchmarks.cases:publish_paced", paced),
        ]
        if crowds is not None:
            many = {"address": server.address, "consumers": setting.consumers, "seconds": setting.seconds + 0.5}
            jobs.append(Job("crowd", f"{HERE}:crowd", many))
        outcome = together(jobs, server=server)
    if crowds is not None:
        had = outcome.reports["crowd"].result
        if had["events"] >= setting.backlog:
            raise click.ClickException(f"the crowd had all of its {setting.backlog:,} events: give it more (--backlog)")
        crowds.append(had)
    return outcome.to_result(events=events, size=SIZE, latency=Latency(**outcome.reports["single"].result))


def report(rounds: Rounds, crowds: Crowds) -> str:
    header = ("case", "p50 ms", "p99 ms", "p99 × alone", "crowd, events/s", "crowd, messages/s", "foreign cores")
    rows = [_row(name, rounds, crowds.get(name, [])) for name in rounds.names]
    return markdown(header, rows)


def _row(name: str, rounds: Rounds, crowd: Sequence[Mapping[str, float]]) -> Sequence[str]:
    rates = [Spread.of([had[key] for had in crowd]) for key in ("events_per_s", "messages_per_s")] if crowd else []
    foreign = rounds.spread(name, lambda result: result.foreign_cores)
    return (
        name,
        _figures(rounds.spread(name, _p50)),
        _figures(rounds.spread(name, _p99)),
        _figures(rounds.ratio(name, rounds.names[0], _p99)),
        *(f"{count(rate.median)}" for rate in rates or ()),
        *("" for _ in range(2 - len(rates))),
        f"{foreign.median:.1f}",
    )


def _p50(result: Result) -> float:
    assert result.latency
    return result.latency.p50_ms


def _p99(result: Result) -> float:
    assert result.latency
    return result.latency.p99_ms


def _figures(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="How long a run takes.")
@click.option("--consumers", default=200, show_default=True, help="How many the crowd is.")
@click.option("--backlog", "events", default=4_000_000, show_default=True, help="Events that wait for the crowd.")
@click.option("--serve", nargs=3, type=str, hidden=True)
def command(rounds: int, seconds: float, consumers: int, events: int, serve: tuple[str, str, str] | None) -> None:
    """Latency of a single consumer beside a crowd; Markdown on stdout, progress on stderr."""
    if serve:
        asyncio.run(_serve(serve[0], int(serve[1]), serve[2]))
        return
    setting = Setting(seconds, consumers, events)
    crowds: Crowds = {"beside the crowd, fair turns": [], "beside the crowd, first come": []}
    fair, unfair = crowds.values()
    cases: dict[str, Callable[[], Result]] = {
        "alone": partial(measure, setting, "fair", None),
        "beside the crowd, fair turns": partial(measure, setting, "fair", fair),
        "beside the crowd, first come": partial(measure, setting, "first-come", unfair),
    }
    found = interleaved(cases, rounds, on_result=_progress)
    click.echo(f"{machine(['lmdb', 'grpcio', 'protobuf'])}\n")
    title = (
        f"A single consumer, {RATE} events/s of {SIZE:,} B, beside {consumers} with a backlog of {count(events)} events"
    )
    click.echo(f"## {title}\n\n{report(found, crowds)}\n")


def _progress(name: str, result: Result) -> None:
    click.echo(f"  {name}: p50 {_p50(result):.2f} ms, p99 {_p99(result):.2f} ms", err=True)


if __name__ == "__main__":
    command()
