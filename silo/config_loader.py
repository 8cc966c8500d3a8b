"""Load a silo's configuration: a TOML file, `HEADRACE_*` variables over it, and flags over both.

A variable names an option in capitals, with two underscores for each dot: `HEADRACE_DATA`, `HEADRACE_HTTP__PORT`,
`HEADRACE_PROVIDERS__DEFAULT__CACHE__MAX_BYTES`. A path in a variable or a flag is relative to the working directory.

An unknown option is an error: a misspelt option must not be ignored. A variable without two underscores that is no
option may belong to another program, so it only causes a warning.

msgspec converts and checks the values. An error names the source, the option and the accepted values in one line:
`silo.toml: [providers.default] queues = "8": expected an integer >= 1; write queues = 8`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import inspect

from ..streams.arguments import one_of
from ..streams.errors import InvalidArgument
from .config import SiloConfig, check

PREFIX = "HEADRACE_"
OTHER_VARIABLES = {
    "data_permissions",
    "provider",
    "server",
    "token",
    "ca",
    "install_servers",
    "redis_password",
    "redis_server",
    "redis_user",
    "rabbitmq_server",
    "nats_server",
    "node",
    "npm",
}
"""Variables, without the prefix, that adapters, other commands and the benchmarks read."""
PATHS = {(): ("data",), ("grpc",): ("certificate", "key", "client_ca"), ("cluster",): ("ca",)}
"""Options that are paths, by section. In the file they are relative to the file's folder."""
MAX_SHOWN = 60
"""Characters of a wrong value that a message shows."""

_SECTIONS = {"http", "grpc", "cluster", "providers"}
_SCALARS: Mapping[type[inspect.Type], Any] = {inspect.IntType: int, inspect.FloatType: float, inspect.BoolType: bool}
_TYPE = inspect.type_info(SiloConfig)

Table = Mapping[str, Any]
OptionPath = tuple[str, ...]


def load_config(file: Path | None, environ: Mapping[str, str], flags: Table) -> SiloConfig:
    """Merge the three sources. `flags` is a nested table of the options that were given.

    Raises InvalidArgument, which names the source, the option and the accepted values; OSError if the file cannot be
    read.
    """
    table: dict[str, Any] = {}
    if file is not None:
        table = _read(file)

        def in_file(path: OptionPath) -> str:
            return f"{file}: {_option(path)}"

        _convert(table, in_file)  # by itself, so that errors name the file
        table = resolve_paths(table, file.absolute().parent)
    variables = parse_environment(environ)

    def name(path: OptionPath) -> str:
        if _value_at(flags, path) is not None:
            return f"command line: {_option(path)}"
        given = (name for name, (at, _) in variables.items() if at[: len(path)] == path[: len(at)])
        return next(given, f"configuration: {_option(path)}")

    for at, value in variables.values():
        table = merge(table, _nested(at, value))
    config = _convert(merge(table, flags), name)
    check(config)
    return config


def unknown_variables(environ: Mapping[str, str]) -> Sequence[str]:
    """Return a warning for each variable that looks like an option at the top level and is none."""
    known = [field.name for field in msgspec.structs.fields(SiloConfig)]
    accepted = ", ".join(f"{PREFIX}{name.upper()}" for name in known if name not in _SECTIONS)
    return [
        f"variable {variable} is no option and without effect: accepted are {accepted}, {PREFIX}HTTP__..., "
        f"{PREFIX}GRPC__..., {PREFIX}CLUSTER__... and {PREFIX}PROVIDERS__..."
        for variable in environ
        if variable.startswith(PREFIX)
        and "__" not in variable
        and variable.removeprefix(PREFIX).lower() not in {*known, *OTHER_VARIABLES}
    ]


def parse_environment(environ: Mapping[str, str]) -> dict[str, tuple[OptionPath, Any]]:
    """Return the path and the value of each variable that names an option.

    A text that the option's type does not accept stays as it is: `load_config` reports it.
    """
    found: dict[str, tuple[OptionPath, Any]] = {}
    for variable, text in environ.items():
        path = tuple(variable.removeprefix(PREFIX).lower().split("__"))
        if variable.startswith(PREFIX) and (len(path) > 1 or _type_of(path) is not None):
            found[variable] = path, _parse(_type_of(path), text)
    return found


def _parse(kind: inspect.Type | None, text: str) -> Any:
    if isinstance(kind, inspect.VarTupleType):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        if isinstance(kind, inspect.AnyType):
            return msgspec.json.decode(text)
        if kind is not None and (scalar := _SCALARS.get(type(kind))) is not None:
            return msgspec.convert(text, scalar | None, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError):
        pass
    return text


