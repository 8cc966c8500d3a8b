"""Lets Spark find the format "headrace" by itself, in every Python that can import `headrace`.

Spark looks for modules named `pyspark_*` and takes each one's `DefaultSource`. One that fails on import hides the
sources of all others, so this one never does. Where something is missing, the format says so when it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_USES = ("schema", "reader", "writer", "streamReader", "simpleStreamReader", "streamWriter")


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Kept: Spark pickles the class by its name, and must find the very same one.
    found = globals()["DefaultSource"] = _default_source()
    return found


def _default_source() -> type[Any]:
    """Import the format. Raise AttributeError if Spark is not installed: then no program can use the format."""
    try:
        data_source = import_module("pyspark.sql.datasource").DataSource
    except Exception as error:
        raise AttributeError(f"format headrace needs pyspark: pip install 'headrace[spark]' ({error})") from error
    try:
        found: type[Any] = import_module("headrace.pipeline.source").HeadraceSource
    except Exception as error:  # noqa: BLE001 (whatever fails in headrace, or in what it needs)
        return _unusable(data_source, error)
    return found


def _unusable(data_source: type[Any], error: Exception) -> type[Any]:
    """Return a class that stands for the format if its code cannot be imported. Each use of it raises the reason."""
    reason = (
        f"format headrace cannot be used in {sys.executable}: {type(error).__name__}: {error}: "
        "install 'headrace[spark]' there"
    )

    def refuse(*_: Any, **__: Any) -> Any:
        raise ImportError(reason)

    def name(_: type[Any]) -> str:
        return "headrace"

    members: dict[str, Any] = {"__module__": __name__, "name": classmethod(name), **dict.fromkeys(_USES, refuse)}
    return type("DefaultSource", (data_source,), members)
