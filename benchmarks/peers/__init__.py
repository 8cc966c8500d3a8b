"""Other systems, measured beside headrace with the same methods in the same run."""

from .kafka import Kafka
from .peer import Peer
from .rabbitmq_streams import RabbitStreams
from .redis_streams import RedisStreams

__all__ = ("PEERS", "Kafka", "Peer", "RabbitStreams", "RedisStreams")

PEERS: dict[str, Peer] = {
    "redis": RedisStreams("everysec"),
    "redis-asyncio": RedisStreams("everysec", blocking_client=False),
    "redis-always": RedisStreams("always"),
    "rabbitmq": RabbitStreams(),
    "kafka": Kafka(),
}
"""By short name, for choosing."""
