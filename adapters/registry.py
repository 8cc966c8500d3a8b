"""Finds adapters by name, through the entry point group `headrace.adapters`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from ..streams.errors import InvalidArgument, NotFound
from ..streams.option_tables import OptionTable
from .seam import AdapterContext, AdapterFactory, QueueAdapter

GROUP = "headrace.adapters"

_T = TypeVar("_T")


def adapter_names() -> list[str]:
    return sorted({entry.name for entry in entry_points(group=GROUP)})


async def open_adapter(name: str, context: AdapterContext, options: Mapping[str, Any]) -> QueueAdapter:
    """Open the adapter called `name`. Raises NotFound, with the names of all installed adapters, and InvalidArgument if
    an option is wrong."""
    factory = await asyncio.to_thread(_find, name)  # in a thread, because it reads files
    return await factory(context, options)


@cache
def _find(name: str) -> AdapterFactory:
    """Return an adapter's factory. Cached, because the search reads the metadata of all installed packages."""
    for entry in entry_points(group=GROUP, name=name):
        try:
            return cast(AdapterFactory, entry.load())
        except ModuleNotFoundError as error:
            raise NotFound(
                f"the adapter {name!r} needs the package {error.name!r}, which is not installed: if the adapter is one "
                f"of headrace's own, run pip install 'headrace[{name}]'"
            ) from None
    raise NotFound(f"there is no adapter {name!r}; installed are: {', '.join(adapter_names())}")


def read_options(adapter: str, kind: type[_T], options: Mapping[str, Any]) -> _T:
    """Convert a table of options into the adapter's own dataclass or Struct.

    Declare the type with `forbid_unknown_fields=True`, so that a misspelt option is an error. Raises InvalidArgument,
    which names the option.
    """
    try:
        return OptionTable(kind).convert(
            dict(options), lambda path: f"adapter {adapter!r}: {'.'.join(path)}".rstrip(":. ")
        )
    except InvalidArgument as error:
        raise InvalidArgument(str(error), option="options") from None
