"""`headrace queues`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ...adapters import QueueStatistics
from ...streams import Checkpoint, NotFound
from ..provider import Provider
from ..views import age_s, due_in_s, lag_of
from .options import Place, Server, Where, adapter_options, check_how, delays_option, opened, place_options
from .output import json_option, print_json, print_table
from .running import run

if TYPE_CHECKING:
    from ...proto.v1 import cluster_pb2 as pb
    from ...streams.parking import Waiting


@click.command("queues")
@place_options
@adapter_options
@delays_option
@json_option
def command(*, place: Place, delays: str | None, as_json: bool) -> None:
    """Show each queue: what it holds, or which silo serves it, and how far its subscriptions are.

    Lag is what is in a queue from the first batch on that some subscription has not finished: batches, their events
    (~ where they are estimated), and how long ago the oldest was stored. What is not due yet is no lag, and shown as
    delayed, with when the first of it is due: what waits in the queue, in the control store, and where the silos'
    `delays` or --delays say. With --data, the lag of each subscription in batches is shown, too.
    """
    check_how(place, {"delays": delays})
    if isinstance(place, Server):
        queues = run(_of_silos(place))
        show = _print_served
    else:
        queues = run(_of_data(place, delays))
        show = _print_stored
    if as_json:
        print_json(queues)
    else:
        show(queues)


LAG = ("lag batches", "lag events", "lag seconds")


def _lag(queue: Mapping[str, Any]) -> tuple[object, ...]:
    batches = queue["lag_batches"]
    return "-" if batches is None else batches, _estimate(queue), _seconds(queue["lag_s"])


def _estimate(queue: Mapping[str, Any]) -> str:
    events = queue["lag_events"]
    return "-" if events is None else f"{'~' if queue['lag_estimated'] else ''}{events:,}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.1f}"


# ---- on a data directory ---------------------------------------------------------------------------------------------


def _print_stored(queues: list[dict[str, Any]]) -> None:
    names = sorted({name for queue in queues for name in queue["subscriptions"]})
    delayed = _delayed_columns(queues)
    print_table(
        ("queue", "first", "next", "events", "bytes", *LAG, *delayed, *(f"lag of {name}" for name in names)),
        [
            [
                *(queue[column] for column in ("queue", "first", "next", "events", "bytes")),
                *_lag(queue),
                *(_delayed(queue) if delayed else ()),
                *(queue["subscriptions"].get(name, {"lag": ""})["lag"] for name in names),
            ]
            for queue in queues
        ],
        right=(*LAG, *delayed),
    )


def _delayed_columns(queues: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    return ("delayed", "due in s") if any(queue["delayed_events"] for queue in queues) else ()


def _delayed(queue: Mapping[str, Any]) -> tuple[object, ...]:
    events = queue["delayed_events"]
    return "-" if events is None else f"{events:,}", _seconds(queue["due_in_s"])


async def _of_data(where: Where, delays: str | None) -> list[dict[str, Any]]:
    async with opened(where, {"delays": delays}) as provider:
        checkpoints = await all_checkpoints(provider)
        parked = await provider.waiting()
        found: list[dict[str, Any]] = []
        for queue in range(provider.queues):
            of = {name: each[queue] for name, each in checkpoints.items() if queue in each}
            document = describe(queue, await provider.adapter.statistics(queue))
            document["subscriptions"] = await _standings(provider, queue, of)
            found.append(document | await _behind(provider, queue, of, parked.get(queue)))
        return found


async def _standings(provider: Provider, queue: int, of: Mapping[str, Checkpoint]) -> dict[str, Any]:
    ends = await provider.ends(queue, {at.watermark for at in of.values()})
    return {name: standing(at, ends[at.watermark]) for name, at in sorted(of.items())}


async def all_checkpoints(provider: Provider) -> dict[str, Mapping[int, Checkpoint]]:
    """Of each subscription, by name."""
    definitions = await provider.store.subscriptions(provider.name)
    return {one.name: await provider.store.checkpoints(provider.name, one.name) for one in definitions}


async def _behind(
    provider: Provider, queue: int, of: Mapping[str, Checkpoint], parked: Waiting | None
) -> dict[str, Any]:
    lag = await lag_of(provider.adapter, queue, min((at.watermark for at in of.values()), default=None), parked)
    return {
        "lag_batches": lag.batches,
        "lag_events": lag.events,
        "lag_estimated": lag.estimated,
        "lag_s": age_s(lag),
        "delayed_events": lag.later_events,
        "due_in_s": due_in_s(lag),
    }


def describe(queue: int, statistics: QueueStatistics) -> dict[str, Any]:
    bounds = statistics.bounds
    return {
        "queue": queue,
        "first": bounds.first,
        "next": bounds.next,
        "events": statistics.events,
        "bytes": statistics.bytes,
    }


def standing(checkpoint: Checkpoint, end: int) -> dict[str, Any]:
    """A subscription's stored progress in a queue that ends at offset `end`, as `Provider.ends` has it."""
    return {
        "next_offset": checkpoint.next_offset,
        "watermark": checkpoint.watermark,
        "streams_behind": len(checkpoint.behind),
        "streams_paused": sum(bool(one.paused) for one in checkpoint.behind.values()),
        "lag": max(end - checkpoint.watermark, 0),
    }


