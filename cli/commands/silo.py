"""`headrace silo`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...silo.addresses import parse_address
from ..interrupts import interrupts_kill
from .help import SectionedCommand, SectionedOption

_grpc_option = functools.partial(click.option, cls=SectionedOption, section="gRPC")
_http_option = functools.partial(click.option, cls=SectionedOption, section="HTTP")


def grpc_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of the section `[grpc]`, passed to the command as the table `grpc`."""

    @_grpc_option(
        "--listen", metavar="HOST:PORT", help="Address of the gRPC server; port 0: a free one. [default: no gRPC]"
    )
    @_grpc_option("--insecure", is_flag=True, default=None, help="Serve other machines without TLS.")
    @_grpc_option("--certificate", metavar="FILE", help="Certificate of the silo for TLS, PEM.")
    @_grpc_option("--key", metavar="FILE", help="Key of the certificate, PEM.")
    @_grpc_option("--client-ca", metavar="FILE", help="Clients need a certificate signed by one of these.")
    @_grpc_option(
        "--auth", metavar="HOW", help="tokens: clients need tokens; or none.  [default: see docs/security.md]"
    )
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


@click.command("silo", cls=SectionedCommand)
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--data", metavar="DIR", help="Data directory, relative to the working directory.")
@click.option("--module", "modules", multiple=True, metavar="MODULE", help="Module with handlers; may be repeated.")
@click.option("--drain", "drain_s", type=float, metavar="SECONDS", help="How long handlers may take to end.")
@click.option("--workers", type=int, metavar="N", help="Run N silos as a cluster, on consecutive ports.")
@_http_option("--host", help="Host of /metrics, /healthz and the dashboard.")
@_http_option("--port", type=int, help="Port of /metrics, /healthz and the dashboard; 0: a free one.  [default: none]")
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
    """Run a silo, with the handlers that your modules declare, and gRPC with --listen, until SIGTERM or SIGINT.

    CONFIG is a TOML file; the option `data` in it is relative to the file's folder. HEADRACE_* variables, such as
    HEADRACE_HTTP__PORT, override it. Flags override both. At the first signal the silo waits for running handlers,
    saves their progress, and exits with 0. A second signal stops it at once.

    With --workers, N processes serve the data directory. Each has its own name and its own ports: the given ones, and
    those that follow. A process that dies is started again.
    """
    flags = _given(**top, modules=list(modules) or None, http=_given(host=host, port=port) or None, grpc=grpc or None)
    with interrupts_kill():
        from ..serving import run_silo  # noqa: PLC0415 (not for --help)
    return run_silo(config, flags)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
