"""`headrace postgres`."""

from __future__ import annotations

from types import ModuleType

import click

from ...streams.errors import NotFound
from .help import CommandGroup
from .output import json_option, note, print_json, print_table


@click.group("postgres", cls=CommandGroup)
def command() -> None:
    """Tables of queues in PostgreSQL, of the adapter `postgres`.

    URL is postgresql://USER@HOST:PORT/DATABASE. A password may also be in PGPASSWORD or ~/.pgpass.
    """


@command.command()
@click.argument("url")
@json_option
def migrate(*, url: str, as_json: bool) -> None:
    """Create the tables in the database at URL, if they are missing."""
    administration, schema = _modules()
    changed = administration.migrate(url)
    if as_json:
        print_json({"version": schema.VERSION, "changed": changed})
    else:
        note(f"the tables for queues have version {schema.VERSION}" + ("" if changed else " already"))


@command.command()
@json_option
def ddl(*, as_json: bool) -> None:
    """Print the statements that create the tables, for a migration of your own."""
    _, schema = _modules()
    if as_json:
        print_json(list(schema.DDL))
        return
    for statement in schema.DDL:
        click.echo(f"{statement};")


@command.command("list")
@click.argument("url")
@json_option
def list_(*, url: str, as_json: bool) -> None:
    """List the providers in the database at URL, and how much they hold."""
    administration, _ = _modules()
    found = administration.providers(url)
    if as_json:
        print_json([each._asdict() for each in found])
        return
    print_table(("provider", "queues", "segments", "events", "bytes"), found)


def _modules() -> tuple[ModuleType, ModuleType]:
    try:
        from ...adapters.postgres import administration, schema  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as missing:
        raise NotFound(str(missing)) from None
    return administration, schema
