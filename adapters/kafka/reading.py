"""Reads a range of one partition, in a thread, and then ends: for ledgers and for single records."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from confluent_kafka import KafkaError, TopicPartition

from .client import KafkaClients, KafkaRecord

READ_RECORDS = 10_000
POLL_S = 0.1


def read_range(
    clients: KafkaClients, topic: str, partition: int, start: int, end: int, *, timeout_s: float
) -> Generator[Sequence[KafkaRecord]]:
    """Yield the records from offset `start` up to `end`, in groups. Offsets without a record are left out.

    Blocks. Raises StorageError if nothing comes for `timeout_s` seconds, or if `start` was deleted meanwhile.
    """
    if start >= end:
        return
    doing = f"partition {partition} of topic {topic!r} cannot be read from offset {start}"
    consumer = clients.consumer()
    try:
        consumer.assign([TopicPartition(topic, partition, start)])
        deadline = time.monotonic() + timeout_s
        while True:
            first = consumer.poll(POLL_S)
            if first is None:
                if time.monotonic() > deadline:
                    raise clients.failure(doing, TimeoutError("the brokers do not answer"))
                continue
            deadline = time.monotonic() + timeout_s
            found: list[KafkaRecord] = []
            at = start
            for record in (first, *consumer.consume(READ_RECORDS, 0)):
                error = record.error()
                if error is None:
                    found.append(record)
                    at = record.offset() + 1
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 (its name)
                    at = record.offset()
                else:
                    raise clients.failure(doing, error)
            kept = [record for record in found if record.offset() < end]
            if kept:
                yield kept
            if at >= end or len(kept) < len(found):
                return
    finally:
        consumer.close()
