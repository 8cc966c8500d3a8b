"""`headrace pipeline audit`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ....pipeline.jobs.findings import CLASSES, LIMIT, PROBLEMS, UNKNOWN, AuditResult
from ....streams.outcomes import CommandFailed
from ....streams.wording import counted
from ..help import SectionedCommand
from ..options import ProviderPlace, parse_start, place_options
from ..output import json_option, note, print_table
from .spark import options_to_read, report, spark_needed, spark_options, spark_session


@click.command("audit", cls=SectionedCommand)
@click.argument("subscriptions", nargs=-1, metavar="[SUBSCRIPTION]...")
@place_options
@click.option(
    "--delivered", type=click.Path(path_type=Path, exists=True), metavar="PATH",
    help="Records of the consumers: Parquet or JSON lines with queue, offset, index (and subscription).",
)  # fmt: skip
@click.option(
    "--archive", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Archive of headrace pipeline archive, for events that retention has removed.",
)  # fmt: skip
@click.option("--start", metavar="POSITION", help="First position: earliest, or a time.  [default: as subscribed]")
@click.option(
    "--limit", type=click.IntRange(min=0), default=LIMIT, show_default=True, help="Details of a subscription at most."
)
@spark_options
@json_option
def command(
    *, subscriptions: Sequence[str], place: ProviderPlace, start: str | None, master: str | None,
    spark_log: Path | None, as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Compare the published events with the deliveries, dead letters and gaps of each SUBSCRIPTION (default: all).

    Exit code 1 if an event is missing, or was delivered twice. Nothing is changed.
    """
    with spark_needed():
        from ....pipeline.jobs.audit import audit  # noqa: PLC0415 (not for --help)
    begin = None if start is None else parse_start(start)

    def progress(name: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            note(f"subscription {name!r}, {done + 1} of {total}")

    how |= options_to_read(place)
    with spark_session("headrace audit", master, spark_log) as spark:
        found = audit(spark, subscriptions, start=begin, progress=progress, **how)
    if as_json:
        report(found.document(), as_json, "")
    else:
        _print(found)
    if not found.ok:
        raise CommandFailed(*_problems(found))


def _print(found: AuditResult) -> None:
    shown = [kind for kind in (*CLASSES, UNKNOWN) if any(one.counts[kind] for one in found.subscriptions)]
    rows = [[one.name, one.published, *(one.counts[kind] for kind in shown)] for one in found.subscriptions]
    print_table(["subscription", "published", *shown], rows)
    details = [(one.name, finding) for one in found.subscriptions for finding in one.findings]
    details += [("", finding) for finding in found.findings]
    if details:
        columns = ["subscription", "what", "stream", "queue", "first", "last", "events", "reason"]
        print_table(columns, [_row(name, finding.document()) for name, finding in details], wrap=["reason"])


def _row(name: str, finding: Mapping[str, Any]) -> list[object]:
    values = [finding[column] for column in ("kind", "stream", "queue", "first", "last", "events", "reason")]
    return [name, *values]


def _problems(found: AuditResult) -> list[str]:
    lines = [
        f"subscription {one.name!r}: {counted(one.counts[kind], 'event')} {kind}"
        for one in found.subscriptions
        for kind in PROBLEMS
        if one.counts.get(kind)
    ]
    lines += [
        f"subscription {one.name!r}: {counted(one.lost_offsets, 'batch')} removed before they were done"
        for one in found.subscriptions
        if one.lost_offsets
    ]
    if found.published_twice:
        lines.append(f"{counted(found.published_twice, 'event')} published twice, by their ids")
    if found.holes:
        lines.append(f"the log has no batch at {counted(found.holes, 'offset')}")
    return lines
