"""The binary layout of a batch: the protobuf message `headrace.v1.EventBatch`, written and read by columns.

`proto/v1/events.proto` describes it. A producer writes, in this order: namespace and key (`StreamId.prefix`), sizes,
timestamps, ids and headers if there are any, payload. This module reads batches in this order without the protobuf
library, also if fields above 15 were appended. The protobuf library reads everything else: ids, headers, columns in
pieces or not packed, and bytes that look damaged.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

from .errors import InvalidArgument
from .identity import read_varint, varint

if TYPE_CHECKING:
    from ..proto.v1 import events_pb2

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

_NAMESPACE, _KEY, _SIZES, _TIMESTAMPS, _IDS, _HEADERS, _TRACE, _PAYLOAD = 0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32, 0x3A, 0x7A
_RARE = (_IDS, _HEADERS)
TRACE_BYTES = 25
"""The length of a trace."""
NOT_RECORDED = b"\0"
"""The trace of a batch whose publisher has tracing on, but records no span for it."""
_PAYLOAD_TAG = bytes((_PAYLOAD,))
_FIRST_APPENDED = 16
_LENGTH_DELIMITED = 2
_ONE_EVENT = struct.Struct("<HIHqB")
"""The bytes of a batch of one event between the prefix and the payload's length: sizes and timestamps, each after its
tag and length, which are read as one number, and then the payload's tag."""
_ONE_SHORT_EVENT = struct.Struct("<HIHqBB")
"""As `_ONE_EVENT`, followed by the length of the payload in one byte: for payloads below 128 bytes without a trace."""
_ONE_SIZE, _ONE_TIMESTAMP = 4 << 8 | _SIZES, 8 << 8 | _TIMESTAMPS
_SWAPPED = sys.byteorder == "big"


class BatchColumns(NamedTuple):
    """The columns of a batch. `source` holds the payloads from `start` on: the batch itself, or a copy."""

    sizes: Sequence[int]
    timestamps: Sequence[int]
    """One timestamp for each event, one for all events, or none."""
    source: bytes
    start: int
    rare: bool
    """Whether an event has an id or headers."""


def write_one(prefix: bytes, payload: bytes, timestamp_us: int, trace: bytes = b"") -> bytes:
    """Encode a batch of one event without id and headers. Raises InvalidArgument for an invalid timestamp."""
    size = len(payload)
    try:
        if size < 0x80 and not trace:  # the fast path of the most common event
            columns = _ONE_SHORT_EVENT.pack(_ONE_SIZE, size, _ONE_TIMESTAMP, timestamp_us, _PAYLOAD, size)
            return prefix + columns + payload
        columns = _ONE_EVENT.pack(_ONE_SIZE, size, _ONE_TIMESTAMP, timestamp_us, _TRACE if trace else _PAYLOAD)
    except struct.error:
        raise _no_timestamp() from None
    if trace:
        return b"".join((prefix, columns, bytes((len(trace),)), trace, _PAYLOAD_TAG, varint(size), payload))
    return b"".join((prefix, columns, varint(size), payload))


def write(prefix: bytes, sizes: Sequence[int], timestamps_us: Sequence[int], rare: bytes, payload: bytes) -> bytes:
    """Encode a batch from its columns; `rare` is the result of `write_rare`, and perhaps that of `write_trace`.

    Raises InvalidArgument for an invalid timestamp.
    """
    try:
        times = _packed("q", timestamps_us)
    except (OverflowError, TypeError):
        raise _no_timestamp() from None
    widths = _packed("I", sizes)
    columns = (b"\x1a", varint(len(widths)), widths, b"\x22", varint(len(times)), times)
    return b"".join((prefix, *columns, rare, b"\x7a", varint(len(payload)), payload))


def write_trace(trace: bytes) -> bytes:
    """Encode the field of a trace, which precedes the payload; nothing for one of another length."""
    return bytes((_TRACE, len(trace))) + trace if is_trace(trace) else b""


def is_trace(trace: bytes) -> bool:
    """Whether these bytes may be the trace of a batch."""
    return len(trace) == TRACE_BYTES or trace == NOT_RECORDED


