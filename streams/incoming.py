"""Check batches that producers send, and bring them into the form that headrace stores. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..proto.v1 import events_pb2
from . import layout
from .errors import InvalidArgument, PayloadTooLarge
from .events import MAX_BATCH_EVENTS, MAX_EVENT_BYTES, EventBatch, ScheduledBatch
from .field_limits import MAX_TIME_US, MIN_TIME_US, check_headers, check_ids, check_times
from .identity import StreamId, read_varint
from .layout import TRACE_BYTES, is_trace
from .publishing import MAX_BATCH_BYTES

_ONE_TIMESTAMP = struct.Struct("<BBq")
_TIMESTAMPS_TAG, _TIMESTAMP_BYTES = 0x22, 8
_NAMESPACE, _KEY = 0x0A, 0x12
_COLUMNS = (0x1A, 0x22, 0x3A, 0x7A)
"""Tags of sizes, timestamps, trace and payload."""
_TRACE = 0x3A
_APPENDED = range(16, 21)
_SHORT = 0x7F
"""The largest length in one byte."""


def accepted(encoded: bytes, now_us: int) -> EventBatch:
    """Return a producer's batch in its stored form: the stream's name first, each column in one piece, with a time.

    Nearly all batches without ids and headers have this form already, and keep their bytes. The protobuf library
    encodes the others again: reading their fields one by one, of which there may be millions, would delay all other
    callers.

    Raises InvalidArgument if the bytes are not a batch, or have fields that delivery appends. Raises PayloadTooLarge
    for a payload above MAX_EVENT_BYTES, and for a batch above MAX_BATCH_BYTES.
    """
    if len(encoded) > MAX_BATCH_BYTES:
        raise PayloadTooLarge("a batch", len(encoded), MAX_BATCH_BYTES)
    return _single(encoded) or _any(encoded, now_us)


def _single(encoded: bytes) -> EventBatch | None:
    """Return a batch of one event in its stored form, with names below 128 bytes. Return None for any other batch, also
    for one that is to be refused. Takes a third of the time of `_any`."""
    try:
        key_at = 2 + encoded[1]
        end = key_at + 2 + encoded[key_at + 1]
        if encoded[0] != _NAMESPACE or encoded[key_at] != _KEY or encoded[1] > _SHORT or encoded[key_at + 1] > _SHORT:
            return None
        prefix = encoded[:end]
        one = layout.read_one(encoded, prefix)
        if one is None or not MIN_TIME_US <= one[0] <= MAX_TIME_US or len(encoded) - one[1] > MAX_EVENT_BYTES:
            return None
        stream = StreamId.of_prefix(encoded[2:key_at].decode(), encoded[key_at + 2 : end].decode(), prefix)
        return EventBatch(stream, encoded, 1)
    except (IndexError, UnicodeDecodeError):
        return None


def _any(encoded: bytes, now_us: int) -> EventBatch:
    message = None if _plain(encoded) else layout.message_of(encoded)
    namespace, key, columns = layout.read(encoded) if message is None else layout.read_message(message)
    stream = StreamId(namespace, key)
    _check_sizes(stream, columns.sizes, len(encoded))
    if columns.timestamps:
        check_times(columns.timestamps, "timestamps_us")
    if message is not None or not encoded.startswith(stream.prefix):
        encoded = stream.prefix + _written(message or layout.message_of(encoded), len(columns.sizes))
    if not columns.timestamps:
        encoded += _ONE_TIMESTAMP.pack(_TIMESTAMPS_TAG, _TIMESTAMP_BYTES, now_us)
    if message is not None and (message.delay_us or message.priority):
        schedule = {"delay_us": message.delay_us, "priority": message.priority}
        return ScheduledBatch(stream, encoded, len(columns.sizes), **schedule)
    return EventBatch(stream, encoded, len(columns.sizes))


def _check_sizes(stream: StreamId, sizes: Sequence[int], nbytes: int) -> None:
    """Check the sizes of the payloads of a batch of so many bytes."""
    if len(sizes) > MAX_BATCH_EVENTS:
        raise InvalidArgument(f"a batch has at most {MAX_BATCH_EVENTS:,} events, not {len(sizes):,}: split it")
    if nbytes > MAX_EVENT_BYTES and (largest := max(sizes)) > MAX_EVENT_BYTES:
        raise PayloadTooLarge(f"the payload of an event for {stream}", largest, MAX_EVENT_BYTES)


def _plain(encoded: bytes) -> bool:
    """Whether the batch has its names, then sizes, timestamps, trace and payload, each at most once, and no other
    field."""
    wanted = {*_COLUMNS}
    try:
        if encoded[0] != _NAMESPACE or encoded[at := _end(encoded, 1)] != _KEY:
            return False
        at = _end(encoded, at + 1)
        while at < len(encoded):
            if encoded[at] not in wanted:
                return False
            wanted.remove(encoded[at])
            if encoded[at] == _TRACE and not is_trace(encoded[at + 2 : at + 2 + encoded[at + 1]]):
                return False
            at = _end(encoded, at + 1)
    except IndexError:
        return False
    return at == len(encoded)


def _end(encoded: bytes, at: int) -> int:
    """Return the end of the field whose length is at `at`. Raises IndexError if there is none."""
    length, start = read_varint(encoded, at)
    return start + length


def _written(message: events_pb2.EventBatch, count: int) -> bytes:
    """Return the fields after the stream's name, in order, without unknown fields."""
    for column in (message.ids, message.headers):
        if len(column) not in (0, count):
            raise InvalidArgument(f"damaged batch: {len(column)} ids or headers for {count} events")
    check_ids(message.ids)
    for each in message.headers:
        check_headers(each.values)
    if any(field.number in _APPENDED for field, _ in message.ListFields()):
        raise InvalidArgument("a batch has fields from 16 to 20, which the silo appends on delivery: leave them out")
    if message.trace and not is_trace(message.trace):
        raise InvalidArgument(
            f"the trace of a batch has {TRACE_BYTES} bytes, or is one zero byte; not {len(message.trace)} bytes"
        )
    message.DiscardUnknownFields()
    message.ClearField("namespace")
    message.ClearField("key")
    return message.SerializeToString(deterministic=True)
