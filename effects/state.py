"""The state of a stream: its options and its encoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import msgspec

from ..streams.arguments import check_callable, check_integer, refused
from ..streams.errors import InvalidArgument, PayloadTooLarge
from ..streams.field_limits import MAX_STATE_VERSION

MAX_STATE_BYTES = 1 << 16
MAX_TTL = timedelta(days=1_000_000)
"""Limit of the time to live of a state. Its end is stored in microseconds, in 64 bits; the limit is well below that."""
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Options of the state that a handler keeps for each stream. Raises InvalidArgument for wrong ones."""

    format: Literal["json", "bytes"] = "json"
    max_bytes: int = MAX_STATE_BYTES
    """Limit of one encoded state, in bytes."""
    version: int = 1
    """Stored beside each state."""
    upgrade: Callable[[Any, int], Any] | None = None
    """Called with a stored state of another version, and with that version. It returns the state of this version."""
    ttl: timedelta | None = None
    """How long a state is valid after its last assignment; then `tx.state` is None. None: for ever."""

    def __post_init__(self) -> None:
        if self.format not in ("json", "bytes"):
            raise refused("format", self.format, "'json' or 'bytes'")
        check_integer("max_bytes", self.max_bytes, 1)
        check_integer("version", self.version, 1, MAX_STATE_VERSION)
        check_callable("upgrade", self.upgrade)
        if inspect.iscoroutinefunction(self.upgrade):
            raise refused("upgrade", self.upgrade, "a plain function: write `def` instead of `async def`")
        if self.ttl is not None and (not isinstance(self.ttl, timedelta) or not timedelta() < self.ttl <= MAX_TTL):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise refused("ttl", self.ttl, f"a timedelta above 0 and up to {MAX_TTL.days:,} days, or None")

    def encode(self, value: Any) -> bytes | None:
        """Return the stored form; None for no state. Raises InvalidArgument, PayloadTooLarge."""
        if value is None:
            return None
        if self.format == "bytes":
            if not isinstance(value, bytes):
                raise InvalidArgument(f"tx.state is bytes here, not {type(value).__name__}: encode it first")
            encoded = value
        else:
            try:
                encoded = msgspec.json.encode(value)
            except (TypeError, ValueError, RecursionError) as error:  # the last one if it is nested too deeply
                raise InvalidArgument(f"tx.state cannot be encoded as JSON: {error}") from None
        if len(encoded) > self.max_bytes:
            raise PayloadTooLarge("tx.state", len(encoded), self.max_bytes, "raise StreamState(max_bytes=...)")
        return encoded

    def decode(self, stored: bytes | None, version: int | None, expires_at_us: int | None, now_us: int) -> Any:
        """Return the value of a stored state. Return None if there is no state, or if its time to live is over.

        Raises InvalidArgument for a state of another version if there is no `upgrade`.
        """
        if stored is None or (expires_at_us is not None and expires_at_us <= now_us):
            return None
        value = bytes(stored) if self.format == "bytes" else msgspec.json.decode(stored)
        if version == self.version:
            return value
        if self.upgrade is None or version is None:
            raise InvalidArgument(
                f"the stored state has version {version}, and this handler has version {self.version}: give "
                "StreamState an `upgrade` function"
            )
        upgraded = self.upgrade(value, version)
        if inspect.isawaitable(upgraded):
            raise refused("upgrade", self.upgrade, "a plain function: write `def` instead of `async def`")
        return upgraded

    def expires_at_us(self, now_us: int) -> int | None:
        """Return the end of the time to live of a state that is assigned now."""
        return None if self.ttl is None else now_us + self.ttl // _MICROSECOND
