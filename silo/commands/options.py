"""Options that several commands share, and how they open what these name."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from ...streams.errors import InvalidArgument, NotFound
from ..datadir import MARKER
from ..provider import Provider


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
async def opened(where: Where, how: Mapping[str, Any] | None = None) -> AsyncGenerator[Provider]:
    """The provider, for the length of an `async with`. Without `how` it has to exist: looking makes nothing.

    Raises NotFound where it does not exist.
    """
    if how is None and not (where.data / MARKER).exists():
        raise NotFound(f"{where.data} is no data directory: publish something to it first")
    if how is None and not (where.data / "providers" / where.provider).exists():
        there = sorted(entry.name for entry in (where.data / "providers").glob("*")) or ["none"]
        raise NotFound(f"data directory {where.data} has no provider {where.provider!r}: there is {', '.join(there)}")
    async with Provider.open(where.data, name=where.provider, **(how or {})) as provider:
        yield provider
