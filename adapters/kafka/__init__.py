"""Adapter `kafka`: queues on Apache Kafka. Needs `headrace[kafka]`. See docs/kafka.md."""

try:
    import confluent_kafka as confluent_kafka  # imported early, so that a missing package is named
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "headrace.adapters.kafka needs the package 'confluent_kafka', which is not installed: "
        "pip install 'headrace[kafka]'",
        name=missing.name,
    ) from None

from .adapter import KafkaAdapter, open_adapter
from .limits import KafkaLimits
from .options import KafkaOptions

__all__ = ("KafkaAdapter", "KafkaLimits", "KafkaOptions", "open_adapter")
