"""Options that several commands share, and functions that open the provider or the silo named by them."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
import msgspec

from ...silo.addresses import check_store
from ...store.datadir import MARKER, check_marker_kept
from ...streams.errors import DataDirectoryError, HeadraceError, InvalidArgument, NotFound
from ...streams.subscriptions import Start, check_provider_name
from ...streams.wording import counted
from .help import SectionedOption
from .output import note

if TYPE_CHECKING:  # they take longer to import than a command takes to show its help
    from ...client.client import Client
    from ...client.connection import GrpcTransport
    from ...silo.provider import Provider

CONNECT_S = 5.0
"""How long a command tries to reach a silo, in seconds."""
START_HELP = "earliest, latest, a token, or the time of storage, such as 2026-11-21T10:00 (UTC, or with a zone)."


class DataPlace(NamedTuple):
    """A provider in a data directory."""

    data: Path
    provider: str
    options: Mapping[str, Any] = {}
    """Options of its adapter."""


class SiloPlace(NamedTuple):
    """A provider of a silo, with the keywords of `Client` to connect to it."""

    address: str
    provider: str
    token: str | None
    tls: Mapping[str, Path] | None
    """Keywords of `Tls`. None: without TLS."""
    insecure: bool


ProviderPlace = DataPlace | SiloPlace

_place_option = functools.partial(click.option, cls=SectionedOption, section="Data directory or silo")
_connection_option = functools.partial(click.option, cls=SectionedOption, section="Connection to the silo")
_queue_option = functools.partial(click.option, cls=SectionedOption, section="Queues of the provider, with --data")


class NumberRange(click.FloatRange):
    """A number in a range. `nan` is refused: click accepts it in each range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class DataPath(click.Path):
    """A data directory. A URL is refused, and not repeated in the message: it may contain a password."""

    def __init__(self, hint: str) -> None:
        super().__init__(path_type=Path)
        self._hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in str(value):
            raise click.UsageError(f"--data takes a directory, not a URL: {self._hint}", ctx)
        return super().convert(value, param, ctx)


