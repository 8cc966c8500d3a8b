"""How batches are stored as records."""

from __future__ import annotations

from typing import Protocol

from ...streams.errors import InvalidArgument, PayloadTooLarge
from ...streams.events import EventBatch
from .client import KafkaRecord, RecordHeaders
from .publisher import OutgoingRecord


class RecordFormat(Protocol):
    """Turns batches into records, and records into batches."""

    def records(self, queue: int, batch: EventBatch) -> list[OutgoingRecord]:
        """Return the records of a batch. Raises PayloadTooLarge and InvalidArgument."""
        ...

    def batch(self, record: KafkaRecord, headers: RecordHeaders) -> EventBatch | str:
        """Return the batch of a record with these headers, or the reason why it has none. Runs in a thread."""
        ...


class PackedFormat:
    """A record is one batch: its key is the text of the stream, its value the encoded batch."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the largest batch that the topic stores."""
        self._max_bytes = max_bytes

    def records(self, queue: int, batch: EventBatch) -> list[OutgoingRecord]:
        encoded = batch.encoded
        if len(encoded) > self._max_bytes:
            raise PayloadTooLarge(f"a batch for {batch.stream}", len(encoded), self._max_bytes)
        if not encoded.startswith(batch.stream.prefix) and EventBatch.decode(encoded).stream != batch.stream:
            raise InvalidArgument(f"a batch for {batch.stream} names another stream in its encoding")
        return [OutgoingRecord(queue, str(batch.stream).encode(), encoded)]

    def batch(self, record: KafkaRecord, headers: RecordHeaders) -> EventBatch | str:
        value = record.value()
        if value is None:
            return "the record has no value"
        try:
            return EventBatch.decode(value, record.offset())
        except InvalidArgument as error:
            return f"the record is not a batch of events: {error}"
