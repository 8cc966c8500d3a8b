"""`headrace subscriptions`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from ...streams.errors import NotFound
from ...streams.identity import StreamId
from ...streams.outcomes import CommandFailed
from ...streams.states import QueueProgress, SubscriptionState
from ...streams.subscriptions import OnFailure, RetryPolicy, Selector, SlowConsumer, Start, SubscriptionDefinition
from .help import CommandGroup
from .managing import managed
from .options import START_HELP, ProviderPlace, adapter_options, check_how, creation_options, parse_start, place_options
from .output import json_option, note, print_fields, print_json, print_table
from .running import run

ASKED_AT_ONCE = 4
_DEFAULT = RetryPolicy()


@click.group("subscriptions", cls=CommandGroup)
def command() -> None:
    """List, inspect, create, move and delete subscriptions.

    In a data directory you can move, resume and delete a subscription only while no process serves it. On a silo you
    can do so at any time.
    """


@command.command("list")
@place_options
@adapter_options
@json_option
def list_(*, place: ProviderPlace, as_json: bool) -> None:
    """List all subscriptions and their progress.

    A damaged record that stops a subscription is named on stderr with its offsets, and the exit code is 1.
    """
    found = run(_list(place))
    if as_json:
        print_json(found)
    else:
        columns = ("name", "selector", "lag", "paused", "dead_letters", "gaps")
        print_table(columns, [[one[column] for column in columns] for one in found])
        for one in found:
            _note_held(one["name"], one["held"])
    _fail_with_faults(found)


@command.command()
@place_options
@adapter_options
@click.argument("name")
@json_option
def show(*, place: ProviderPlace, name: str, as_json: bool) -> None:
    """Show a subscription's definition, and its progress in each queue.

    A damaged record that stops it is named on stderr with its offsets, and the exit code is 1.
    """
    found = run(_show(place, name))
    if as_json:
        print_json(found)
    else:
        _print_one(name, found)
    _fail_with_faults([found])


def _print_one(name: str, found: Mapping[str, Any]) -> None:
    fields = {key: value for key, value in found.items() if key not in ("queues", "held", "faults")}
    queues, held = found["queues"], found["held"]
    print_fields(fields | {"start": _start_text(found["start"])})
    click.echo()
    columns = ("next_offset", "watermark", "lag", "streams_behind", "streams_paused")
    print_table(
        ("queue", *columns), [[int(queue), *(of[column] for column in columns)] for queue, of in queues.items()]
    )
    for queue, of in queues.items():
        for stream, why in of["paused"].items():
            note(f"queue {queue}: stream {stream!r} is paused: {why}")
    _note_held(name, held)


def _fail_with_faults(found: Sequence[Mapping[str, Any]]) -> None:
    if faults := [f"subscription {one['name']!r}: {fault}" for one in found for fault in one["faults"]]:
        raise CommandFailed(*faults)


def _note_held(name: str, held: Mapping[str, Any] | None) -> None:
    if held is not None:
        since = datetime.fromtimestamp(held["since_us"] / 1e6, UTC).isoformat(timespec="seconds")
        state = "resumes; it was held" if held["resuming"] else "is held"
        note(f"subscription {name!r} {state} since {since}: {held['reason']}")


@command.command()
@place_options
@creation_options
@click.argument("name")
@click.argument("selector")
@click.option("--from", "start", metavar="START", default="latest", show_default=True, help=START_HELP)
@click.option(
    "--on-failure", type=click.Choice([one.value for one in OnFailure]), default="dead-letter", show_default=True
)
@click.option("--slow-consumer", type=click.Choice([one.value for one in SlowConsumer]))
@click.option("--max-attempts", type=int, default=_DEFAULT.max_attempts, show_default=True)
@click.option("--max-elapsed", type=float, default=_DEFAULT.max_elapsed_s, show_default=True, help="Seconds.")
@json_option
def create(
    *, place: ProviderPlace, how: Mapping[str, Any], name: str, selector: str, start: str, on_failure: str,
    slow_consumer: str | None, max_attempts: int, max_elapsed: float, as_json: bool,
) -> None:  # fmt: skip
    """Create a durable subscription: from now on events are kept for it.

    The provider has to exist; --adapter creates it.
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
        note(
            f"subscription {name!r} is created"
            if created
            else f"subscription {name!r} exists already, with this definition"
        )


