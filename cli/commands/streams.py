"""`headrace streams`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import click

from ...streams.errors import CorruptRecord, NotSupported
from ...streams.identity import SequenceToken, StreamId
from ...streams.outcomes import CommandFailed
from .help import SectionedCommand
from .options import DataPlace, adapter_options, data_place_options, opened
from .output import json_option, print_json, print_table
from .running import run

if TYPE_CHECKING:
    from ...silo.provider import Provider
    from ...streams.events import EventBatch

EVENTS_AT_ONCE = 10_000
BYTES_AT_ONCE = 4 << 20


@click.command("streams", cls=SectionedCommand)
@data_place_options
@adapter_options
@click.option("--namespace", metavar="NS", help="Only streams of this namespace.")
@json_option
def command(*, data_place: DataPlace, namespace: str | None, as_json: bool) -> None:
    """List the streams that have events, by name, with their queue and the number of stored events and bytes.

    A stream exists as soon as it is named. To find the streams with events, the command reads all queues.
    """
    found, damages = run(_streams(data_place, namespace))
    if as_json:
        print_json(found)
    else:
        columns = ("stream", "queue", "events", "bytes", "first", "last")
        print_table(columns, [[stream[column] for column in columns] for stream in found])
    if damages:
        raise CommandFailed(*map(str, damages))


async def _streams(data_place: DataPlace, namespace: str | None) -> tuple[list[dict[str, Any]], list[CorruptRecord]]:
    """The streams, and the damaged records. These may hide events of more streams."""
    async with opened(data_place) as provider:
        if not provider.adapter.capabilities.rewindable:
            raise NotSupported(f"provider {provider.name!r}: its queues cannot be read without taking from them")
        found: dict[StreamId, dict[str, Any]] = {}
        damages: list[CorruptRecord] = []
        for queue in range(provider.queues):
            start, end = await provider.adapter.bounds(queue)
            while start < end:
                try:
                    async for batch in _batches(provider, queue, start, end):
                        if namespace in (None, batch.stream.namespace):
                            _add(found, queue, batch)
                    break
                except CorruptRecord as damage:
                    damages.append(damage)
                    start = damage.next_offset or end
            try:
                await provider.adapter.resume_at(queue, end)
            except CorruptRecord as damage:  # records are stored behind the end
                damages.append(damage)
        return [found[stream] for stream in sorted(found)], damages


async def _batches(provider: Provider, queue: int, start: int, end: int) -> AsyncGenerator[EventBatch]:
    """The batches of a queue from offset `start` up to `end`. Raises CorruptRecord."""
    receiver = await provider.adapter.open_receiver(queue, start)
    try:
        while start < end:
            received = await receiver.receive(EVENTS_AT_ONCE, BYTES_AT_ONCE)
            start = received.next_offset
            for batch in received.batches:
                yield batch
    finally:
        await receiver.aclose()


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
