"""The screen and the keys of `headrace top`. Pure: content and the size of the terminal in, lines out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import set_cell_size
from rich.text import Text

from ...streams.wording import counted, printable
from .cells import (
    ABSENT,
    Column,
    known,
    line_of,
    number,
    number_column,
    seconds,
    severity,
    style_of,
    text_column,
)
from .details import queue_lines, subscription_lines
from .sources import Content

MIN_WIDTH = 40
SILENT = ("dead", "unreachable")
PROBLEMS = 3
"""Most lines of problems above a table."""
HELP = (
    "1  subscriptions          2  queues              3  silos",
    "↑ ↓ or k j  choose a row, scroll details  enter  show details  esc  back",
    "/  filter by text         s  sort by the next column    r  reverse the order",
    "p  freeze the screen      + -  refresh more or less often",
    "?  this help              q  quit",
)


_LATE = Column("LATE", 6, lambda row: seconds(row.get("lag_ms")), lambda row: known(row.get("lag_ms")))
_STATE = Column(
    "STATE", 13, lambda row: row.get("state") or ABSENT, lambda row: severity(row.get("state") or ""), right=False
)


def _cache(row: Mapping[str, Any]) -> float | None:
    limit = row.get("cache_limit_bytes")
    return row["cached_bytes"] / limit if limit else None


def _title(row: Mapping[str, Any]) -> str:
    return row.get("title") or row["name"]


def _bar(share: float | None) -> str:
    if share is None:
        return ABSENT
    filled = round(8 * min(share, 1.0))
    return "█" * filled + "·" * (8 - filled)


SUBSCRIPTIONS: Sequence[Column] = (
    Column("SUBSCRIPTION", 14, lambda row: printable(_title(row)), _title, right=False),
    _STATE,
    _LATE,
    number_column("lag_events", "LAG", 7),
    number_column("rate", "OUT/S", 7),
    number_column("in_flight", "RUN", 6),
    number_column("retries", "RETRY", 6),
    number_column("dead_letters", "DEAD", 6),
    number_column("connected_count", "CONS", 6),
)
QUEUES: Sequence[Column] = (
    Column(
        "QUEUE", 11, lambda row: printable(f"{row['provider']}/{row['index']}"), lambda row: -row["index"], right=False
    ),
    text_column("silo", "SILO", 12),
    _STATE,
    number_column("epoch", "EPOCH", 6),
    _LATE,
    number_column("lag_events", "LAG", 7),
    number_column("rate", "BATCH/S", 7),
    Column("CACHE", 8, lambda row: _bar(_cache(row)), lambda row: known(_cache(row)), right=False),
)
SILOS: Sequence[Column] = (
    text_column("name", "SILO", 20),
    _STATE,
    number_column("queues", "QUEUES", 7),
    Column("SILENT", 7, lambda row: seconds(row.get("silent_ms")), lambda row: known(row.get("silent_ms"))),
    text_column("address", "ADDRESS", 22),
)
TABLES: Mapping[str, Sequence[Column]] = {"subscriptions": SUBSCRIPTIONS, "queues": QUEUES, "silos": SILOS}
_KEYS = {"1": "subscriptions", "2": "queues", "3": "silos"}


@dataclass
class TopScreen:
    """The state of the screen: which table it shows, and how."""

    where: str
    """The silo or the data directory, for the first line."""
    interval_s: float = 1.0
    table: str = "subscriptions"
    target: tuple[str, str] | None = None
    """The provider, and the subscription or the number of the queue, whose details are shown."""
    chosen: int = 0
    scrolled: int = 0
    """Lines of the details above the first one that is shown."""
    filter: str = ""
    typing: bool = False
    """The keys are text of the filter."""
    frozen: bool = False
    helping: bool = False
    quitting: bool = False
    _sorted_by: dict[str, int] = field(default_factory=dict[str, int])
    _reversed: bool = False

    # ---- keys ------------------------------------------------------------------------------------------------------

    def press(self, key: str, content: Content) -> None:
        """Carry out the command of a key. `content` is that of the overview."""
        if self.typing:
            self._type(key)
        elif self.helping:
            self.helping = False
        elif key in _KEYS:
            self.table, self.target, self.chosen = _KEYS[key], None, 0
        elif (action := _ACTIONS.get(key)) is not None:
            action(self, self.rows(content))

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.typing = False
            self.filter = self.filter if key == "enter" else ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1 and key.isprintable():
            self.filter += key
        self.chosen = 0

    def open_details(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows and self.target is None and self.table != "silos":
            row = rows[min(self.chosen, len(rows) - 1)]
            self.target = row["provider"], str(row["index"] if self.table == "queues" else row["name"])
            self.scrolled = 0

    def close_details(self, _: Sequence[Mapping[str, Any]]) -> None:
        if self.target is not None:
            self.target = None
        else:
            self.filter = ""

    def move(self, step: int, count: int) -> None:
        """Choose another row; if details are shown, scroll them."""
        if self.target is not None:
            self.scrolled = max(self.scrolled + step, 0)
        else:
            self.chosen = max(min(self.chosen + step, count - 1), 0)

    def search(self, _: Sequence[Mapping[str, Any]]) -> None:
        self.typing, self.filter = True, ""

    def sort(self, _: Sequence[Mapping[str, Any]]) -> None:
        self._sorted_by[self.table] = (self._sorted_by.get(self.table, -1) + 1) % len(TABLES[self.table])

    def reverse(self, _: Sequence[Mapping[str, Any]]) -> None:
        self._reversed = not self._reversed

    # ---- drawing ---------------------------------------------------------------------------------------------------

    def rows(self, content: Content) -> list[Mapping[str, Any]]:
        """Return the rows of the table in their order: the worst first, unless a column was chosen.

        If there are several providers, a subscription has a `title` with its provider.
        """
        rows: list[Mapping[str, Any]] = [row for row in content[self.table] if self.filter.lower() in _searched(row)]
        if self.table == "subscriptions" and _has_several_providers(content):
            rows = [{**row, "title": f"{row['provider']}/{row['name']}"} for row in rows]
        column = self._sorted_by.get(self.table)
        if column is not None:
            chosen = TABLES[self.table][column]
            return sorted(rows, key=chosen.order, reverse=chosen.right != self._reversed)
        if self.table == "queues":
            rows.sort(key=lambda row: (-severity(row["state"]), row["provider"], row["index"]))
        else:
            rows.sort(key=lambda row: (-severity(row["state"]), -known(row.get("lag_ms")), row["name"]))
        return rows[::-1] if self._reversed else rows

    def draw(self, content: Content, detail: Content | None, width: int, height: int, note: str = "") -> list[Text]:
        """Return at most `height` lines of at most `width` cells. `note`, such as the error of the last refresh, is
        shown before the problems."""
        width = max(width, MIN_WIDTH)
        head = [*self._head(content), *_problem_lines(content, note)]
        foot = [self._foot(width)]
        space = max(height - len(head) - len(foot) - 1, 1)
        if self.helping:
            body = [Text(line) for line in HELP]
        elif self.target is not None:
            body = self._scrolled(self._detail(content, detail, width), space)
        else:
            body = self._table(content, width, space)
        lines = [*head, Text(""), *body[:space]]
        lines += [Text("")] * max(height - len(lines) - len(foot), 0)
        for line in (*lines, *foot):
            line.truncate(width, overflow="ellipsis")
        return [*lines, *foot][:height]

    def page(self, content: Content, width: int) -> list[Text]:
        """Return all tables, one after the other, with all rows."""
        problems = _problem_lines(content, "")
        for line in problems:
            line.truncate(width, overflow="ellipsis")
        lines = [*self._head(content), *problems]
        for self.table in TABLES:
            if content[self.table]:
                lines += [Text(""), *self._titles(width), *(self._row(row, width) for row in self.rows(content))]
        return lines

    def _head(self, content: Content) -> list[Text]:
        queues, subscriptions, silos = content["queues"], content["subscriptions"], content["silos"]
        served = sum(bool(row["silo"]) for row in queues)
        late = max((row["lag_ms"] for row in subscriptions if row.get("lag_ms") is not None), default=None)
        rates = [row["rate"] for row in subscriptions if row.get("rate") is not None]
        alive = sum(row["state"] not in SILENT for row in silos)
        parts = [
            f"{alive} of {len(silos)} silos" if alive < len(silos) else counted(alive, "silo") if silos else "",
            f"{served}/{len(queues)} queues served" if silos else counted(len(queues), "queue"),
            f"out {number(None if subscriptions and not rates else sum(rates))}/s",
            f"late {seconds(late)}",
            f"dead letters {number(sum(row.get('dead_letters') or 0 for row in subscriptions))}",
        ]
        state = "  FROZEN" if self.frozen else f"  every {self.interval_s:g} s"
        title = Text.assemble(("headrace top", "bold"), f"  {printable(self.where)}", (state, "dim"))
        return [title, Text(" · ".join(filter(None, parts)))]

    def _foot(self, width: int) -> Text:
        if self.typing:
            return Text(f"filter: {self.filter}▏  enter: keep  esc: all rows", style="reverse")
        filtered = f"filter: {printable(self.filter)} (esc)  " if self.filter else ""
        back = "esc back  ↑ ↓ scroll  " if self.target else "enter details  / filter  s sort  "
        return Text(set_cell_size(f"{filtered}1 2 3 tables  {back}p freeze  ? help  q quit", width), style="reverse")

    def _table(self, content: Content, width: int, space: int) -> list[Text]:
        rows = self.rows(content)
        self.chosen = max(min(self.chosen, len(rows) - 1), 0)
        lines = self._titles(width)
        if not rows:
            hint = f"no {self.table} match the filter" if self.filter else f"no {self.table}"
            return [*lines, Text(hint, style="dim")]
        shown = max(space - 2, 1)  # one line is for the titles, one for the reason
        first = min(max(self.chosen - shown + 1, 0), max(len(rows) - shown, 0))
        for place, row in enumerate(rows[first : first + shown], first):
            line = self._row(row, width)
            if place == self.chosen:
                line.stylize("reverse")
            lines.append(line)
        mark = f"rows {first + 1}–{first + shown} of {len(rows):,}" if len(rows) > shown else ""
        reason = printable(rows[self.chosen].get("reason") or "")
        if mark or reason:
            lines.append(Text(f"  {'  '.join(filter(None, (mark, reason)))}", style="dim"))
        return lines

    def _scrolled(self, lines: Sequence[Text], space: int) -> Sequence[Text]:
        """Return the lines that fit, with a mark if others do not."""
        shown = max(space - 1, 1)  # one line is for the mark
        if len(lines) <= space:
            self.scrolled = 0
            return lines
        self.scrolled = first = min(self.scrolled, len(lines) - shown)
        mark = Text(f"  lines {first + 1}–{first + shown} of {len(lines):,}", style="dim")
        return [*lines[first : first + shown], mark]

    def _titles(self, width: int) -> list[Text]:
        columns, sorted_by = TABLES[self.table], self._sorted_by.get(self.table)
        titles = [f"{one.title}▾" if place == sorted_by else one.title for place, one in enumerate(columns)]
        return [Text(line_of(columns, titles, width), style="bold")]

    def _row(self, row: Mapping[str, Any], width: int) -> Text:
        columns = TABLES[self.table]
        return Text(line_of(columns, [one.value(row) for one in columns], width), style=style_of(row))

    def _detail(self, content: Content, detail: Content | None, width: int) -> list[Text]:
        assert self.target is not None
        provider, name = self.target
        if detail is None:
            return [Text(f"looking into {printable(name)} …", style="dim")]
        if self.table == "queues":
            return queue_lines(detail, width)
        title = f"{provider}/{name}" if _has_several_providers(content) else name
        return subscription_lines(title, detail, width)


_ACTIONS: Mapping[str, Callable[[TopScreen, Sequence[Mapping[str, Any]]], None]] = {
    "enter": TopScreen.open_details,
    "escape": TopScreen.close_details,
    "s": TopScreen.sort,
    "r": TopScreen.reverse,
    "up": lambda screen, rows: screen.move(-1, len(rows)),
    "k": lambda screen, rows: screen.move(-1, len(rows)),
    "down": lambda screen, rows: screen.move(1, len(rows)),
    "j": lambda screen, rows: screen.move(1, len(rows)),
    "/": TopScreen.search,
    "p": lambda screen, _: setattr(screen, "frozen", not screen.frozen),
    "?": lambda screen, _: setattr(screen, "helping", True),
    "q": lambda screen, _: setattr(screen, "quitting", True),
    "+": lambda screen, _: setattr(screen, "interval_s", max(screen.interval_s / 2, 0.25)),
    "-": lambda screen, _: setattr(screen, "interval_s", min(screen.interval_s * 2, 60.0)),
}


def _searched(row: Mapping[str, Any]) -> str:
    return " ".join(
        str(row.get(name, "")) for name in ("provider", "name", "index", "silo", "state", "selector")
    ).lower()


def _has_several_providers(content: Content) -> bool:
    return len({row["provider"] for row in (*content["queues"], *content["subscriptions"])}) > 1


def _problem_lines(content: Content, note: str) -> list[Text]:
    problems = [Text(f"! {printable(note)}", style="red")] if note else []
    problems += [
        Text(f"! {printable(one['text'])}", style="red" if one["severity"] == "bad" else "yellow")
        for one in content["problems"]
    ]
    left = len(problems) - PROBLEMS
    if left > 0:
        return [*problems[:PROBLEMS], Text(f"  and {counted(left, 'more problem')}", style="dim")]
    return problems
