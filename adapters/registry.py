"""Finds adapters by name, through the entry point group `headrace.adapters`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

import msgspec

from ..streams.errors import InvalidArgument, NotFound
from .seam import AdapterContext, AdapterFactory, QueueAdapter

GROUP = "headrace.adapters"

_T = TypeVar("_T")


def adapter_names() -> list[str]:
    return sorted({entry.name for entry in entry_points(group=GROUP)})


async def open_adapter(name: str, context: AdapterContext, options: Mapping[str, Any]) -> QueueAdapter:
    """Open the adapter called `name`. Raises NotFound with the names there are, InvalidArgument for its options."""
    factory = await asyncio.to_thread(_find, name)  # reads metadata and imports: files, in either case
    return await factory(context, options)


def _find(name: str) -> AdapterFactory:
    for entry in entry_points(group=GROUP, name=name):
        return cast(AdapterFactory, entry.load())
    raise NotFound(f"there is no adapter {name!r}; installed are: {', '.join(adapter_names())}")


def read_options(adapter: str, kind: type[_T], options: Mapping[str, Any]) -> _T:
    """Convert a table of options into the adapter's own dataclass or Struct. Raises InvalidArgument naming the option.

    Declare the type with `forbid_unknown_fields=True` so that a misspelt option is an error.
    """
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"options of adapter {adapter!r}: {error}") from None