def data_option(
    text: str = "Data directory.",
    *,
    required: bool = True,
    hint: str = "if the control data is in a database, ask a silo",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--data`, passed to the command as `data`. `text` is its help; `hint` tells what to do instead of a URL."""
    return _place_option(
        "--data", required=required, type=DataPath(hint), envvar="HEADRACE_DATA", show_envvar=True, metavar="DIR",
        help=text,
    )  # fmt: skip


def store_option(text: str, *, required: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--store`, passed to the command as `store`. `text` begins its help."""
    return _place_option(
        "--store", required=required, envvar="HEADRACE_CLUSTER__STORE", show_envvar=True, metavar="URL",
        help=f"{text} If it has a password, use the variable.",
    )  # fmt: skip


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data` and `--store`, passed to the command as `data` and `store`."""

    @data_option()
    @store_option("The silos' cluster.store, if they have one.")
    @functools.wraps(command)
    def with_data(*args: Any, store: str | None, **options: Any) -> Any:
        if store is not None:
            check_store(store, "--store")
        return command(*args, store=store, **options)

    return with_data


def data_place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data` and `--provider`, passed to the command as `data_place`."""

    @data_option()
    @provider_option
    @functools.wraps(command)
    def with_data_place(*args: Any, data: Path, provider: str, **options: Any) -> Any:
        return command(*args, data_place=DataPlace(data, provider), **options)

    return with_data_place


_FLAGS = {
    "address": "--server",
    "token": "--token or HEADRACE_TOKEN",
    "tls": "--ca FILE or --tls",
    "tls.ca": "--ca",
    "tls.certificate": "--certificate",
    "tls.key": "--key",
    "insecure": "--insecure",
    "options": "--option NAME=VALUE",
}
"""Options of the command line, by their names in Python."""
_CREDENTIALS = ("token", "ca", "certificate", "key", "tls", "insecure")


def provider_option(command: Callable[..., Any], *, shown_default: str | Literal[True] = True) -> Callable[..., Any]:
    """`--provider`. `shown_default` is the help's text of the default, if it is not that of the option."""
    return _place_option(
        "--provider", default="default", show_default=shown_default, envvar="HEADRACE_PROVIDER", show_envvar=True,
        metavar="NAME", help="Provider of the data directory or silo.",
    )(command)  # fmt: skip


def _credential_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `_CREDENTIALS`, passed to the command as they are."""
    file = click.Path(path_type=Path, dir_okay=False)

    @_connection_option(
        "--token", envvar="HEADRACE_TOKEN", show_envvar=True, metavar="TOKEN",
        help="Token for the silo. Better use the variable: other users see the command line.",
    )  # fmt: skip
    @_connection_option(
        "--ca", type=file, envvar="HEADRACE_CA", show_envvar=True, metavar="FILE",
        help="Use TLS, and trust these certificates (PEM).",
    )  # fmt: skip
    @_connection_option("--certificate", type=file, metavar="FILE", help="This client's own certificate, with --key.")
    @_connection_option("--key", type=file, metavar="FILE", help="Key of the certificate.")
    @_connection_option("--tls", is_flag=True, help="Use TLS, and trust well-known authorities.")
    @_connection_option("--insecure", is_flag=True, help="Send the token without TLS to another machine.")
    @functools.wraps(command)
    def with_credentials(*args: Any, **options: Any) -> Any:
        return command(*args, **options)

    return with_credentials


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--server` and the options of the connection, passed to the command as `server`."""

    @_place_option(
        "--server", required=True, envvar="HEADRACE_SERVER", show_envvar=True, metavar="HOST:PORT",
        help="Any silo. Several with commas between: if one does not answer, the next is tried.",
    )  # fmt: skip
    @_credential_options
    @functools.wraps(command)
    def with_server(*args: Any, server: str, **options: Any) -> Any:
        rest = {name: value for name, value in options.items() if name not in _CREDENTIALS}
        return command(*args, server=_server(server, rest.get("provider", "default"), options), **rest)

    return with_server


def place_options(command: Callable[..., Any], *, shown_default: str | Literal[True] = True) -> Callable[..., Any]:
    """`--data` or `--server`, with the options of each, passed to the command as `place`. `shown_default`: as in
    `provider_option`."""

    @functools.partial(optional_place_options, shown_default=shown_default)
    @functools.wraps(command)
    def with_place(*args: Any, place: ProviderPlace | None, **options: Any) -> Any:
        if place is None:
            raise click.UsageError("Missing option '--data' or '--server'.")
        return command(*args, place=place, **options)

    return with_place


def optional_place_options(
    command: Callable[..., Any], *, shown_default: str | Literal[True] = True
) -> Callable[..., Any]:
    """The same, where `place` is None if neither is given."""

    @data_option(required=False)
    @_place_option(
        "--server", envvar="HEADRACE_SERVER", show_envvar=True, metavar="HOST:PORT",
        help="Silo, instead of a data directory. Several with commas: if one does not answer, the next is tried.",
    )  # fmt: skip
    @functools.partial(provider_option, shown_default=shown_default)
    @_credential_options
    @functools.wraps(command)
    def with_place(*args: Any, data: Path | None, server: str | None, provider: str, **options: Any) -> Any:
        rest = {name: value for name, value in options.items() if name not in _CREDENTIALS}
        credentials = {name: options[name] for name in _CREDENTIALS}
        return command(*args, place=_place(data, server, provider, credentials), **rest)

    return with_place


def _place(data: Path | None, server: str | None, provider: str, options: Mapping[str, Any]) -> ProviderPlace | None:
    """Accept at most one of the two. An option on the command line overrides a variable."""
    if data is not None and server is not None:
        data, server = (data if typed("data") else None), (server if typed("server") else None)
        if (data is None) == (server is None):
            raise click.UsageError("--data and --server exclude each other: name a data directory or a silo")
    if server is not None:
        return _server(server, provider, options)
    if data is None:
        return None
    if wrong := [f"--{name}" for name in _CREDENTIALS if options[name] and typed(name)]:
        raise click.UsageError(f"{wrong[0]} is for --server, not for --data")
    return DataPlace(data, provider)


def _server(address: str, provider: str, options: Mapping[str, Any]) -> SiloPlace:
    files = {name: options[name] for name in ("ca", "certificate", "key") if options[name] is not None}
    tls = files if files or options["tls"] else None
    return SiloPlace(address, provider, options["token"], tls, options["insecure"])


def typed(name: str) -> bool:
    """Whether an option comes from the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def given(name: str) -> bool:
    """Whether an option comes from the command line, or from its variable."""
    return click.get_current_context().get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def check_how(place: ProviderPlace, how: Mapping[str, Any]) -> None:
    """Raises UsageError if options for a new provider are given with a silo."""
    if isinstance(place, SiloPlace) and (given := [name for name, value in how.items() if value]):
        flag = "option" if given[0] == "options" else given[0]
        raise click.UsageError(f"--{flag} is for --data: a silo's providers are in its configuration")


_adapter_option = _queue_option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="Option of the adapter; may be repeated."
)


