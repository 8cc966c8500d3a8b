"""Where it is put together: the provider, the silo process, the command line.

The public names are imported when they are first used: the command line is here as well, and `headrace --help` should
not wait for the database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .provider import CacheOptions, Provider, ProviderOptions, Subscription
    from .views import ProviderStatistics

__all__ = ("CacheOptions", "Provider", "ProviderOptions", "ProviderStatistics", "Subscription")

_MODULES = dict.fromkeys(__all__, ".provider") | {"ProviderStatistics": ".views"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value
