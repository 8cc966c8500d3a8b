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
from .queue import RedisQueue, TakenEvent
from .shard import ClaimedEvent, PushedEvent, QueuedEvent, ShardSize

__all__ = (
    "ClaimedEvent",
    "PushedEvent",
    "QueuedEvent",
    "RedisAdapter",
    "RedisOptions",
    "RedisQueue",
    "ShardOptions",
    "ShardSize",
    "TakenEvent",
    "open_adapter",
)