def read_trace(encoded: bytes, prefix: bytes) -> bytes:
    """Return the trace of a batch of the stream with this `prefix`; empty if it has none."""
    if not encoded.startswith(prefix):
        return message_of(encoded).trace
    at = len(prefix)
    try:
        while (tag := encoded[at]) != _PAYLOAD:
            length, start = encoded[at + 1], at + 2
            if length > _ONE_BYTE:
                length, start = read_varint(encoded, at + 1, _SHORT)
            if tag == _TRACE:
                return encoded[start : start + length]
            at = start + length
    except IndexError:  # damaged
        return b""
    return b""


def write_schedule(delay_us: int, priority: int) -> bytes:
    """Encode the fields that are appended to a batch with a delay or a priority."""
    delay = b"\xa8\x01" + varint(delay_us) if delay_us else b""
    return delay + (b"\xb0\x01" + varint(priority) if priority else b"")


def write_rare(ids: Sequence[str], headers: Sequence[Mapping[str, str]]) -> bytes:
    """Encode the columns of ids and headers. A column without values is left out. Raises InvalidArgument for other
    types."""
    from ..proto.v1 import events_pb2  # noqa: PLC0415 (only where ids or headers are used)

    try:
        return events_pb2.EventBatch(
            ids=ids if any(ids) else (),
            headers=[events_pb2.Headers(values=values) for values in headers] if any(headers) else (),
        ).SerializeToString(deterministic=True)
    except (TypeError, ValueError, AttributeError) as error:
        wrong = [f"id {each!r}" for each in ids if type(each) is not str]
        wrong += [_wrong_header(each) for each in headers]
        found = next(filter(None, wrong), str(error))
        raise InvalidArgument(f"ids and headers are text in UTF-8: {found}") from None


def _wrong_header(headers: object) -> str:
    """Describe the first name or value in one event's headers that is not text; "" if all are."""
    if not isinstance(headers, Mapping):
        return f"headers {headers!r}"
    items = cast("Mapping[object, object]", headers).items()
    return next((f"{k!r}: {v!r}" for k, v in items if type(k) is not str or type(v) is not str), "")


def read_one(encoded: bytes, prefix: bytes) -> tuple[int, int] | None:
    """Return the timestamp of a batch that `write_one` made for the stream of `prefix`, and the start of its payload.

    Return None for any other batch.
    """
    at = len(prefix)
    length = at + _ONE_EVENT.size
    if len(encoded) <= length or not encoded.startswith(prefix):
        return None
    size_tag, size, time_tag, timestamp, tag = _ONE_EVENT.unpack_from(encoded, at)
    start = len(encoded) - size
    if tag == _TRACE and is_trace(trace := encoded[length + 1 : length + 1 + encoded[length]]):
        length += len(trace) + 2
        tag = encoded[length - 1] if length <= len(encoded) else _TRACE
    if size_tag != _ONE_SIZE or time_tag != _ONE_TIMESTAMP or tag != _PAYLOAD or encoded[length:start] != varint(size):
        return None
    return timestamp, start


def read(encoded: bytes) -> tuple[str, str, BatchColumns]:
    """Return namespace, key and columns of any batch. Raises InvalidArgument if the bytes are not a batch."""
    fields = _fields(encoded)
    return read_message(message_of(encoded)) if fields is None else _read_fields(encoded, fields)


def read_rare(encoded: bytes, count: int) -> tuple[Sequence[str | None], Sequence[Mapping[str, str]]]:
    """Return the ids and the headers of `count` events. Raises InvalidArgument if they are damaged."""
    message = message_of(encoded)
    for column in (message.ids, message.headers):
        if len(column) not in (0, count):
            raise InvalidArgument(f"damaged batch: {len(column)} ids or headers for {count} events")
    ids = [text or None for text in message.ids]
    headers = [dict(each.values) for each in message.headers]
    return ids or [None] * count, headers or [NO_HEADERS] * count


def slices(columns: BatchColumns, first: int = 0) -> list[bytes]:
    """Return the payloads from index `first` on."""
    return list(iter_slices(columns, first))


def iter_slices(columns: BatchColumns, first: int = 0) -> Iterator[bytes]:
    """Yield the payloads from index `first` on."""
    sizes = columns.sizes
    payloads = BytesIO(columns.source)  # shares the bytes
    payloads.seek(columns.start + sum(sizes[:first]))
    return map(payloads.read, sizes[first:] if first else sizes)


