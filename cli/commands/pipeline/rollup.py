"""`headrace pipeline rollup`."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from ....streams.wording import counted
from ..help import SectionedCommand
from ..options import ProviderPlace, place_options
from ..output import json_option, note
from ..progress import events_progress
from .spark import options_to_read, report, spark_needed, spark_options, spark_session

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


class DurationType(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A time such as 30s, 5m, 1h or 500ms."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)(ms|[smhd])", str(value), re.ASCII)
        if found is None:
            self.fail(f"{value!r} is not a time: write it as 30s, 5m, 1h or 1d", param, ctx)
        return timedelta(seconds=float(found[1]) * _UNITS_S[found[2]])


@click.command("rollup", cls=SectionedCommand)
@place_options
@click.option("--streams", default="*/*", show_default=True, metavar="PATTERN", help="Streams, as namespace/key.")
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write Parquet there.")
@click.option("--to-namespace", metavar="NS", help="Write events into streams of this namespace, as JSON.")
@click.option("--by", type=click.Choice(["stream", "namespace", "both"]), default="both", show_default=True)
@click.option("--window", type=DurationType(), default="1m", show_default=True, help="Length of a window.")
@click.option("--watermark", type=DurationType(), default="1m", show_default=True, help="How late an event may come.")
@click.option("--once", is_flag=True, help="End when all stored events are counted.")
@click.option(
    "--every", type=DurationType(), default="10s", show_default=True, help="Without --once: interval of reading."
)
@click.option(
    "--checkpoint", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Directory of its progress.  [default: _checkpoint in the directory of --to]",
)  # fmt: skip
@click.option("--start", metavar="POSITION", help="Start of a new rollup: earliest, latest or a time.")
@click.option("--max-events", type=click.IntRange(min=1), metavar="N", help="Limit of a micro-batch.")
@spark_options
@json_option
def command(
    *, place: ProviderPlace, streams: str, once: bool, every: timedelta, start: str | None, max_events: int | None,
    master: str | None, spark_log: Path | None, as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Count events by windows of their timestamps: rates, lags and latencies of streams and namespaces.

    A window is written once, when the watermark has passed its end: after a newer event was read. If it ends early, the
    same command goes on.
    """
    with spark_needed():
        from ....pipeline.jobs.rollup import follow, rollup  # noqa: PLC0415 (not for --help)
        from ....pipeline.options import selector_options  # noqa: PLC0415
    options = selector_options(streams) | options_to_read(place)
    more = {"start": start, "maxEventsPerTrigger": max_events}
    options |= {name: str(value) for name, value in more.items() if value is not None}
    with spark_session("headrace rollup", master, spark_log) as spark, events_progress("counting") as progress:
        query = rollup(spark, **how, every=None if once else every, **options)
        done = follow(query, progress)
    if done.late:
        note(f"{counted(done.late, 'row')} came too late for a window: give a longer --watermark to wait for such rows")
    report(done._asdict(), as_json, f"counted {counted(done.events, 'event')}")
