"""Events, and the batches in which they are stored, cached and delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import repeat
from typing import Any, cast

import msgspec

from . import clock, layout
from .arguments import CheckedStruct, check_instance, refused
from .errors import InvalidArgument, PayloadTooLarge
from .field_limits import check_headers, check_ids, check_times
from .identity import SequenceToken, StreamId
from .layout import NO_HEADERS, BatchColumns

MAX_EVENT_BYTES = 1 << 20
"""Limit of one payload, in bytes."""
BATCH_TARGET_BYTES = 1 << 20
"""A publish with more bytes than this is stored as several batches."""
MAX_BATCH_EVENTS = 1 << 16
"""Limit of events in one batch."""
MAX_DELAY = timedelta(days=36_500)
MAX_PRIORITY = 99
"""The most urgent priority. Events without a priority have 0."""

_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# gc=False: an event is in no reference cycle, and a batch creates many events
class Event(msgspec.Struct, metaclass=CheckedStruct, gc=False):
    """An event to publish, or a delivered event.

    `timestamp_us` is microseconds since 1970 UTC; the default is the time of publishing. An empty `id` counts as no id.
    `delay` and `priority` need an adapter that supports them; a delivered event has None in both. `stream` and `token`
    are set on delivery and ignored on publishing.
    """

    payload: bytes
    headers: Mapping[str, str] = NO_HEADERS
    id: str | None = None
    timestamp_us: int | None = None
    delay: timedelta | None = None
    priority: int | None = None
    stream: StreamId | None = None
    token: SequenceToken | None = None

    @property
    def time(self) -> datetime | None:
        """`timestamp_us` as a time. Raises InvalidArgument outside of the years 1 to 9999."""
        try:
            return None if self.timestamp_us is None else _EPOCH + timedelta(microseconds=self.timestamp_us)
        except OverflowError:
            raise InvalidArgument(f"timestamp_us {self.timestamp_us} is outside of the years 1 to 9999") from None

    @property
    def idempotency_key(self) -> str:
        """A text of 32 characters that is the same at each delivery of this event, and other for each other event. Send
        it to services that act once for each key. Raises InvalidArgument for an event that was not delivered."""
        if self.stream is None or self.token is None:
            raise InvalidArgument("idempotency_key: only a delivered event has one, because it has a position")
        # The time tells apart events of providers that were made anew, and began at position 0 again.
        text = f"{self.stream}@{self.token}@{self.timestamp_us}"
        return blake2b(text.encode(), digest_size=16).hexdigest()


_new_event = cast(Callable[..., Event], msgspec.StructMeta.__call__.__get__(Event))
"""`Event`, without the check of the names, which costs more than all the rest."""


class EventBatch:
    """Events of ONE stream, published together. Immutable once made.

    `encoded` is the whole protobuf message. `offset` is the batch's position in its queue, which the adapter sets when
    it stores the batch.
    """

    __slots__ = ("_columns", "count", "encoded", "offset", "stream")

    _columns: BatchColumns
    """Set at first use."""

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
        """Encoded size in bytes. All limits in bytes count this size."""
        return len(self.encoded)

    @classmethod
    def of(
        cls, stream: StreamId, events: Iterable[bytes | Event], now_us: int | None = None, trace: bytes = b""
    ) -> EventBatch:
        """Encode events of one stream as one batch. `trace` is the span that publishes them, if there is one.

        Raises InvalidArgument for other types, without any event, and for more than `MAX_BATCH_EVENTS`; PayloadTooLarge
        for a payload above `MAX_EVENT_BYTES`.
        """
        check_instance("stream", stream, StreamId, "StreamId('orders', '42')")
        items = events if isinstance(events, list) else list(events)
        if now_us is not None:
            _check_times((now_us,))
        now = clock.now_us() if now_us is None else now_us
        one = len(items) == 1
        encoded = _encode_one(stream, items[0], now, trace) if one else _encode(stream, items, now, trace)
        return cls(stream, encoded, len(items))

    @classmethod
    def of_payload(cls, stream: StreamId, payload: bytes, trace: bytes = b"") -> EventBatch:
        """Like `of` with one payload, for callers that have checked both types. Raises PayloadTooLarge."""
        if len(payload) > MAX_EVENT_BYTES:
            _check_size(stream, len(payload))
        return cls(stream, layout.write_one(stream.prefix, payload, clock.now_us(), trace), 1)

    @classmethod
    def decode(cls, encoded: bytes, offset: int = 0) -> EventBatch:
        """Read an encoded batch whose stream is not known, and check all of it.

        Raises InvalidArgument if the bytes are not a batch.
        """
        namespace, key, columns = layout.read(encoded)
        if columns.rare:
            layout.read_rare(encoded, len(columns.sizes))
        batch = cls(StreamId(namespace, key), encoded, len(columns.sizes), offset)
        batch._columns = columns
        return batch

    def payloads(self) -> list[bytes]:
        """Return only the payloads, in order: the cheapest way to read a batch.

        Raises InvalidArgument if the batch is damaged, as all methods do that read it.
        """
        if self.count == 1 and (one := layout.read_one(self.encoded, self.stream.prefix)):
            return [self.encoded[one[1] :]]
        return layout.slices(self._read())

    def sizes(self) -> Sequence[int]:
        """Return the payload size of each event, in bytes."""
        return self._read().sizes

    def timestamps_us(self) -> Sequence[int]:
        """Return the time of each event, in microseconds since 1970 UTC."""
        timestamps = self._read().timestamps
        return timestamps if len(timestamps) == self.count else [timestamps[0] if timestamps else 0] * self.count

    def first_timestamp_us(self) -> int:
        """Return the time of the first event, in microseconds since 1970 UTC; 0 if it has none. Keeps no columns."""
        timestamps = layout.read(self.encoded)[2].timestamps
        return timestamps[0] if timestamps else 0

    def trace(self) -> bytes:
        """Return the span that published the batch, as its field `trace` has it; empty if there is none."""
        return layout.read_trace(self.encoded, self.stream.prefix)

    def events(self, start: int = 0) -> list[Event]:
        """Return the events from index `start` on, with `stream` and `token` set."""
        return list(self.iter_events(start))

    def iter_events(self, start: int = 0) -> Iterator[Event]:
        """Yield the events from index `start` on, each made when it is asked for. Raises InvalidArgument at once."""
        if self.count == 1 and not start and (one := layout.read_one(self.encoded, self.stream.prefix)):
            timestamp, at = one
            token = SequenceToken(self.offset, 0)
            return iter((_new_event(self.encoded[at:], NO_HEADERS, None, timestamp, None, None, self.stream, token),))
        columns = self._read()
        ids, headers = self._rare_columns(columns, start)
        timestamps = self.timestamps_us()[start:]
        nothing, tokens = repeat(None), _tokens(self.offset, range(start, self.count))
        payloads = layout.iter_slices(columns, start)
        return map(_new_event, payloads, headers, ids, timestamps, nothing, nothing, repeat(self.stream), tokens)

    def _rare_columns(
        self, columns: BatchColumns, start: int
    ) -> tuple[Iterable[str | None], Iterable[Mapping[str, str]]]:
        if not columns.rare:
            return repeat(None), repeat(NO_HEADERS)
        ids, headers = layout.read_rare(self.encoded, self.count)
        return ids[start:], headers[start:]

    def _read(self) -> BatchColumns:
        try:
            return self._columns
        except AttributeError:
            columns = layout.read(self.encoded)[2]
        if len(columns.sizes) != self.count:
            raise InvalidArgument(f"damaged batch: it has {len(columns.sizes)} events, not {self.count}")
        self._columns = columns
        return columns


class PartialBatch(EventBatch):
    """Some events of a published batch, with their tokens in that batch. A consumer gets this if a filter or its credit
    lets only a part through, or if a part was done before a restart."""

    __slots__ = ("_events",)

    def __init__(self, batch: EventBatch, events: list[Event]) -> None:
        super().__init__(batch.stream, batch.encoded, len(events), batch.offset)
        self._events = events

    @classmethod
    def of_part(cls, batch: EventBatch, indexes: Sequence[int]) -> PartialBatch:
        """Wrap `batch`, which has the events of a stored batch with these indexes."""
        events = batch.events()
        for event, index in zip(events, indexes, strict=True):
            event.token = SequenceToken(batch.offset, index)
        return cls(batch, events)

    @property
    def token(self) -> SequenceToken:
        return self._events[0].token or super().token

    def iter_events(self, start: int = 0) -> Iterator[Event]:
        return iter(self._events[start:])

    def payloads(self) -> list[bytes]:
        return [event.payload for event in self._events]

    def sizes(self) -> Sequence[int]:
        return [len(event.payload) for event in self._events]

    def timestamps_us(self) -> Sequence[int]:
        return [event.timestamp_us or 0 for event in self._events]


class ScheduledBatch(EventBatch):
    """A batch to publish, with a delay or a priority. Both are also in `encoded`."""

    __slots__ = ("delay_us", "priority")

    delay_us: int
    """Least time between storing and delivery, in microseconds."""
    priority: int

    def __init__(self, stream: StreamId, encoded: bytes, count: int, *, delay_us: int, priority: int) -> None:
        """`encoded` already contains delay and priority. Raises InvalidArgument for an invalid delay or priority."""
        super().__init__(stream, encoded, count)
        if not 0 <= delay_us <= MAX_DELAY // _MICROSECOND:
            raise InvalidArgument(f"a delay is 0 to {MAX_DELAY.days:,} days, not {delay_us:,} microseconds")
        self.delay_us = delay_us
        self.priority = _checked_priority(priority)

    @classmethod
    def of_events(
        cls,
        stream: StreamId,
        events: Iterable[bytes | Event],
        delay: timedelta | None,
        priority: int | None,
        trace: bytes = b"",
    ) -> ScheduledBatch:
        """Like `EventBatch.of`, with this delay and priority instead of those of the events. Raises InvalidArgument for
        an invalid delay or priority."""
        plain = EventBatch.of(stream, events, trace=trace)
        delay_us, priority = _delay_us(delay or timedelta()), _checked_priority(priority or 0)
        encoded = plain.encoded + layout.write_schedule(delay_us, priority)
        return cls(stream, encoded, plain.count, delay_us=delay_us, priority=priority)

    def undelayed(self) -> EventBatch:
        """Return a batch with the same events and priority, and without the delay."""
        if self.priority:
            return self.with_delay(0)
        return EventBatch(self.stream, self._without_schedule(), self.count)

    def with_delay(self, delay_us: int) -> ScheduledBatch:
        """Return a batch with the same events and priority, and this delay."""
        encoded = self._without_schedule() + layout.write_schedule(delay_us, self.priority)
        return ScheduledBatch(self.stream, encoded, self.count, delay_us=delay_us, priority=self.priority)

    def _without_schedule(self) -> bytes:
        return self.encoded.removesuffix(layout.write_schedule(self.delay_us, self.priority))


def _delay_us(delay: Any) -> int:
    if not isinstance(delay, timedelta) or not timedelta() <= delay <= MAX_DELAY:
        raise InvalidArgument(f"a delay is a timedelta from 0 to {MAX_DELAY.days:,} days, not {delay!r}")
    return delay // _MICROSECOND


def _checked_priority(priority: Any) -> int:
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise InvalidArgument(f"a priority is a whole number from 0 to {MAX_PRIORITY}, not {priority!r}")
    return priority


def _encode_one(stream: StreamId, item: bytes | Event, now: int, trace: bytes) -> bytes:
    if type(item) is bytes:
        payload = item
    elif isinstance(item, Event) and type(item.payload) is bytes and not item.headers and not item.id:
        payload = item.payload
        if item.timestamp_us is not None:
            now = item.timestamp_us
            _check_times((now,))
    else:
        return _encode(stream, [item], now, trace)
    _check_size(stream, len(payload))
    return layout.write_one(stream.prefix, payload, now, trace)


def _encode(stream: StreamId, items: Sequence[bytes | Event], now: int, trace: bytes = b"") -> bytes:
    _check_count(len(items))
    try:
        sizes, payload = _joined(stream, cast(Sequence[bytes], items))
    except TypeError:  # some are not bytes; checking each one first would cost more than all other work
        events = [item if isinstance(item, Event) else Event(item) for item in items]
        sizes, payload = _joined(stream, [check_payload(event.payload) for event in events])
        rare = _encode_rare(events) + layout.write_trace(trace)
        return layout.write(stream.prefix, sizes, _timestamps(events, now), rare, payload)
    return layout.write(stream.prefix, sizes, (now,), layout.write_trace(trace), payload)


def _joined(stream: StreamId, payloads: Sequence[bytes]) -> tuple[list[int], bytes]:
    """Return the sizes of the payloads, and the payloads as one. Raises TypeError if one is not bytes."""
    sizes = list(map(len, payloads))
    payload = b"".join(payloads)
    if len(payload) != sum(sizes):
        raise TypeError  # a memoryview whose items are not bytes
    if len(payload) > MAX_EVENT_BYTES:
        _check_size(stream, max(sizes))
    return sizes, payload


def check_payload(payload: Any) -> bytes:
    """Return a payload as bytes. Raises InvalidArgument for another type."""
    if type(payload) is bytes:
        return payload
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(cast(bytes, payload))
    kind = type(payload).__name__
    raise InvalidArgument(
        f"publish bytes or Event, not {kind}: encode it first, for example with json.dumps(x).encode()"
    )


def _timestamps(events: Sequence[Event], now: int) -> Sequence[int]:
    given = [event.timestamp_us for event in events]
    same = given.count(given[0]) == len(given)
    times = [now if time is None else time for time in (given[:1] if same else given)]
    _check_times(times)
    return times


def _check_times(times: Sequence[int]) -> None:
    if bool in map(type, times):
        raise refused(
            "timestamp_us", next(time for time in times if type(time) is bool), "an integer of microseconds since 1970"
        )
    check_times(times)


def _encode_rare(events: Sequence[Event]) -> bytes:
    ids = [event.id for event in events]
    headers = [event.headers for event in events]
    if ids.count(None) == len(ids) and headers.count(NO_HEADERS) == len(headers):
        return b""
    return write_rare([text or "" for text in ids], headers)


def write_rare(ids: Sequence[str], headers: Sequence[Mapping[str, str]]) -> bytes:
    """Encode the columns of ids and headers of a batch. Raises InvalidArgument for other types, and above the
    limits."""
    columns = layout.write_rare(ids, headers)
    check_ids(ids)
    for each in headers:
        if each:
            check_instance("headers", each, Mapping, "{'source': 'web'}")
            check_headers(each)
    return columns


def _tokens(offset: int, indexes: range) -> Iterator[SequenceToken]:
    # Skips the class's own __new__, which is Python code and costs twice as much.
    new = cast(Callable[..., SequenceToken], tuple.__new__)  # pyright: ignore[reportUnknownMemberType]
    return map(new, repeat(SequenceToken), zip(repeat(offset), indexes, strict=False))


def _check_size(stream: StreamId, size: int) -> None:
    if size > MAX_EVENT_BYTES:
        raise PayloadTooLarge(f"the payload of an event for {stream}", size, MAX_EVENT_BYTES)


def _check_count(count: int) -> None:
    if not count:
        raise InvalidArgument("a batch has at least one event")
    if count > MAX_BATCH_EVENTS:
        raise InvalidArgument(f"a batch has at most {MAX_BATCH_EVENTS:,} events, not {count:,}")
