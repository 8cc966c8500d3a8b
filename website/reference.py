"""Writes the pages of the reference that come from the code: Python, command line, configuration, protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

import click
import griffe
import msgspec

from headrace.cli.main import cli

from .pages import REPOSITORY, Section

PYTHON_PAGES = {
    "Providers and streams": ("headrace.silo", "headrace.streams.stream"),
    "Clients": ("headrace.client",),
    "Events": ("headrace.streams.events", "headrace.streams.identity", "headrace.streams.publishing"),
    "Subscriptions": ("headrace.streams.subscriptions", "headrace.streams.handlers", "headrace.streams.states"),
    "Payloads": ("headrace.streams.codecs",),
    "Effects": ("headrace.effects",),
    "Errors": ("headrace.streams.errors",),
    "Tracing": ("headrace.streams.tracing",),
    "Other names": ("headrace",),
}
"""Titles of the pages about the public names of `headrace`, and the modules that define these names."""
OTHER_PACKAGES = {"Adapters": "headrace.adapters", "Spark jobs": "headrace.pipeline"}
"""Titles of the pages about other packages with public names."""
CONFIGURATION = {
    "": "headrace.silo.config.SiloConfig",
    "http": "headrace.server.config.HttpConfig",
    "grpc": "headrace.server.config.GrpcConfig",
    "grpc.limits": "headrace.server.limits.ClientLimits",
    "cluster": "headrace.silo.config.ClusterConfig",
    "providers.NAME": "headrace.silo.config.ProviderConfig",
    "providers.NAME.cache": "headrace.silo.config.CacheConfig",
}
"""Tables of the configuration file, and the classes that define their options."""
ADAPTER_OPTIONS = {
    "log": "headrace.adapters.log.options.LogOptions",
    "kafka": "headrace.adapters.kafka.options.KafkaOptions",
    "postgres": "headrace.adapters.postgres.options.PostgresOptions",
    "redis": "headrace.adapters.redis.options.RedisOptions",
    "memory": "headrace.adapters.memory.adapter.MemoryOptions",
    "generator": "headrace.adapters.generator.options.GeneratorOptions",
}
"""Adapters, and the classes that define their options."""


class Page(NamedTuple):
    """A page that comes from the code."""

    place: str
    text: str


def reference_pages(repository: Path = REPOSITORY) -> list[Page]:
    """Return all pages that come from the code."""
    package = cast("griffe.Module", griffe.load("headrace", resolve_aliases=False))
    return [
        *_python_pages(package),
        Page("reference/command-line.md", _command_line()),
        Page("reference/options.md", _configuration(package)),
        Page("reference/protocol.md", _protocol(repository)),
    ]


def reference_section(pages: list[Page]) -> Section:
    return Section("Reference from the code", [page.place for page in pages])


def _python_pages(package: griffe.Module) -> Iterator[Page]:
    names = {title: list[str]() for title in PYTHON_PAGES}
    for target in sorted(_targets(package), key=lambda path: path.rpartition(".")[2]):
        title = next(
            title for title, modules in PYTHON_PAGES.items() if any(target.startswith(f"{one}.") for one in modules)
        )
        names[title].append(target)
    for title, path in OTHER_PACKAGES.items():
        names[title] = sorted(_targets(cast("griffe.Module", package[path.removeprefix("headrace.")])))
    for title, targets in names.items():
        if not targets:
            continue
        source = OTHER_PACKAGES.get(title, "headrace")
        directives = "\n\n".join(f"::: {target}" for target in targets)
        slug = title.lower().replace(" ", "-")
        yield Page(f"reference/python/{slug}.md", f"# {title}\n\nImport these names from `{source}`.\n\n{directives}\n")


def _targets(module: griffe.Module) -> Iterator[str]:
    """Yield the full path of the definition of each public name of a package."""
    for name in public_names(module):
        member = module.members[name]
        while member.is_alias:
            target = cast("griffe.Alias", member).target_path
            member = module.modules_collection[target]
        yield member.path


def public_names(module: griffe.Module) -> list[str]:
    """Return the public names of a package: its `__all__`, or the names that it imports for type checkers as
    themselves."""
    if module.exports is not None and module.path != "headrace":
        return [str(name) for name in module.exports]
    return [
        name
        for name, member in module.members.items()
        if member.is_alias and cast("griffe.Alias", member).target_path.startswith("headrace.")
    ]


def _command_line() -> str:
    lines = ["# Command line", "", "The text of `--help` of each command. Exit codes: 0 done, 1 failed, 2 wrong usage,"]
    lines += ["130 interrupted.", ""]
    for name, command, context in _commands(cli, click.Context(cli, info_name="headrace", max_content_width=100)):
        lines += [f"## {name}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def _commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _commands(child, click.Context(child, info_name=name, parent=context, max_content_width=100))


def _configuration(package: griffe.Module) -> str:
    lines = [
        "# Options of the configuration",
        "",
        "All options of the [configuration](../configuration.md) file, as the code defines them. A variable has",
        "precedence over the file. Write the name of the provider in place of NAME.",
        "",
    ]
    for table, path in CONFIGURATION.items():
        lines += [f"## `[{table}]`" if table else "## Top level", "", *_options(package, path, table), ""]
    lines += ["## Options of the adapters", "", "They are in `options` of a provider.", ""]
    for adapter, path in ADAPTER_OPTIONS.items():
        lines += [f"### `{adapter}`", "", *_options(package, path, "providers.NAME.options"), ""]
    return "\n".join(lines)


def _options(package: griffe.Module, path: str, table: str) -> Iterator[str]:
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    members = cast("griffe.Class", package[path.removeprefix("headrace.")]).members
    yield "| option | type | default | variable | meaning |"
    yield "|---|---|---|---|---|"
    for field in msgspec.structs.fields(kind):
        place = [*filter(None, table.split(".")), field.name]
        if any(one.split(".")[: len(place)] == place for one in CONFIGURATION):
            continue  # a table of its own
        docstring = members[field.name].docstring
        cells = (
            f"`{field.name}`",
            _type(msgspec.inspect.type_info(field.type)),
            _default(field),
            f"`HEADRACE_{'__'.join(place).upper()}`",
            " ".join(docstring.value.split()) if docstring else "",
        )
        yield f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(cell: str) -> str:
    """Return the text of a table's cell: bars end a cell, and brackets are a link."""
    return re.sub(r"[|\[\]]", r"\\\g<0>", cell)


