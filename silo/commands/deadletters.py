"""`headrace deadletters`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from ...streams import DeadLetter, InvalidArgument, NotFound
from ..wording import counted
from .managing import Managed, managed
from .options import Place, adapter_options, place_options
from .output import json_option, note, print_json, print_table
from .rendering import payload_fields
from .running import run

REASON_WIDTH = 100
"""Characters of a reason that the list shows."""


@click.group("deadletters")
def command() -> None:
    """List, inspect, redrive and delete events that were given up on."""


def _chosen_options(function: Any) -> Any:
    function = click.argument("ids", nargs=-1, type=int)(function)
    function = click.option("--all", "all_", is_flag=True, help="All of the subscription, instead of ids.")(function)
    return click.option("--subscription", required=True, metavar="NAME", help="Whose they are.")(function)


@command.command("list")
@place_options
@adapter_options
@click.option("--subscription", metavar="NAME", help="Only of this subscription.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At the most.")
@click.option("--after", type=int, default=0, metavar="ID", help="Only those after this one.")
@json_option
def list_(*, place: Place, subscription: str | None, limit: int, after: int, as_json: bool) -> None:
    """The oldest dead letters, without their payload."""
    letters = run(_list(place, subscription, limit, after))
    if as_json:
        print_json([_summary(letter) for letter in letters])
        return
    columns = ("id", "subscription", "stream", "token", "attempts", "failed_at", "reason")
    print_table(columns, [_row(letter) for letter in letters])
    if len(letters) == limit:
        note(f"there may be more: --after {letters[-1].id} goes on")


@command.command()
@place_options
@adapter_options
@click.argument("letter_id", metavar="ID", type=int)
@json_option
def show(*, place: Place, letter_id: int, as_json: bool) -> None:
    """A dead letter with its payload and headers."""
    letter = run(_show(place, letter_id))
    document = _summary(letter) | {"headers": dict(letter.headers), **payload_fields(letter.payload)}
    if as_json:
        print_json(document)
    else:
        print_table(("", ""), list(document.items()))


@command.command()
@place_options
@adapter_options
@_chosen_options
@json_option
def redrive(*, place: Place, subscription: str, all_: bool, ids: Sequence[int], as_json: bool) -> None:
    """Deliver dead letters once more: those with IDS, or --all.

    Whoever serves the subscription does so within about a second; where nobody does, as soon as somebody does. What is
    delivered is deleted, what fails again stays.
    """
    count = run(_redrive(place, subscription, _ids(all_, ids)))
    if as_json:
        print_json({"subscription": subscription, "asked_for": count})
    else:
        note(f"to be delivered once more: {counted(count, 'dead letter')} of {subscription}")


@command.command()
@place_options
@adapter_options
@_chosen_options
@json_option
def delete(*, place: Place, subscription: str, all_: bool, ids: Sequence[int], as_json: bool) -> None:
    """Delete dead letters: those with IDS, or --all."""
    count = run(_delete(place, subscription, _ids(all_, ids)))
    if as_json:
        print_json({"subscription": subscription, "deleted": count})
    else:
        note(f"deleted: {counted(count, 'dead letter')} of {subscription}")


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
        "failed_at": _failed_at(letter).isoformat(),
        "bytes": len(letter.payload),
        "redrive": letter.redrive,
    }


def _row(letter: DeadLetter) -> list[object]:
    when = _failed_at(letter).isoformat(timespec="seconds")
    token = str(letter.token)
    return [letter.id, letter.subscription, letter.stream, token, letter.attempts, when, one_line(letter.reason)]


def _failed_at(letter: DeadLetter) -> datetime:
    return datetime.fromtimestamp(letter.failed_at_us / 1_000_000, UTC)


def one_line(text: str) -> str:
    """The first line of a text, and so much of it as a table has room for; an ellipsis tells of the rest."""
    whole = text.strip()
    first = whole.partition("\n")[0].rstrip()[:REASON_WIDTH]
    return first if first == whole else f"{first} …"


async def _list(place: Place, subscription: str | None, limit: int, after: int) -> list[DeadLetter]:
    async with managed(place) as provider:
        letters = await provider.dead_letters(subscription, limit=limit, after_id=after)
        if not letters and subscription is not None:
            await _check_known(provider, subscription)
        return letters


async def _show(place: Place, letter_id: int) -> DeadLetter:
    async with managed(place) as provider:
        for letter in await provider.dead_letters(limit=1, after_id=letter_id - 1):
            if letter.id == letter_id:
                return letter
    raise NotFound(f"there is no dead letter {letter_id}")


async def _redrive(place: Place, subscription: str, ids: Sequence[int] | None) -> int:
    async with managed(place) as provider:
        await _check_there(provider, subscription, ids)
        return await provider.redrive(subscription, ids)


async def _delete(place: Place, subscription: str, ids: Sequence[int] | None) -> int:
    async with managed(place) as provider:
        await _check_there(provider, subscription, ids)
        return await provider.delete_dead_letters(subscription, ids)


async def _check_there(provider: Managed, subscription: str, ids: Sequence[int] | None) -> None:
    """Raises NotFound, before anything is done, for ids that are no dead letters of the subscription."""
    if missing := [str(one) for one in ids or () if not await _is_of(provider, subscription, one)]:
        what = "dead letter" if len(missing) == 1 else "dead letters"
        raise NotFound(f"subscription {subscription!r} has no {what} {', '.join(missing)}: nothing is done")
    if ids is None:
        await _check_known(provider, subscription)


async def _is_of(provider: Managed, subscription: str, letter_id: int) -> bool:
    found = await provider.dead_letters(subscription, limit=1, after_id=letter_id - 1)
    return [letter.id for letter in found] == [letter_id]


async def _check_known(provider: Managed, subscription: str) -> None:
    """Raises NotFound where there is neither such a subscription nor a dead letter of one that was."""
    if not await provider.dead_letters(subscription, limit=1):
        await provider.subscription(subscription)
