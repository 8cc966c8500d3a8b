"""Options that several commands share, and how they open what these name."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from ...streams import Start
from ...streams.errors import DataDirectoryError, HeadraceError, InvalidArgument, NotFound, error_of
from ..datadir import MARKER, check_provider_name
from ..provider import Provider
from ..wording import counted
from .output import note

if TYPE_CHECKING:
    from ...streams.client import Client
    from ...streams.client.connection import Connection

CONNECT_S = 5.0
"""How long a command tries to reach a silo."""
START_HELP = "earliest, latest, a token, or the time of storing, such as 2026-11-21T10:00 (in UTC, or with its zone)."


class Where(NamedTuple):
    """A provider on a data directory."""

    data: Path
    provider: str
    options: Mapping[str, Any] = {}
    """Of its adapter."""


class Server(NamedTuple):
    """A provider of a silo, and how to come to it: the keywords of `Client`."""

    address: str
    provider: str
    token: str | None
    tls: Mapping[str, Path] | None
    """The keywords of `Tls`; None: without."""
    insecure: bool


Place = Where | Server


class DataPath(click.Path):
    """A data directory. A URL is refused, without repeating it: it may hold a password."""

    def __init__(self, hint: str) -> None:
        super().__init__(path_type=Path)
        self._hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in str(value):
            raise click.UsageError(f"--data takes a directory, not a URL: {self._hint}", ctx)
        return super().convert(value, param, ctx)


DATA_PATH = DataPath("where the control data is in a database, ask a silo")


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data` and `--provider`, handed to the command as `where`."""

    @click.option(
        "--data", required=True, type=DATA_PATH, envvar="HEADRACE_DATA", show_envvar=True,
        metavar="DIR", help="Data directory.",
    )  # fmt: skip
    @click.option(
        "--provider", default="default", show_default=True, envvar="HEADRACE_PROVIDER", show_envvar=True,
        metavar="NAME", help="Provider in it.",
    )  # fmt: skip
    @functools.wraps(command)
    def with_where(*args: Any, data: Path, provider: str, **options: Any) -> Any:
        return command(*args, where=Where(data, provider), **options)

    return with_where


_TYPED = {
    "tls.ca": "--ca",
    "tls.certificate": "--certificate",
    "tls.key": "--key",
    "give tls=Tls(...), or insecure=True": "give --ca FILE or --tls, or --insecure",
    "leave tls out": "leave --tls and --ca out",
    "a client's certificate": "a client's certificate (--certificate and --key)",
    "TLS, or with": "TLS (--ca FILE or --tls), or with",
    "send the metadata `authorization: Bearer hr_...`, with a token": "give --token, or HEADRACE_TOKEN, a token",
}
"""What a client says, and what that is in the command line."""
_OF_THE_SERVER = ("token", "ca", "certificate", "key", "tls", "insecure")


def provider_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--provider", default="default", show_default=True, envvar="HEADRACE_PROVIDER", show_envvar=True,
        metavar="NAME", help="Provider in it.",
    )(command)  # fmt: skip


