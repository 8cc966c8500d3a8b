"""Options of a provider's queues on Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ...streams.errors import InvalidArgument
from .secrets import ClientValue, SecretPlace, masked

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class KafkaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adapter `kafka`."""

    bootstrap: str
    """Addresses of some brokers, as host:port,host:port."""

    topic: str | None = None
    """The topic that has the queues. None: `headrace.` and the provider's name."""

    create: bool = True
    """Create the topic if it does not exist. False: refuse to open."""

    replication: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Replicas of a topic that is created. None: the default of the cluster."""

    retain_age_s: _Positive | None = None
    """Delete batches older than this, in seconds. None: do not delete by age."""

    retain_unfinished: bool = True
    """True: headrace deletes, and only batches that every subscription has finished. False: Kafka deletes by itself,
    and leaves gap records."""

    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """How long a publish waits for the brokers, in seconds. Keep it below `lease_s` of a cluster."""

    linger_ms: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    """How long the client waits for more records before it sends some, in milliseconds."""

    compression: str = "zstd"
    """Compression of records: zstd, lz4, snappy, gzip or none."""

    kafka: dict[str, ClientValue] = {}
    """Settings of the client by librdkafka's names, such as `security.protocol`. A secret is a text, or
    `{ file = ... }`, or `{ env = ... }`."""

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in self.__struct_fields__} | {"kafka": masked(self.kafka)}
        return f"KafkaOptions({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    def location(self, topic: str, topic_id: str) -> Mapping[str, Any]:
        """Return the options that locate the queues and decide the settings of the topic, without secrets."""
        stored = {
            name: value for name, value in self.kafka.items() if isinstance(value, SecretPlace) or not _secret(name)
        }
        return {
            "bootstrap": self.bootstrap,
            "topic": topic,
            "topic_id": topic_id,
            "retain_unfinished": self.retain_unfinished,
            "kafka": msgspec.to_builtins(stored),
        }


def _secret(name: str) -> bool:
    return masked({name: "x"})[name] != "x"


def with_location(provider: str, given: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the options given, completed by the stored location, and the id of the topic, "" if it is not known.

    Brokers may move: other addresses are accepted. Raises InvalidArgument for another topic.
    """
    stored = dict(stored)
    topic_id = stored.pop("topic_id", "")
    if "topic" in stored and given.get("topic", stored["topic"]) != stored["topic"]:
        raise InvalidArgument(
            f"provider {provider!r} has its queues in the topic {stored['topic']!r}, not {given['topic']!r}: open it "
            f"with topic = {stored['topic']!r}, or create another provider",
            option="options",
        )
    if "bootstrap" in given:
        stored.pop("kafka", None)
    return {**stored, **given}, topic_id