# ---- at silos --------------------------------------------------------------------------------------------------------


def _print_served(queues: list[dict[str, Any]]) -> None:
    delayed = _delayed_columns(queues)
    print_table(
        ("queue", "silo", "state", "epoch", "next", *LAG, *delayed, "cached", "cache"),
        [
            (
                *(_or_dash(queue[column]) for column in ("queue", "silo", "state", "epoch", "next")),
                *_lag(queue),
                *(_delayed(queue) if delayed else ()),
                _or_dash(queue["cached_events"]),
                _filled(queue),
            )
            for queue in queues
        ],
        right=("queue", "epoch", "next", *LAG, *delayed, "cached", "cache"),
    )


def _filled(queue: Mapping[str, Any]) -> str:
    limit = queue["cache_limit_bytes"]
    return f"{100 * queue['cached_bytes'] / limit:.0f}%" if limit else "-"


def _or_dash(cell: object) -> object:
    return "-" if cell is None else cell


async def _of_silos(server: Server) -> list[dict[str, Any]]:
    from ...proto.v1 import cluster_pb2 as pb  # noqa: PLC0415 (only where a silo is called)
    from .cluster import described  # noqa: PLC0415

    cluster = await described(server)
    of = [(silo.name, each) for silo in cluster.silos for each in silo.providers]
    mine = [(silo, provider) for silo, provider in of if provider.name == server.provider]
    if not mine:
        there = ", ".join(sorted({provider.name for _, provider in of})) or "none"
        raise NotFound(f"no silo has a provider {server.provider!r}: there is {there}")
    served = {index: ("", pb.Queue(index=index, state="unserved")) for index in range(_count(mine))}
    for silo, provider in mine:
        for queue in provider.queues:
            # While one moves, or a silo does not answer: who had it last.
            if queue.epoch >= served[queue.index][1].epoch:
                served[queue.index] = silo, queue
    return [_shown(*served[index]) for index in sorted(served)]


def _count(providers: Sequence[tuple[str, pb.Provider]]) -> int:
    indexes = (queue.index for _, provider in providers for queue in provider.queues)
    return max(max(indexes, default=-1) + 1, *(provider.queue_count for _, provider in providers))


def _shown(silo: str, queue: pb.Queue) -> dict[str, Any]:
    """What is not told is None: of a queue that nobody serves, or to who may not manage all."""
    told = queue.cache_limit_bytes > 0
    numbers = {
        "read": queue.read_offset,
        "next": queue.end_offset,
        "lag_batches": queue.lag_batches,
        "lag_events": queue.lag_events,
        "lag_estimated": queue.lag_estimated,
        "lag_s": queue.lag_ms / 1000,
        "delayed_events": queue.delayed_events,
        "due_in_s": queue.due_in_ms / 1000 if queue.delayed_events else None,
        "cached_events": queue.cached_events,
        "cached_bytes": queue.cached_bytes,
        "cache_limit_bytes": queue.cache_limit_bytes,
    }
    return {
        "queue": queue.index,
        "silo": silo or None,
        "state": queue.state,
        "reason": queue.reason,
        "epoch": queue.epoch or None,
        **(numbers if told else dict.fromkeys(numbers)),
    }
