"""`headrace doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ...streams.errors import HeadraceError
from ...streams.outcomes import CommandFailed
from ...streams.wording import counted, printable
from ..interrupts import interrupts_kill
from .help import SectionedCommand
from .options import DataPlace, ProviderPlace, SiloPlace, optional_place_options
from .output import json_option, note, print_json
from .running import run

if TYPE_CHECKING:
    from ..diagnosis import Finding

COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command("doctor", cls=SectionedCommand)
@optional_place_options
@json_option
def command(*, place: ProviderPlace | None, as_json: bool) -> None:
    """Check that headrace can run here: Python, packages, limits and clock.

    Without --data and --server, it also checks the ports of `headrace dev`. With --data it checks the disk and the data
    directory; with --server, that the silos answer. Nothing is written.
    Each line is ok, warn or bad, with what to do. The exit code is 1 if a check is bad.
    """
    with interrupts_kill():
        from ..diagnosis import data_findings, local_findings, port_findings  # noqa: PLC0415 (not for --help)
    found = local_findings()
    if isinstance(place, DataPlace):
        found += data_findings(place.data)
    elif place is not None:
        found += run(_of_silos(place))
    else:
        found += port_findings()
    if as_json:
        print_json({"ok": not any(one.verdict == "bad" for one in found), "checks": [one._asdict() for one in found]})
    else:
        for one in found:
            _print(one)
    if bad := sum(one.verdict == "bad" for one in found):
        raise CommandFailed(f"{counted(bad, 'check')} failed")
    if not as_json:
        warned = sum(one.verdict == "warn" for one in found)
        note(f"{counted(len(found), 'check')}, {counted(warned, 'warning')}" if warned else "all is well")


def _print(finding: Finding) -> None:
    verdict = click.style(f"{finding.verdict:4}", fg=COLOURS[finding.verdict], bold=True)
    click.echo(f"{verdict}  {finding.check}: {printable(finding.text)}")
    if finding.remedy and finding.verdict != "ok":
        click.echo(f"      do: {printable(finding.remedy)}")


async def _of_silos(server: SiloPlace) -> list[Finding]:
    """Check that the silos answer, and that their version is that of this program."""
    from importlib.metadata import version  # noqa: PLC0415 (not for --help)

    from ..diagnosis import Finding  # noqa: PLC0415
    from .cluster import described  # noqa: PLC0415

    try:
        cluster = await described(server)
    except HeadraceError as error:
        return [Finding("server", "bad", str(error), "start the silo, or correct its address, TLS or token")]
    found = [Finding("server", "ok", f"{server.address} answers for {counted(len(cluster.silos), 'silo')}")]
    for silo in cluster.silos:
        name = f"silo {silo.name or silo.address}"
        if silo.state not in ("running", "draining", "drained"):
            found.append(Finding(name, "bad", silo.state, "look at its log, and start it again"))
        elif silo.version != version("headrace"):
            text = f"version {silo.version}, and this program is {version('headrace')}"
            found.append(Finding(name, "warn", text, "install the same version"))
        else:
            found.append(Finding(name, "ok", f"{silo.state}, version {silo.version}"))
    return found