def adapter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--option`, put into the command's `place` or `data_place`. Apply it below the decorator that passes these."""

    @_adapter_option
    @functools.wraps(command)
    def with_options(*args: Any, options: Sequence[str], **given: Any) -> Any:
        name = "place" if "place" in given else "data_place"
        place: ProviderPlace = given[name]
        if isinstance(place, DataPlace):
            given[name] = place._replace(options=dict(map(_option, options)))
        check_how(place, {"options": options})
        return command(*args, **given)

    return with_options


def creation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--adapter`, `--queues`, `--option` and `--delays`, passed to the command as `how`: the keywords of
    `Provider.open`."""

    @_queue_option("--adapter", metavar="NAME", help="Queue technology.  [default: the provider's, or log]")
    @_queue_option(
        "--queues", type=click.IntRange(min=1), metavar="N", help="Number of queues.  [default: the provider's, or 8]"
    )
    @_adapter_option
    @_queue_option(
        "--delays", metavar="store", help="Keep delayed events in the control store; for other adapters than redis."
    )
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
    except RecursionError:
        raise InvalidArgument(f"--option {name}: the JSON is nested too deeply") from None


@asynccontextmanager
async def opened(
    data_place: DataPlace, how: Mapping[str, Any] | None = None, *, create: bool = False
) -> AsyncGenerator[Provider]:
    """Open the provider for an `async with` block. It has to exist, unless `create`: then a note says if it is new.

    `how` are the keywords of `Provider.open`. Raises NotFound if the provider does not exist, DataDirectoryError if the
    directory is not headrace's.
    """
    check_provider_name(data_place.provider)
    if not create:
        check_data_directory(data_place)
    from ...silo.options import ProviderOptions  # noqa: PLC0415 (after the checks that need no more than --help)
    from ...silo.provider import Provider  # noqa: PLC0415

    new = [path for path in (data_place.data / MARKER, _directory(data_place)) if not path.exists()]
    async with AsyncExitStack() as stack:
        keywords: dict[str, Any] = {"options": data_place.options, **(how or {})}
        try:
            options = ProviderOptions(name=data_place.provider, **keywords)
            provider = await Provider.start(data_place.data, options, create=create)
            stack.push_async_callback(provider.aclose)
        except InvalidArgument as error:
            silo = not keywords["options"] and "server" in click.get_current_context().params
            way_out = "; or ask a silo: --server" if error.option == "options" and silo else ""
            raise InvalidArgument(f"{error.text_for(_FLAGS)}{way_out}") from None
        if data_place.data / MARKER in new:
            note(f"created data directory {str(data_place.data)!r}")
        if new:
            note(f"created provider {provider.name!r} with {counted(provider.queues, 'queue')}")
        yield provider


@asynccontextmanager
async def connected(server: SiloPlace) -> AsyncGenerator[Client]:
    """Connect to the provider of a silo for an `async with` block. Raises Unavailable if no silo answers."""
    from ...client.client import Client  # noqa: PLC0415 (it loads grpc)
    from ...client.connection import Tls  # noqa: PLC0415 (it loads grpc)

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
async def calling(server: SiloPlace, *, patient: bool = True) -> AsyncGenerator[GrpcTransport]:
    """Open a connection to a silo for an `async with` block. Raises Unavailable if no silo answers.

    Unless `patient`, it does so at once if each address refuses the connection.
    """
    from ...client.connection import GrpcTransport, Tls, open_once  # noqa: PLC0415 (it loads grpc)

    try:
        tls = None if server.tls is None else Tls(**server.tls)
        connection = GrpcTransport(server.address, token=server.token, tls=tls, insecure=server.insecure)
    except HeadraceError as error:
        raise _as_typed(error) from None
    try:
        await (connection.open(CONNECT_S) if patient else open_once(connection, CONNECT_S))
        yield connection
    except HeadraceError as error:
        raise _as_typed(error) from None
    finally:
        await connection.aclose()


def _as_typed(error: HeadraceError) -> HeadraceError:
    """The same error, with the options of the command line in its text."""
    typed = error.copy()
    typed.args = (error.text_for(_FLAGS),)
    return typed


def check_exists(data_place: DataPlace) -> None:
    """Raise NotFound if the data directory, or the provider in it, is missing; else as `check_data_directory`."""
    check_data_directory(data_place)
    if not _directory(data_place).exists():
        existing = ", ".join(sorted(entry.name for entry in (data_place.data / "providers").glob("*")))
        raise NotFound(
            f"data directory {str(data_place.data)!r} has no provider {data_place.provider!r}: "
            f"there is {existing or 'none'}",
            hint="name it with --provider" if existing else "",
        )


def check_data_directory(data_place: DataPlace) -> None:
    """Raise NotFound if the data directory is missing, DataDirectoryError if it is not headrace's."""
    if not (data_place.data / MARKER).exists():
        check_marker_kept(data_place.data)
        if data_place.data.exists() and not (data_place.data.is_dir() and not any(data_place.data.iterdir())):
            raise DataDirectoryError(
                f"{str(data_place.data)!r} is no data directory: it is not empty and not made by headrace: name another"
            )
        context = click.get_current_context(silent=True)
        way_out = (
            "create it with --adapter log"
            if context is not None and "adapter" in context.params
            else "publish something to it first"
        )
        raise NotFound(f"{str(data_place.data)!r} is no data directory: check its name, or {way_out}")


def _directory(data_place: DataPlace) -> Path:
    return data_place.data / "providers" / data_place.provider


def parse_start(text: str) -> Start:
    """`Start.parse`, with UTC for a time without a zone."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return Start.parse(text)
    if when.tzinfo is not None or text.isdecimal():  # 20261121 is a token
        return Start.parse(text)
    return Start.since(when.replace(tzinfo=UTC))
