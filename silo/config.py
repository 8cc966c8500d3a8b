"""Configuration of a silo: a TOML file, `HEADRACE_*` variables over it, and flags over both.

    data = "data"                        # data directory; relative to this file's folder
    modules = ["shop.handlers"]          # imported; what they declare with @subscription is served
    drain_s = 10.0

    [http]                               # /metrics and /healthz
    host = "127.0.0.1"
    port = 9464

    [providers.default]
    adapter = "log"
    queues = 8
    options = { durability = "commit" }
    cache = { max_events = 1_000_000, max_bytes = 67_108_864 }
    detach_after_s = 0.25

A variable names an option in capitals, with two underscores for each dot: `HEADRACE_DATA`, `HEADRACE_HTTP__PORT`,
`HEADRACE_PROVIDERS__DEFAULT__CACHE__MAX_BYTES`. An unknown option is an error, for otherwise a misspelt one would be
without effect; a variable without two underscores that is no option may be another program's, so it is only warned of.
A data directory that a variable or a flag names is relative to the working directory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from ..streams.errors import InvalidArgument
from .provider import CacheOptions, ProviderOptions

PREFIX = "HEADRACE_"
OTHERS = {"provider", "install_servers", "redis_server", "rabbitmq_server"}
"""Variables, without the prefix, that the other commands and the benchmarks understand."""
_CACHE = CacheOptions()

_T = TypeVar("_T")
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what a provider caches in this process, over all its queues."""

    max_events: _Positive = _CACHE.max_events
    max_bytes: _Positive = _CACHE.max_bytes


class ProviderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One provider. `adapter` and `queues` are fixed when it is first opened; left out, they are what it has."""

    adapter: str | None = None
    queues: _Positive | None = None
    options: dict[str, Any] = {}
    """The adapter's own options."""
    cache: CacheConfig = CacheConfig()
    detach_after_s: _Seconds = 0.25

    def named(self, name: str) -> ProviderOptions:
        return ProviderOptions(
            name=name,
            adapter=self.adapter,
            queues=self.queues,
            options=self.options,
            cache=CacheOptions(max_events=self.cache.max_events, max_bytes=self.cache.max_bytes),
            detach_after_s=self.detach_after_s,
        )


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where /metrics and /healthz are served."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    """None: nowhere. 0: at a free port, which is logged."""


class SiloConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A silo."""

    data: str | None = None
    """Data directory. None: nothing is kept, for adapters that need no directory."""
    modules: tuple[str, ...] = ()
    """Imported at the start; the subscriptions that they declare are served."""
    drain_s: _Seconds = 10.0
    """How long running handlers may take to end when the silo stops, in seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    http: HttpConfig = HttpConfig()
    providers: dict[str, ProviderConfig] = msgspec.field(default_factory=lambda: {"default": ProviderConfig()})


def load_config(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> SiloConfig:
    """Put the three sources together. `flags` is a nested table of the options that were given.

    Raises InvalidArgument naming the source, the option, and what is accepted; OSError where the file cannot be read.
    """
    table = {} if file is None else _read(file)
    if file is not None:
        read(SiloConfig, table, str(file))  # first by itself, so that the message names the file
        table = _placed(table, file)
    from_environment = _of_environment(environ)
    return read(SiloConfig, _over(_over(table, from_environment), flags), "configuration")


def unknown_variables(environ: Mapping[str, str]) -> Sequence[str]:
    """A line for each variable that looks like an option at the top and is none: it is without effect."""
    known = _top()
    accepted = ", ".join(f"{PREFIX}{name.upper()}" for name in known if name not in ("http", "providers"))
    return [
        f"variable {variable} is no option and without effect: accepted are {accepted}, {PREFIX}HTTP__... and "
        f"{PREFIX}PROVIDERS__..."
        for variable in environ
        if variable.startswith(PREFIX)
        and "__" not in variable
        and variable.removeprefix(PREFIX).lower() not in {*known, *OTHERS}
    ]


def _top() -> Sequence[str]:
    return [field.name for field in msgspec.structs.fields(SiloConfig)]


def _placed(table: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The file's options, its data directory relative to the file's folder."""
    data = table.get("data")
    return {**table, "data": str(file.absolute().parent / data)} if data else dict(table)


def read(kind: type[_T], table: Mapping[str, Any], source: str, path: str = "") -> _T:
    """Convert a table into the Struct `kind`. Raises InvalidArgument with the path of what is wrong."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}  # pyright: ignore[reportArgumentType]
    for name in table:
        if name not in fields:
            raise InvalidArgument(
                f"{source}: unknown option {path}{name}: accepted {'at the top' if not path else 'there'} are "
                f"{', '.join(fields)}"
            )
    return kind(**{name: _value(fields[name].type, value, source, path + name) for name, value in table.items()})


def _value(kind: Any, value: Any, source: str, path: str) -> Any:
    if _is_struct(kind):
        return read(kind, _table(value, source, path), source, f"{path}.")
    if get_origin(kind) is dict and _is_struct(element := get_args(kind)[1]):
        entries = _table(value, source, path).items()
        return {name: _value(element, entry, source, f"{path}.{name}") for name, entry in entries}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        accepted = f": accepted are {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""
        raise InvalidArgument(f"{source}: option {path}: {str(error).replace('`', '')}{accepted}") from None


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _table(value: Any, source: str, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{source}: option {path} is a table, not {value!r}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file}: not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{file}: not TOML: {error}") from None


def _of_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    known = _top()
    for variable, text in environ.items():
        path = variable.removeprefix(PREFIX).lower().split("__")
        if not variable.startswith(PREFIX) or (len(path) == 1 and path[0] not in known):
            continue
        kind = _kind_at(SiloConfig, path, variable)
        inner: Any = _understood(kind, text, variable)
        for name in reversed(path):
            inner = {name: inner}
        table = _over(table, inner)
    return table


def _kind_at(kind: Any, path: list[str], variable: str) -> Any:
    """The type of the option at `path`; Any within an adapter's own options."""
    for name in path:
        if _is_struct(kind):
            fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
            if name not in fields:
                raise InvalidArgument(
                    f"variable {variable}: unknown option {name}: accepted there are {', '.join(fields)}"
                )
            kind = fields[name]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            raise InvalidArgument(f"variable {variable}: there is nothing below {name}")
    return kind


def _understood(kind: Any, text: str, variable: str) -> Any:
    """A variable's text as the option's type has it."""
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is Any:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    try:
        return msgspec.to_builtins(msgspec.convert(text, kind, strict=False))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"variable {variable}: {str(error).replace('`', '')}") from None


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables put on top of each other."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = _over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]
    return merged
