"""Records that are one event each, as other programs write and read them. docs/kafka.md has the table of the rules."""

from __future__ import annotations

import logging

from ...streams import layout
from ...streams.errors import InvalidArgument, PayloadTooLarge
from ...streams.events import MAX_EVENT_BYTES, Event, EventBatch
from ...streams.field_limits import MAX_HEADERS, MAX_TIME_US, MIN_TIME_US, check_headers, check_ids
from ...streams.identity import MAX_NAME_BYTES, StreamId, varint
from .client import KafkaRecord, RecordHeaders
from .keys import as_base64, record_key, stream_key
from .ledger import CALL
from .partitioners import PartitionMapper
from .publisher import OutgoingRecord

log = logging.getLogger("headrace.adapters.kafka")

OWN = "headrace."
"""Names of headers that begin with this text belong to headrace."""
TIME, ID = f"{OWN}time", f"{OWN}id"
NULL_VALUE = "kafka.value"
"""An event with this header, and the value `null`, is a record without a value: a tombstone."""
MAX_DIGITS = 20
_HEADER_BYTES = 8
"""Bytes that Kafka adds to a header, at most: the lengths of its name and value."""
_HEADERS_BYTES = 64 + _HEADER_BYTES * (MAX_HEADERS + 2)
"""Bound of the bytes of an event's headers that its batch does not have: the header of the time, the name of the header
of the id, and the bytes that Kafka adds."""
KNOWN_KEYS = 1 << 16
"""Largest number of keys whose streams a reader remembers."""
CHECKED_KEYS = 1 << 12
"""Number of new keys whose partition is checked."""
CHECK_EACH = 64
"""The partition of one record in so many is checked, too. To check all would double the cost of a record."""


