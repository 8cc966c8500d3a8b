"""`headrace pipeline states`."""

from __future__ import annotations

from pathlib import Path

import click

from ....streams.wording import counted
from ..help import SectionedCommand
from ..output import json_option, note, print_json
from .spark import spark_needed


@click.command("states", cls=SectionedCommand)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--database", required=True, metavar="URL", help="postgresql://USER:PASSWORD@HOST/DATABASE or sqlite:///FILE."
)
@click.option("--subscription", metavar="NAME", help="Only the states of this subscription.")
@click.option("--origin", help="Only the states of this provider.")
@json_option
def command(*, file: Path, database: str, subscription: str | None, origin: str | None, as_json: bool) -> None:
    """Write the states that handlers keep in a database into the Parquet file FILE, as they are at one moment.

    This needs no Java: it does not start Spark.
    """
    with spark_needed():
        from ....pipeline.jobs.states import states  # noqa: PLC0415 (not for --help)
    written = states(database, file, subscription=subscription, origin=origin)
    if as_json:
        print_json({"file": str(file), "states": written})
    else:
        note(f"{file}: {counted(written, 'state')}")
