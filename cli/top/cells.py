"""Cells of tables, and texts of numbers, for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size

from ...streams.wording import printable

ABSENT = "–"
_BAD = ("faulted", "unserved", "blocked", "held", "dead", "unreachable")
_ODD = (
    "throttled",
    "stopped",
    "out of credit",
    "paused",
    "retrying",
    "behind",
    "resuming",
    "not served",
    "leaving",
)


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    width: int
    """In cells. The first column takes the rest of the line, too."""
    value: Callable[[Mapping[str, Any]], str]
    order: Callable[[Mapping[str, Any]], Any]
    """The key to sort by; the largest comes first."""
    right: bool = True


def number_column(field_: str, title: str, width: int) -> Column:
    return Column(title, width, lambda row: number(row.get(field_)), lambda row: known(row.get(field_)))


def text_column(field_: str, title: str, width: int) -> Column:
    return Column(
        title, width, lambda row: printable(row.get(field_) or ABSENT), lambda row: row.get(field_) or "", right=False
    )


def known(value: float | None) -> float:
    return -1.0 if value is None else value


def number(value: float | None) -> str:
    """Return a number in at most six characters, as in 0.4, 1,234 or 56.7k."""
    if value is None:
        return ABSENT
    if 0 < value < 9.95 and value != int(value):
        return f"{value:.1f}"
    if value < 9_999.5:
        return f"{value:,.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if value < 999.95 * size:
            return f"{value / size:.1f}{unit}"
    return "many"


def seconds(ms: float | None) -> str:
    """Return a time in at most five characters, as in 0.3s, 45s, 12m, 3.1h or 60d."""
    if ms is None:
        return ABSENT
    value = ms / 1000
    if value < 9.95:
        return f"{value:.1f}s"
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "m"), (36_000, 3600, "h"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / size:.1f}{unit}" if limit == 36_000 else f"{value / size:.0f}{unit}"
    return f"{min(value / 86_400, 9_999):.0f}d"


def severity(state: str) -> int:
    return 2 if state in _BAD else 1 if state in _ODD else 0


def style_of(row: Mapping[str, Any]) -> str:
    return {2: "red", 1: "yellow", 0: ""}[severity(row.get("state") or "")]


def line_of(columns: Sequence[Column], cells: Sequence[str], width: int) -> str:
    """Put cells side by side. The first column takes the rest of the width; last columns that do not fit are left
    out."""
    fitting, used = [columns[0]], columns[0].width
    for column in columns[1:]:
        if used + 1 + column.width > width:
            break
        fitting.append(column)
        used += 1 + column.width
    spare = width - used
    sized = [
        _sized(cell, column.width + (spare if not place else 0), right=column.right)
        for place, (column, cell) in enumerate(zip(fitting, cells, strict=False))
    ]
    return " ".join(sized)


def _sized(text: str, width: int, *, right: bool) -> str:
    text = cut(text, width)
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def cut(text: str, width: int) -> str:
    """Return a text in at most `width` cells. A longer one loses its middle: many names differ at their ends."""
    if cell_len(text) <= width:
        return text
    end = ""
    for character in reversed(text):
        if cell_len(character + end) > (width - 1) // 2:
            break
        end = character + end
    return f"{set_cell_size(text, width - 1 - cell_len(end))}…{end}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as bars of eighths, the last ones that fit."""
    last = values[-max(width, 1) :]
    most = max(last, default=0)
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * value / most) if most else 0] for value in last)
