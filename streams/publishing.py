"""Checks of published events, their division into batches, and the results of publishing. Providers and clients share
this module, so that they accept and refuse the same events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from itertools import groupby
from time import monotonic
from typing import NamedTuple, Self, cast

from msgspec.structs import replace

from .arguments import check_call, check_instance, check_text
from .codecs import Codecs, Publishable, is_value, not_publishable
from .errors import InvalidArgument, NotSupported, code_of
from .events import BATCH_TARGET_BYTES, MAX_BATCH_EVENTS, Event, EventBatch, ScheduledBatch, check_payload
from .histograms import Histogram
from .identity import SequenceToken, StreamId

MAX_BATCH_BYTES = 3 << 20
"""Limit of an encoded batch that is published to a silo, in bytes. Consumers accept messages of 4 MiB, the default of
gRPC."""
MEASURED = 8
"""The duration of one publish in so many is measured."""
MAX_REQUEST_BATCHES = 10_000
"""Limit of batches in one request to a silo."""


class _SequenceFields(NamedTuple):
    producer: str
    number: int
    previous: int


class ProducerSequence(_SequenceFields):
    """Identifies one `enqueue` call of an idempotent producer, so that a retry stores nothing twice.

    `number` strictly increases from call to call of one `producer`; `previous` is the number of the call before, 0 for
    the first call. A call whose number is not above the last stored one is a duplicate: nothing is stored. A call whose
    `previous` is not the last stored number is refused with SequenceConflict, because an earlier call is missing.

    Raises InvalidArgument if `number` is not above `previous`, or is above `MAX_SEQUENCE`.
    """

    __slots__ = ()

    @check_call
    def __new__(cls, producer: str, number: int, previous: int) -> Self:
        check_text("producer", producer)
        numbers = previous, number
        if any(type(each) is not int for each in numbers) or not 0 <= previous < number <= MAX_SEQUENCE:
            raise InvalidArgument(
                f"sequence: number is a whole number above previous, from 1 to {MAX_SEQUENCE}, and previous is 0 for "
                f"the first call; not number {number!r} after previous {previous!r}"
            )
        return super().__new__(cls, producer, number, previous)


MAX_PRODUCER_BYTES = 128
"""Limit of a producer's id, in bytes of UTF-8."""
MAX_SEQUENCE = (1 << 63) - 1
"""Highest number of a call."""


