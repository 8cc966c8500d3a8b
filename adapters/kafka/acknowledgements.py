"""Offsets that are committed to Kafka.

Under the provider's group: the offset of each queue below which everything is finished. A process commits no lower one
than it has read, but of two processes one may commit a lower one than the other: then batches come once more. Under a
group for each subscription: its progress, for Kafka's tools.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from ...streams.background import BackgroundTasks
from ...streams.errors import StorageError
from .client import KafkaClients
from .limits import KafkaLimits

log = logging.getLogger("headrace.adapters.kafka")

RETRY_S = 0.1
_COORDINATOR_STARTS = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
)
"""Errors while the coordinator of a group starts, after the start of a broker."""


class KafkaAcknowledgements:
    """The acknowledged offset of each queue."""

    def __init__(self, group: str, topic: str, clients: KafkaClients, limits: KafkaLimits) -> None:
        self._clients = clients
        self._group = group
        self._topic = topic
        self._limits = limits
        self._noted: dict[int, int] = {}
        self._known: dict[int, int] = {}
        """The committed offsets that were read so far."""
        self._unsaved: set[int] = set()
        self._is_failing = False
        """Whether the last commit failed: an outage is logged once."""
        self._closing = asyncio.Event()
        self._background = BackgroundTasks()

    def note(self, queue: int, offset: int) -> None:
        """Note an offset. It is committed soon, and by `aclose`."""
        if offset <= self._noted.get(queue, 0):
            return
        self._noted[queue] = offset
        self._unsaved.add(queue)
        if not self._background:
            self._background.start(self._commit_later(), "headrace kafka acknowledgements")

    async def of(self, queue: int) -> int:
        """Return the acknowledged offset of a queue. Raises StorageError."""
        await self._read([queue])
        return max(self._known[queue], self._noted.get(queue, 0))

    async def _read(self, queues: Iterable[int]) -> None:
        partitions = [TopicPartition(self._topic, queue) for queue in queues]
        found = await asyncio.to_thread(self._committed, partitions)
        for each in found:
            self._known[each.partition] = max(each.offset, 0)

    def _committed(self, partitions: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        """Return the offsets that the group has committed. An administrative client would crash the process while the
        coordinator of the group loads (librdkafka 2.16)."""
        consumer = self._clients.consumer(self._group)
        deadline = time.monotonic() + self._limits.request_s
        try:
            while True:
                try:
                    return consumer.committed(partitions, self._limits.request_s)
                except KafkaException as error:
                    if error.args[0].code() not in _COORDINATOR_STARTS or time.monotonic() > deadline:
                        raise self._clients.failure(
                            f"the commits of group {self._group!r} cannot be read", error
                        ) from None
                time.sleep(RETRY_S)
        finally:
            consumer.close()

    async def _commit_later(self) -> None:
        while self._unsaved and not self._closing.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.commit_s):
                    await self._closing.wait()
            await self._commit()

    async def _commit(self) -> None:
        queues, self._unsaved = self._unsaved, set()
        if not queues:
            return
        try:
            await self._read(queues)
            higher = {queue: self._noted[queue] for queue in queues if self._noted[queue] > self._known[queue]}
            if higher:
                partitions = [TopicPartition(self._topic, queue, offset) for queue, offset in higher.items()]
                await asyncio.to_thread(self._clients.commit, self._group, partitions, self._limits.request_s)
        except StorageError as error:
            level = logging.DEBUG if self._is_failing else logging.WARNING
            log.log(level, "acknowledged offsets were not committed, and are tried again: %s", error)
            self._is_failing = True
            self._unsaved |= queues
        else:
            if self._is_failing:
                log.info("acknowledged offsets of group %r are committed again", self._group)
            self._is_failing = False

    async def aclose(self) -> None:
        """Commit the noted offsets. A commit that has begun is not interrupted: it could end after a later one."""
        self._closing.set()
        await self._background.join()
        await self._commit()


class ProgressGroups:
    """Commits the progress of each subscription under a group of its own. Nothing reads it but Kafka's tools."""

    def __init__(self, provider: str, topic: str, clients: KafkaClients, limits: KafkaLimits) -> None:
        self._provider = provider
        self._clients = clients
        self._topic = topic
        self._limits = limits
        self._shown: dict[str, tuple[float, Mapping[int, int]]] = {}
        """By subscription: the positions that were committed last, and the loop time."""
        self._failing: set[str] = set()
        """Subscriptions whose last commit failed: an outage is logged once."""

    async def show(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Commit positions by subscription and queue. A subscription that fails is logged, and tried again."""
        now = asyncio.get_running_loop().time()
        for name in self._shown.keys() - positions.keys():
            del self._shown[name]
        self._failing &= positions.keys()
        for name, offsets in positions.items():
            shown_at, shown = self._shown.get(name, (now - self._limits.repeat_commit_s, None))
            if (
                not offsets
                or now - shown_at < self._limits.show_s
                or (offsets == shown and now - shown_at < self._limits.repeat_commit_s)
            ):
                continue
            group = f"headrace.{self._provider}.{name}"
            partitions = [TopicPartition(self._topic, queue, offset) for queue, offset in offsets.items()]
            try:
                await asyncio.to_thread(self._clients.commit, group, partitions, self._limits.request_s)
            except StorageError as error:
                level = logging.DEBUG if self._failing else logging.WARNING
                log.log(level, "the progress of subscription %r is not shown to Kafka: %s", name, error)
                self._failing.add(name)
                continue
            self._failing.discard(name)
            self._shown[name] = now, offsets
