"""The consistent hash ring that streams share with queues, and queues with silos (Karger and others 1997).

Each name has a number of points on the ring: the hashes of the texts "name-0", "name-1", …. A key belongs to the first
point above the key's own hash, or to the first point of the ring if there is none. The hash is BLAKE2b of 8 bytes, read
as a big-endian integer. It spreads keys of any form, does not depend on the process, and works on systems that forbid
MD5.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import cast

from uhashring import HashRing  # pyright: ignore[reportMissingTypeStubs]


def hash_bytes(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")


def hash_text(text: str) -> int:
    return hash_bytes(text.encode())


def ring(names: Sequence[str], points_each: int) -> tuple[list[int], list[str]]:
    """Return the points of the ring in order, and the name that each belongs to."""
    made = HashRing([*names], hash_fn=hash_text, vnodes=points_each)
    points = cast(list[tuple[int, str]], made.get_points())  # pyright: ignore[reportUnknownMemberType]
    return [position for position, _ in points], [name for _, name in points]
