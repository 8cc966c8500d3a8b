"""Load a silo's configuration: a TOML file, `HEADRACE_*` variables over it, and flags over both.

A variable names an option in capitals, with two underscores for each dot: `HEADRACE_DATA`, `HEADRACE_HTTP__PORT`,
`HEADRACE_PROVIDERS__DEFAULT__CACHE__MAX_BYTES`. A path in a variable or a flag is relative to the working directory.

An unknown option is an error: a misspelt option must not be ignored. A variable without two underscores that is no
option may belong to another program, so it only causes a warning.

msgspec converts and checks the values. An error names the source, the option and the accepted values in one line:
`silo.toml: [providers.default] queues = "8": expected an integer >= 1; write queues = 8`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from ..streams.errors import InvalidArgument
from ..streams.option_tables import OptionPath, OptionTable, Table, nested, parse, value_at
from ..streams.wording import printable
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
PATHS = {
    (): ("data",),
    ("http",): ("certificate", "key"),
    ("grpc",): ("certificate", "key", "client_ca"),
    ("cluster",): ("ca",),
}
"""Options that are paths, by section. In the file they are relative to the file's folder."""
_SECTIONS = {"http", "grpc", "cluster", "providers"}
_CONFIG = OptionTable(SiloConfig)


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

        _CONFIG.convert(table, in_file)  # by itself, so that errors name the file
        if (path := _with_nul(table)) is not None:
            raise InvalidArgument(f"{file}: {printable(_option(path))}: a NUL character is not accepted")
        table = resolve_paths(table, file.absolute().parent)
    config = _converted(table, environ, flags)
    check(config)
    return config


def check_variables(environ: Mapping[str, str], flags: Table) -> None:
    """Raise InvalidArgument if a variable that no flag overrides has a wrong value, or names no option."""
    _converted({}, environ, flags)


def _converted(table: Table, environ: Mapping[str, str], flags: Table) -> SiloConfig:
    variables = parse_environment(environ)

    def name(path: OptionPath) -> str:
        if value_at(flags, path) is not None:
            return f"command line: {_option(path)}"
        given = (name for name, (at, _) in variables.items() if at[: len(path)] == path[: len(at)])
        return next(given, f"configuration: {_option(path)}")

    for at, value in variables.values():
        table = merge(table, nested(at, value))
    return _CONFIG.convert(merge(table, flags), name)


def named_source(error: InvalidArgument, file: Path | None, environ: Mapping[str, str]) -> InvalidArgument:
    """Return an error about an adapter's option with its source, the variable or the file. `load_config` does not know
    these options: the adapter refuses them when it is opened."""
    section = re.fullmatch(r"\[(providers\..*\.options)\]", error.option)
    if section is None:
        return error
    named = [
        variable
        for variable, (path, _) in parse_environment(environ).items()
        if ".".join(path[:-1]) == section[1] and re.search(rf"\b{re.escape(path[-1])}\b", error.problem)
    ]
    source = named[0] if named else f"{file}: {error.option}"
    return error if file is None and not named else InvalidArgument(error.problem, option=source)


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
        if variable.startswith(PREFIX) and (len(path) > 1 or _CONFIG.type_of(path) is not None):
            found[variable] = path, parse(_CONFIG.type_of(path), text)
    return found


def resolve_paths(table: Table, folder: Path) -> dict[str, Any]:
    """Return the file's options; its relative paths are now below `folder`."""
    for section, names in PATHS.items():
        options = value_at(table, section)
        for name in names:
            if options and options.get(name):
                table = merge(table, nested((*section, name), str(folder / options[name])))
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
    except ValueError:
        raise InvalidArgument(f"{file}: an integer has more than 4,300 digits") from None
    except RecursionError:
        raise InvalidArgument(f"{file}: its lists and tables are nested too deeply") from None


def _with_nul(table: Table) -> OptionPath | None:
    """The path of an option that has a NUL character; None if there is none. Names of files and hosts end there for the
    system, so Python refuses them with a ValueError."""
    left: list[tuple[OptionPath, object]] = [((), table)]
    while left:
        path, value = left.pop()
        if "\0" in (value if isinstance(value, str) else "".join(path[-1:])):
            return path
        if isinstance(value, dict):
            left += [((*path, name), each) for name, each in cast("Table", value).items()]
        elif isinstance(value, list):
            left += [(path, each) for each in cast("list[object]", value)]
    return None


def _option(path: OptionPath) -> str:
    """`[section] name`, as the file has it; `[section]` if the name is empty."""
    section = ".".join(path[:-1])
    return f"[{section}] {path[-1]}".rstrip() if section else path[-1]
