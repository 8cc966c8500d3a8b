"""`headrace cluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...balancer.mapper import MAX_QUEUES
from ...silo.addresses import check_store
from ...streams.errors import HeadraceError
from .help import CommandGroup
from .options import NumberRange, SiloPlace, calling, data_option, provider_option, server_options, store_option
from .output import json_option, note, print_json, print_table
from .running import run

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ...proto.v1 import cluster_pb2 as pb

ASK_S = 30.0
"""How long the description of the cluster may take, in seconds."""

_drain_option = click.option(
    "--timeout", "drain_s", type=NumberRange(min=0, min_open=True, max=86400.0), metavar="SECONDS",
    help="How long running handlers may take to end.  [default: the silo's drain_s]",
)  # fmt: skip
_queue_option = click.option(
    "--queue", "queues", type=click.IntRange(0, MAX_QUEUES - 1), multiple=True, metavar="N",
    help="Only this queue; may be repeated.  [default: all]",
)  # fmt: skip


class _ShowByDefault(CommandGroup):
    """Runs `show` if no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group("cluster", cls=_ShowByDefault)
def command() -> None:
    """Show the silos that share the queues; drain them, stop and start agents.

    Without a command, `show`. Any silo answers for all.
    """


@command.command()
@server_options
@json_option
def show(*, server: SiloPlace, as_json: bool) -> None:
    """Show the silos, and how evenly the queues are spread."""
    document = run(_show(server))
    if as_json:
        print_json(document)
        return
    print_silos(document)


@command.command(short_help="Move all queues of SILO to other silos.")
@server_options
@click.argument("silo")
@_drain_option
@json_option
def drain(*, server: SiloPlace, silo: str, drain_s: float | None, as_json: bool) -> None:
    """Move all queues and consumers of SILO to other silos. It keeps running without queues.

    This lasts until it is undrained or restarted. If no other silo runs, a note says that no silo serves the queues.
    """
    unserved = run(_drain(server, silo, drain_s))
    _done(as_json, f"silo {silo!r} is drained", silo=silo, drained=True)
    for provider in unserved:
        note(f"no silo is left to serve the queues of provider {provider!r}: undrain one, or start another")


@command.command()
@server_options
@click.argument("silo")
@json_option
def undrain(*, server: SiloPlace, silo: str, as_json: bool) -> None:
    """Allow queues and consumers on SILO again."""
    run(_tell(server, "UndrainSilo", silo=silo))
    _done(as_json, f"silo {silo!r} may have queues again", silo=silo, drained=False)


@command.command()
@server_options
@click.argument("silo")
@json_option
def forget(*, server: SiloPlace, silo: str, as_json: bool) -> None:
    """Forget a dead SILO for ever: no queue waits for it any more.

    It may join again later, as a new silo.
    """
    run(_tell(server, "ForgetSilo", silo=silo))
    _done(as_json, f"silo {silo!r} is forgotten", silo=silo, forgotten=True)


@command.command("move-store", short_help="Store the new address of a cluster's database.")
@data_option("Data directory. No silo may run on it.")
@store_option("New URL of the PostgreSQL database.", required=True)
@json_option
def move_store(*, data: Path, store: str, as_json: bool) -> None:
    """Store the new address of the cluster's database in a data directory.

    It must be the same database, or a copy of it. Change cluster.store of the silos, too.
    """
    check_store(store, "--store")
    run(_move_store(data, store))
    _done(as_json, f"data directory '{data}': its control data is at the new address", data=str(data), moved=True)


@command.command("stop-agents", short_help="Stop the delivery of queues.")
@server_options
@provider_option
@_queue_option
@_drain_option
@json_option
def stop_agents(
    *, server: SiloPlace, provider: str, queues: Sequence[int], drain_s: float | None, as_json: bool
) -> None:
    """Stop the delivery of queues, on any silo, until they are started. Publishing continues."""
    run(_tell(server, "StopAgents", provider=provider, queues=queues, drain_ms=_ms(drain_s)))
    _done(as_json, f"{_named(provider, queues)} stopped", provider=provider, queues=queues or None, stopped=True)


@command.command("start-agents")
@server_options
@provider_option
@_queue_option
@json_option
def start_agents(*, server: SiloPlace, provider: str, queues: Sequence[int], as_json: bool) -> None:
    """Start the delivery of stopped queues."""
    run(_tell(server, "StartAgents", provider=provider, queues=queues))
    _done(as_json, f"{_named(provider, queues)} started", provider=provider, queues=queues or None, stopped=False)


def _ms(seconds: float | None) -> int:
    return 0 if seconds is None else max(round(seconds * 1000), 1)


def _named(provider: str, queues: Sequence[int]) -> str:
    which = f"queue{'s' if len(queues) > 1 else ''} {', '.join(map(str, sorted(queues)))}" if queues else "all queues"
    return f"agents of {which} of provider {provider!r} are"


def _done(as_json: bool, text: str, **document: Any) -> None:
    if as_json:
        print_json(document)
    else:
        note(text)


# ---- requests ------------------------------------------------------------------------------------------------------


async def _tell(server: SiloPlace, method: str, **fields: Any) -> None:
    """Call a method of the cluster's service, without a time limit."""
    from ...proto.v1 import cluster_pb2 as pb  # noqa: PLC0415 (only where a silo is called)

    request: Message = getattr(pb, f"{method}Request")(**fields)
    async with calling(server) as connection:
        await connection.unary(f"ClusterService/{method}", request.SerializeToString(), timeout_s=None)


