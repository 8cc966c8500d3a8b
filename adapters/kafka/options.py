"""Options of a provider's queues on Kafka."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ...streams.errors import InvalidArgument
from .secrets import ClientValue, SecretPlace, is_secret, masked

MAX_TOPIC_CHARACTERS = 239
"""Kafka's limit is 249, and `TOPIC.producers` must be a name, too."""
_TOPIC = re.compile(rf"[a-zA-Z0-9._-]{{1,{MAX_TOPIC_CHARACTERS}}}")
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class KafkaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the adapter `kafka`."""

    bootstrap: str
    """Addresses of some brokers, as host:port,host:port."""

    topic: str | None = None
    """The topic that has the queues. None: `headrace.` and the provider's name."""

    format: Literal["packed", "raw"] = "packed"
    """`packed`: a record is a batch of events, which only headrace writes and reads. `raw`: a record is one event, and
    other programs write and read the topic, too."""

    partitioner: Literal["any", "murmur2", "crc32", "ring"] = "any"
    """How the producers of a raw topic choose the partition of a key."""

    namespace: str | None = None
    """The namespace of the streams of a raw topic. None: the name of the topic."""

    create: bool = True
    """Create the topic if it does not exist. False: refuse to open."""

    replication: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Replicas of a topic that is created. None: the default of the cluster."""

    retain_age_s: _Positive | None = None
    """Delete batches older than this, in seconds. None: do not delete by age."""

    retain_unfinished: bool | None = None
    """True: headrace deletes, and only batches that every subscription has finished. False: Kafka deletes by itself,
    and leaves gap records. None: False for a raw topic, else True."""

    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """How long a publish waits for the brokers, in seconds. Keep it below `lease_s` of a cluster."""

    linger_ms: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    """How long the client waits for more records before it sends some, in milliseconds."""

    compression: Literal["zstd", "lz4", "snappy", "gzip", "none"] = "zstd"
    """Compression of records."""

    kafka: dict[str, ClientValue] = {}
    """Settings of the client by librdkafka's names, such as `security.protocol`. A secret is a text, or
    `{ file = ... }`, or `{ env = ... }`."""

    def __post_init__(self) -> None:
        if not self.bootstrap.strip():
            raise ValueError("bootstrap is empty: write the addresses of some brokers, as host:port,host:port")
        if self.topic is not None and not _TOPIC.fullmatch(self.topic):
            raise ValueError(
                f"topic = {self.topic!r} cannot be the name of a topic: write 1 to {MAX_TOPIC_CHARACTERS} letters of "
                "ASCII, digits, '.', '_' or '-'"
            )
        if self.format == "packed" and self.partitioner != "any":
            raise ValueError("partitioner is an option of raw topics: set format = 'raw', or leave it out")
        if self.format == "packed" and self.namespace is not None:
            raise ValueError("namespace is an option of raw topics: set format = 'raw', or leave it out")

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in self.__struct_fields__} | {"kafka": masked(self.kafka)}
        return f"KafkaOptions({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    @property
    def keeps_unfinished(self) -> bool:
        """Whether headrace deletes finished batches, and Kafka deletes nothing by itself."""
        return self.format == "packed" if self.retain_unfinished is None else self.retain_unfinished

    def location(self, topic: str, topic_id: str) -> Mapping[str, Any]:
        """Return the options that locate the queues and decide the settings of the topic, without secrets."""
        stored = {
            name: value for name, value in self.kafka.items() if isinstance(value, SecretPlace) or not is_secret(name)
        }
        return {
            "bootstrap": self.bootstrap,
            "topic": topic,
            "topic_id": topic_id,
            "retain_unfinished": self.keeps_unfinished,
            # If Kafka deletes by age, the topic has the age.
            **({"retain_age_s": self.retain_age_s} if self.keeps_unfinished and self.retain_age_s else {}),
            "kafka": msgspec.to_builtins(stored),
            **({} if self.format == "packed" else self._raw_location(topic)),
        }

    def _raw_location(self, topic: str) -> Mapping[str, Any]:
        return {"format": self.format, "partitioner": self.partitioner, "namespace": self.namespace or topic}


_FIXED_OPTIONS = ("topic", "format", "partitioner", "namespace")
"""Options that decide the meaning of the queues' offsets and streams."""


def with_location(provider: str, given: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the options given, completed by the stored location, and the id of the topic, "" if it is not known.

    Given options win, except those in `_FIXED_OPTIONS`, which must be equal: brokers may move, for example. Settings of
    the client in `kafka` are replaced as a whole. Raises InvalidArgument for another topic, or for a raw topic that is
    read in another way.
    """
    stored = dict(stored)
    topic_id = stored.pop("topic_id", "")
    fixed = {"format": "packed", **stored} if stored else {}
    for name in _FIXED_OPTIONS:
        if name in fixed and given.get(name, fixed[name]) != fixed[name]:
            raise InvalidArgument(
                f"provider {provider!r} has its queues in {name} = {fixed[name]!r}, not {given[name]!r}: open it "
                f"with {name} = {fixed[name]!r}, or create another provider",
                option="options",
            )
    return {**stored, **given}, topic_id
