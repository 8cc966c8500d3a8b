"""Packed records of Kafka as rows of events."""

from datetime import UTC, datetime

import pytest

from headrace.pipeline import RecordEvent, decode_record
from headrace.streams.events import Event, EventBatch
from headrace.streams.identity import StreamId


def test_events_of_a_record_are_in_order_with_all_their_fields() -> None:
    rich = Event(b"\xff", headers={"type": "größer"}, id="e1", timestamp_us=1_500_000)
    encoded = EventBatch.of(StreamId("orders", "ключ"), [rich, b"plain"], now_us=2_000_000).encoded
    first, second = datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC), datetime(1970, 1, 1, 0, 0, 2, 0, UTC)
    assert decode_record(encoded) == [
        RecordEvent("orders", "ключ", b"\xff", {"type": "größer"}, "e1", first, 0),
        RecordEvent("orders", "ключ", b"plain", None, None, second, 1),
    ]
    assert decode_record(bytearray(encoded)) == decode_record(encoded)  # Spark's binary values in Python


@pytest.mark.parametrize("value", [None, b"", b"\xff no batch", b'{"json": 1}'])
def test_value_that_is_no_batch_has_no_events(value: bytes | None) -> None:
    assert decode_record(value) is None
