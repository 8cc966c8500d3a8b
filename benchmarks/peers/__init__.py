"""Other systems, measured beside headrace with the same methods in the same run."""

from .kafka import Kafka
from .nats_jetstream import NatsJetStream
from .peer import Peer
from .rabbitmq_streams import RabbitStreams
from .redis_streams import RedisStreams

__all__ = ("PEERS", "Kafka", "NatsJetStream", "Peer", "RabbitStreams", "RedisStreams")

PEERS: dict[str, Peer] = {
    "redis": RedisStreams("everysec"),
    "redis-asyncio": RedisStreams("everysec", blocking_client=False),
    "redis-always": RedisStreams("always"),
    "nats": NatsJetStream(),
    "rabbitmq": RabbitStreams(),
    "kafka": Kafka(),
}
"""By short name, for choosing."""
