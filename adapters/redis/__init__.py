"""Adapter `redis`: queues with delays and priorities in Redis, Redis Cluster or Valkey. Needs `headrace[redis]`."""

try:
    import redis as redis  # only whether it is there
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "headrace.adapters.redis needs the package 'redis', which is not installed: pip install 'headrace[redis]'",
        name=missing.name,
    ) from None

from .adapter import RedisAdapter, open_adapter
from .options import RedisOptions, ShardOptions
from .queue import RedisQueue, Taken
from .shard import Claim, Pushed, QueuedEvent, ShardSize

__all__ = (
    "Claim",
    "Pushed",
    "QueuedEvent",
    "RedisAdapter",
    "RedisOptions",
    "RedisQueue",
    "ShardOptions",
    "ShardSize",
    "Taken",
    "open_adapter",
)
