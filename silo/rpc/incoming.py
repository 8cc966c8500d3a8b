"""Batches as producers send them: checked, and brought into the form in which headrace stores them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...streams import layout
from ...streams.errors import InvalidArgument, PayloadTooLarge
from ...streams.events import MAX_BATCH_EVENTS, MAX_EVENT_BYTES, EventBatch
from ...streams.identity import StreamId
from ...streams.publishing import MAX_BATCH_BYTES

_ONE_TIMESTAMP = struct.Struct("<BBq")
_TIMESTAMPS_TAG, _TIMESTAMP_BYTES = 0x22, 8
_NAMES = (0x0A, 0x12)
_REPEATED = (0x2A, 0x32)
"""Ids and headers: one field per event."""
_FIRST_APPENDED = 16


def accepted(encoded: bytes, now_us: int) -> EventBatch:
    """A producer's batch, as it is stored: with its stream's name first, each column in one piece, and a time.

    Nearly all come so, and stay the bytes that they are.

    Raises InvalidArgument for what is no batch or has fields that are not the producer's, PayloadTooLarge for a payload
    above MAX_EVENT_BYTES and a batch above MAX_BATCH_BYTES.
    """
    if len(encoded) > MAX_BATCH_BYTES:
        raise PayloadTooLarge("a batch", len(encoded), MAX_BATCH_BYTES)
    namespace, key, columns = layout.read(encoded)
    stream, count = StreamId(namespace, key), len(columns.sizes)
    _check_sizes(stream, columns.sizes)
    if columns.rare:
        layout.read_rare(encoded, count)
    if not _in_order(encoded, stream.prefix):
        encoded = _put_in_order(encoded, stream.prefix)
    if not columns.timestamps:
        encoded += _ONE_TIMESTAMP.pack(_TIMESTAMPS_TAG, _TIMESTAMP_BYTES, now_us)
    return EventBatch(stream, encoded, count)


def _check_sizes(stream: StreamId, sizes: Sequence[int]) -> None:
    if len(sizes) > MAX_BATCH_EVENTS:
        raise InvalidArgument(f"a batch has at most {MAX_BATCH_EVENTS:,} events, not {len(sizes):,}: split it")
    if (largest := max(sizes)) > MAX_EVENT_BYTES:
        raise PayloadTooLarge(f"the payload of an event for {stream}", largest, MAX_EVENT_BYTES)


def _in_order(encoded: bytes, prefix: bytes) -> bool:
    """Whether a sound batch can be stored as it is. Raises InvalidArgument for a field that delivery appends."""
    if not encoded.startswith(prefix):
        return False
    seen: set[int] = set(_NAMES)
    at, end = len(prefix), len(encoded)
    while at < end:
        tag = encoded[at]
        if tag >= 0x80:
            raise _appended()
        if tag & 7 != 2 or tag in seen:
            return False
        if tag not in _REPEATED:
            seen.add(tag)
        at = _end(encoded, at + 1)
    return True


def _end(encoded: bytes, at: int) -> int:
    """Where the field ends whose length is at `at`."""
    length = shift = 0
    while (byte := encoded[at]) >= 0x80:
        length |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return at + 1 + (length | byte << shift)


def _put_in_order(encoded: bytes, prefix: bytes) -> bytes:
    message = layout.message_of(encoded)
    if any(field.number >= _FIRST_APPENDED for field, _ in message.ListFields()):
        raise _appended()
    message.DiscardUnknownFields()
    message.ClearField("namespace")
    message.ClearField("key")
    return prefix + message.SerializeToString(deterministic=True)


def _appended() -> InvalidArgument:
    return InvalidArgument("a batch has fields from 16 on, which the silo appends on delivery: leave them out")
