"""When the records of a topic were stored: for the age of the oldest record that a subscription needs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import TopicPartition

from .client import KafkaClients, PartitionConsumer
from .reading import read_with

KNOWN_TIMES = 1000
"""Times that are remembered."""
_ONE_RECORD = {"fetch.message.max.bytes": 1024, "fetch.wait.max.ms": 10, "queued.min.messages": 1}


class RecordTimes:
    """Looks up times with one consumer, in a thread of its own: other readers of the topic do not make it wait."""

    def __init__(self, topic: str, clients: KafkaClients, timeout_s: float) -> None:
        self._topic = topic
        self._clients = clients
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-kafka-times")
        self._consumer: PartitionConsumer | None = None
        self._known: OrderedDict[tuple[int, int], tuple[int, int | None]] = OrderedDict()
        """By queue and offset: the offset up to which a record was searched for, and the time of the first one."""

    async def stored_us(self, queue: int, start: int, end: int) -> int | None:
        """Return the time at which the first record from `start` up to `end` was stored, in microseconds since 1970;
        None if there is none. Raises StorageError."""
        searched, found = self._known.get((queue, start), (start, None))
        if found is None and searched >= end:
            return None
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, queue, searched, end)
            self._known[queue, start] = end, found
        self._known.move_to_end((queue, start))
        if len(self._known) > KNOWN_TIMES:
            self._known.popitem(last=False)
        return found

    def _read(self, queue: int, start: int, end: int) -> int | None:
        if self._consumer is None:
            self._consumer = self._clients.consumer(more=_ONE_RECORD)
        place, timeout_s = TopicPartition(self._topic, queue, start), self._timeout_s
        groups = read_with(self._consumer, self._clients, place, end, timeout_s=timeout_s, max_records=1)
        try:
            group = next(groups, None)
            self._consumer.assign([])
        except BaseException:
            self._close()
            raise
        return None if group is None else group[0].timestamp()[1] * 1000

    def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    async def aclose(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
