"""The division of published events into batches."""

from datetime import timedelta

import pytest

from headrace import Event, InvalidArgument, PayloadTooLarge, StreamId
from headrace.streams.events import BATCH_TARGET_BYTES, MAX_BATCH_EVENTS, MAX_EVENT_BYTES
from headrace.streams.publishing import encoded

STREAM = StreamId("orders", "42")
HALF = BATCH_TARGET_BYTES // 2


def counts(events: list[bytes | Event]) -> list[int]:
    batches = encoded(STREAM, events)
    assert [payload for batch in batches for payload in batch.payloads()] == [
        each.payload if isinstance(each, Event) else each for each in events
    ]
    return [batch.count for batch in batches]


@pytest.mark.parametrize("whole", [False, True])
def test_a_publish_is_one_batch_up_to_the_limits_of_a_batch(whole: bool) -> None:
    def made(payload: bytes) -> bytes | Event:
        return Event(payload) if whole else payload

    half, rest = made(bytes(HALF)), made(bytes(HALF - 1))
    assert counts([made(b"a")]) == [1]
    assert counts([half, rest, made(b"b")]) == [3]
    assert counts([half, rest, made(b"bc")]) == [2, 1]
    assert counts([made(b"")] * MAX_BATCH_EVENTS) == [MAX_BATCH_EVENTS]
    assert counts([made(b"")] * (MAX_BATCH_EVENTS + 1)) == [MAX_BATCH_EVENTS, 1]


def test_payloads_and_events_are_published_together() -> None:
    assert counts([b"a", Event(b"b"), b"c"]) == [3]
    assert counts([b"a", Event(b"b", delay=timedelta(seconds=1)), b"c"]) == [1, 1, 1]
    assert counts([Event(b"a", priority=5)]) == [1]


def test_a_payload_above_its_limit_is_refused() -> None:
    for events in ([bytes(MAX_EVENT_BYTES + 1)], [b"a", bytes(MAX_EVENT_BYTES + 1)]):
        with pytest.raises(PayloadTooLarge):
            encoded(STREAM, [*events])


@pytest.mark.parametrize("wrong", ["text", 5, None])
def test_other_types_among_payloads_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="publish bytes or Event"):
        encoded(STREAM, [b"a", wrong])  # type: ignore[list-item]


def test_a_publish_without_events_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one event"):
        encoded(STREAM, [])
