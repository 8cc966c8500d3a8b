"""`headrace streams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ...streams import EventBatch, NotSupported, SequenceToken, StreamId
from ..provider import Provider
from .options import Where, adapter_options, opened, where_options
from .output import json_option, print_json, print_table
from .running import run

EVENTS_AT_ONCE = 10_000
BYTES_AT_ONCE = 4 << 20


@click.command("streams")
@where_options
@adapter_options
@click.option("--namespace", metavar="NS", help="Only streams of this namespace.")
@json_option
def command(*, where: Where, namespace: str | None, as_json: bool) -> None:
    """List the streams that have events, by name, with their queue and how much is stored of them.

    A stream exists as soon as it is named; which ones have events, only reading all queues tells.
    """
    found = run(_streams(where, namespace))
    if as_json:
        print_json(found)
    else:
        columns = ("stream", "queue", "events", "bytes", "first", "last")
        print_table(columns, [[stream[column] for column in columns] for stream in found])


async def _streams(where: Where, namespace: str | None) -> list[dict[str, Any]]:
    async with opened(where) as provider:
        if not provider.adapter.capabilities.rewindable:
            raise NotSupported(f"provider {provider.name!r}: its queues cannot be read without taking from them")
        found: dict[StreamId, dict[str, Any]] = {}
        for queue in range(provider.queues):
            found.update(await _of_queue(provider, queue, namespace))
        return [found[stream] for stream in sorted(found)]


async def _of_queue(provider: Provider, queue: int, namespace: str | None) -> Mapping[StreamId, dict[str, Any]]:
    """The streams of a queue, up to where it ends now."""
    found: dict[StreamId, dict[str, Any]] = {}
    bounds = await provider.adapter.bounds(queue)
    position = bounds.first
    receiver = await provider.adapter.open_receiver(queue, position)
    try:
        while position < bounds.next:
            received = await receiver.receive(EVENTS_AT_ONCE, BYTES_AT_ONCE)
            position = received.next_offset
            for batch in received.batches:
                if namespace in (None, batch.stream.namespace):
                    _add(found, queue, batch)
    finally:
        await receiver.aclose()
    return found


def _add(found: dict[StreamId, dict[str, Any]], queue: int, batch: EventBatch) -> None:
    stream = batch.stream
    entry = found.get(stream)
    if entry is None:
        entry = found[stream] = {
            "stream": str(stream), "namespace": stream.namespace, "key": stream.key, "queue": queue,
            "events": 0, "bytes": 0, "first": str(batch.token), "last": "",
        }  # fmt: skip
    entry["events"] += batch.count
    entry["bytes"] += batch.nbytes
    entry["last"] = str(SequenceToken(batch.offset, batch.count - 1))
