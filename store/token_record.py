"""The record of a client's token. It imports no SQLAlchemy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class TokenRecord(NamedTuple):
    """An access token as it is stored: its client and its permissions, not the token itself.

    `hash` is its plain SHA-256. A slow hash, as for passwords, would add no protection: a token is 256 random bits,
    which cannot be guessed.
    """

    name: str
    hash: bytes
    permissions: Mapping[str, Sequence[str]]
    """Patterns of namespaces by permission, such as {"publish": ["orders*"]}."""
    created_at_us: int
    client: str
    """The client that uses the token. A client may have several tokens, so that one can replace another."""
