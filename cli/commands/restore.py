"""`headrace restore`."""

from __future__ import annotations

from pathlib import Path

import click

from ..interrupts import interrupts_kill
from .backup import report
from .check import progress
from .help import SectionedCommand
from .options import data_option
from .output import json_option
from .running import run


@click.command("restore", cls=SectionedCommand)
@click.argument("backup", type=click.Path(path_type=Path), metavar="BACKUP")
@data_option("Data directory to make. It must be missing or empty.")
@json_option
def command(*, backup: Path, data: Path, as_json: bool) -> None:
    """Make a data directory from BACKUP, and check it. BACKUP is not changed.

    Events that were published after the backup are lost, and each subscription gets a gap record. Their offsets are not
    used again.
    """
    with interrupts_kill():
        from ...silo.backup import restore  # noqa: PLC0415 (not for --help)
    report(run(restore(backup, data, progress())), data, as_json=as_json)