def _type(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(dict.fromkeys(_type(one) for one in types if not _is_none(one)))
        case msgspec.inspect.LiteralType(values=values):
            return ", ".join(f'`"{value}"`' for value in values)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return _number(kind)
        case _:
            return _TYPES.get(type(kind).__name__, "table")


def _is_none(kind: msgspec.inspect.Type) -> bool:
    return isinstance(kind, msgspec.inspect.NoneType)


def _number(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    limits = (("at least", kind.ge), ("more than", kind.gt), ("at most", kind.le), ("less than", kind.lt))
    named = [f"{words} {limit:,}" for words, limit in limits if limit is not None]
    return ", ".join([_TYPES[type(kind).__name__], *named])


_TYPES = {
    "BoolType": "boolean",
    "FloatType": "number",
    "IntType": "integer",
    "StrType": "text",
    "VarTupleType": "list",
}


def _default(field: msgspec.structs.FieldInfo) -> str:
    match field.default:
        case None:
            return "none"
        case bool() | str():
            return f"`{json.dumps(field.default)}`"
        case int() | float():
            return f"{field.default:,}"
        case _:
            return "empty"


def _protocol(repository: Path) -> str:
    lines = ["# Protocol", "", "The files of the [protocol](../grpc.md), with a comment for each field.", ""]
    for file in sorted((repository / "proto" / "v1").glob("*.proto")):
        lines += [f"## {file.name}", "", "```protobuf", file.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(lines)
