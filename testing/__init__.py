"""Tests of programs that use headrace: the real engine in memory and in virtual time. See docs/testing.md.

The pytest plugin has the fixture `headrace`, a `TestProvider`. Other test frameworks call `opened_provider`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .deliveries import RecordedDelivery as RecordedDelivery
    from .provider import InjectedError as InjectedError
    from .provider import TestProvider as TestProvider
    from .provider import opened_provider as opened_provider
    from .schemas import assert_schema_compatible as assert_schema_compatible
    from .virtual_time import NothingLeftToHappenError as NothingLeftToHappenError

_MODULES = {
    "InjectedError": "provider",
    "NothingLeftToHappenError": "virtual_time",
    "RecordedDelivery": "deliveries",
    "TestProvider": "provider",
    "assert_schema_compatible": "schemas",
    "opened_provider": "provider",
}
"""The public names, imported when they are first used: pytest loads this package in each run."""

__all__ = (
    "InjectedError",
    "NothingLeftToHappenError",
    "RecordedDelivery",
    "TestProvider",
    "assert_schema_compatible",
    "opened_provider",
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value