def check_producer(producer: object, field: str = "sequence.producer") -> str:
    """Return a producer's id, or raise InvalidArgument."""
    if not isinstance(producer, str):
        raise InvalidArgument(f"{field}: the id of a producer is text, not {producer!r}")
    size = len(producer.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_PRODUCER_BYTES:
        raise InvalidArgument(
            f"{field}: the id of a producer has 1 to {MAX_PRODUCER_BYTES} bytes in UTF-8, not {size:,}; use a UUID"
        )
    return producer


def check_sequence(sequence: ProducerSequence) -> ProducerSequence:
    """Return `sequence`, or raise InvalidArgument if it is something else."""
    return check_instance("sequence", sequence, ProducerSequence, "ProducerSequence('import-7', 1, 0)")


class Receipt(NamedTuple):
    """The position of one published batch. `token` is None for a duplicate whose position is no longer known."""

    token: SequenceToken | None
    duplicate: bool = False


class _Flush:
    """Waits for the publishes that began before it."""

    def __init__(self, last: int, left: int) -> None:
        """`left` publishes with numbers up to `last` have not ended."""
        self._last = last
        self._left = left
        self.done = asyncio.Event()

    def note_end(self, number: int, count: int) -> None:
        if number <= self._last:
            self._left -= count
            if not self._left:
                self.done.set()


def _measured_among(number: int, count: int) -> int:
    """Return how many of the `count` publishes up to `number` are measured: one in `MEASURED`."""
    return (number - 1) // MEASURED - (number - 1 - count) // MEASURED


class PendingPublishes:
    """Publishes that have begun and not ended. A flush waits for those that began before it."""

    def __init__(self) -> None:
        self.under_way = 0
        """Number of publishes that have begun and not ended."""
        self._last = 0
        """Number of the publish that began last."""
        self._measured: dict[int, float] = {}
        """When publishes began (`monotonic`), by the number that `begin` returned."""
        self._flushes: list[_Flush] = []
        self.durations = Histogram()
        """How long publishes took until they were stored, or failed: one in `MEASURED`."""
        self.errors = Counter[str]()
        """Failed publishes, by the code of the error."""

    def begin(self, count: int = 1) -> int:
        """Count publishes that begin together. Returns the number to pass to `end`: that of the last one."""
        self._last = number = self._last + count
        self.under_way += count
        if _measured_among(number, count):
            self._measured[number] = monotonic()
        return number

    def end(self, number: int, count: int = 1) -> None:
        """Note that publishes that began together are stored, or have failed."""
        self.under_way -= count
        if measured := _measured_among(number, count):
            self.durations.observe(monotonic() - self._measured.pop(number), measured)
        if self._flushes:
            for flush in self._flushes:
                flush.note_end(number, count)

    def note_error(self, error: BaseException) -> None:
        """Count a publish that failed."""
        self.errors[code_of(error)] += 1

    async def flush(self) -> None:
        """Return when all publishes that began before the call have ended."""
        if not self.under_way:
            return
        flush = _Flush(self._last, self.under_way)
        self._flushes.append(flush)
        try:
            await flush.done.wait()
        finally:
            self._flushes.remove(flush)


def check_stream(stream: object) -> None:
    """Raise InvalidArgument if `stream` is not a StreamId."""
    if type(stream) is not StreamId:
        raise InvalidArgument(f"publish to a StreamId, such as StreamId('orders', '42'), not to {stream!r}")


def grouped(items: Iterable[tuple[StreamId, Publishable]], codecs: Codecs) -> dict[StreamId, list[bytes | Event]]:
    """Group items by stream, in order, and encode values. Raises InvalidArgument if an item is not a pair of a stream
    and something to publish."""
    by_stream: dict[StreamId, list[Publishable]] = {}
    try:
        for stream, event in items:
            by_stream.setdefault(stream, []).append(event)
    except (TypeError, ValueError):
        raise InvalidArgument("publish_many takes pairs of a StreamId and bytes, an Event or a value") from None
    for stream in by_stream:
        check_stream(stream)
    return {stream: codecs.encode_all(stream, each) for stream, each in by_stream.items()}


def listed(stream: StreamId, events: object, codecs: Codecs) -> list[bytes | Event]:
    """Return one event or several as a list. Values are encoded. Raises InvalidArgument for another type."""
    if isinstance(events, bytes | Event):
        return [events]
    if is_value(events):
        return [codecs.encode(stream, events)]
    if isinstance(events, bytearray | memoryview) or not isinstance(events, Iterable):
        raise not_publishable(cast("object", events))
    return codecs.encode_all(stream, list(cast("Iterable[object]", events)))


def scheduled(events: list[bytes | Event], delay: timedelta | None, priority: int | None) -> list[bytes | Event]:
    """Return the events with this delay and priority. Events that have their own keep them."""
    if delay is None and priority is None:
        return events
    return [_with_schedule(event, delay, priority) for event in events]


def _with_schedule(event: bytes | Event, delay: timedelta | None, priority: int | None) -> Event:
    given = event if isinstance(event, Event) else Event(event)
    return replace(
        given,
        delay=delay if given.delay is None else given.delay,
        priority=priority if given.priority is None else given.priority,
    )


def encoded(stream: StreamId, events: list[bytes | Event], trace: bytes = b"") -> list[EventBatch]:
    """Encode events of one stream as batches, in order. Each batch has one delay and one priority. `trace` is the span
    that publishes them."""
    if (len(events) == 1 and _schedule(events[0]) is None) or _fit_one_batch(events):
        return [EventBatch.of(stream, events, trace=trace)]
    if not any(map(_schedule, events)):
        return [EventBatch.of(stream, part, trace=trace) for part in parts(events)]
    return [
        ScheduledBatch.of_events(stream, part, *schedule, trace)
        if schedule
        else EventBatch.of(stream, part, trace=trace)
        for schedule, run in groupby(events, _schedule)
        for part in parts(list(run))
    ]


def _fit_one_batch(events: list[bytes | Event]) -> bool:
    """Whether these are plain payloads, and few enough for one batch. Takes a tenth of the time of `parts`."""
    try:
        size = sum(map(len, cast("list[bytes]", events)))
    except TypeError:  # an Event has no length
        return False
    return size <= BATCH_TARGET_BYTES and len(events) <= MAX_BATCH_EVENTS


def check_schedules(batches: Iterable[EventBatch], provider: str, *, delay: bool, priority: bool) -> None:
    """Raise NotSupported for a delay or priority that the adapter does not support. `delay` and `priority` say which of
    them it supports."""
    for batch in batches:
        if type(batch) is ScheduledBatch:
            if batch.delay_us and not delay:
                raise NotSupported(
                    f"provider {provider!r} cannot delay events: its adapter does not declare it; open it with "
                    'delays = "store", use an adapter that does, such as redis, or leave the delay out'
                )
            if batch.priority and not priority:
                raise NotSupported(
                    f"provider {provider!r} has no priorities: its adapter does not declare them; use one that does, "
                    "such as redis, or leave the priority out"
                )


def _schedule(event: bytes | Event) -> tuple[timedelta | None, int | None] | None:
    """Return delay and priority of an event, or None if it has neither."""
    if not isinstance(event, Event) or (event.delay is None and event.priority is None):
        return None
    return event.delay, event.priority


def parts(events: list[bytes | Event]) -> Iterable[list[bytes | Event]]:
    """Cut a long publish into batches of about `BATCH_TARGET_BYTES`."""
    part: list[bytes | Event] = []
    size = 0
    for event in events:
        payload = event.payload if isinstance(event, Event) else event
        try:
            length = len(payload)
        except TypeError:
            length = len(check_payload(payload))  # raises
        if part and (size + length > BATCH_TARGET_BYTES or len(part) == MAX_BATCH_EVENTS):
            yield part
            part, size = [], 0
        part.append(event)
        size += length
    yield part