class RawFormat:
    """A record is one event: its key is the stream's key, its topic the stream's namespace."""

    def __init__(self, namespace: str, mapper: PartitionMapper, max_bytes: int) -> None:
        """`max_bytes`: the largest record that the topic stores."""
        self._namespace = namespace
        self._mapper = mapper
        self._max_bytes = max_bytes
        self._streams: dict[tuple[bytes | None, int], StreamId] = {}
        self._prefix = StreamId(namespace, "").prefix[:-1]
        """The beginning of the `prefix` of each stream. The last byte is left out: the length of the empty key."""
        self._new_keys = self._records = 0
        self._misplaced = False

    # ---- writing ---------------------------------------------------------------------------------------------------

    def records(self, queue: int, batch: EventBatch) -> list[OutgoingRecord]:
        """See RecordFormat. Raises InvalidArgument for another namespace, for a key that cannot be a record's, and for
        names of headers that belong to headrace."""
        stream = batch.stream
        if stream.namespace != self._namespace:
            raise InvalidArgument(
                f"{stream} cannot be stored: the records of this topic are the streams of the namespace "
                f"{self._namespace!r}; publish there, or use another provider"
            )
        key = record_key(stream.key)
        if key.is_hashed:
            raise InvalidArgument(f"{stream} stands for a key that is too long for a name: headrace only reads it")
        records = [self._record(queue, key.key, event) for event in batch.iter_events()]
        if batch.nbytes + len(records) * _HEADERS_BYTES > self._max_bytes:
            for record in records:
                nbytes = record.nbytes + sum(
                    len(name.encode()) + len(value) + _HEADER_BYTES for name, value in record.headers or ()
                )
                if nbytes > self._max_bytes:
                    raise PayloadTooLarge(f"an event for {stream}", nbytes, self._max_bytes)
        return records

    def _record(self, queue: int, key: bytes | None, event: Event) -> OutgoingRecord:
        headers = [(TIME, b"%d" % (event.timestamp_us or 0))]
        if not event.id and not event.headers:
            return OutgoingRecord(queue, key, event.payload, headers)
        if event.id:
            headers.append((ID, event.id.encode()))
        value: bytes | None = event.payload
        for name, text in event.headers.items():
            if name.startswith(OWN):
                raise InvalidArgument(f"the header {name!r} cannot be stored: names with {OWN!r} belong to headrace")
            if name == NULL_VALUE and text == "null" and not value:
                value = None
            else:
                headers.append((name, text.encode()))
        return OutgoingRecord(queue, key, value, headers)

    # ---- reading, in a thread --------------------------------------------------------------------------------------

    def batch(self, record: KafkaRecord, headers: RecordHeaders) -> EventBatch | str:
        value = record.value()
        if value is not None and len(value) > MAX_EVENT_BYTES:
            return f"the record's value has {len(value):,} bytes, and an event has at most {MAX_EVENT_BYTES:,}"
        stream = self._stream(record)
        if value is not None and (given := _only_time(headers)) is not None:
            return EventBatch(stream, layout.write_one(stream.prefix, value, given), 1, record.offset())
        time_us = _time_us(record.timestamp()[1] * 1000)
        if value is not None and not headers:
            return EventBatch(stream, layout.write_one(stream.prefix, value, time_us), 1, record.offset())
        try:
            found = _fields(headers, time_us)
            if value is None:
                found.headers[NULL_VALUE] = "null"
            check_headers(found.headers)
            check_ids((found.event_id,))
        except InvalidArgument as error:
            return f"the record is not an event: {error}"
        rare = layout.write_rare([found.event_id], [found.headers]) if found.event_id or found.headers else b""
        payload = value or b""
        encoded = (
            layout.write(stream.prefix, (len(payload),), (found.time_us,), rare, payload)
            if rare
            else layout.write_one(stream.prefix, payload, found.time_us)
        )
        return EventBatch(stream, encoded, 1, record.offset())

    def _stream(self, record: KafkaRecord) -> StreamId:
        key_and_partition = record.key(), record.partition()
        stream = self._streams.get(key_and_partition)
        if stream is None:
            stream = self._new_stream(stream_key(*key_and_partition))
            if len(self._streams) >= KNOWN_KEYS:
                self._streams.clear()
            if len(key_and_partition[0] or b"") <= MAX_NAME_BYTES:
                self._streams[key_and_partition] = stream
            self._new_keys += 1
            if self._new_keys <= CHECKED_KEYS:
                self._check_partition(stream, key_and_partition[1], record.offset())
        self._records += 1
        if not self._records % CHECK_EACH:
            self._check_partition(stream, key_and_partition[1], record.offset())
        return stream

    def _new_stream(self, key: str) -> StreamId:
        encoded = key.encode()
        prefix = b"".join((self._prefix, varint(len(encoded)), encoded))
        return StreamId.of_prefix(self._namespace, key, prefix)

    def _check_partition(self, stream: StreamId, partition: int, offset: int) -> None:
        """Report a record in another partition than the partitioner's: subscriptions to its stream alone miss it."""
        if self._misplaced or partition in self._mapper.queues_with(stream):
            return
        self._misplaced = True
        log.error(
            "queue %d, offset %d: a record of %s is here, and %s expects it in queue %d: its producer partitions in "
            "another way, so subscriptions to one stream miss events, and those with effects give up on them; create "
            "the provider anew with the partitioner of its producers, or with partitioner = 'any'",
            partition, offset, stream, self._mapper.name, self._mapper.queue_of(stream),
        )  # fmt: skip


class _Fields:
    """The fields of an event that are in headers."""

    def __init__(self, time_us: int) -> None:
        self.time_us = time_us
        self.event_id = ""
        self.headers: dict[str, str] = {}


def _fields(headers: RecordHeaders, time_us: int) -> _Fields:
    """Return the fields in the headers of a record. `time_us` is the time if no header has it."""
    found = _Fields(time_us)
    for name, value in headers:
        if not name.startswith(OWN):
            found.headers[name] = "" if value is None else _text(value)
        elif name == TIME and (given := _given_time(value)) is not None:
            found.time_us = given
        elif name == ID and value is not None:
            found.event_id = _text(value)
        elif name != CALL:
            found.headers[name] = "" if value is None else _text(value)
    return found


def _only_time(headers: RecordHeaders) -> int | None:
    """Return the time in the headers if they have nothing else, as those of most events that headrace has published."""
    return _given_time(headers[0][1]) if len(headers) == 1 and headers[0][0] == TIME else None


def _given_time(value: bytes | None) -> int | None:
    """Return the time of an event that its publisher wrote, None if it is no number."""
    if value is None or len(value) >= MAX_DIGITS or not value.removeprefix(b"-").isdigit():
        return None
    return _time_us(int(value))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return as_base64(value)


def _time_us(time_us: int) -> int:
    """Return the time of an event, or 0 if the number cannot be a time in microseconds: a producer may have written
    another unit."""
    return time_us if MIN_TIME_US <= time_us <= MAX_TIME_US else 0
