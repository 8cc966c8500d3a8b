"""`headrace backup`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..interrupts import interrupts_kill
from .check import amounts_as_text, progress
from .help import SectionedCommand
from .options import data_option
from .output import json_option, note, print_json
from .running import run

if TYPE_CHECKING:
    from ...silo.backup import CopiedDirectory


@click.command("backup", cls=SectionedCommand)
@click.argument("target", type=click.Path(path_type=Path), metavar="TARGET")
@data_option()
@json_option
def command(*, target: Path, data: Path, as_json: bool) -> None:
    """Copy a data directory to the new directory TARGET, and check the copy. Silos may run meanwhile.

    The copy has every event whose publish returned before the command began. TARGET appears at the end, and is whole;
    until then its name is TARGET.unfinished. It has the tokens and payloads of the data directory: keep it as safe.
    """
    with interrupts_kill():
        from ...silo.backup import back_up  # noqa: PLC0415 (not for --help)
    copied = run(back_up(data, target, progress()))
    report(copied, target, as_json=as_json)


def report(copied: CopiedDirectory, target: Path, *, as_json: bool) -> None:
    """Print the result of a backup, or of a restore."""
    for provider, adapter in copied.elsewhere.items():
        note(f"provider {provider!r}: its queues are in {adapter}, and not in {target}")
    if as_json:
        print_json({"directory": str(target), "checked": copied.checked._asdict(), "elsewhere": dict(copied.elsewhere)})
    else:
        note(f"{target} is whole: {amounts_as_text(copied.checked)}")
