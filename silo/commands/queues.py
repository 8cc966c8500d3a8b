"""`headrace queues`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ...adapters import QueueStatistics
from ...streams import Checkpoint
from ..provider import Provider
from .options import Where, opened, where_options
from .output import json_option, print_json, print_table
from .running import run


@click.command("queues")
@where_options
@json_option
def command(*, where: Where, as_json: bool) -> None:
    """Show each queue: the offsets it holds, how much that is, and how far its subscriptions are.

    A subscription's lag in a queue is the number of batches from the first that it has not finished to the queue's end.
    """
    queues = run(_queues(where))
    if as_json:
        print_json(queues)
        return
    names = sorted({name for queue in queues for name in queue["subscriptions"]})
    print_table(
        ("queue", "first", "next", "events", "bytes", *(f"lag of {name}" for name in names)),
        [
            [
                *(queue[column] for column in ("queue", "first", "next", "events", "bytes")),
                *(queue["subscriptions"].get(name, {"lag": ""})["lag"] for name in names),
            ]
            for queue in queues
        ],
    )


async def _queues(where: Where) -> list[dict[str, Any]]:
    async with opened(where) as provider:
        checkpoints = await all_checkpoints(provider)
        return [
            describe(queue, await provider.adapter.statistics(queue), checkpoints) for queue in range(provider.queues)
        ]


async def all_checkpoints(provider: Provider) -> dict[str, Mapping[int, Checkpoint]]:
    """Of each subscription, by name."""
    definitions = await provider.store.subscriptions(provider.name)
    return {one.name: await provider.store.checkpoints(provider.name, one.name) for one in definitions}


def describe(
    queue: int, statistics: QueueStatistics, checkpoints: Mapping[str, Mapping[int, Checkpoint]]
) -> dict[str, Any]:
    bounds = statistics.bounds
    return {
        "queue": queue,
        "first": bounds.first,
        "next": bounds.next,
        "events": statistics.events,
        "bytes": statistics.bytes,
        "subscriptions": {
            name: standing(of[queue], bounds.next) for name, of in sorted(checkpoints.items()) if queue in of
        },
    }


def standing(checkpoint: Checkpoint, end: int) -> dict[str, Any]:
    """A subscription's stored progress in a queue that ends at offset `end`."""
    return {
        "next_offset": checkpoint.next_offset,
        "watermark": checkpoint.watermark,
        "streams_behind": len(checkpoint.behind),
        "streams_paused": sum(bool(one.paused) for one in checkpoint.behind.values()),
        "lag": max(end - checkpoint.watermark, 0),
    }
