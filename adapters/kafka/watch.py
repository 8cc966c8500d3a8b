"""Watches that a topic can be reached, and that it is still the one that was opened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...streams.errors import HeadraceError, StorageError
from .limits import KafkaLimits
from .topics import KafkaTopics, TopicFacts, added_partitions

log = logging.getLogger("headrace.adapters.kafka")


class TopicWatch:
    """Checks the topic from time to time. `fault` is the reason why it cannot be used at present, or None."""

    def __init__(
        self,
        topic: str,
        facts: TopicFacts,
        topics: KafkaTopics,
        limits: KafkaLimits,
        changed: Callable[[], None],
        *,
        queues: int,
        is_shared: bool,
    ) -> None:
        """`changed` is called when the fault changes. `is_shared`: other programs write to the topic, too."""
        self._partitions = queues
        """The number of partitions that is known, at first the number of those that are read."""
        self._queues = queues
        self._is_shared = is_shared
        self._topic = topic
        self._facts = facts
        self._topics = topics
        self._limits = limits
        self._changed = changed
        self.fault: HeadraceError | None = None
        self._replaced: StorageError | None = None
        """Set when the topic has another id."""
        self.is_unusable = False
        """Whether the topic is not the one that was opened, so that nothing may be stored in it or read from it."""

    async def check(self) -> None:
        """Check now. Raises StorageError if the topic cannot be used."""
        if self._replaced is not None:  # for ever, also if a broker that is behind still answers with the old id
            raise self._replaced.copy()
        try:
            timeout_s = min(self._limits.request_s, self._limits.watch_answer_s)
            facts = await self._topics.describe_known(self._topic, timeout_s)
            fault = self._difference(facts)
            self.is_unusable = fault is not None
        except StorageError as error:
            fault = error
        if str(fault or "") != str(self.fault or ""):
            if fault is None:
                log.warning("the queues in topic %r can be read and written again", self._topic)
            elif self.fault is None or type(fault) is not type(self.fault) or self.is_unusable:
                log.error("the queues in topic %r cannot be read and written: %s", self._topic, fault)
            self.fault = fault
            self._changed()
        if fault is not None:
            raise fault.copy()

    async def run(self) -> None:
        """Check periodically. Does not end."""
        while True:
            await asyncio.sleep(self._limits.watch_s)
            try:
                await self.check()
            except StorageError:
                pass

    def _difference(self, facts: TopicFacts | None) -> StorageError | None:
        if facts is None:
            return StorageError(
                f"the topic {self._topic!r} was deleted, so its events are gone: create a provider of another name"
            )
        if facts.topic_id != self._facts.topic_id:
            self._replaced = StorageError(
                f"the topic {self._topic!r} was deleted and created again (its id was {self._facts.topic_id}, and is "
                f"{facts.topic_id}): its events are gone; create a provider of another name"
            )
            return self._replaced
        if facts.partitions > self._queues and self._is_shared:
            return StorageError(added_partitions(self._topic, facts.partitions, self._queues))
        if facts.partitions != self._partitions:
            self._partitions = facts.partitions
            log.warning(
                "topic %r has %d partitions, and the provider has %d queues: records in partitions from %d on are not "
                "read; headrace writes none there",
                self._topic, facts.partitions, self._queues, self._queues,
            )  # fmt: skip
        return None
