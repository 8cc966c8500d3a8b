"""`headrace deadletters`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from ...streams import DeadLetter, InvalidArgument
from .options import Where, opened, where_options
from .output import json_option, note, print_json, print_table
from .rendering import payload_fields
from .running import run


@click.group("deadletters")
def command() -> None:
    """List, inspect, redrive and delete events that were given up on."""


def _chosen_options(function: Any) -> Any:
    function = click.argument("ids", nargs=-1, type=int)(function)
    function = click.option("--all", "all_", is_flag=True, help="All of the subscription, instead of ids.")(function)
    return click.option("--subscription", required=True, metavar="NAME", help="Whose they are.")(function)


@command.command("list")
@where_options
@click.option("--subscription", metavar="NAME", help="Only of this subscription.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At the most.")
@click.option("--after", type=int, default=0, metavar="ID", help="Only those after this one.")
@json_option
def list_(*, where: Where, subscription: str | None, limit: int, after: int, as_json: bool) -> None:
    """The oldest dead letters, without their payload."""
    letters = run(_list(where, subscription, limit, after))
    if as_json:
        print_json([_summary(letter) for letter in letters])
        return
    columns = ("id", "subscription", "stream", "token", "attempts", "failed_at", "reason")
    print_table(columns, [[_summary(letter)[column] for column in columns] for letter in letters])
    if len(letters) == limit:
        note(f"there may be more: --after {letters[-1].id} goes on")


@command.command()
@where_options
@click.argument("letter_id", metavar="ID", type=int)
@json_option
def show(*, where: Where, letter_id: int, as_json: bool) -> None:
    """A dead letter with its payload and headers."""
    letter = run(_show(where, letter_id))
    document = _summary(letter) | {"headers": dict(letter.headers), **payload_fields(letter.payload)}
    if as_json:
        print_json(document)
    else:
        print_table(("", ""), list(document.items()))


@command.command()
@where_options
@_chosen_options
@json_option
def redrive(*, where: Where, subscription: str, all_: bool, ids: Sequence[int], as_json: bool) -> None:
    """Deliver dead letters once more: those with IDS, or --all.

    Whoever serves the subscription does so within about a second; where nobody does, as soon as somebody does. What is
    delivered is deleted, what fails again stays.
    """
    count = run(_redrive(where, subscription, _ids(all_, ids)))
    if as_json:
        print_json({"subscription": subscription, "asked_for": count})
    else:
        note(f"{count:,} dead letters of {subscription} are to be delivered once more")


@command.command()
@where_options
@_chosen_options
@json_option
def delete(*, where: Where, subscription: str, all_: bool, ids: Sequence[int], as_json: bool) -> None:
    """Delete dead letters: those with IDS, or --all."""
    count = run(_delete(where, subscription, _ids(all_, ids)))
    if as_json:
        print_json({"subscription": subscription, "deleted": count})
    else:
        note(f"{count:,} dead letters of {subscription} are deleted")


def _ids(all_: bool, ids: Sequence[int]) -> Sequence[int] | None:
    if all_ == bool(ids):
        raise InvalidArgument("say which dead letters: their ids, or --all")
    return None if all_ else ids


def _summary(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "subscription": letter.subscription,
        "queue": letter.queue,
        "stream": str(letter.stream),
        "token": str(letter.token),
        "event_id": letter.event_id,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "failed_at": datetime.fromtimestamp(letter.failed_at_us / 1_000_000, UTC).isoformat(),
        "bytes": len(letter.payload),
        "redrive": letter.redrive,
    }


async def _list(where: Where, subscription: str | None, limit: int, after: int) -> list[DeadLetter]:
    async with opened(where) as provider:
        return await provider.store.dead_letters(provider.name, subscription, limit=limit, after_id=after)


async def _show(where: Where, letter_id: int) -> DeadLetter:
    async with opened(where) as provider:
        return await provider.store.dead_letter(letter_id)


async def _redrive(where: Where, subscription: str, ids: Sequence[int] | None) -> int:
    async with opened(where) as provider:
        return await provider.store.request_redrive(provider.name, subscription, ids)


async def _delete(where: Where, subscription: str, ids: Sequence[int] | None) -> int:
    async with opened(where) as provider:
        return await provider.store.delete_dead_letters(provider.name, subscription, ids)
