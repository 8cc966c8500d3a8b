"""How commands report: JSON for programs, tables for people on stdout; notes on stderr."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import click
import msgspec

_ANY_WIDTH = 1 << 30

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def print_json(document: Any) -> None:
    """Print one document on a line of its own."""
    click.echo(msgspec.json.encode(document))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Collection[str] = ()) -> None:
    """Print rows for people: numbers, and the columns named in `right`, to the right; as wide as they are where stdout
    is no terminal."""
    from rich.box import SIMPLE  # noqa: PLC0415 (only where a table is printed)
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        numbers = column in right or all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _ANY_WIDTH)
    console.print(table)


def note(text: str) -> None:
    """Tell people something, on stderr."""
    click.echo(f"headrace: {text}", err=True)
