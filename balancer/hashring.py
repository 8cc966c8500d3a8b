"""The consistent hash ring that streams share with queues, and queues with silos (Karger and others 1997).

Each name stands at a number of points: the hashes of the texts "name-0", "name-1", …. Something belongs to the first
point above its own hash, and above the last point to the first. The hash is BLAKE2b of 8 bytes, read as a big-endian
integer: it spreads any shape of key, does not depend on the process, and exists where MD5 is forbidden.
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
    """The points of the ring in order, and whose each is."""
    made = HashRing([*names], hash_fn=hash_text, vnodes=points_each)
    points = cast(list[tuple[int, str]], made.get_points())  # pyright: ignore[reportUnknownMemberType]
    return [position for position, _ in points], [name for _, name in points]