def _credential_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those of `_OF_THE_SERVER`, handed to the command as they are."""
    file = click.Path(path_type=Path, dir_okay=False)

    @click.option(
        "--token", envvar="HEADRACE_TOKEN", show_envvar=True, metavar="TOKEN",
        help="For the silo. Others see what is on the command line: better by the variable.",
    )  # fmt: skip
    @click.option(
        "--ca", type=file, envvar="HEADRACE_CA", show_envvar=True, metavar="FILE",
        help="Use TLS, and trust these certificates (PEM).",
    )  # fmt: skip
    @click.option("--certificate", type=file, metavar="FILE", help="This client's own certificate, with --key.")
    @click.option("--key", type=file, metavar="FILE", help="Its key.")
    @click.option("--tls", is_flag=True, help="Use TLS, and trust well-known authorities.")
    @click.option("--insecure", is_flag=True, help="Send the token without TLS to another machine.")
    @functools.wraps(command)
    def with_credentials(*args: Any, **options: Any) -> Any:
        return command(*args, **options)

    return with_credentials


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--server`, with what belongs to it, handed to the command as `server`."""

    @click.option(
        "--server", required=True, envvar="HEADRACE_SERVER", show_envvar=True, metavar="HOST:PORT",
        help="Any silo. Several with commas between: the next where one does not answer.",
    )  # fmt: skip
    @_credential_options
    @functools.wraps(command)
    def with_server(*args: Any, server: str, **options: Any) -> Any:
        rest = {name: value for name, value in options.items() if name not in _OF_THE_SERVER}
        return command(*args, server=_server(server, rest.get("provider", "default"), options), **rest)

    return with_server


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data` or `--server`, with what belongs to each, handed to the command as `place`."""

    @click.option(
        "--data", type=DATA_PATH, envvar="HEADRACE_DATA", show_envvar=True, metavar="DIR",
        help="Data directory.",
    )  # fmt: skip
    @click.option(
        "--server", envvar="HEADRACE_SERVER", show_envvar=True, metavar="HOST:PORT",
        help="Silo, instead of a data directory. Several with commas between: the next where one does not answer.",
    )  # fmt: skip
    @provider_option
    @_credential_options
    @functools.wraps(command)
    def with_place(*args: Any, data: Path | None, server: str | None, provider: str, **options: Any) -> Any:
        rest = {name: value for name, value in options.items() if name not in _OF_THE_SERVER}
        of_the_server = {name: options[name] for name in _OF_THE_SERVER}
        return command(*args, place=_place(data, server, provider, of_the_server), **rest)

    return with_place


def _place(data: Path | None, server: str | None, provider: str, options: Mapping[str, Any]) -> Place:
    """Exactly one of the two; one on the command line goes before one in a variable."""
    if data is not None and server is not None:
        data, server = (data if typed("data") else None), (server if typed("server") else None)
        if (data is None) == (server is None):
            raise click.UsageError("--data and --server exclude each other: name a data directory or a silo")
    if server is not None:
        return _server(server, provider, options)
    if data is None:
        raise click.UsageError("Missing option '--data' or '--server'.")
    if wrong := [f"--{name}" for name in _OF_THE_SERVER if options[name] and typed(name)]:
        raise click.UsageError(f"{wrong[0]} is for --server, not for --data")
    return Where(data, provider)


def _server(address: str, provider: str, options: Mapping[str, Any]) -> Server:
    files = {name: options[name] for name in ("ca", "certificate", "key") if options[name] is not None}
    tls = files if files or options["tls"] else None
    return Server(address, provider, options["token"], tls, options["insecure"])


def typed(name: str) -> bool:
    """Whether an option comes from the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def check_how(place: Place, how: Mapping[str, Any]) -> None:
    """Raises UsageError for options that make a provider, where a silo has it."""
    if isinstance(place, Server) and (given := [name for name, value in how.items() if value]):
        flag = "option" if given[0] == "options" else given[0]
        raise click.UsageError(f"--{flag} is for --data: a silo's providers are in its configuration")


_adapter_option = click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="Option of the adapter; may be repeated."
)


def adapter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--option`, put into the command's `place` or `where`: below what makes that."""

    @_adapter_option
    @functools.wraps(command)
    def with_options(*args: Any, options: Sequence[str], **given: Any) -> Any:
        name = "place" if "place" in given else "where"
        place: Place = given[name]
        if isinstance(place, Where):
            given[name] = place._replace(options=dict(map(_option, options)))
        check_how(place, {"options": options})
        return command(*args, **given)

    return with_options


def delays_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--delays", metavar="store|URL",
        help="Where delayed events wait that the adapter cannot delay: the control store, or redis://HOST:PORT.",
    )(command)  # fmt: skip


