"""How commands report: JSON for programs, tables for people on stdout; notes on stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click
import msgspec

from ...streams.wording import printable

if TYPE_CHECKING:
    from rich.table import Table

ABSENT = "–"
"""Shown for an absent value."""
_ANY_WIDTH = 1 << 30
_GAP = 2
_WRAPPED_WIDTH = 20
"""Least width of a column that may be wrapped, in characters."""

_BETWEEN_WORDS = re.compile("[ _]")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def print_json(document: Any) -> None:
    """Print one document on a line of its own."""
    click.echo(msgspec.json.encode(document))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[str] = (),
    wrap: Collection[str] = (),
) -> None:
    """Print rows for people. Numbers, and the columns named in `right`, are aligned to the right; None is a dash.

    On a terminal, headings take several lines if there is no room. Of the cells, only those of columns in `wrap` do.
    If the table is still too wide, columns without any value are left out. If that is not enough, each row is a list of
    its cells. If stdout is no terminal, each row is one line with all columns.
    """
    from rich.console import Console  # noqa: PLC0415 (only where a table is printed)

    shown = [
        _Column(
            name,
            [_text(row[index]) for row in rows],
            _is_right(name, [row[index] for row in rows], right),
            name in wrap,
        )
        for index, name in enumerate(columns)
    ]
    if not sys.stdout.isatty():
        Console(highlight=False, width=_ANY_WIDTH).print(_table(shown, short=False))
        return
    console = Console(highlight=False)
    if _least_width(shown) > console.width:
        shown = [column for column in shown if any(cell != ABSENT for cell in column.cells)]
    if _least_width(shown) <= console.width:
        console.print(_table(shown, short=_least_width(shown, short=False) > console.width))
        return
    for number in range(len(rows)):
        if number:
            console.print()
        console.print(_fields([(column.name, column.cells[number]) for column in shown]), soft_wrap=True)


def print_fields(document: Mapping[str, object]) -> None:
    """Print names and values for people. The names within an inner mapping are shown as `outer.inner`."""
    from rich.console import Console  # noqa: PLC0415 (only where a table is printed)

    Console(highlight=False).print(_fields([(name, _text(value)) for name, value in _flat(document)]), soft_wrap=True)


def note(text: str) -> None:
    """Print a note for people, on stderr."""
    click.echo(f"headrace: {text}", err=True)


def _flat(document: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            found += _flat(cast("Mapping[str, object]", value), f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", cast("object", value)))
    return found


class _Column(NamedTuple):
    name: str
    cells: Sequence[str]
    right: bool
    wrap: bool

    @property
    def words(self) -> Sequence[str]:
        """Lines of the heading on a terminal."""
        return _BETWEEN_WORDS.split(self.name)


def _is_right(name: str, values: Sequence[object], right: Collection[str]) -> bool:
    numbers = all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)
    return name in right or numbers


def _text(value: object) -> str:
    if value is None or value in ("", [], {}):
        return ABSENT
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.15g}"
        case list():
            return printable(", ".join(map(str, value)))  # pyright: ignore[reportUnknownArgumentType]
        case _:
            return "\n".join(map(printable, str(value).splitlines()))


def _least_width(columns: Sequence[_Column], *, short: bool = True) -> int:
    from rich.cells import cell_len  # noqa: PLC0415 (only where a table is printed)

    width = _GAP * (len(columns) - 1)
    for column in columns:
        widest = max(map(cell_len, [*(column.words if short else [column.name]), *column.cells]))
        width += min(widest, _WRAPPED_WIDTH) if column.wrap else widest
    return width


def _table(columns: Sequence[_Column], *, short: bool) -> Table:
    """A table as wide as its cells; with `short`, each word of a heading is on a line of its own."""
    from rich.table import Table  # noqa: PLC0415 (only where a table is printed)
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in columns:
        heading = Text("\n".join(column.words) if short else column.name)
        justify = "right" if column.right else "left"
        table.add_column(heading, justify=justify, no_wrap=not column.wrap, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _fields(fields: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in fields), default=0)
    indent = "\n" + " " * (width + _GAP)
    return "\n".join(f"{name:<{width}}  {indent.join(value.splitlines())}" for name, value in fields)
