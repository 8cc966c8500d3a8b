"""Batches on the wire, without decoding them.

Field 1 of a response is `repeated EventBatch batches`. Each batch is written as a *frame*: the field's tag, the length,
the batch as its producer encoded it, and the fields from 16 on, which delivery appends (`proto/v1/events.proto`). A
frame is the same for every consumer, so it is made once. Concatenated frames are a valid message. Other encoded fields
of the response may follow them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

from . import layout
from .errors import InvalidArgument
from .events import EventBatch, PartialBatch
from .identity import StreamId, read_varint, varint

BATCHES = 1
"""Number of the field of a response that has the batches."""

_OFFSET, _QUEUE, _ATTEMPT, _INDEXES = b"\x80\x01", b"\x88\x01", b"\x90\x01", b"\x9a\x01"
_REDRIVEN = b"\xa0\x01\x01"
BATCH_TAG = b"\x0a"
"""First byte of a frame."""
_SIZES, _PAYLOAD = 0x1A, 0x7A
_KNOWN_STREAMS = 65536
_STATUS = b"\x1a"


class QueueState(enum.IntEnum):
    """The state of a queue in a session: `QueueStatus.State` of `proto/v1/consumer.proto`."""

    SERVED = 1
    DRAINING = 2
    ENDED = 3


class DeliveredBatch(NamedTuple):
    """A batch as a consumer gets it. `batch` has its offset. If only a part of a published batch was sent, the events
    keep their tokens in the published batch."""

    batch: EventBatch
    queue: int
    attempt: int
    """Number of the delivery of its first event, from 1."""
    indexes: Sequence[int] | None
    """Index of each event in the published batch; None if all its events are there."""
    redriven: bool = False
    """Whether it is a redriven dead letter, outside of the order of its stream."""


def frame(
    encoded: bytes, queue: int, offset: int, *, attempt: int = 1, indexes: Sequence[int] = (), redriven: bool = False
) -> bytes:
    """Return one element of `batches`, with tag and length."""
    tail = b"".join((_OFFSET, varint(offset), _QUEUE, varint(queue)))
    if attempt > 1:
        tail += _ATTEMPT + varint(attempt)
    if indexes:
        packed = b"".join(map(varint, indexes))
        tail += _INDEXES + varint(len(packed)) + packed
    if redriven:
        tail += _REDRIVEN
    return b"".join((BATCH_TAG, varint(len(encoded) + len(tail)), encoded, tail))


def element_frame(element: bytes) -> bytes:
    """Return an element of `batches` with tag and length."""
    return b"".join((BATCH_TAG, varint(len(element)), element))


def status_frame(queue: int, state: QueueState, epoch: int, generation: int, *, assigned: bool = True) -> bytes:
    """Return an encoded response with the status of one queue."""
    values = (queue, state, epoch, generation, int(assigned))
    fields = b"".join(bytes((number << 3,)) + varint(value) for number, value in enumerate(values, 1) if value)
    return b"".join((_STATUS, varint(len(fields)), fields))


def is_status(frame: bytes) -> bool:
    """Whether this is the status of a queue, not a batch."""
    return frame[:1] == _STATUS


def head_bytes(frame: bytes) -> int:
    """Return the number of bytes of a frame before the batch: its tag and length."""
    return read_varint(frame, 1)[1]


class BatchParts:
    """A batch that is sent in parts. It is parsed once for all parts.

    Raises InvalidArgument if the batch is damaged.
    """

    def __init__(self, batch: EventBatch) -> None:
        self.count = batch.count
        self._prefix = batch.stream.prefix
        self._columns = columns = layout.read(batch.encoded)[2]
        self._times = batch.timestamps_us()
        self._ends = list(accumulate(columns.sizes, initial=columns.start))
        self._rare = layout.read_rare(batch.encoded, batch.count) if columns.rare else None
        self._trace = layout.write_trace(batch.trace())

    def encode(self, indexes: Sequence[int]) -> bytes:
        """Return a batch of the events with these indexes, which must ascend."""
        rare = b""
        if self._rare is not None:
            ids, headers = self._rare
            rare = layout.write_rare([ids[i] or "" for i in indexes], [headers[i] for i in indexes])
        sizes, times = [self._columns.sizes[i] for i in indexes], [self._times[i] for i in indexes]
        return layout.write(self._prefix, sizes, times, rare + self._trace, self._payloads(indexes))

    def _payloads(self, indexes: Sequence[int]) -> bytes:
        source, ends, first, last = self._columns.source, self._ends, indexes[0], indexes[-1]
        if last - first + 1 == len(indexes):  # consecutive events, as when credit cuts a batch
            return source[ends[first] : ends[last + 1]]
        return b"".join([source[ends[i] : ends[i + 1]] for i in indexes])


def part(batch: EventBatch, indexes: Sequence[int]) -> bytes:
    """Encode only some events of a batch. Raises InvalidArgument if the batch is damaged."""
    return BatchParts(batch).encode(indexes)


def split(message: bytes) -> tuple[list[DeliveredBatch], bytes]:
    """Return the batches of a response, and its other fields for the protobuf library.

    Raises InvalidArgument if the bytes are not such a message.
    """
    elements_, rest = elements(message, BATCHES)
    return list(map(_delivered, elements_)), rest


def elements(message: bytes, field: int, most: int = 1 << 62) -> tuple[list[bytes], bytes]:
    """Return the elements of a repeated bytes or message field below 16, in order, and the message without them.

    Raises InvalidArgument if the bytes are not a message, or if it has more than `most` fields, including elements: an
    untrusted message may have millions of empty fields, and each costs time.
    """
    try:
        return _split_off(message, field << 3 | 2, most)
    except IndexError:
        raise InvalidArgument(f"damaged message: {len(message)} bytes that are no protobuf") from None


def _split_off(message: bytes, tag: int, most: int) -> tuple[list[bytes], bytes]:
    found: list[bytes] = []
    rest: list[bytes] = []
    at, end = 0, len(message)
    while at < end:
        if len(found) + len(rest) == most:
            raise InvalidArgument(f"the message has more than {most:,} fields: send less at once")
        start = at
        if message[at] == tag:
            length = message[at + 1]
            if length < 0x80:
                at += 2
            else:
                length, at = read_varint(message, at + 1)
            found.append(message[at : at + length])
            at += length
        else:
            at = _skip(message, at)
            rest.append(message[start:at])
    if at > end:
        raise IndexError
    return found, b"".join(rest)


def _delivered(element: bytes) -> DeliveredBatch:
    try:
        at, length = element[1] + 2, len(element)
        names = at + 2 + element[at + 1]
        # The fast path for most small batches: names below 128 bytes, one event in the form that `layout.write_one`
        # writes, and an offset and a queue below 128 behind it.
        tail = length - 3
        if (
            at < 0x82
            and names < at + 0x82
            and element[names : names + 2] == b"\x1a\x04"
            and element[names + 16] == _PAYLOAD
            and element[tail : tail + 2] == _QUEUE
            and element[0] == 0x0A
            and element[at] == 0x12
        ):
            size, end = element[names + 17], names + 18
            if size >= 0x80:
                size, end = read_varint(element, names + 17)
            end += size
            if element[end : end + 2] == _OFFSET:
                offset, at = read_varint(element, end + 2)
                if at == tail:
                    stream = _streams.get(element[:names]) or _remember(element[:names])
                    batch = EventBatch(stream, element[:end], 1, offset)
                    return _new(DeliveredBatch, (batch, element[-1], 1, None, False))
        return _delivered_any(element)
    except IndexError:
        raise InvalidArgument("damaged message: a batch is cut short") from None


def _delivered_any(element: bytes) -> DeliveredBatch:
    names = _names_end(element)
    prefix = element[:names]
    count, end = _columns_end(element, names)
    offset, queue, attempt, indexes, redriven = _appended(element, end)
    stream = _streams.get(prefix) or _remember(prefix)
    batch = EventBatch(stream, element[:end], count, offset)
    if indexes is not None:
        if len(indexes) != count:
            raise InvalidArgument(f"damaged message: {len(indexes)} indexes for {count} events")
        batch = PartialBatch.of_part(batch, indexes)
    return DeliveredBatch(batch, queue, attempt, indexes, redriven)


def _names_end(element: bytes) -> int:
    """Return the end of namespace and key, the first fields of every batch that headrace stores."""
    length, at = element[1], 2
    if length >= 0x80:
        length, at = read_varint(element, 1)
    at += length
    if element[0] != 0x0A or element[at] != 0x12:
        raise IndexError
    length = element[at + 1]
    if length < 0x80:
        return at + 2 + length
    length, at = read_varint(element, at + 1)
    return at + length


def _columns_end(element: bytes, at: int) -> tuple[int, int]:
    """Return the number of events, and the end of the fields that the producer wrote."""
    count, end = 0, len(element)
    while at < end and (tag := element[at]) < 0x80:
        length = element[at + 1]
        if length < 0x80:
            at += 2
        else:
            length, at = read_varint(element, at + 1)
        at += length
        if tag == _SIZES:
            count = length // 4
    return count, at


_Appended = tuple[int, int, int, Sequence[int] | None, bool]
"""Offset, queue, attempt, indexes, redriven."""


def _appended(element: bytes, at: int) -> _Appended:
    if element[at : at + 2] == _OFFSET:
        offset, at = read_varint(element, at + 2)
        if element[at : at + 2] == _QUEUE and len(element) == at + 3 and element[at + 2] < 0x80:
            return offset, element[at + 2], 1, None, False  # true of nearly all
        return _more_appended(element, at, offset)
    return _more_appended(element, at, 0)


def _more_appended(element: bytes, at: int, offset: int) -> _Appended:
    values: dict[int, int] = {16: offset}
    indexes: list[int] | None = None
    end = len(element)
    while at < end:
        tag, at = read_varint(element, at)
        value, at = read_varint(element, at)
        if tag == 19 << 3 | 2:
            stop, indexes = at + value, indexes or []
            while at < stop:
                index, at = read_varint(element, at)
                indexes.append(index)
        elif tag & 7 == 2:
            at += value
        else:
            values[tag >> 3] = value
    return values[16], values.get(17, 0), values.get(18, 1), indexes, bool(values.get(20))


# Skips the class's own __new__, which is Python code and costs twice as much.
_new = cast(Callable[..., DeliveredBatch], tuple.__new__)  # pyright: ignore[reportUnknownMemberType]
_streams: dict[bytes, StreamId] = {}


def _remember(prefix: bytes) -> StreamId:
    """Return the stream of an encoded name. The result is cached: creating a StreamId costs more than all other work on
    a small batch."""
    message = layout.message_of(prefix)
    if len(_streams) >= _KNOWN_STREAMS:
        _streams.clear()
    stream = _streams[prefix] = StreamId(message.namespace, message.key)
    return stream


def _skip(message: bytes, at: int) -> int:
    """Return the end of the field that begins at `at`."""
    tag, at = read_varint(message, at)
    wire = tag & 7
    if tag < 8 or wire in (3, 4, 6, 7):
        raise IndexError
    if wire == 0:
        return read_varint(message, at)[1]
    if wire == 2:
        length, at = read_varint(message, at)
        return at + length
    return at + (8 if wire == 1 else 4)
