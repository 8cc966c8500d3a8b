"""The ledger of idempotent producers, kept by the log itself. Pure.

A producer here is a caller of `publish_many(sequence=…)`, not a client of Kafka.

Each record of an idempotent call has a header: the tag of its partition, producer, number of the call, number of the
call before, index of the batch in the call, and number of batches of the call. The tag identifies the partition for
which the record was written. A record that was copied to another topic has another tag, so it belongs to no call.

A `QueueLedger` is made from the headers of one queue, in order. So all processes that read the same records decide in
the same way which of them are duplicates. A duplicate is stored only if a publisher gave up on a call, another one sent
it again, and the first write still arrived.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ...streams.producer_ledger import LastCall
from ...streams.publishing import ProducerSequence

CALL = "headrace.call"
"""Name of the header."""
TAG_BYTES = 8
_FIXED = struct.Struct(f"<B{TAG_BYTES}sQQII")
_VERSION = 2


def partition_tag(topic_id: str, partition: int) -> bytes:
    """Return the tag of a partition, as headers have it. A topic that is created again has another id."""
    return hashlib.blake2b(f"{topic_id}/{partition}".encode(), digest_size=TAG_BYTES).digest()


class CallPart(msgspec.Struct, frozen=True, array_like=True):
    """The call to which a record belongs, and the index of its batch in the call."""

    producer: str
    number: int
    previous: int
    index: int
    count: int

    def encode(self, tag: bytes) -> bytes:
        fixed = _FIXED.pack(_VERSION, tag, self.number, self.previous, self.index, self.count)
        return fixed + self.producer.encode()

    @classmethod
    def decode(cls, header: bytes, tag: bytes) -> CallPart | None:
        """Return None if the header is not one that this version writes for this partition."""
        if len(header) <= _FIXED.size or header[0] != _VERSION:
            return None
        _, written_for, number, previous, index, count = _FIXED.unpack_from(header)
        if written_for != tag:
            return None
        try:
            return cls(header[_FIXED.size :].decode(), number, previous, index, count)
        except UnicodeDecodeError:
            return None


def call_part(headers: Iterable[tuple[str, bytes | None]], tag: bytes) -> CallPart | None:
    """Return the part of a call that is in a record with these headers. None if the record belongs to no call."""
    for name, value in headers:
        if name == CALL and value is not None:
            return CallPart.decode(value, tag)
    return None


class StoredCall(msgspec.Struct, array_like=True):
    """The parts of a producer's last call that are in one queue."""

    number: int
    previous: int
    count: int
    parts: dict[int, int]
    """The offset of each part, by its index."""
    time_ms: int


class LedgerSnapshot(msgspec.Struct, array_like=True):
    """A `QueueLedger`, as it is stored. Other versions may add fields."""

    position: int
    calls: dict[str, StoredCall]
    duplicates: list[int]


class QueueLedger:
    """The last call of each producer in one queue, by the records below `position`."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self._calls: dict[str, StoredCall] = {}
        self._duplicates: list[int] = []

    def observe(self, offset: int, part: CallPart, time_ms: int) -> bool:
        """Note a record that has a part of a call. Return False if it is a duplicate, which readers leave out.

        All records with a part below `offset` must have been observed. Records may be observed again.
        """
        if offset < self.position:
            return not self._is_duplicate(offset)
        self.position = offset + 1
        last = self._calls.get(part.producer)
        if last is None or part.number > last.number:
            self._calls[part.producer] = StoredCall(
                part.number, part.previous, part.count, {part.index: offset}, time_ms
            )
            return True
        if part.number == last.number and part.index not in last.parts:
            last.parts[part.index] = offset
            last.time_ms = time_ms
            return True
        self._duplicates.append(offset)
        return False

    def _is_duplicate(self, offset: int) -> bool:
        if not self._duplicates:
            return False
        at = bisect_left(self._duplicates, offset)
        return at < len(self._duplicates) and self._duplicates[at] == offset

    def advance(self, position: int) -> None:
        """Move the position over offsets that have no records, only transaction markers or deleted records."""
        self.position = max(self.position, position)

    def stored(self, producer: str) -> StoredCall | None:
        return self._calls.get(producer)

    def snapshot(self, oldest_ms: int, first: int) -> LedgerSnapshot:
        """Return the ledger as it is to be stored. Forget producers without a call since `oldest_ms`, and duplicates
        below `first`."""
        for producer in [name for name, call in self._calls.items() if call.time_ms < oldest_ms]:
            del self._calls[producer]
        del self._duplicates[: bisect_left(self._duplicates, first)]
        return LedgerSnapshot(self.position, self._calls, self._duplicates)

    def forget_oldest_half(self) -> int:
        """Forget the half of the producers that stored nothing for the longest time. Return their number."""
        oldest = sorted(self._calls, key=lambda producer: self._calls[producer].time_ms)[: (len(self._calls) + 1) // 2]
        for producer in oldest:
            del self._calls[producer]
        return len(oldest)

    @classmethod
    def copy_of(cls, other: QueueLedger) -> QueueLedger:
        """Return a ledger that does not change with the other one."""
        copy = cls()
        copy.adopt(msgspec.msgpack.decode(msgspec.msgpack.encode(other.snapshot(0, 0)), type=LedgerSnapshot))
        return copy

    def adopt(self, snapshot: LedgerSnapshot) -> None:
        """Continue from a snapshot, unless this ledger is further."""
        if snapshot.position > self.position:
            self.position = snapshot.position
            self._calls = snapshot.calls
            self._duplicates = snapshot.duplicates


class ProducerState(msgspec.Struct, frozen=True):
    """A producer's last call, as the queues have stored it."""

    last: LastCall
    """The last call that is stored as a whole."""
    begun: int = 0
    """The number of a later call that is stored in part, 0 if there is none."""
    parts: Mapping[int, int] = msgspec.field(default_factory=dict[int, int])
    """The offsets of its parts that are stored, by index."""

    def missing(self, sequence: ProducerSequence, batches: int) -> Sequence[int]:
        """Return the indexes of the batches of a call that must still be stored."""
        if sequence.number != self.begun:
            return range(batches)
        return [index for index in range(batches) if index not in self.parts]


def producer_state(calls: Iterable[StoredCall]) -> ProducerState:
    """Put together what each queue has of a producer's last call."""
    known = list(calls)
    number = max((call.number for call in known), default=0)
    of_last = [call for call in known if call.number == number]
    if not of_last:
        return ProducerState(LastCall())
    parts = {index: offset for call in of_last for index, offset in call.parts.items()}
    count, previous = of_last[0].count, of_last[0].previous
    if len(parts) == count:
        return ProducerState(LastCall(number, [parts[index] for index in range(count)]))
    return ProducerState(LastCall(previous), number, parts)
