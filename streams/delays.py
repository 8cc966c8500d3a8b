"""The option `delays` of a provider."""

from __future__ import annotations

from urllib.parse import urlsplit

from .errors import InvalidArgument

STORE = "store"
"""Delayed events wait in the provider's control store. Any other value is the URL of a Redis."""


def check_delays(delays: str | None) -> None:
    """Raise InvalidArgument unless the option is `STORE`, the URL of a Redis, or None."""
    if delays not in (None, STORE) and not _is_redis(delays):
        shown = delays.rpartition("@")[2]  # without a password
        raise InvalidArgument(f'delays is "{STORE}", redis://host[:port][/number], or left out, not {shown!r}')


def _is_redis(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("redis", "rediss") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or an IPv6 address has no closing bracket
        return False
