"""`headrace cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...streams.errors import HeadraceError
from .options import Server, calling, provider_option, server_options
from .output import json_option, note, print_json, print_table
from .running import run

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ...proto.v1 import cluster_pb2 as pb

ASK_S = 30.0
"""How long a description may take."""

_drain_option = click.option(
    "--timeout", "drain_s", type=click.FloatRange(min=0, min_open=True, max=86400.0), metavar="SECONDS",
    help="How long what is in flight may take to end.  [default: the silo's drain_s]",
)  # fmt: skip
_queue_option = click.option(
    "--queue", "queues", type=click.IntRange(min=0), multiple=True, metavar="N",
    help="This queue; may be repeated.  [default: all]",
)  # fmt: skip


class _Showing(click.Group):
    """`show` is what is meant where no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group("cluster", cls=_Showing)
def command() -> None:
    """Show the silos that share the queues; drain them, stop and start agents.

    Without a command, `show`. Any silo answers for all.
    """


@command.command()
@server_options
@json_option
def show(*, server: Server, as_json: bool) -> None:
    """The silos, and how evenly the queues are spread."""
    document = run(_show(server))
    if as_json:
        print_json(document)
        return
    print_silos(document)


@command.command()
@server_options
@click.argument("silo")
@_drain_option
@json_option
def drain(*, server: Server, silo: str, drain_s: float | None, as_json: bool) -> None:
    """Give all queues of SILO to others, and send its consumers there; it stays up, without any.

    Until it is undrained, or started again. Where it was the last one that runs, that is said, and nobody serves.
    """
    unserved = run(_drain(server, silo, drain_s))
    _done(as_json, f"silo {silo} is drained", silo=silo, drained=True)
    for provider in unserved:
        note(f"no silo is left to serve the queues of provider {provider}: undrain one, or start another")


@command.command()
@server_options
@click.argument("silo")
@json_option
def undrain(*, server: Server, silo: str, as_json: bool) -> None:
    """Let SILO have queues and consumers again."""
    run(_tell(server, "UndrainSilo", silo=silo))
    _done(as_json, f"silo {silo} may have queues again", silo=silo, drained=False)


@command.command("stop-agents")
@server_options
@provider_option
@_queue_option
@_drain_option
@json_option
def stop_agents(*, server: Server, provider: str, queues: Sequence[int], drain_s: float | None, as_json: bool) -> None:
    """Deliver nothing more of queues, wherever they are, until they are started. Publishing goes on."""
    run(_tell(server, "StopAgents", provider=provider, queues=queues, drain_ms=_ms(drain_s)))
    _done(as_json, f"{_named(provider, queues)} stopped", provider=provider, queues=queues or None, stopped=True)


@command.command("start-agents")
@server_options
@provider_option
@_queue_option
@json_option
def start_agents(*, server: Server, provider: str, queues: Sequence[int], as_json: bool) -> None:
    """Deliver again what was stopped."""
    run(_tell(server, "StartAgents", provider=provider, queues=queues))
    _done(as_json, f"{_named(provider, queues)} started", provider=provider, queues=queues or None, stopped=False)


def _ms(seconds: float | None) -> int:
    return 0 if seconds is None else max(round(seconds * 1000), 1)


def _named(provider: str, queues: Sequence[int]) -> str:
    which = f"queue{'s' if len(queues) > 1 else ''} {', '.join(map(str, sorted(queues)))}" if queues else "all queues"
    return f"agents of {which} of {provider} are"


def _done(as_json: bool, text: str, **document: Any) -> None:
    if as_json:
        print_json(document)
    else:
        note(text)


# ---- what is asked ---------------------------------------------------------------------------------------------------


async def _tell(server: Server, method: str, **fields: Any) -> None:
    """Have something done, however long it takes."""
    from ...proto.v1 import cluster_pb2 as pb  # noqa: PLC0415 (only where a silo is called)

    request: Message = getattr(pb, f"{method}Request")(**fields)
    async with calling(server) as connection:
        await connection.unary(f"ClusterService/{method}", request.SerializeToString(), timeout_s=None)


