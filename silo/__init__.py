"""The provider, and the silo process that serves it.

The public names are imported at their first use, so that `headrace --help` does not wait for the database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import CacheOptions, ProviderOptions
    from .provider import LocalSubscription, Provider
    from .views import ProviderStatistics

__all__ = ("CacheOptions", "LocalSubscription", "Provider", "ProviderOptions", "ProviderStatistics")

_MODULES = {
    "CacheOptions": ".options",
    "Provider": ".provider",
    "ProviderOptions": ".options",
    "ProviderStatistics": ".views",
    "LocalSubscription": ".provider",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value
