"""When the records of a topic were stored: for the age of the oldest record that a subscription needs."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaError, TopicPartition

from ...streams.errors import Closed
from .client import KafkaClients, PartitionConsumer

CONSUMERS = 4
"""A partition that does not answer keeps one of them busy for as long as a lookup may take."""
LOOKUP_S = 2.0
"""Longest time of one lookup, in seconds."""
POLL_S = 0.1
KNOWN_TIMES = 1000
"""Times that are remembered."""
_ONE_RECORD = {"fetch.message.max.bytes": 1024, "fetch.wait.max.ms": 10, "queued.min.messages": 1}


class RecordTimes:
    """Looks up times with a few consumers, which stay open, in threads of their own."""

    def __init__(self, topic: str, clients: KafkaClients, timeout_s: float) -> None:
        self._topic = topic
        self._clients = clients
        self._timeout_s = min(timeout_s, LOOKUP_S)
        self._threads = ThreadPoolExecutor(CONSUMERS, thread_name_prefix="headrace-kafka-times")
        self._idle: list[PartitionConsumer] = []
        self._closed = False
        self._known: OrderedDict[tuple[int, int], tuple[int, int | None]] = OrderedDict()
        """By queue and offset: the offset up to which a record was searched for, and the time of the first one."""

    async def stored_us(self, queue: int, start: int, end: int) -> int | None:
        """Return the time at which the first record from `start` up to `end` was stored, in microseconds since 1970;
        None if there is none. Raises StorageError, Closed."""
        self._check_open()
        searched, found = self._known.get((queue, start), (start, None))
        if found is None and searched >= end:
            return None
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, queue, searched, end)
            self._known[queue, start] = end, found
        self._known.move_to_end((queue, start))
        if len(self._known) > KNOWN_TIMES:
            self._known.popitem(last=False)
        return found

    def _look_up(self, queue: int, start: int, end: int) -> int | None:
        self._check_open()
        try:
            consumer = self._idle.pop()
        except IndexError:
            consumer = self._clients.consumer(more=_ONE_RECORD)
        try:
            found = self._read(consumer, TopicPartition(self._topic, queue, start), end)
            consumer.assign([])
        except BaseException:
            consumer.close()
            raise
        self._idle.append(consumer)
        return found

    def _read(self, consumer: PartitionConsumer, start: TopicPartition, end: int) -> int | None:
        doing = f"partition {start.partition} of topic {self._topic!r} cannot be read from offset {start.offset}"
        consumer.assign([start])
        deadline = time.monotonic() + self._timeout_s
        while (record := consumer.poll(POLL_S)) is None:
            self._check_open()
            if time.monotonic() > deadline:
                raise self._clients.failure(doing, TimeoutError("the brokers do not answer"))
        error = record.error()
        if error is None:
            return record.timestamp()[1] * 1000 if record.offset() < end else None
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 (its name)
            return None
        raise self._clients.failure(doing, error)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the times of records of topic {self._topic!r} are closed")

    async def aclose(self) -> None:
        """Lookups that wait or run raise Closed."""
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown()
        for consumer in self._idle:
            consumer.close()
        self._idle.clear()
