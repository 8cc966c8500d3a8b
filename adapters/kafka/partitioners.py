"""How producers of Kafka choose the partition of a key, and the mapper of a raw topic. Pure.

`murmur2` is the rule of the Java client, and `crc32` that of librdkafka (C, Python, Go, .NET, Node).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from zlib import crc32

from ...streams.errors import InvalidArgument
from ...streams.identity import StreamId
from .keys import RecordKey, record_key

REMEMBERED = 1 << 17
"""Largest number of streams whose partition is remembered."""
_SEED, _FACTOR, _MASK = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Return the hash of the Java client, as an unsigned number of 32 bits."""
    result = _SEED ^ len(data)
    whole = len(data) & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        mixed = word * _FACTOR & _MASK
        mixed = (mixed ^ mixed >> 24) * _FACTOR & _MASK
        result = result * _FACTOR & _MASK ^ mixed
    if whole < len(data):
        result = (result ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    result = (result ^ result >> 13) * _FACTOR & _MASK
    return result ^ result >> 15


def murmur2_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key as the Java client does."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def crc32_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key as librdkafka does. It spreads empty keys at random."""
    return crc32(key) % partitions


class PartitionMapper:
    """The mapper of a raw topic: the partitions that producers choose for the key of a stream."""

    def __init__(self, partitioner: str, queues: int, ring: Callable[[StreamId], int] | None = None) -> None:
        """`partitioner` is `murmur2`, `crc32`, `any` or `ring`. The partitioner `ring` needs the argument `ring`,
        headrace's own mapper."""
        if partitioner == "ring" and ring is None:
            raise InvalidArgument("partitioner = 'ring' needs the mapper of the provider", option="options")
        self.name = f"kafka-{partitioner}"
        self.queues = queues
        self._partitioner = partitioner
        self._ring = ring
        self._remembered: dict[StreamId, int] = {}

    def queue_of(self, stream: StreamId) -> int:
        """See StreamMapper. With `any`, headrace publishes by `murmur2`."""
        queue = self._remembered.get(stream)
        if queue is None:
            queue = self._choose(stream, self._key_of(stream))
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            self._remembered[stream] = queue
        return queue

    def queues_with(self, stream: StreamId) -> Sequence[int]:
        """See StreamMapper: one queue, or all if producers may choose any."""
        key = self._key_of(stream)
        at_random = self._partitioner == "any" or (self._partitioner == "crc32" and not key.key)
        return range(self.queues) if key.partition is None and at_random else (self.queue_of(stream),)

    def _key_of(self, stream: StreamId) -> RecordKey:
        found = record_key(stream.key)
        if found.partition is not None and not 0 <= found.partition < self.queues:
            raise InvalidArgument(f"the key {stream.key!r} names a partition that the topic does not have")
        return found

    def _choose(self, stream: StreamId, key: RecordKey) -> int:
        if key.partition is not None:
            return key.partition
        if self._ring is not None and self._partitioner == "ring":
            return self._ring(stream)
        choose = crc32_partition if self._partitioner == "crc32" else murmur2_partition
        return choose(key.key or b"", self.queues)
