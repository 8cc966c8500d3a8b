"""`headrace silo`."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..config import SiloConfig, load_config, parse_address, unknown_variables
from ..host import Silo
from ..outcome import DONE
from ..supervisor import Supervisor, configurations
from ..tuning import tune_interpreter
from .running import heed_signals

log = logging.getLogger("headrace.silo")

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def grpc_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is set in the section `[grpc]`, handed to the command as the table `grpc` of the options that were given."""

    @click.option(
        "--listen", metavar="HOST:PORT", help="Where gRPC is served; port 0 for a free one. [default: nowhere]"
    )
    @click.option("--insecure", is_flag=True, default=None, help="Without TLS, though others may reach it.")
    @click.option("--certificate", metavar="FILE", help="The silo's certificate, PEM, for TLS.")
    @click.option("--key", metavar="FILE", help="Its key, PEM.")
    @click.option("--client-ca", metavar="FILE", help="Clients need a certificate that one of these signed.")
    @click.option("--auth", metavar="HOW", help="Clients need tokens, or none.  [default: see docs/security.md]")
    @functools.wraps(command)
    def with_grpc(
        *args: Any,
        listen: str | None,
        insecure: bool | None,
        certificate: str | None,
        key: str | None,
        client_ca: str | None,
        auth: str | None,
        **rest: Any,
    ) -> Any:
        host, port = (None, None) if listen is None else parse_address(listen)
        tls = _given(insecure=insecure, certificate=certificate, key=key, client_ca=client_ca, auth=auth)
        return command(*args, grpc=_given(host=host, port=port) | tls, **rest)

    return with_grpc


@click.command("silo")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--data", metavar="DIR", help="Data directory, relative to the working directory.")
@click.option("--module", "modules", multiple=True, metavar="MODULE", help="Module with handlers; may be repeated.")
@click.option("--drain", "drain_s", type=float, metavar="SECONDS", help="How long handlers may take to end.")
@click.option("--workers", type=int, metavar="N", help="So many silos, with the ports from these on, as a cluster.")
@click.option("--host", help="Where /metrics and /healthz are served.")
@click.option("--port", type=int, help="Their port; 0 for a free one.  [default: none]")
@grpc_options
@click.option("--log-level", help="debug, info, warning or error.")
def command(
    *,
    config: Path | None,
    modules: Sequence[str],
    host: str | None,
    port: int | None,
    grpc: Mapping[str, Any],
    **top: Any,
) -> int:
    """Run a silo: the handlers that your modules declare, and gRPC with --listen, until SIGTERM or SIGINT.

    CONFIG is a TOML file; data = in it is relative to its folder. HEADRACE_* variables go before it, as in
    HEADRACE_HTTP__PORT, and flags before both. When it is told to stop, it lets running handlers end, saves what is
    done, and exits with 0; told again, it stops at once.

    With --workers, N processes serve the data directory, each with a name and ports of its own, consecutive from those
    given. One that dies is started again.
    """
    flags = _given(**top, modules=list(modules) or None, http=_given(host=host, port=port) or None, grpc=grpc or None)
    loaded = load_config(config, os.environ, flags)
    logging.basicConfig(level=loaded.log_level.upper(), format=FORMAT)
    for line in unknown_variables(os.environ):
        log.warning("%s", line)
    if loaded.workers is None:
        asyncio.run(serve(loaded, None))
        return DONE
    return asyncio.run(_supervise(configurations(loaded, loaded.workers)))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


async def serve(
    config: SiloConfig, told: asyncio.Event | None, ready: Callable[[Silo], object] = lambda _: None
) -> None:
    """Until a signal, or until it is `told`."""
    told = told or asyncio.Event()
    heed_signals(lambda _: told.set())
    async with Silo.opened(config) as silo:
        tune_interpreter()
        ready(silo)
        await _first(told.wait(), silo.until_superseded())


async def _supervise(configs: Sequence[SiloConfig]) -> int:
    supervisor = Supervisor(configs)
    heed_signals(lambda _: supervisor.stop(), supervisor.kill)
    return await supervisor.run()


async def _first(*ends: Coroutine[Any, Any, object]) -> None:
    """Return or raise as the first one does."""
    tasks = [asyncio.create_task(end, name="headrace silo end") for end in ends]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
