"""Events, and the batches in which they are stored, cached and delivered.

An `EventBatch` is the protobuf message `headrace.v1.EventBatch` (see `proto/v1/events.proto`), encoded once by its
producer. Its hot columns (sizes, timestamps, payload) are fixed-width or plain bytes, so this module writes and slices
them itself: each payload byte is copied once in and once out. The rare columns (ids, headers) go through the protobuf
library. Tests compare both ways with the generated code.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import InvalidArgument, PayloadTooLarge
from .identity import SequenceToken, StreamId, varint

if TYPE_CHECKING:
    from ..proto.v1 import events_pb2

MAX_EVENT_BYTES = 1 << 20
"""Limit of one payload, in bytes."""
BATCH_TARGET_BYTES = 1 << 20
"""A publish of more than this is stored as several batches."""
MAX_BATCH_EVENTS = 1 << 16
"""Limit of events in one batch."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SIZES, _TIMESTAMPS, _IDS, _HEADERS, _PAYLOAD = 0x1A, 0x22, 0x2A, 0x32, 0x7A
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Event:
    """What is published and delivered.

    `timestamp_us` is microseconds since 1970 UTC; the time of publishing where it is not given. `delay` and `priority`
    need an adapter that declares them. `stream` and `token` are set on delivery and ignored on publishing.
    """

    payload: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: _NO_HEADERS)
    id: str | None = None
    timestamp_us: int | None = None
    delay: timedelta | None = None
    priority: int | None = None
    stream: StreamId | None = None
    token: SequenceToken | None = None

    @property
    def time(self) -> datetime | None:
        return None if self.timestamp_us is None else _EPOCH + timedelta(microseconds=self.timestamp_us)


_NOT_AN_EVENT = "publish bytes or Event, not {}: encode it first, for example with json.dumps(x).encode()"


class EventBatch:
    """Events of ONE stream, published together. Immutable once made.

    `encoded` is the whole protobuf message. `offset` is the batch's position in its queue, set by the adapter that
    stored it.
    """

    __slots__ = ("_columns", "bucket", "count", "encoded", "following", "offset", "stream")

    # `bucket` and `following` belong to the cache that holds the batch (agents/cache.py): one object per batch on the
    # whole path is worth two fields here. They, and what is known of the columns, are set when they are first needed.
    bucket: Any
    following: EventBatch | None
    _columns: _Columns

    def __init__(self, stream: StreamId, encoded: bytes, count: int, offset: int = 0) -> None:
        self.stream = stream
        self.encoded = encoded
        self.count = count
        self.offset = offset

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EventBatch):
            return NotImplemented
        return (self.stream, self.offset, self.encoded) == (other.stream, other.offset, other.encoded)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"EventBatch({self.stream!s}, offset={self.offset}, count={self.count})"

    @property
    def token(self) -> SequenceToken:
        """The position of the first event."""
        return SequenceToken(self.offset, 0)

    @property
    def nbytes(self) -> int:
        """Encoded size in bytes: what counts against every byte limit."""
        return len(self.encoded)

    @classmethod
    def of(cls, stream: StreamId, events: Iterable[bytes | Event], now_us: int | None = None) -> EventBatch:
        """Encode events of one stream as one batch.

        Raises InvalidArgument for what is no event, PayloadTooLarge above `MAX_EVENT_BYTES`.
        """
        return _encode(stream, list(events), now_us)

    @classmethod
    def decode(cls, encoded: bytes, offset: int = 0) -> EventBatch:
        """Read an encoded batch whose stream is not known. Raises InvalidArgument where the bytes are no batch."""
        columns = _scan(encoded)
        batch = cls(_stream_of(encoded), encoded, len(columns.sizes), offset)
        batch._columns = columns  # noqa: SLF001
        return batch

    def payloads(self) -> list[bytes]:
        """The payloads alone, in order: the cheapest way to read a batch."""
        columns = self._scanned()
        encoded = self.encoded
        return [encoded[a:b] for a, b in pairwise(accumulate(columns.sizes, initial=columns.payload))]

    def sizes(self) -> Sequence[int]:
        """Payload size of each event, in bytes."""
        return self._scanned().sizes

    def timestamps_us(self) -> Sequence[int]:
        """Time of each event, in microseconds since 1970 UTC."""
        timestamps = self._scanned().timestamps
        return timestamps if len(timestamps) == self.count else [timestamps[0] if timestamps else 0] * self.count

    def events(self, start: int = 0) -> list[Event]:
        """The events from index `start` on, with `stream` and `token` set."""
        stream, offset = self.stream, self.offset
        columns = self._scanned()
        token = SequenceToken
        rows = zip(self.payloads(), self.timestamps_us(), strict=True)
        if not columns.rare:
            return [
                Event(payload, _NO_HEADERS, None, timestamp, None, None, stream, token(offset, index))
                for index, (payload, timestamp) in enumerate(rows)
                if index >= start
            ]
        rare = _parse_rare(self.encoded, columns)
        ids = rare.ids or [""] * self.count
        headers: Sequence[Mapping[str, str]] = [dict(h.values) for h in rare.headers] or [_NO_HEADERS] * self.count
        return [
            Event(payload, headers[index], ids[index] or None, timestamp, None, None, stream, token(offset, index))
            for index, (payload, timestamp) in enumerate(rows)
            if index >= start
        ]

    def _scanned(self) -> _Columns:
        try:
            return self._columns
        except AttributeError:
            columns = self._columns = _scan(self.encoded)
            return columns


class _Columns(NamedTuple):
    """Where the columns of an encoded batch are."""

    sizes: array[int]
    timestamps: array[int]
    payload: int  # where the payload begins
    payload_size: int
    rare: bool  # ids or headers are there


