"""Limits of the adapter `redis`."""

from __future__ import annotations

from typing import NamedTuple


class RedisLimits(NamedTuple):
    """Times and bounds of one adapter or queue. They are not configured."""

    command_s: float = 5.0
    """A command fails if it is not answered within this many seconds."""
    block_s: float = 5.0
    """The longest wait for a bell, in seconds: a lost wake-up costs no more than this."""
    superseded_s: float = 5.0
    """Seconds after which a superseded receiver ends, so that its agent may open another."""
    owner_s: float = 5.0
    """Seconds after which the owner of the queues is stored again, in case that the server has lost it."""
    cached_producers: int = 10_000
    """Producers whose last call is kept in memory, so that the server is not asked for it."""


REDIS_LIMITS = RedisLimits()
