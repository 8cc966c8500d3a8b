"""The details of one queue, and of one subscription. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from ...streams.wording import counted, printable
from .cells import ABSENT, Column, line_of, number, number_column, seconds, sparkline, style_of, text_column
from .sources import Content

MAX_CONSUMERS = 8
_CELL = 7
"""The width of a bucket in the drawing of a cache, in cells."""


def queue_lines(content: Content, width: int) -> list[Text]:
    """Draw a queue: the buckets of its cache, oldest first, and where each subscription is in them."""
    row, cache = content["queue"], content["cache"]
    state = row.get("state") or ABSENT
    title = [
        f"queue {printable(content['provider'])}/{content['index']}",
        state,
        f"silo {printable(content['silo'] or ABSENT)}",
        f"epoch {number(row.get('epoch') or None)}",
    ]
    lines = [Text("  ".join(title), style="bold")]
    if row.get("reason"):
        lines.append(Text(printable(row["reason"]), style=style_of(row)))
    lines.append(
        Text(
            f"read to {number(content.get('read_offset'))} of {number(row.get('end_offset'))}"
            f"  late {seconds(row.get('lag_ms'))}  lag {number(row.get('lag_events'))} events"
            f"  delayed {number(row.get('delayed_events'))}"
        )
    )
    buckets = content["buckets"]
    if cache is not None:
        share = cache["bytes"] / cache["max_bytes"] if cache["max_bytes"] else 0.0
        pressure = "  PRESSURE: reading waits" if cache["pressure"] else ""
        lines += [
            Text(""),
            Text(f"cache {number(cache['events'])} events, {number(cache['bytes'])} bytes, {share:.0%} full{pressure}"),
            Text(_bucket_line(buckets, cache, width)),
        ]
    return [*lines, *(_cursor_line(cursor, buckets, width) for cursor in content["cursors"])]


def _bucket_line(buckets: Sequence[Mapping[str, Any]], cache: Mapping[str, Any], width: int) -> str:
    if not buckets:
        return "[no bucket in use]"
    most = max(cache["max_events"] / 10, 1)
    cells = [f"[{'█' * max(round(5 * min(one['events'] / most, 1.0)), 1):·<5}]" for one in buckets]
    return "".join(cells)[:width]


def _cursor_line(cursor: Mapping[str, Any], buckets: Sequence[Mapping[str, Any]], width: int) -> Text:
    """A marker below the bucket that holds the position, and the name."""
    bucket = cursor["bucket"]
    at = 0 if bucket is None else bucket * _CELL + 3
    if bucket is None and buckets and cursor["watermark"] > buckets[-1]["high"]:
        at = len(buckets) * _CELL
    doing = [
        f"at {cursor['watermark']:,}",
        f"{number(cursor['active'])} active" if cursor["active"] else "",
        f"{number(cursor['parked'])} parked" if cursor["parked"] else "",
        "catching up" if cursor["catching_up"] else "",
    ]
    outside = bucket is None and bool(buckets) and cursor["watermark"] < buckets[0]["low"]
    marker = "◀" if outside else "▲"
    text = f"{printable(cursor['subscription'])}: {', '.join(filter(None, doing))}"
    if at + 2 + cell_len(text) > width and at > cell_len(text):  # no space to the right of the marker
        line = f"{' ' * (at - cell_len(text) - 1)}{text} {marker}"
    else:
        line = f"{' ' * at}{marker} {text}"
    return Text(line, style="yellow" if outside or cursor["catching_up"] else "")


def subscription_lines(name: str, content: Content, width: int) -> list[Text]:
    """Draw a subscription: its consumers, the one with the least credit first, and the streams that are blocked."""
    state = content.get("state") or ABSENT
    title = [f"subscription {printable(name)}", state, printable(content["selector"]), content["mode"]]
    lines = [Text("  ".join(title), style="bold")]
    if content.get("reason"):
        lines.append(Text(printable(content["reason"]), style=style_of(content)))
    lines.append(
        Text(
            f"late {seconds(content.get('lag_ms'))}  lag {number(content.get('lag_events'))} events"
            f"  out {number(content.get('rate'))}/s"
        )
    )
    lines.append(
        Text(
            f"running {number(content.get('in_flight'))}"
            f"  ready {number(content.get('ready'))}  parked {number(content.get('parked'))}"
            f"  dead letters {number(content.get('dead_letters'))}  gaps {number(content.get('gaps'))}"
        )
    )
    if series := [point["events"] for point in content.get("series", ()) if point["events"] is not None]:
        lines.append(Text(f"lag over time  {sparkline(series, width - 15)}"))
    if consumers := sorted(content["consumers"], key=lambda one: (not one["blocked"], one["credit_events"])):
        lines += [Text(""), Text(line_of(_CONSUMERS, [one.title for one in _CONSUMERS], width), style="bold")]
        lines += [
            Text(
                line_of(_CONSUMERS, [one.value(row) for one in _CONSUMERS], width),
                style="yellow" if row["blocked"] else "",
            )
            for row in consumers[:MAX_CONSUMERS]
        ]
        if len(consumers) > MAX_CONSUMERS:
            lines.append(Text(f"and {len(consumers) - MAX_CONSUMERS} more consumers", style="dim"))
    if content["blocked"]:
        lines += [
            Text(""),
            Text(f"{counted(content['blocked_total'], 'blocked stream')}", style="bold"),
            *(Text(_blocked(one), style="yellow") for one in content["blocked"]),
        ]
        if (left := content["blocked_total"] - len(content["blocked"])) > 0:
            lines.append(Text(f"and {left:,} more", style="dim"))
    return lines


_CONSUMERS: Sequence[Column] = (
    text_column("id", "CONSUMER", 16),
    text_column("silo", "SILO", 12),
    number_column("credit_events", "CREDIT", 7),
    number_column("in_flight_events", "HOLDS", 7),
    text_column("blocked", "BLOCKED", 30),
)


def _blocked(one: Mapping[str, Any]) -> str:
    stream = printable(f"{one['stream']['namespace']}/{one['stream']['key']}")
    attempts = f", attempt {one['attempts']}" if one["attempts"] else ""
    again = f", again in {seconds(one['next_in_ms'])}" if one.get("next_in_ms") is not None else ""
    return f"{stream}  {one['state']}{attempts}{again}: {printable(one['reason'])}"