def _encode(stream: StreamId, events: list[bytes | Event], now_us: int | None) -> EventBatch:
    if not events:
        raise InvalidArgument("a batch has at least one event")
    if len(events) > MAX_BATCH_EVENTS:
        raise InvalidArgument(f"a batch has at most {MAX_BATCH_EVENTS:,} events, not {len(events):,}")
    now = time.time_ns() // 1000 if now_us is None else now_us
    plain = all(type(event) is bytes for event in events)
    payloads: list[bytes] = events if plain else [_payload(event) for event in events]  # type: ignore[assignment]
    sizes = array("I", map(len, payloads))
    if max(sizes) > MAX_EVENT_BYTES:
        raise PayloadTooLarge(f"the payload of an event for {stream}", max(sizes), MAX_EVENT_BYTES)
    if plain:
        timestamps, rare = array("q", (now,)), b""
    else:
        timestamps, rare = _timestamps(events, now), _encode_rare(events)
    if sys.byteorder == "big":
        sizes.byteswap()
        timestamps.byteswap()
    size_bytes, time_bytes, total = sizes.tobytes(), timestamps.tobytes(), sum(map(len, payloads))
    head = (stream.prefix, b"\x1a", varint(len(size_bytes)), size_bytes, b"\x22", varint(len(time_bytes)), time_bytes)
    encoded = b"".join((*head, rare, b"\x7a", varint(total), *payloads))
    return EventBatch(stream, encoded, len(payloads))


def _payload(event: object) -> bytes:
    payload = event.payload if isinstance(event, Event) else event
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload)
    raise InvalidArgument(_NOT_AN_EVENT.format(type(payload).__name__))


def _timestamps(events: Sequence[bytes | Event], now: int) -> array[int]:
    values = [now if not isinstance(e, Event) or e.timestamp_us is None else e.timestamp_us for e in events]
    try:
        return array("q", values[:1] if values.count(values[0]) == len(values) else values)
    except (OverflowError, TypeError):
        raise InvalidArgument("timestamp_us is an integer of microseconds since 1970 that fits 64 bits") from None


def _encode_rare(events: Sequence[bytes | Event]) -> bytes:
    ids = [event.id or "" if isinstance(event, Event) else "" for event in events]
    headers = [event.headers if isinstance(event, Event) else _NO_HEADERS for event in events]
    if not any(ids) and not any(headers):
        return b""
    from ..proto.v1 import events_pb2  # noqa: PLC0415 (only where ids or headers are used)

    try:
        return events_pb2.EventBatch(
            ids=ids if any(ids) else (),
            headers=[events_pb2.Headers(values=h) for h in headers] if any(headers) else (),
        ).SerializeToString(deterministic=True)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"ids and headers are text in UTF-8: {error}") from None


def _parse_rare(encoded: bytes, columns: _Columns) -> events_pb2.EventBatch:
    from ..proto.v1 import events_pb2  # noqa: PLC0415

    tail = columns.payload + columns.payload_size
    return events_pb2.EventBatch.FromString(encoded[: columns.payload - _payload_head(columns)] + encoded[tail:])


def _payload_head(columns: _Columns) -> int:
    return 1 + len(varint(columns.payload_size))


def _scan(encoded: bytes) -> _Columns:
    """Find the columns. Raises InvalidArgument where the bytes are no batch."""
    sizes, timestamps = array("I"), array("q")
    payload = payload_size = 0
    rare = False
    for tag, start, end in _fields(encoded):
        if tag == _SIZES:
            sizes = _fixed("I", encoded[start:end])
        elif tag == _TIMESTAMPS:
            timestamps = _fixed("q", encoded[start:end])
        elif tag == _PAYLOAD:
            payload, payload_size = start, end - start
        elif tag in (_IDS, _HEADERS):
            rare = True
    if sum(sizes) != payload_size:
        raise InvalidArgument(f"damaged batch: the sizes add up to {sum(sizes)}, the payload has {payload_size} bytes")
    if len(timestamps) not in (0, 1, len(sizes)):
        raise InvalidArgument(f"damaged batch: {len(timestamps)} timestamps for {len(sizes)} events")
    return _Columns(sizes, timestamps, payload, payload_size, rare)


def _fixed(code: str, data: bytes) -> array[int]:
    values = array(code)
    try:
        values.frombytes(data)
    except ValueError:
        raise InvalidArgument("damaged batch: a fixed-width column is cut short") from None
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _fields(encoded: bytes) -> Iterator[tuple[int, int, int]]:
    """Walk the top-level fields: (tag, start, end) of each that is length-delimited; varints and fixed are skipped."""
    at, size = 0, len(encoded)
    try:
        while at < size:
            tag, at = _read_varint(encoded, at)
            wire = tag & 7
            if wire == 2:
                length, at = _read_varint(encoded, at)
                if at + length > size:
                    break
                yield tag, at, at + length
                at += length
            elif wire == 0:
                _, at = _read_varint(encoded, at)
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:
                break
        else:
            if at == size:
                return
    except IndexError:
        pass
    raise InvalidArgument(f"damaged batch: {size} bytes that are no EventBatch")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7


def _stream_of(encoded: bytes) -> StreamId:
    namespace = key = ""
    try:
        for tag, start, end in _fields(encoded):
            if tag == 0x0A:
                namespace = encoded[start:end].decode()
            elif tag == 0x12:
                key = encoded[start:end].decode()
    except UnicodeDecodeError:
        raise InvalidArgument("damaged batch: the stream's name is not UTF-8") from None
    return StreamId(namespace, key)
