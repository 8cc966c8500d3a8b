"""`headrace effects`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

from ...streams.errors import InvalidArgument
from ..interrupts import interrupts_kill
from .help import CommandGroup
from .output import json_option, note, print_json, print_table

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@click.group("effects", cls=CommandGroup)
def command() -> None:
    """Tables of exactly-once effects in a database of yours: create them, list and delete their rows.

    URL is that of SQLAlchemy: postgresql://USER:PASSWORD@HOST/DATABASE or sqlite:///FILE.
    """


@command.command()
@click.argument("url")
@json_option
def migrate(*, url: str, as_json: bool) -> None:
    """Create the tables in the database at URL, or bring them to this version."""
    with interrupts_kill():
        from ...effects import administration, schema  # noqa: PLC0415 (it imports SQLAlchemy)
    with administration.opened(url, migrated=False) as connection:
        changed = schema.migrate(connection)
    if as_json:
        print_json({"version": schema.VERSION, "changed": changed})
    else:
        note(f"the tables for effects have version {schema.VERSION}" + ("" if changed else " already"))


@command.command()
@click.option(
    "--dialect", type=click.Choice(["postgresql", "sqlite"]), default="postgresql", help="Default: postgresql."
)
@json_option
def ddl(*, dialect: str, as_json: bool) -> None:
    """Print the statements that create the tables, for a migration of your own."""
    with interrupts_kill():
        from ...effects import schema  # noqa: PLC0415 (it imports SQLAlchemy)
    if as_json:
        print_json(schema.ddl(dialect))
        return
    for statement in schema.ddl(dialect):
        click.echo(f"{statement};")


@command.command("list")
@click.argument("url")
@json_option
def list_(*, url: str, as_json: bool) -> None:
    """List the providers (origins) and subscriptions that have rows in the database at URL."""
    with interrupts_kill():
        from ...effects import administration  # noqa: PLC0415 (it imports SQLAlchemy)
    with administration.opened(url) as connection:
        found = administration.summaries(connection)
    if as_json:
        print_json([each._asdict() for each in found])
        return
    rows = [(*each[:6], _moment(each.written_at_us)) for each in found]
    print_table(("origin", "subscription", "streams", "states", "unapplied", "unknown", "written_at"), rows)


@command.command()
@click.argument("url")
@click.option("--subscription", metavar="NAME", help="Only the events of this subscription.")
@click.option("--origin", help="Only the events of this provider.")
@click.option("--apply", is_flag=True, help="Let redrives apply these events from now on.")
@json_option
def unknown(*, url: str, subscription: str | None, origin: str | None, apply: bool, as_json: bool) -> None:
    """Show the dead letters whose redrive was refused, because it is not known whether their effects are applied.

    They stay dead letters. To apply them, give --apply, and then redrive them again. To discard them, run 'headrace
    deadletters delete'.
    """
    with interrupts_kill():
        from ...effects import administration  # noqa: PLC0415 (it imports SQLAlchemy)
    with administration.opened(url) as connection:
        found = administration.unknown_events(connection, subscription, origin)
        if apply:
            note(f"a redrive applies them: {administration.apply_unknown(connection, subscription, origin)} events")
    if as_json:
        print_json([{**each._asdict(), "token": str(each.token)} for each in found])
        return
    rows = [(*each[:3], str(each.token), _moment(each.timestamp_us)) for each in found]
    print_table(("origin", "subscription", "stream", "token", "published_at"), rows)


@command.command()
@click.argument("url")
@click.option(
    "--older-than", required=True, metavar="TIME", help="Delete rows not written for this time, as in 30d or 12h."
)
@click.option("--origin", help="Delete only the rows of this provider.")
@json_option
def prune(*, url: str, older_than: str, origin: str | None, as_json: bool) -> None:
    """Delete positions that are not needed any more, and states whose time to live is over.

    A position is kept if it has a state, or an event that failed and may be redriven.
    """
    with interrupts_kill():
        from ...effects import administration  # noqa: PLC0415 (it imports SQLAlchemy)
    age = _duration(older_than)
    with administration.opened(url) as connection:
        ended, deleted = administration.prune(connection, age, origin)
    if as_json:
        print_json({"deleted": deleted, "ended_states": ended})
    else:
        note(f"deleted: {deleted} positions; {ended} states whose time to live was over")


@command.command()
@click.argument("url")
@click.option("--retry", is_flag=True, help="Let streams go on that wait because the queue refused a batch.")
@json_option
def outbox(*, url: str, retry: bool, as_json: bool) -> None:
    """Show the events in the outbox of the database at URL that are not published yet."""
    with interrupts_kill():
        from ...effects import administration  # noqa: PLC0415 (it imports SQLAlchemy)
    with administration.opened(url) as connection:
        if retry:
            count = administration.retry_refused(connection)
            note(f"to be tried again by the silo: {count} {'batch' if count == 1 else 'batches'}")
        found = administration.outboxes(connection)
    if as_json:
        print_json([each._asdict() for each in found])
        return
    rows = [(*each[:3], _moment(each.oldest_at_us), *each[4:]) for each in found]
    print_table(("provider", "batches", "events", "oldest_at", "refused", "problem"), rows)


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6})([smhd])", text, re.ASCII)
    if match is None:
        raise InvalidArgument(f"--older-than {text!r}: write a number with s, m, h or d, as in 30d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _moment(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="seconds")
