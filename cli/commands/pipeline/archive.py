"""`headrace pipeline archive`."""

from __future__ import annotations

from pathlib import Path

import click

from ....streams.wording import counted
from ..help import SectionedCommand
from ..options import ProviderPlace, place_options
from ..output import json_option, note
from ..progress import events_progress
from .spark import options_to_read, report, spark_needed, spark_options, spark_session


@click.command("archive", cls=SectionedCommand)
@click.argument("into", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@place_options
@click.option("--streams", default="*/*", show_default=True, metavar="PATTERN", help="Streams, as namespace/key.")
@click.option("--compact/--no-compact", default=True, help="Compact small files.  [default: compact]")
@click.option(
    "--fail-on-data-loss/--no-fail-on-data-loss", default=True,
    help="Fail if retention has removed unarchived events; else go on, and note the gap.  [default: fail]",
)  # fmt: skip
@spark_options
@json_option
def command(
    *, into: Path, place: ProviderPlace, streams: str, compact: bool, fail_on_data_loss: bool,
    master: str | None, spark_log: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Add the new events to the Parquet files under DIR, each event exactly once.

    If it ends early, the same command goes on. A second run at the same time on one DIR is refused.
    """
    with spark_needed():
        from ....pipeline.jobs.archive import archive  # noqa: PLC0415 (not for --help)
        from ....pipeline.options import selector_options  # noqa: PLC0415
    options = selector_options(streams) | options_to_read(place)
    with spark_session("headrace archive", master, spark_log) as spark, events_progress("archiving") as progress:
        done = archive(spark, into, compact=compact, fail_on_data_loss=fail_on_data_loss, progress=progress, **options)
    for gap in done.gaps:
        note(f"queue {gap.queue}: offsets {gap.start} to {gap.end - 1} were gone, and are not in the archive")
    document = {"archive": str(into), **done._asdict()}
    added = f"archived {counted(done.events, 'event')} in {counted(done.files, 'file')}, {done.total:,} in all"
    report(document, as_json, added + (f"; {done.compacted:,} small files compacted" if done.compacted else ""))
