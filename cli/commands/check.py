"""`headrace check`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...streams.outcomes import CommandFailed
from ...streams.wording import counted
from ..interrupts import interrupts_kill
from .help import SectionedCommand
from .options import data_options
from .output import json_option, note, print_json
from .running import run

if TYPE_CHECKING:
    from ...silo.checking import CheckedAmounts

_EVERY_S = 2.0


@click.command("check", cls=SectionedCommand)
@data_options
@json_option
def command(*, data: Path, store: str | None, as_json: bool) -> None:
    """Read all of a data directory, and report its damaged, missing and inconsistent parts.

    Nothing is written to the directory, and silos may run on it. Prints a line for each fault, with what to do. The
    exit code is 0 if there is none, else 1.
    """
    with interrupts_kill():
        from ...silo.checking import DirectoryCheck  # noqa: PLC0415 (not for --help)
    check = DirectoryCheck(data, store, progress())
    run(check.run())
    found, checked = check.findings, check.checked
    if as_json:
        print_json(
            {
                "sound": not found,
                "findings": [finding._asdict() for finding in found],
                "checked": checked._asdict(),
                "skipped": check.skipped,
            }
        )
    else:
        for finding in found:
            click.echo(str(finding))
    for skipped in check.skipped:
        note(f"not checked: {skipped}")
    note(f"checked {amounts_as_text(checked)}: {counted(len(found), 'fault') if found else 'sound'}")
    if found:
        raise CommandFailed


def progress() -> Callable[[CheckedAmounts], None]:
    """Return a function that notes the progress of the check on stderr every few seconds."""
    last = time.monotonic()

    def report(checked: CheckedAmounts) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY_S:
            last = time.monotonic()
            note(f"checked {amounts_as_text(checked)} so far")

    return report


def amounts_as_text(checked: CheckedAmounts) -> str:
    """Return the extent of a check as text."""
    read = f"{checked.nbytes / 1e6:,.1f} MB"
    return f"{counted(checked.providers, 'provider')}, {counted(checked.queues, 'queue')}, {read}"