def message_of(encoded: bytes) -> events_pb2.EventBatch:
    """Parse with the protobuf library. Raises InvalidArgument if the library refuses the bytes."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 (only for what is rare)

    from ..proto.v1 import events_pb2  # noqa: PLC0415

    try:
        return events_pb2.EventBatch.FromString(encoded)
    except DecodeError:
        raise _damaged(encoded) from None


def _read_fields(encoded: bytes, fields: Mapping[int, tuple[int, int]]) -> tuple[str, str, BatchColumns]:
    def field(tag: int) -> bytes:
        start, end = fields.get(tag, (0, 0))
        return encoded[start:end]

    start, end = fields.get(_PAYLOAD, (0, 0))
    rare = _IDS in fields or _HEADERS in fields
    try:
        columns = BatchColumns(_unpacked("I", field(_SIZES)), _unpacked("q", field(_TIMESTAMPS)), encoded, start, rare)
        namespace, key = field(_NAMESPACE).decode(), field(_KEY).decode()
    except ValueError:  # a column is cut short, or a name is not UTF-8
        raise _damaged(encoded) from None
    _check(columns, end - start)
    return namespace, key, columns


def read_message(message: events_pb2.EventBatch) -> tuple[str, str, BatchColumns]:
    """Like `read`, for a batch that the protobuf library has parsed."""
    rare = bool(message.ids or message.headers)
    columns = BatchColumns(array("I", message.sizes), array("q", message.timestamps_us), message.payload, 0, rare)
    _check(columns, len(columns.source))
    return message.namespace, message.key, columns


def _check(columns: BatchColumns, payload: int) -> None:
    count, total = len(columns.sizes), sum(columns.sizes)
    if not count:
        raise InvalidArgument("damaged batch: it has no events")
    if total != payload:
        raise InvalidArgument(f"damaged batch: the sizes add up to {total}, the payload has {payload} bytes")
    if len(columns.timestamps) not in (0, 1, count):
        raise InvalidArgument(f"damaged batch: {len(columns.timestamps)} timestamps for {count} events")


_ONE_BYTE = 0x7F
"""The largest varint in one byte."""
_SHORT = 4
"""Longest varint that is read here, in bytes: the protobuf library judges longer ones."""


def _fields(encoded: bytes) -> dict[int, tuple[int, int]] | None:
    """Return start and end of each field below 16, by tag.

    Return None if a field is in pieces, not length-delimited, or cut off: then the protobuf library decides.
    """
    fields: dict[int, tuple[int, int]] = {}
    at, end = 0, len(encoded)
    try:
        while at < end:
            tag = encoded[at]
            if tag >= 0x80:
                at = _skip(encoded, at)
                continue
            length, at = read_varint(encoded, at + 1, _SHORT)
            whole = tag & 7 == _LENGTH_DELIMITED and tag > 7 and (tag not in fields or tag in _RARE)
            if not whole or at + length > end:
                return None
            fields[tag] = at, at + length
            at += length
    except IndexError:
        return None
    return fields if at == end else None


def _skip(encoded: bytes, at: int) -> int:
    """Return the start of the next field, after an appended one. Raises IndexError if the library must decide."""
    tag, at = read_varint(encoded, at, _SHORT)
    if not _FIRST_APPENDED <= tag >> 3 < 1 << 11:
        raise IndexError
    wire = tag & 7
    if wire == 0:
        return read_varint(encoded, at, _SHORT)[1]
    if wire == _LENGTH_DELIMITED:
        length, at = read_varint(encoded, at, _SHORT)
        return at + length
    if wire in (1, 5):
        return at + (8 if wire == 1 else 4)
    raise IndexError


def _packed(code: str, values: Iterable[int]) -> bytes:
    column: array[int] = array(code, values)
    if _SWAPPED:
        column.byteswap()
    return column.tobytes()


def _unpacked(code: str, data: bytes) -> array[int]:
    """Decode an array. Raises ValueError if the data is cut short."""
    column: array[int] = array(code)
    column.frombytes(data)
    if _SWAPPED:
        column.byteswap()
    return column


def _no_timestamp() -> InvalidArgument:
    return InvalidArgument("timestamp_us is an integer of microseconds since 1970 that fits 64 bits")


def _damaged(encoded: bytes) -> InvalidArgument:
    return InvalidArgument(f"damaged batch: its {len(encoded):,} bytes cannot be decoded")
