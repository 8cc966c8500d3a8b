"""Options that several commands share, and how they open what these name."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from ...streams import Start
from ...streams.errors import DataDirectoryError, InvalidArgument, NotFound
from ..datadir import MARKER, check_provider_name
from ..provider import Provider
from ..wording import counted
from .output import note

START_HELP = "earliest, latest, a token, or the time of storing, such as 2026-11-21T10:00 (in UTC, or with its zone)."


class Where(NamedTuple):
    """A provider on a data directory."""

    data: Path
    provider: str


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--data` and `--provider`, handed to the command as `where`."""

    @click.option(
        "--data", required=True, type=click.Path(path_type=Path), envvar="HEADRACE_DATA", show_envvar=True,
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


def creation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--adapter`, `--queues` and `--option`, handed to the command as `how`: the keywords of `Provider.open`."""

    @click.option("--adapter", metavar="NAME", help="Queue technology.  [default: the provider's, or log]")
    @click.option("--queues", type=click.IntRange(min=1), metavar="N", help="Its queues.  [default: as it has, or 8]")
    @click.option(
        "--option", "options", multiple=True, metavar="NAME=VALUE", help="Option of the adapter; may be repeated."
    )
    @functools.wraps(command)
    def with_how(*args: Any, adapter: str | None, queues: int | None, options: Sequence[str], **rest: Any) -> Any:
        how = {"adapter": adapter, "queues": queues, "options": dict(map(_option, options))}
        return command(*args, how=how, **rest)

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
        _check_exists(where)
    new = [what for what in (where.data / MARKER, _directory(where)) if not what.exists()]
    async with Provider.open(where.data, name=where.provider, **(how or {})) as provider:
        if where.data / MARKER in new:
            note(f"created data directory {where.data}")
        if new:
            note(f"created provider {provider.name} with {counted(provider.queues, 'queue')}")
        yield provider


def _check_exists(where: Where) -> None:
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
