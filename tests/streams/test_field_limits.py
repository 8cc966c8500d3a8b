"""Python refuses the same values as gRPC does (`tests/faults/test_grpc_absurd.py`)."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from headrace import Event, EventBatch, InvalidArgument, RetryPolicy, Selector, Start, StreamId
from headrace.streams.field_limits import MAX_TIME_US, MIN_TIME_US
from headrace.streams.publishing import ProducerSequence, check_producer
from headrace.streams.subscriptions import StartKind

STREAM = StreamId("n", "k")


def batch(*events: Event) -> EventBatch:
    return EventBatch.of(STREAM, list(events))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: batch(Event(b"", timestamp_us=1 << 63)), "timestamp_us is a time in the years 1 to 9999"),
        (lambda: batch(Event(b"", timestamp_us=MIN_TIME_US - 1)), "timestamp_us is a time in the years 1 to 9999"),
        (lambda: batch(Event(b""), Event(b"", timestamp_us=MAX_TIME_US + 1)), "timestamp_us is a time in the years"),
        (lambda: batch(Event(b"", id="x" * 1025)), "the id of an event has at most 1,024 bytes in UTF-8, not 1,025"),
        (lambda: batch(Event(b"", headers={"a": "é" * 40_000})), "the headers of an event have at most 65,536 bytes"),
        (lambda: batch(Event(b"", headers={str(n): "" for n in range(129)})), "at most 128 headers, not 129"),
        (lambda: Selector("n/" + "k" * 8192), "a selector has at most 8,192 characters, not 8,194"),
        (lambda: Start(kind=StartKind.TIME, time_us=MAX_TIME_US + 1), "the time of a start is a time in the years"),
        (lambda: Start.parse("9" * 30), "is not a token: an offset or index is at most"),
        (lambda: RetryPolicy(initial_delay_s=1e308), "retry.initial_delay_s is a number of seconds from 0 to"),
        (
            lambda: RetryPolicy(max_attempts=True),
            "retry.max_attempts is a whole number from 1 to 2,147,483,647, not True",
        ),
        (lambda: RetryPolicy(max_attempts=2.5), "retry.max_attempts is a whole number"),  # type: ignore[arg-type]
        (lambda: RetryPolicy(multiplier="2"), "retry.multiplier is a number from 1 to 1,000,000, not '2'"),  # type: ignore[arg-type]
        (lambda: check_producer("é" * 65), "the id of a producer has 1 to 128 bytes in UTF-8, not 130"),
        (lambda: check_producer(7), "the id of a producer is text, not 7"),
        (
            lambda: ProducerSequence("p", 1 << 63, 0),
            "sequence: number is a whole number",
        ),
        (lambda: ProducerSequence("p", 1, -1), "sequence: number is a whole number"),
    ],
)
def test_value_above_a_limit_is_refused(make: Callable[[], Any], why: str):
    with pytest.raises(InvalidArgument, match=why) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_value_at_a_limit_is_taken():
    largest = [
        Event(b"", timestamp_us=MIN_TIME_US, id="é" * 512),
        Event(b"", timestamp_us=MAX_TIME_US, headers={"é": "é" * ((32 << 10) - 1)}),
        Event(b"", headers={str(number): "" for number in range(128)}),
    ]
    found = batch(*largest).events()
    assert [event.headers for event in found] == [event.headers for event in largest]
    assert found[0].time == datetime(1, 1, 1, tzinfo=UTC)
    assert found[1].time == datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)