def resolve_paths(table: Table, folder: Path) -> dict[str, Any]:
    """Return the file's options; its relative paths are now below `folder`."""
    for section, names in PATHS.items():
        options = _value_at(table, section)
        for name in names:
            if options and options.get(name):
                table = merge(table, _nested((*section, name), str(folder / options[name])))
    return dict(table)


def merge(lower: Table, upper: Table) -> dict[str, Any]:
    """Merge nested tables. For an option in both, `upper` decides."""
    merged = dict(lower)
    for name, value in upper.items():
        old = merged.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[name] = merge(cast("Table", old), cast("Table", value)) if both else value
    return merged


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file}: not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{file}: not TOML: {error}") from None


# ---- conversion and its errors -------------------------------------------------------------------------------------


def _convert(table: Table, name: Callable[[OptionPath], str]) -> SiloConfig:
    """`name` returns the source and the option of a path, for messages."""
    try:
        return msgspec.convert(table, SiloConfig)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        path = _resolve(table, place.rstrip("`"), str(error))
        if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message):
            accepted = ", ".join(_fields(path))
            raise InvalidArgument(f"{name((*path, unknown[1]))}: unknown option; accepted are {accepted}") from None
        if isinstance(error.__cause__, InvalidArgument):  # options that do not go together
            raise InvalidArgument(f"{name((*path, ''))}: {message}") from None
        raise InvalidArgument(f"{name(path)}{_problem(path, _value_at(table, path))}") from None


def _resolve(table: Table, place: str, message: str) -> OptionPath:
    """The path at `place`, such as `.providers[...].queues`. msgspec does not tell the key of a mapping: the right one
    gives the same error by itself."""
    path: OptionPath = ()
    for part in re.findall(r"\.(\w+)|(\[\.\.\.\])|\[\d+\]", place):
        if part[0]:
            path = (*path, part[0])
        elif part[1]:
            entries: Table = _value_at(table, path)
            path = (*path, next(key for key, entry in entries.items() if _fails(_nested((*path, key), entry), message)))
    return path


def _fails(table: Table, message: str) -> bool:
    try:
        msgspec.convert(table, SiloConfig)
    except msgspec.ValidationError as error:
        return str(error) == message
    return False


def _option(path: OptionPath) -> str:
    """`[section] name`, as the file has it; `[section]` if the name is empty."""
    section = ".".join(path[:-1])
    return f"[{section}] {path[-1]}".rstrip() if section else path[-1]


def _problem(path: OptionPath, value: Any) -> str:
    kind = _type_of(path)
    shown = "" if isinstance(value, dict) else json.dumps(value, ensure_ascii=False, default=str)
    given = f" = {shown}" if shown and len(shown) <= MAX_SHOWN else ""
    wanted = _fitting(kind, value)
    hint = "" if wanted is None else f"; write {path[-1]} = {json.dumps(wanted, ensure_ascii=False)}"
    return f"{given}: expected {_expected(kind)}{hint}"


def _fitting(kind: inspect.Type | None, value: Any) -> Any:
    """The value that was probably meant, None if there is none."""
    if isinstance(value, str) and isinstance(kind, inspect.VarTupleType):
        return [value]
    if isinstance(value, int | float) and not isinstance(value, bool) and isinstance(kind, inspect.StrType):
        return str(value)
    if isinstance(value, str) and kind is not None and type(kind) in _SCALARS:
        parsed = _parse(kind, value)
        return None if isinstance(parsed, str) else parsed
    return None


def _expected(kind: inspect.Type | None) -> str:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            limits = {">=": kind.ge, ">": kind.gt, "<=": kind.le, "<": kind.lt}
            bounds = " and ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if limit is not None)
            return f"{'an integer' if isinstance(kind, inspect.IntType) else 'a number'} {bounds}".rstrip()
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            return one_of([f'"{value}"' for value in kind.values])
        case inspect.VarTupleType():
            return "a list of texts"
        case inspect.StructType() | inspect.DictType():
            return "a table"
        case _:
            return "text"


# ---- tables and types at a path ------------------------------------------------------------------------------------


def _nested(path: OptionPath, value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


def _value_at(table: Any, path: OptionPath) -> Any:
    """None if the option is not given."""
    for name in path:
        table = table.get(name) if isinstance(table, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return table  # pyright: ignore[reportUnknownVariableType]


def _type_of(path: OptionPath) -> inspect.Type | None:
    """The type of the option at `path`, without None; None if there is no such option."""
    kind: inspect.Type | None = _TYPE
    for name in path:
        if isinstance(kind, inspect.StructType):
            kind = next((field.type for field in kind.fields if field.name == name), None)
        else:
            kind = kind.value_type if isinstance(kind, inspect.DictType) else None
        if isinstance(kind, inspect.UnionType):
            kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    return kind


def _fields(path: OptionPath) -> Sequence[str]:
    kind = _type_of(path)
    return [field.name for field in kind.fields] if isinstance(kind, inspect.StructType) else []
