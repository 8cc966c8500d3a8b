"""`headrace subscriptions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from ...streams import (
    Checkpoint,
    NotFound,
    OnFailure,
    RetryPolicy,
    Selector,
    SlowConsumer,
    Start,
    StreamId,
    SubscriptionDefinition,
)
from ...streams.subscriptions import Behind
from ..datadir import lock_subscription, open_data_directory
from ..provider import Provider
from .options import START_HELP, Where, creation_options, opened, parse_start, where_options
from .output import json_option, note, print_json, print_table
from .queues import standing
from .running import run

_DEFAULT = RetryPolicy()


@click.group("subscriptions")
def command() -> None:
    """List, inspect, create, move and delete subscriptions.

    Moving, resuming and deleting is for subscriptions that no process serves at the time.
    """


@command.command("list")
@where_options
@json_option
def list_(*, where: Where, as_json: bool) -> None:
    """All subscriptions, and how far they are."""
    found = run(_list(where))
    if as_json:
        print_json(found)
        return
    columns = ("name", "selector", "lag", "paused", "dead_letters", "gaps")
    print_table(columns, [[one[column] for column in columns] for one in found])


@command.command()
@where_options
@click.argument("name")
@json_option
def show(*, where: Where, name: str, as_json: bool) -> None:
    """A subscription's definition, and how far it is in each queue."""
    found = run(_show(where, name))
    if as_json:
        print_json(found)
        return
    queues = found.pop("queues")
    print_table(("", ""), [(key, _plain(value)) for key, value in found.items()])
    columns = ("next_offset", "watermark", "lag", "streams_behind", "streams_paused")
    print_table(("queue", *columns), [[queue, *(of[column] for column in columns)] for queue, of in queues.items()])
    for queue, of in queues.items():
        for stream, why in of["paused"].items():
            note(f"queue {queue}: stream {stream} is paused: {why}")


@command.command()
@where_options
@creation_options
@click.argument("name")
@click.argument("selector")
@click.option("--from", "start", default="latest", show_default=True, help=START_HELP)
@click.option(
    "--on-failure", type=click.Choice([one.value for one in OnFailure]), default="dead-letter", show_default=True
)
@click.option("--slow-consumer", type=click.Choice([one.value for one in SlowConsumer]))
@click.option("--max-attempts", type=int, default=_DEFAULT.max_attempts, show_default=True)
@click.option("--max-elapsed", type=float, default=_DEFAULT.max_elapsed_s, show_default=True, help="Seconds.")
@json_option
def create(
    *, where: Where, how: Mapping[str, Any], name: str, selector: str, start: str, on_failure: str,
    slow_consumer: str | None, max_attempts: int, max_elapsed: float, as_json: bool,
) -> None:  # fmt: skip
    """Create a durable subscription: from now on events are kept for it.

    The provider has to exist: only with --adapter it is made.
    """
    definition = SubscriptionDefinition(
        name=name,
        selector=Selector(selector),
        start=parse_start(start),
        retry=RetryPolicy(max_attempts=max_attempts, max_elapsed_s=max_elapsed),
        on_failure=OnFailure(on_failure),
        slow_consumer=SlowConsumer(slow_consumer) if slow_consumer else None,
    )
    created = run(_create(where, how, definition))
    if as_json:
        print_json({"name": name, "created": created})
    else:
        note(f"subscription {name} is created" if created else f"subscription {name} exists already, just so")


@command.command()
@where_options
@click.argument("name")
@json_option
def delete(*, where: Where, name: str, as_json: bool) -> None:
    """Delete a subscription and its progress. Its dead letters stay."""
    run(_delete(where, name))
    _done(as_json, name, "deleted")


@command.command()
@where_options
@click.argument("name")
@click.argument("start")
@json_option
def seek(*, where: Where, name: str, start: str, as_json: bool) -> None:
    """Go on from START, also back: earliest, latest, a token, or the time of storing (in UTC, or with its zone)."""
    run(_seek(where, name, parse_start(start)))
    _done(as_json, name, "moved")


@command.command()
@where_options
@click.argument("name")
@click.argument("stream")
@json_option
def resume(*, where: Where, name: str, stream: str, as_json: bool) -> None:
    """Go on with a STREAM that was paused after a failure."""
    run(_resume(where, name, StreamId.parse(stream)))
    _done(as_json, name, "resumed")


def _done(as_json: bool, name: str, what: str) -> None:
    if as_json:
        print_json({"name": name, what: True})
    else:
        note(f"subscription {name} is {what}")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def _list(where: Where) -> list[dict[str, Any]]:
    async with opened(where) as provider:
        ends = await _ends(provider)
        definitions = await provider.store.subscriptions(provider.name)
        return [await _summary(provider, definition, ends) for definition in definitions]


async def _summary(provider: Provider, definition: SubscriptionDefinition, ends: Mapping[int, int]) -> dict[str, Any]:
    store, name = provider.store, definition.name
    checkpoints = await store.checkpoints(provider.name, name)
    standings = [standing(checkpoint, ends[queue]) for queue, checkpoint in checkpoints.items()]
    return {
        **_definition(definition),
        "lag": sum(one["lag"] for one in standings),
        "paused": sum(one["streams_paused"] for one in standings),
        "dead_letters": await _count_dead_letters(provider, name),
        "gaps": len(await store.gaps(provider.name, name)),
    }


async def _count_dead_letters(provider: Provider, name: str) -> int:
    count = after = 0
    while letters := await provider.store.dead_letters(provider.name, name, limit=1000, after_id=after):
        count, after = count + len(letters), letters[-1].id
    return count


def _definition(definition: SubscriptionDefinition) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(definition)
    return content | {"selector": definition.selector.pattern}


async def _ends(provider: Provider) -> dict[int, int]:
    return {queue: (await provider.adapter.bounds(queue)).next for queue in range(provider.queues)}


async def _show(where: Where, name: str) -> dict[str, Any]:
    async with opened(where) as provider:
        ends = await _ends(provider)
        definition = await provider.store.subscription(provider.name, name)
        checkpoints = await provider.store.checkpoints(provider.name, name)
        summary = await _summary(provider, definition, ends)
        return summary | {"queues": {str(q): standing(cp, ends[q]) | _paused(cp) for q, cp in checkpoints.items()}}


def _paused(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"paused": {str(stream): one.paused for stream, one in checkpoint.behind.items() if one.paused}}


async def _create(where: Where, how: Mapping[str, Any], definition: SubscriptionDefinition) -> bool:
    async with opened(where, how, create=how["adapter"] is not None) as provider:
        return await provider.create_subscription(definition)


async def _delete(where: Where, name: str) -> None:
    async with opened(where) as provider:
        await provider.delete_subscription(name)


async def _seek(where: Where, name: str, start: Start) -> None:
    async with opened(where) as provider:
        await provider.seek(name, start)


async def _resume(where: Where, name: str, stream: StreamId) -> None:
    async with opened(where) as provider:
        with lock_subscription(open_data_directory(where.data), provider.name, name):
            checkpoints = await provider.store.checkpoints(provider.name, name)
            queue = provider.queue_of(stream)
            checkpoint = checkpoints.get(queue, Checkpoint(0))
            behind = checkpoint.behind.get(stream)
            if behind is None or not behind.paused:
                raise NotFound(f"subscription {name!r}: stream {stream} is not paused")
            going_on = Checkpoint(checkpoint.next_offset, {**checkpoint.behind, stream: Behind(behind.token)})
            await provider.store.seek(provider.name, name, {queue: going_on}, f"stream {stream} is resumed")
