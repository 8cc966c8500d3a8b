"""`headrace deadletters`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ...streams.errors import InvalidArgument, NotFound
from ...streams.field_limits import MAX_ID
from ...streams.subscriptions import DeadLetter
from ...streams.wording import counted
from .help import CommandGroup
from .managing import managed
from .options import ProviderPlace, adapter_options, place_options
from .output import json_option, note, print_fields, print_json, print_table
from .rendering import payload_fields
from .running import run

if TYPE_CHECKING:
    from ...client.stream_provider import SubscriptionAdministration

REASON_WIDTH = 100
"""Most characters of a reason that the list shows."""


@click.group("deadletters", cls=CommandGroup)
def command() -> None:
    """List, inspect, redrive and delete dead letters: events that were given up."""


def _chosen_options(function: Any) -> Any:
    function = click.argument("ids", nargs=-1, type=int)(function)
    function = click.option(
        "--all", "all_", is_flag=True, help="All dead letters of the subscription, instead of ids."
    )(function)
    return click.option("--subscription", required=True, metavar="NAME", help="Their subscription.")(function)


@command.command("list")
@place_options
@adapter_options
@click.option("--subscription", metavar="NAME", help="Only dead letters of this subscription.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most this number.")
@click.option("--after", type=int, default=0, metavar="ID", help="Only dead letters with a higher id.")
@json_option
def list_(*, place: ProviderPlace, subscription: str | None, limit: int, after: int, as_json: bool) -> None:
    """List the oldest dead letters, without their payload."""
    letters = run(_list(place, subscription, limit, after))
    if as_json:
        print_json([_summary(letter) for letter in letters])
        return
    columns = ("id", "subscription", "stream", "token", "attempts", "failed_at", "reason")
    print_table(columns, [_row(letter) for letter in letters], wrap=("reason",))
    if len(letters) == limit:
        note(f"there may be more: continue with --after {letters[-1].id}")


@command.command()
@place_options
@adapter_options
@click.argument("letter_id", metavar="ID", type=int)
@json_option
def show(*, place: ProviderPlace, letter_id: int, as_json: bool) -> None:
    """Show a dead letter with its payload and headers."""
    letter = run(_show(place, letter_id))
    document = _summary(letter) | {"headers": dict(letter.headers), **payload_fields(letter.payload)}
    if as_json:
        print_json(document)
    else:
        print_fields(document)


@command.command()
@place_options
@adapter_options
@_chosen_options
@json_option
def redrive(*, place: ProviderPlace, subscription: str, all_: bool, ids: Sequence[int], as_json: bool) -> None:
    """Deliver dead letters once more: those with IDS, or --all.

    The process that serves the subscription delivers them within about a second, or as soon as one serves it. Delivered
    dead letters are deleted. Those that fail again stay.
    """
    count = run(_redrive(place, subscription, _ids(all_, ids)))
    if as_json:
        print_json({"subscription": subscription, "asked_for": count})
    else:
        note(f"to be delivered once more: {counted(count, 'dead letter')} of subscription {subscription!r}")


@command.command()
@place_options
@adapter_options
@_chosen_options
@json_option
def delete(*, place: ProviderPlace, subscription: str, all_: bool, ids: Sequence[int], as_json: bool) -> None:
    """Delete dead letters: those with IDS, or --all."""
    count = run(_delete(place, subscription, _ids(all_, ids)))
    if as_json:
        print_json({"subscription": subscription, "deleted": count})
    else:
        note(f"deleted: {counted(count, 'dead letter')} of subscription {subscription!r}")


def _ids(all_: bool, ids: Sequence[int]) -> Sequence[int] | None:
    if all_ == bool(ids):
        raise InvalidArgument("name the dead letters: give their ids, or --all")
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
    """The first line of a text, cut to fit into a table. An ellipsis stands for the rest."""
    whole = text.strip()
    first = whole.partition("\n")[0].rstrip()[:REASON_WIDTH]
    return first if first == whole else f"{first} …"


async def _list(place: ProviderPlace, subscription: str | None, limit: int, after: int) -> list[DeadLetter]:
    async with managed(place) as provider:
        letters = await provider.dead_letters(subscription, limit=limit, after_id=max(0, min(after, MAX_ID)))
        if not letters and subscription is not None:
            await _check_known(provider, subscription)
        return letters


async def _show(place: ProviderPlace, letter_id: int) -> DeadLetter:
    async with managed(place) as provider:
        if 0 < letter_id <= MAX_ID:
            for letter in await provider.dead_letters(limit=1, after_id=letter_id - 1):
                if letter.id == letter_id:
                    return letter
    raise NotFound(f"there is no dead letter {letter_id}")


async def _redrive(place: ProviderPlace, subscription: str, ids: Sequence[int] | None) -> int:
    async with managed(place) as provider:
        found = await _letters(provider, subscription, ids)
        if missing := [one for one in ids or () if one not in found]:
            raise _not_there(subscription, missing)
        if ids is not None:
            selects = (await provider.subscription(subscription)).definition.selector.matcher()
            if foreign := [one for one in ids if not selects(found[one].stream)]:
                raise NotFound(
                    f"subscription {subscription!r} does not select the stream of {_named(foreign)}: a deleted "
                    "subscription had the same name; nothing was changed"
                )
        return await provider.redrive(subscription, ids)


async def _delete(place: ProviderPlace, subscription: str, ids: Sequence[int] | None) -> int:
    async with managed(place) as provider:
        found = await _letters(provider, subscription, ids)
        missing = [one for one in dict.fromkeys(ids or ()) if one not in found]
        # The list has no damaged dead letters, but they can be deleted.
        damaged = await provider.delete_dead_letters(subscription, missing) if missing else 0
        if damaged < len(missing):
            raise _not_there(subscription, missing)
        listed = None if ids is None else [one for one in ids if one not in missing]
        return damaged + (0 if listed == [] else await provider.delete_dead_letters(subscription, listed))


async def _letters(
    provider: SubscriptionAdministration, subscription: str, ids: Sequence[int] | None
) -> dict[int, DeadLetter]:
    """The dead letters of the subscription with these ids. Raises NotFound if `ids` is None and the subscription is not
    known."""
    if ids is None:
        await _check_known(provider, subscription)
    possible = [one for one in dict.fromkeys(ids or ()) if 0 < one <= MAX_ID]
    found = [await provider.dead_letters(subscription, limit=1, after_id=one - 1) for one in possible]
    return {letter.id: letter for letters in found for letter in letters if letter.id in (ids or ())}


def _not_there(subscription: str, ids: Sequence[int]) -> NotFound:
    return NotFound(f"subscription {subscription!r} has no {_named(ids)}: nothing was changed")


def _named(ids: Sequence[int]) -> str:
    unique = dict.fromkeys(ids)
    return f"dead letter{'s' if len(unique) > 1 else ''} {', '.join(map(str, unique))}"


async def _check_known(provider: SubscriptionAdministration, subscription: str) -> None:
    """Raises NotFound if there is no such subscription, and no dead letter of a deleted one."""
    if not await provider.dead_letters(subscription, limit=1):
        await provider.subscription(subscription)
