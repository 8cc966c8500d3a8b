"""`headrace pipeline audit`: what was published, against what each subscription was given, gave up on or skipped.

Published is what the log has, and below that what an archive has. What a subscription is done with is in its
checkpoints, dead letters and gap records, read after the ends of the queues are fixed, and in this order: so whatever a
checkpoint says is done is known to be given up on where it was. With what its consumers wrote themselves, each event is
compared; without, what a checkpoint says is done counts as delivered. Spark joins all of that by queue, offset and
index; this process sees counts by stream only.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...silo.commands.options import Place as CommandPlace
from ...silo.commands.options import parse_start, place_options
from ...silo.commands.output import json_option, note, print_table
from ...silo.outcome import Failed
from ...silo.wording import counted
from ...streams.errors import InvalidArgument
from ...streams.subscriptions import Start
from ..place import OPTIONS as PLACE_OPTIONS
from .comparing import Comparison, read_deliveries
from .findings import CLASSES, PROBLEMS, UNKNOWN, Audited, SubscriptionAudit
from .published import Published, content
from .running import options_to_read, report, spark_options, spark_session
from .standing import read_standings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LIMIT = 100
Progress = Callable[[str, int, int], object]


def audit(
    spark: SparkSession,
    subscriptions: Sequence[str] = (),
    *,
    delivered: str | Path | DataFrame | None = None,
    archive: str | Path | None = None,
    start: Start | None = None,
    limit: int = LIMIT,
    progress: Progress = lambda _name, _done, _total: None,
    **options: object,
) -> Audited:
    """Compare what was published with what became of it, for these subscriptions, or all.

    `delivered` is what consumers wrote themselves, for each delivery a row with `queue`, `offset` and `index`, and
    `subscription` where it is of several: a DataFrame, or a path of Parquet or (`.json`, `.jsonl`) JSON lines.
    `archive` is that of the job `archive`, for what retention has removed from the log. `start` is where to begin, for
    all: by default where each subscription was to start; where that is `latest`, at the first event in `delivered`.

    Details are limited to `limit` for each subscription, counts are not. `options` say where the provider is. Nothing
    is changed. `progress` is told of each subscription, and how many are done, before it is looked at. Raises NotFound
    for a subscription that is not there, InvalidArgument for a `delivered` without these columns.
    """
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    known = {name.lower() for name in PLACE_OPTIONS}
    if wrong := next((name for name in texts if name.lower() not in known), None):
        raise InvalidArgument(f"option {wrong!r} is not for an audit: it takes those that say where the provider is")
    published = Published.of(spark, texts, archive)
    standings = asyncio.run(read_standings(published.place, subscriptions))
    ledger = None if delivered is None else read_deliveries(spark, delivered, [standing.name for standing in standings])
    found: list[SubscriptionAudit] = []
    for standing in standings:
        progress(standing.name, len(found), len(standings))
        found.append(Comparison(published, standing, start, limit).run(ledger))
    of_all = content(published, [standing.definition.selector for standing in standings], limit)
    return Audited(*of_all, found)


# ---- the command -----------------------------------------------------------------------------------------------------


@click.command("audit")
@click.argument("subscriptions", nargs=-1, metavar="[SUBSCRIPTION]...")
@place_options
@click.option(
    "--delivered", type=click.Path(path_type=Path, exists=True), metavar="PATH",
    help="What consumers wrote themselves: Parquet or JSON lines with queue, offset, index (and subscription).",
)  # fmt: skip
@click.option(
    "--archive", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Where headrace pipeline archive keeps what retention has removed.",
)  # fmt: skip
@click.option("--start", metavar="POSITION", help="Where to begin: earliest, or a time.  [default: as subscribed]")
@click.option(
    "--limit", type=click.IntRange(min=0), default=LIMIT, show_default=True, help="Details of a subscription at most."
)
@spark_options
@json_option
def command(
    *, subscriptions: Sequence[str], place: CommandPlace, start: str | None, master: str | None, spark_log: Path | None,
    as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Compare what was published with what each SUBSCRIPTION (default: all) was given, gave up on or skipped.

    Exit code 1 where an event is missing, or there twice. Nothing is changed.
    """
    begin = None if start is None else parse_start(start)

    def progress(name: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            note(f"subscription {name}, {done + 1} of {total}")

    how |= options_to_read(place)
    with spark_session("headrace audit", master, spark_log) as spark:
        found = audit(spark, subscriptions, start=begin, progress=progress, **how)
    if as_json:
        report(found.document(), as_json, "")
    else:
        _print(found)
    if not found.ok:
        raise Failed(*_problems(found))


def _print(found: Audited) -> None:
    shown = [kind for kind in (*CLASSES, UNKNOWN) if any(one.counts[kind] for one in found.subscriptions)]
    rows = [[one.name, one.published, *(one.counts[kind] for kind in shown)] for one in found.subscriptions]
    print_table(["subscription", "published", *shown], rows)
    details = [(one.name, finding) for one in found.subscriptions for finding in one.findings]
    details += [("", finding) for finding in found.findings]
    if details:
        columns = ["subscription", "what", "stream", "queue", "first", "last", "events", "reason"]
        print_table(columns, [_row(name, finding.document()) for name, finding in details])


def _row(name: str, finding: Mapping[str, Any]) -> list[object]:
    values = [finding[column] for column in ("kind", "stream", "queue", "first", "last", "events", "reason")]
    return [name, *("?" if value is None else value for value in values)]


def _problems(found: Audited) -> list[str]:
    lines = [
        f"subscription {one.name}: {counted(one.counts[kind], 'event')} {kind}"
        for one in found.subscriptions
        for kind in PROBLEMS
        if one.counts.get(kind)
    ]
    lines += [
        f"subscription {one.name}: {counted(one.lost_offsets, 'batch')} removed before they were done"
        for one in found.subscriptions
        if one.lost_offsets
    ]
    if found.published_twice:
        lines.append(f"{counted(found.published_twice, 'event')} published twice, by their ids")
    if found.holes:
        lines.append(f"the log has no batch at {counted(found.holes, 'offset')}")
    return lines
