"""`headrace dev`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ...silo.addresses import parse_address
from ...streams.errors import NotFound
from ..interrupts import interrupts_kill
from .help import SectionedCommand

CONFIG = Path("silo.toml")
DATA = Path(".headrace")


@click.command("dev", cls=SectionedCommand)
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path, file_okay=False, exists=True), default=".")
@click.option(
    "--listen", metavar="HOST:PORT", default="127.0.0.1:9465", show_default=True, help="Address of gRPC, for clients."
)
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="Port of the dashboard.")
def command(*, folder: Path, listen: str, port: int) -> int:
    """Run the handlers of the project in DIR, by default the working directory, while you change them.

    Reads modules and providers from silo.toml in DIR, which `headrace init` creates. The silo keeps its events in
    .headrace in DIR, and serves gRPC and the dashboard on this machine only, without TLS and tokens.

    When a Python file or silo.toml below DIR changes, the silo starts again, and goes on after the events that are
    done. If a file has an error, it is shown, and the silo waits for the next change. If the error is outside of the
    files, such as missing tables, the silo also tries again by itself. Ctrl-C ends it.
    """
    host, grpc_port = parse_address(listen)
    if not (folder / CONFIG).is_file():
        raise NotFound(f"{str(folder)!r} has no {CONFIG}: create a project with `headrace init`, or name its directory")
    os.chdir(folder)
    with interrupts_kill():
        from ..development import run_and_reload  # noqa: PLC0415 (not for --help)
    return run_and_reload(CONFIG, DATA, host, grpc_port, port)