async def _move_store(data: Path, store: str) -> None:
    """Raises DataDirectoryError if the database there is another one, Busy if a silo runs on the directory."""
    from ...silo.ownership import check_moved_store  # noqa: PLC0415
    from ...store.control_store import ControlStore  # noqa: PLC0415 (it loads SQLAlchemy)
    from ...store.datadir import change_control, idle_directory  # noqa: PLC0415 (only this command needs a directory)

    directory = await asyncio.to_thread(idle_directory, data)
    control = await ControlStore.open(store, existing=True)
    try:
        await check_moved_store(control, directory)
    finally:
        await control.aclose()
    await asyncio.to_thread(change_control, directory, store)


async def _drain(server: SiloPlace, silo: str, drain_s: float | None) -> Sequence[str]:
    """Drain the silo. Return the providers that no running silo serves now."""
    await _tell(server, "DrainSilo", silo=silo, drain_ms=_ms(drain_s))
    try:
        return _without_silo((await described(server)).silos, silo)
    except HeadraceError as error:
        note(f"cannot tell whether another silo serves the queues now: {error}")
        return []


def _without_silo(silos: Sequence[pb.Silo], drained: str) -> list[str]:
    """Return the providers of the `drained` silo, in any state, that no running silo serves."""
    running = [silo for silo in silos if silo.state == "running" and silo.name != drained]
    served = {provider.name for silo in running for provider in silo.providers}
    return sorted({provider.name for silo in silos if silo.name == drained for provider in silo.providers} - served)


async def described(server: SiloPlace) -> pb.Cluster:
    from ...proto.v1 import cluster_pb2 as pb  # noqa: PLC0415 (only where a silo is called)

    async with calling(server) as connection:
        answer = await connection.call("ClusterService/DescribeCluster", b"", timeout_s=ASK_S)
    return pb.DescribeClusterResponse.FromString(answer).cluster


async def _show(server: SiloPlace) -> dict[str, Any]:
    cluster = await described(server)
    names = sorted({provider.name for silo in cluster.silos for provider in silo.providers})
    return {
        "silos": [_silo(silo) for silo in cluster.silos],
        "providers": [_spread(cluster, name)._asdict() for name in names],
        "unserved": [
            {"provider": one.provider, "queue": one.index, "for_s": one.since_ms / 1000, "reason": one.reason}
            for one in cluster.unserved
        ],
        "differences": _differences(cluster),
    }


def _differences(cluster: pb.Cluster) -> dict[str, dict[str, list[str]]]:
    """Return the settings in which living silos differ: for each setting, the silos by value."""
    found: dict[str, dict[str, list[str]]] = {}
    for silo in cluster.silos:
        for key, value in silo.settings.items():
            if silo.state != "dead":
                found.setdefault(key, {}).setdefault(value, []).append(silo.name)
    return {key: silos for key, silos in sorted(found.items()) if len(silos) > 1}


def _silo(silo: pb.Silo) -> dict[str, Any]:
    return {
        "name": silo.name,
        "state": silo.state,
        "address": silo.address,
        "public_address": silo.public_address,
        "version": silo.version,
        "queues": {provider.name: [queue.index for queue in provider.queues] for provider in silo.providers},
        "silent_s": silo.silent_ms / 1000,
        "settings": dict(sorted(silo.settings.items())),
    }


class QueueSpread(NamedTuple):
    """How evenly the queues of a provider are spread over the silos that may have some."""

    provider: str
    queues: int
    unserved: int
    silos: int
    """Number of running silos that serve the provider."""
    fewest: int
    mean: float
    most: int
    skew: float
    """The most queues of a silo, relative to the mean."""


def _spread(cluster: pb.Cluster, name: str) -> QueueSpread:
    of = [(silo, provider) for silo in cluster.silos for provider in silo.providers if provider.name == name]
    shares = [len(provider.queues) for silo, provider in of if silo.state == "running"]
    served = sum(len(provider.queues) for silo, provider in of if silo.state not in ("dead", "unreachable"))
    queues = max(provider.queue_count for _, provider in of)
    mean = sum(shares) / len(shares) if shares else 0.0
    most, fewest = max(shares, default=0), min(shares, default=0)
    skew = round(most / mean, 2) if mean else 0.0
    return QueueSpread(name, queues, queues - served, len(shares), fewest, round(mean, 2), most, skew)


def print_silos(document: dict[str, Any]) -> None:
    rows = [
        (silo["name"], silo["state"], silo["address"], _queues_of(silo), _heard(silo), silo["version"])
        for silo in document["silos"]
    ]
    print_table(("silo", "state", "address", "queues", "heard", "version"), rows, right=("heard",), wrap=("queues",))
    click.echo()
    print_table(QueueSpread._fields, [tuple(spread.values()) for spread in document["providers"]])
    if document["unserved"]:
        unserved = [
            (one["provider"], one["queue"], f"{one['for_s']:,.1f} s", one["reason"]) for one in document["unserved"]
        ]
        print_table(("provider", "queue", "unserved for", "reason"), unserved, right=("queue", "unserved for"))
    for key, silos in document["differences"].items():
        values = "; ".join(f"{value or 'empty'} at {', '.join(names)}" for value, names in silos.items())
        note(f"the silos differ in [cluster] {key}: {values}; give all the same value and restart them")


def _queues_of(silo: dict[str, Any]) -> str:
    parts = [f"{provider}: {_runs(queues)}" for provider, queues in silo["queues"].items() if queues]
    return "; ".join(parts)


def _runs(queues: Sequence[int]) -> str:
    """Return ascending numbers as text, such as `0-3 5`."""
    runs: list[list[int]] = []
    for queue in queues:
        if runs and queue == runs[-1][1] + 1:
            runs[-1][1] = queue
        else:
            runs.append([queue, queue])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _heard(silo: dict[str, Any]) -> str:
    return f"{silo['silent_s']:,.1f} s ago"