async def _drain(server: Server, silo: str, drain_s: float | None) -> Sequence[str]:
    """Returns the providers that no silo is left to serve."""
    await _tell(server, "DrainSilo", silo=silo, drain_ms=_ms(drain_s))
    try:
        return _without_silo((await described(server)).silos, silo)
    except HeadraceError as error:
        note(f"whether another silo is left to serve the queues is not known: {error}")
        return []


def _without_silo(silos: Sequence[pb.Silo], drained: str) -> list[str]:
    """The providers of the one that is `drained`, whatever was last heard of it, that no running silo serves."""
    running = [silo for silo in silos if silo.state == "running" and silo.name != drained]
    served = {provider.name for silo in running for provider in silo.providers}
    return sorted({provider.name for silo in silos if silo.name == drained for provider in silo.providers} - served)


async def described(server: Server) -> pb.Cluster:
    from ...proto.v1 import cluster_pb2 as pb  # noqa: PLC0415 (only where a silo is called)

    async with calling(server) as connection:
        answer = await connection.call("ClusterService/DescribeCluster", b"", timeout_s=ASK_S)
    return pb.DescribeClusterResponse.FromString(answer).cluster


async def _show(server: Server) -> dict[str, Any]:
    cluster = await described(server)
    names = sorted({provider.name for silo in cluster.silos for provider in silo.providers})
    return {
        "silos": [_silo(silo) for silo in cluster.silos],
        "providers": [_spread(cluster, name)._asdict() for name in names],
    }


def _silo(silo: pb.Silo) -> dict[str, Any]:
    return {
        "name": silo.name,
        "state": silo.state,
        "address": silo.address,
        "version": silo.version,
        "queues": {provider.name: [queue.index for queue in provider.queues] for provider in silo.providers},
        "silent_s": silo.silent_ms / 1000,
    }


class Spread(NamedTuple):
    """How evenly the queues of a provider are spread over the silos that may have some."""

    provider: str
    queues: int
    unserved: int
    silos: int
    """That run, and serve the provider."""
    fewest: int
    mean: float
    most: int
    skew: float
    """The most queues of a silo, against the mean."""


def _spread(cluster: pb.Cluster, name: str) -> Spread:
    of = [(silo, provider) for silo in cluster.silos for provider in silo.providers if provider.name == name]
    shares = [len(provider.queues) for silo, provider in of if silo.state == "running"]
    served = sum(len(provider.queues) for silo, provider in of if silo.state not in ("dead", "unreachable"))
    queues = max(provider.queue_count for _, provider in of)
    mean = sum(shares) / len(shares) if shares else 0.0
    most, fewest = max(shares, default=0), min(shares, default=0)
    skew = round(most / mean, 2) if mean else 0.0
    return Spread(name, queues, queues - served, len(shares), fewest, round(mean, 2), most, skew)


def print_silos(document: dict[str, Any]) -> None:
    rows = [
        (silo["name"], silo["state"], silo["address"], _queues_of(silo), _heard(silo), silo["version"] or "?")
        for silo in document["silos"]
    ]
    print_table(("silo", "state", "address", "queues", "heard", "version"), rows, right=("heard",))
    print_table(Spread._fields, [tuple(spread.values()) for spread in document["providers"]])


def _queues_of(silo: dict[str, Any]) -> str:
    parts = [f"{provider}: {_runs(queues)}" for provider, queues in silo["queues"].items() if queues]
    return "; ".join(parts) or "none"


def _runs(queues: Sequence[int]) -> str:
    """Numbers in ascending order, as in 0-3 5."""
    runs: list[list[int]] = []
    for queue in queues:
        if runs and queue == runs[-1][1] + 1:
            runs[-1][1] = queue
        else:
            runs.append([queue, queue])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _heard(silo: dict[str, Any]) -> str:
    return f"{silo['silent_s']:,.1f} s ago"