def creation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--adapter`, `--queues`, `--option` and `--delays`, handed to the command as `how`: the keywords of
    `Provider.open`."""

    @click.option("--adapter", metavar="NAME", help="Queue technology.  [default: the provider's, or log]")
    @click.option("--queues", type=click.IntRange(min=1), metavar="N", help="Its queues.  [default: as it has, or 8]")
    @_adapter_option
    @delays_option
    @functools.wraps(command)
    def with_how(*args: Any, options: Sequence[str], **given: Any) -> Any:
        how = {name: given.pop(name) for name in ("adapter", "queues", "delays")}
        return command(*args, how={**how, "options": dict(map(_option, options))}, **given)

    return with_how


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"--option {text}: write it as NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


@asynccontextmanager
async def opened(
    where: Where, how: Mapping[str, Any] | None = None, *, create: bool = False
) -> AsyncGenerator[Provider]:
    """The provider, for the length of an `async with`. It has to exist, unless `create`: then what is made is said.

    `how` are the keywords of `Provider.open`. Raises NotFound where it does not exist, DataDirectoryError where the
    directory is somebody else's.
    """
    check_provider_name(where.provider)
    if not create:
        check_exists(where)
    new = [what for what in (where.data / MARKER, _directory(where)) if not what.exists()]
    async with AsyncExitStack() as stack:
        how = {"options": where.options} | dict(how or {})
        try:
            provider = await stack.enter_async_context(Provider.open(where.data, name=where.provider, **how))
        except InvalidArgument as error:
            raise _with_way_out(error, how) from None
        if where.data / MARKER in new:
            note(f"created data directory {where.data}")
        if new:
            note(f"created provider {provider.name} with {counted(provider.queues, 'queue')}")
        yield provider


def _with_way_out(error: InvalidArgument, how: Mapping[str, Any]) -> InvalidArgument:
    """Where an adapter needs options and got none, the line says how they are given."""
    if how["options"] or not str(error).startswith("options of adapter"):
        return error
    silo = ", or ask a silo: --server" if "server" in click.get_current_context().params else ""
    return InvalidArgument(f"{error}; here by --option NAME=VALUE{silo}")


@asynccontextmanager
async def connected(server: Server) -> AsyncGenerator[Client]:
    """The provider of a silo, for the length of an `async with`. Raises Unavailable where nobody answers."""
    from ...streams.client import Client, Tls  # noqa: PLC0415 (it loads grpc)

    try:
        tls = None if server.tls is None else Tls(**server.tls)
        options: dict[str, Any] = {"token": server.token, "tls": tls, "insecure": server.insecure}
        client = Client(server.address, provider=server.provider, connect_timeout_s=CONNECT_S, **options)
        await client.__aenter__()
    except HeadraceError as error:
        raise _as_typed(error) from None
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def calling(server: Server) -> AsyncGenerator[Connection]:
    """Calls to a silo, for the length of an `async with`. Raises Unavailable where nobody answers."""
    from ...streams.client import Tls  # noqa: PLC0415 (it loads grpc)
    from ...streams.client.connection import Connection  # noqa: PLC0415

    try:
        tls = None if server.tls is None else Tls(**server.tls)
        connection = Connection(server.address, token=server.token, tls=tls, insecure=server.insecure)
    except HeadraceError as error:
        raise _as_typed(error) from None
    try:
        await connection.open(CONNECT_S)
        yield connection
    except HeadraceError as error:
        raise _as_typed(error) from None
    finally:
        await connection.aclose()


def _as_typed(error: HeadraceError) -> HeadraceError:
    """The same error, which names the options of the command line instead of those of Python."""
    text = str(error)
    for python, typed in _TYPED.items():
        text = text.replace(python, typed)
    return error_of(error.code, text) or error


def check_exists(where: Where) -> None:
    """Raises DataDirectoryError for what is no data directory, NotFound where it or the provider in it is missing."""
    if not (where.data / MARKER).exists():
        if where.data.exists() and not (where.data.is_dir() and not any(where.data.iterdir())):
            raise DataDirectoryError(
                f"{where.data} is no data directory: it is not empty and not made by headrace: name another"
            )
        raise NotFound(f"{where.data} is no data directory: check its name, or publish something to it first")
    if not _directory(where).exists():
        there = sorted(entry.name for entry in (where.data / "providers").glob("*")) or ["none"]
        raise NotFound(f"data directory {where.data} has no provider {where.provider!r}: there is {', '.join(there)}")


def _directory(where: Where) -> Path:
    return where.data / "providers" / where.provider


def parse_start(text: str) -> Start:
    """`Start.parse`, which wants a time with its zone; here one without is in UTC."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return Start.parse(text)
    if when.tzinfo is not None or text.isdecimal():  # 20261121 is a token
        return Start.parse(text)
    return Start.since(when.replace(tzinfo=UTC))