@command.command()
@place_options
@adapter_options
@click.argument("name")
@json_option
def delete(*, place: ProviderPlace, name: str, as_json: bool) -> None:
    """Delete a subscription and its progress. Its dead letters stay."""
    run(_delete(place, name))
    _done(as_json, name, "deleted")


@command.command()
@place_options
@adapter_options
@click.argument("name")
@click.argument("start")
@json_option
def seek(*, place: ProviderPlace, name: str, start: str, as_json: bool) -> None:
    """Move a subscription to START, forward or back.

    START is earliest, latest, a token, or the time of storage (UTC, or with a zone).
    """
    not_moved = run(_seek(place, name, parse_start(start)))
    if as_json:
        print_json({"name": name, "moved": True, "not_moved": not_moved})
        return
    _done(as_json, name, "moved")
    if not_moved:
        note(f"consumers that keep their positions and were not moved: {not_moved}; start them with other positions")


@command.command()
@place_options
@adapter_options
@click.argument("name")
@click.argument("stream")
@json_option
def resume(*, place: ProviderPlace, name: str, stream: str, as_json: bool) -> None:
    """Continue a STREAM that was paused after a failure."""
    run(_resume(place, name, StreamId.parse(stream)))
    _done(as_json, name, "resumed")


def _done(as_json: bool, name: str, verb: str) -> None:
    if as_json:
        print_json({"name": name, verb: True})
    else:
        note(f"subscription {name!r} is {verb}")


def _start_text(start: Mapping[str, Any]) -> str:
    if start["time_us"] is not None:
        return f"since {datetime.fromtimestamp(start['time_us'] / 1_000_000, UTC).isoformat()}"
    return f"at {start['token']}" if start["token"] is not None else start["kind"]


async def _list(place: ProviderPlace) -> list[dict[str, Any]]:
    async with managed(place) as provider:
        names = [definition.name for definition in await provider.subscriptions()]
        found: list[dict[str, Any]] = []
        for start in range(0, len(names), ASKED_AT_ONCE):
            some = names[start : start + ASKED_AT_ONCE]
            found += map(_summary, await asyncio.gather(*map(provider.subscription, some)))
        return found


def _summary(state: SubscriptionState) -> dict[str, Any]:
    return {
        **_definition(state.definition),
        "lag": sum(queue.lag for queue in state.progress),
        "paused": sum(queue.streams_paused for queue in state.progress),
        "dead_letters": state.dead_letters,
        "gaps": state.gaps,
        "faults": [queue.fault for queue in state.progress if queue.fault],
        "held": None if state.held is None else msgspec.to_builtins(state.held._asdict()),
    }


def _definition(definition: SubscriptionDefinition) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(definition)
    return content | {"selector": definition.selector.pattern}


async def _show(place: ProviderPlace, name: str) -> dict[str, Any]:
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
        "fault": queue.fault or None,
    }


async def _create(place: ProviderPlace, how: Mapping[str, Any], definition: SubscriptionDefinition) -> bool:
    async with managed(place, how, create=how["adapter"] is not None) as provider:
        return await provider.create_subscription(definition)


async def _delete(place: ProviderPlace, name: str) -> None:
    async with managed(place) as provider:
        await provider.delete_subscription(name)


async def _seek(place: ProviderPlace, name: str, start: Start) -> int:
    async with managed(place) as provider:
        return await provider.seek(name, start)


async def _resume(place: ProviderPlace, name: str, stream: StreamId) -> None:
    async with managed(place) as provider:
        if not await provider.resume(name, stream):
            raise NotFound(f"subscription {name!r}: stream {str(stream)!r} is not paused")
