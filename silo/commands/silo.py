"""`headrace silo`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..config import SiloConfig, load_config, unknown_variables
from ..host import Silo
from ..tuning import tune_garbage_collection
from .running import heed_signals

log = logging.getLogger("headrace.silo")


@click.command("silo")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--data", metavar="DIR", help="Data directory, relative to the working directory.")
@click.option("--module", "modules", multiple=True, metavar="MODULE", help="Module with handlers; may be repeated.")
@click.option("--drain", "drain_s", type=float, metavar="SECONDS", help="How long handlers may take to end.")
@click.option("--host", help="Where /metrics and /healthz are served.")
@click.option("--port", type=int, help="Their port; 0 for a free one.  [default: none]")
@click.option("--log-level", help="debug, info, warning or error.")
def command(*, config: Path | None, modules: Sequence[str], host: str | None, port: int | None, **top: Any) -> None:
    """Run a silo: the handlers that your modules declare, until SIGTERM or SIGINT.

    CONFIG is a TOML file; data = in it is relative to its folder. HEADRACE_* variables go before it, as in
    HEADRACE_HTTP__PORT, and flags before both. When it is told to stop, it lets running handlers end, saves what is
    done, and exits with 0; told again, it stops at once.
    """
    flags = _given(**top, modules=list(modules) or None, http=_given(host=host, port=port) or None)
    loaded = load_config(config, os.environ, flags)
    logging.basicConfig(level=loaded.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for line in unknown_variables(os.environ):
        log.warning("%s", line)
    asyncio.run(_serve(loaded))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


async def _serve(config: SiloConfig) -> None:
    told = asyncio.Event()
    heed_signals(lambda _: told.set())
    async with Silo.opened(config):
        tune_garbage_collection()
        await told.wait()
