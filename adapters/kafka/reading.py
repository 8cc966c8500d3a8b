"""Reads a range of one partition, in threads, and then ends: for ledgers and for single records."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from confluent_kafka import KafkaError, TopicPartition

from ...streams.errors import HeadraceError, StorageError
from .client import KafkaClients, KafkaRecord

READ_RECORDS = 10_000
POLL_S = 0.1

_T = TypeVar("_T")


def read_range(
    clients: KafkaClients, topic: str, partition: int, start: int, end: int, *, timeout_s: float
) -> Generator[Sequence[KafkaRecord]]:
    """Yield the records from offset `start` up to `end`, in groups. Offsets without a record are left out.

    Blocks. Raises StorageError if nothing comes for `timeout_s` seconds, or if `start` was deleted meanwhile.
    """
    ends_at: int | None = None
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
                    if ends_at is not None:  # the brokers have lost the rest
                        raise StorageError(f"{doing} up to {end}: it ends at offset {ends_at}")
                    raise clients.failure(doing, TimeoutError("the brokers do not answer"))
                continue
            deadline = time.monotonic() + timeout_s
            more = consumer.consume(READ_RECORDS - 1, 0)
            found, at, ends_at = _split((first, *more), start, lambda error: clients.failure(doing, error))
            kept = [record for record in found if record.offset() < end]
            if kept:
                yield kept
            if at >= end or len(kept) < len(found):
                return
    finally:
        consumer.close()


def _split(
    messages: Sequence[KafkaRecord], start: int, failure: Callable[[KafkaError], HeadraceError]
) -> tuple[Sequence[KafkaRecord], int, int | None]:
    """Return the records, the offset that was reached, and the end of the partition if it was reached last. Raises
    `failure` of an error."""
    found: list[KafkaRecord] = []
    at, ends_at = start, None
    for record in messages:
        error = record.error()
        if error is None:
            found.append(record)
            at, ends_at = record.offset() + 1, None
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 (its name)
            at = ends_at = record.offset()
        else:
            raise failure(error)
    return found, at, ends_at


async def read_in_thread(
    threads: Executor, groups: Generator[Sequence[KafkaRecord]], digest: Callable[[Sequence[KafkaRecord]], _T]
) -> AsyncGenerator[_T]:
    """Yield `digest` of each group of `read_range`. Groups are read and digested in a thread.

    Close it with `aclosing`: then the consumer is closed in a thread, also if the caller is cancelled while one reads.
    Else the garbage collector would close it, on the event loop, which would wait for the brokers.
    """
    loop = asyncio.get_running_loop()
    using = threading.Lock()

    def following() -> tuple[_T] | None:
        with using:
            group = next(groups, None)
            return None if group is None else (digest(group),)

    def close() -> None:
        with using:
            groups.close()

    try:
        while (found := await loop.run_in_executor(threads, following)) is not None:
            yield found[0]
    finally:
        loop.run_in_executor(None, close)
