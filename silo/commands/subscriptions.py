"""`headrace subscriptions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from ...streams import (
    NotFound,
    OnFailure,
    RetryPolicy,
    Selector,
    SlowConsumer,
    Start,
    StreamId,
    SubscriptionDefinition,
)
from ...streams.states import QueueProgress, SubscriptionState
from .managing import managed
from .options import START_HELP, Place, adapter_options, check_how, creation_options, parse_start, place_options
from .output import json_option, note, print_json, print_table
from .running import run

_DEFAULT = RetryPolicy()


@click.group("subscriptions")
def command() -> None:
    """List, inspect, create, move and delete subscriptions.

    On a data directory, moving, resuming and deleting is for subscriptions that no process serves at the time. A silo
    does it also with those that it serves.
    """


@command.command("list")
@place_options
@adapter_options
@json_option
def list_(*, place: Place, as_json: bool) -> None:
    """All subscriptions, and how far they are."""
    found = run(_list(place))
    if as_json:
        print_json(found)
        return
    columns = ("name", "selector", "lag", "paused", "dead_letters", "gaps")
    print_table(columns, [[one[column] for column in columns] for one in found])


@command.command()
@place_options
@adapter_options
@click.argument("name")
@json_option
def show(*, place: Place, name: str, as_json: bool) -> None:
    """A subscription's definition, and how far it is in each queue."""
    found = run(_show(place, name))
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
@place_options
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
    *, place: Place, how: Mapping[str, Any], name: str, selector: str, start: str, on_failure: str,
    slow_consumer: str | None, max_attempts: int, max_elapsed: float, as_json: bool,
) -> None:  # fmt: skip
    """Create a durable subscription: from now on events are kept for it.

    The provider has to exist: only with --adapter it is made.
    """
    check_how(place, how)
    definition = SubscriptionDefinition(
        name=name,
        selector=Selector(selector),
        start=parse_start(start),
        retry=RetryPolicy(max_attempts=max_attempts, max_elapsed_s=max_elapsed),
        on_failure=OnFailure(on_failure),
        slow_consumer=SlowConsumer(slow_consumer) if slow_consumer else None,
    )
    created = run(_create(place, how, definition))
    if as_json:
        print_json({"name": name, "created": created})
    else:
        note(f"subscription {name} is created" if created else f"subscription {name} exists already, just so")


@command.command()
@place_options
@adapter_options
@click.argument("name")
@json_option
def delete(*, place: Place, name: str, as_json: bool) -> None:
    """Delete a subscription and its progress. Its dead letters stay."""
    run(_delete(place, name))
    _done(as_json, name, "deleted")


@command.command()
@place_options
@adapter_options
@click.argument("name")
@click.argument("start")
@json_option
def seek(*, place: Place, name: str, start: str, as_json: bool) -> None:
    """Go on from START, also back: earliest, latest, a token, or the time of storing (in UTC, or with its zone)."""
    run(_seek(place, name, parse_start(start)))
    _done(as_json, name, "moved")


@command.command()
@place_options
@adapter_options
@click.argument("name")
@click.argument("stream")
@json_option
def resume(*, place: Place, name: str, stream: str, as_json: bool) -> None:
    """Go on with a STREAM that was paused after a failure."""
    run(_resume(place, name, StreamId.parse(stream)))
    _done(as_json, name, "resumed")


def _done(as_json: bool, name: str, what: str) -> None:
    if as_json:
        print_json({"name": name, what: True})
    else:
        note(f"subscription {name} is {what}")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def _list(place: Place) -> list[dict[str, Any]]:
    async with managed(place) as provider:
        names = [definition.name for definition in await provider.subscriptions()]
        return [_summary(await provider.subscription(name)) for name in names]


def _summary(state: SubscriptionState) -> dict[str, Any]:
    return {
        **_definition(state.definition),
        "lag": sum(queue.lag for queue in state.progress),
        "paused": sum(queue.streams_paused for queue in state.progress),
        "dead_letters": state.dead_letters,
        "gaps": state.gaps,
    }


def _definition(definition: SubscriptionDefinition) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(definition)
    return content | {"selector": definition.selector.pattern}


async def _show(place: Place, name: str) -> dict[str, Any]:
    async with managed(place) as provider:
        state = await provider.subscription(name)
        return _summary(state) | {"queues": {str(queue.queue): _standing(queue) for queue in state.progress}}


def _standing(queue: QueueProgress) -> dict[str, Any]:
    return {
        "next_offset": queue.next_offset,
        "watermark": queue.watermark,
        "streams_behind": queue.streams_behind,
        "streams_paused": queue.streams_paused,
        "lag": queue.lag,
        "paused": {str(stream): why for stream, why in queue.paused.items()},
    }


async def _create(place: Place, how: Mapping[str, Any], definition: SubscriptionDefinition) -> bool:
    async with managed(place, how, create=how["adapter"] is not None) as provider:
        return await provider.create_subscription(definition)


async def _delete(place: Place, name: str) -> None:
    async with managed(place) as provider:
        await provider.delete_subscription(name)


async def _seek(place: Place, name: str, start: Start) -> None:
    async with managed(place) as provider:
        await provider.seek(name, start)


async def _resume(place: Place, name: str, stream: StreamId) -> None:
    async with managed(place) as provider:
        if not await provider.resume(name, stream):
            raise NotFound(f"subscription {name!r}: stream {stream} is not paused")
