"""Adapter `redis`: queues with delays and priorities in Redis, Redis Cluster or Valkey. Needs `headrace[redis]`."""

from .adapter import RedisAdapter, open_adapter
from .options import RedisOptions, ShardOptions
from .queue import RedisQueue, Taken
from .shard import Claim, Entry, Pushed, Size

__all__ = (
    "Claim",
    "Entry",
    "Pushed",
    "RedisAdapter",
    "RedisOptions",
    "RedisQueue",
    "ShardOptions",
    "Size",
    "Taken",
    "open_adapter",
)
