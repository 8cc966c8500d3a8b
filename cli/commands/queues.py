"""`headrace queues`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ...streams.errors import DataDirectoryError, NotFound
from ...streams.outcomes import CommandFailed
from ...streams.subscriptions import Checkpoint
from .help import SectionedCommand
from .options import (
    DataPlace,
    ProviderPlace,
    SiloPlace,
    adapter_options,
    opened,
    place_options,
)
from .output import json_option, print_json, print_table
from .running import run

if TYPE_CHECKING:
    from ...adapters import QueueStatistics
    from ...proto.v1 import cluster_pb2 as pb
    from ...silo.provider import Provider


@click.command("queues", cls=SectionedCommand)
@place_options
@adapter_options
@json_option
def command(*, place: ProviderPlace, as_json: bool) -> None:
    """Show each queue: its content, or the silo that serves it, and the progress of its subscriptions.

    Lag starts at the first batch that some subscription has not finished. It is shown as batches, events (~ if
    estimated), and the age of the oldest batch. Events that are not due yet do not count as lag. They are shown as
    delayed, with the time until the first is due: those in the queue and in the control store. `headrace subscriptions
    show NAME` has the lag of one subscription in each queue.

    A queue that cannot be read is named on stderr with its offsets, and the exit code is 1.
    """
    if isinstance(place, SiloPlace):
        queues = run(_of_silos(place))
        show = _print_served
    else:
        queues = run(_of_data(place))
        show = _print_stored
    if as_json:
        print_json(queues)
    else:
        show(queues)
    if faults := [_fault_line(queue) for queue in queues if queue["fault"]]:
        raise CommandFailed(*faults)


def _fault_line(queue: Mapping[str, Any]) -> str:
    number, fault = queue["queue"], queue["fault"]
    return fault if fault.startswith(f"queue {number}") else f"queue {number}: {fault}"


LAG = ("lag batches", "lag events", "lag seconds")
DELAYED = ("delayed", "due in s")


def _lag(queue: Mapping[str, Any]) -> tuple[object, ...]:
    return queue["lag_batches"], _estimate(queue), _seconds(queue["lag_s"])


def _estimate(queue: Mapping[str, Any]) -> str | None:
    events = queue["lag_events"]
    return None if events is None else f"{'~' if queue['lag_estimated'] else ''}{events:,}"


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:,.1f}"


# ---- on a data directory ---------------------------------------------------------------------------------------------


def _print_stored(queues: list[dict[str, Any]]) -> None:
    columns = ("queue", "first", "next", "events", "bytes")
    print_table(
        (*columns, *LAG, *DELAYED),
        [(*(queue[column] for column in columns), *_lag(queue), *_delayed(queue)) for queue in queues],
        right=(*LAG, *DELAYED),
    )


def _delayed(queue: Mapping[str, Any]) -> tuple[object, ...]:
    return queue["delayed_events"] or None, _seconds(queue["due_in_s"])


async def _of_data(data_place: DataPlace) -> list[dict[str, Any]]:
    async with opened(data_place) as provider:
        from ...silo.views import fault_at  # noqa: PLC0415 (not for --help)

        checkpoints = await all_checkpoints(provider)
        found: list[dict[str, Any]] = []
        for queue in range(provider.queues):
            of = {name: each[queue] for name, each in checkpoints.items() if queue in each}
            document = describe(queue, await provider.adapter.statistics(queue))
            document["subscriptions"] = await _standings(provider, queue, of)
            document["fault"] = await fault_at(provider.adapter, queue, of.values()) or None
            found.append(document | await _behind(provider, queue, of))
        return found


async def _standings(provider: Provider, queue: int, of: Mapping[str, Checkpoint]) -> dict[str, Any]:
    ends = await provider.ends(queue, {at.watermark for at in of.values()})
    return {name: standing(at, ends[at.watermark]) for name, at in sorted(of.items())}


async def all_checkpoints(provider: Provider) -> dict[str, Mapping[int, Checkpoint]]:
    """Checkpoints of each subscription, by name. Damaged ones are missing: the provider logs them when it is opened."""
    found: dict[str, Mapping[int, Checkpoint]] = {}
    for definition in await provider.store.subscriptions(provider.name):
        with suppress(DataDirectoryError):
            found[definition.name] = await provider.store.checkpoints(provider.name, definition.name)
    return found


async def _behind(provider: Provider, queue: int, of: Mapping[str, Checkpoint]) -> dict[str, Any]:
    from ...silo.views import age_s, due_in_s, lag_of  # noqa: PLC0415 (not for --help)

    lag = await lag_of(provider.adapter, queue, min((at.watermark for at in of.values()), default=None))
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
    """A subscription's stored progress in a queue. `end` is the queue's end from `Provider.ends`."""
    return {
        "next_offset": checkpoint.next_offset,
        "watermark": checkpoint.watermark,
        "streams_behind": len(checkpoint.behind),
        "streams_paused": sum(bool(one.paused) for one in checkpoint.behind.values()),
        "lag": max(end - checkpoint.watermark, 0),
    }


# ---- at silos --------------------------------------------------------------------------------------------------------


def _print_served(queues: list[dict[str, Any]]) -> None:
    columns = ("queue", "silo", "state", "epoch", "next")
    print_table(
        (*columns, *LAG, *DELAYED, "cached", "cache"),
        [
            (
                *(queue[column] for column in columns),
                *_lag(queue),
                *_delayed(queue),
                queue["cached_events"],
                _filled(queue),
            )
            for queue in queues
        ],
        right=(*LAG, *DELAYED, "cache"),
    )


def _filled(queue: Mapping[str, Any]) -> str | None:
    limit = queue["cache_limit_bytes"]
    return f"{100 * queue['cached_bytes'] / limit:.0f}%" if limit else None


async def _of_silos(server: SiloPlace) -> list[dict[str, Any]]:
    from ...proto.v1 import cluster_pb2 as pb  # noqa: PLC0415 (only where a silo is called)
    from .cluster import described  # noqa: PLC0415

    cluster = await described(server)
    of = [(silo.name, each) for silo in cluster.silos for each in silo.providers]
    mine = [(silo, provider) for silo, provider in of if provider.name == server.provider]
    if not mine:
        there = ", ".join(sorted({provider.name for _, provider in of})) or "none"
        raise NotFound(f"no silo has a provider {server.provider!r}: the silos have {there}")
    served = {index: ("", pb.Queue(index=index, state="unserved")) for index in range(_count(mine))}
    for silo, provider in mine:
        for queue in provider.queues:
            # While a queue moves, or its silo does not answer: the silo that had it last.
            if queue.epoch >= served[queue.index][1].epoch:
                served[queue.index] = silo, queue
    return [_shown(*served[index]) for index in sorted(served)]


def _count(providers: Sequence[tuple[str, pb.Provider]]) -> int:
    indexes = (queue.index for _, provider in providers for queue in provider.queues)
    return max(max(indexes, default=-1) + 1, *(provider.queue_count for _, provider in providers))


def _shown(silo: str, queue: pb.Queue) -> dict[str, Any]:
    """Unknown values are None: the queue has no silo, its adapter does not answer, or the caller may not manage all
    namespaces."""
    told = queue.cache_limit_bytes > 0
    numbers = {
        "read": queue.read_offset,
        "next": queue.end_offset if queue.HasField("lag_batches") else None,
        "lag_batches": queue.lag_batches if queue.HasField("lag_batches") else None,
        "lag_events": queue.lag_events if queue.HasField("lag_events") else None,
        "lag_estimated": queue.lag_estimated,
        "lag_s": queue.lag_ms / 1000 if queue.HasField("lag_ms") else None,
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
        "fault": queue.reason or queue.state if queue.state == "faulted" else None,
        "epoch": queue.epoch or None,
        **(numbers if told else dict.fromkeys(numbers)),
    }
