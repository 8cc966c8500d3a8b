"""Packed records of a Kafka topic that another program has read, as Spark's own Kafka source. See docs/kafka.md."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from ..streams.errors import InvalidArgument
from ..streams.events import EventBatch

RECORD_EVENTS = (
    "array<struct<namespace: string, key: string, payload: binary, headers: map<string, string>, id: string, "
    "timestamp: timestamp, index: int>>"
)
"""The type of the result of `decode_record`, in Spark's schema language."""


class RecordEvent(NamedTuple):
    """An event of a packed record. Its fields are the columns of the format `headrace` with the same names."""

    namespace: str
    key: str
    payload: bytes
    headers: dict[str, str] | None
    """None if there are none."""
    id: str | None
    timestamp: datetime | None
    """In UTC. None if the event has none."""
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (the method of tuples is not used)
    """Position in the record. With the record's partition and offset, it is the token of the event."""


def decode_record(value: bytes | bytearray | None) -> Sequence[RecordEvent] | None:
    """Return the events in the value of a packed record, in order. Pure.

    Return None for a value that is not a batch of events: another program has written the record, or it is damaged.
    """
    if value is None:
        return None
    try:
        batch = EventBatch.decode(bytes(value))
        namespace, key = batch.stream.namespace, batch.stream.key
        return [
            RecordEvent(namespace, key, each.payload, dict(each.headers) or None, each.id or None, each.time, index)
            for index, each in enumerate(batch.iter_events())
        ]
    except InvalidArgument:
        return None
