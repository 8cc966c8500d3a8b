"""The option `delays` of a provider."""

from __future__ import annotations

from .errors import InvalidArgument

STORE = "store"
"""Delayed events wait in the provider's control store."""


def check_delays(delays: str | None) -> None:
    """Raise InvalidArgument unless the option is `STORE` or None."""
    if delays not in (None, STORE):
        shown = delays.rpartition("@")[2]  # of a URL, without a password
        raise InvalidArgument(f'delays is "{STORE}", or left out, not {shown!r}')
