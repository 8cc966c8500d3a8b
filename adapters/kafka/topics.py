"""Requests to the brokers about topics: facts, creation, settings, and the offsets of partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from ...streams.errors import StorageError
from ..receiving import Bounds
from .client import KafkaClients, answer_of
from .limits import KafkaLimits

_LIST_TOPICS_S = 2.0
"""Time limit for a list of all topics. After it, no broker counts as reachable."""
_NONE = -1
"""The offset of a time after the last record."""


class TopicFacts(NamedTuple):
    """The facts about a topic that must not change while it is used."""

    topic_id: str
    partitions: int
    replicas: int


class KafkaTopics:
    """Requests to the brokers about topics. All raise StorageError if the brokers do not answer."""

    def __init__(self, clients: KafkaClients, client: AdminClient, limits: KafkaLimits) -> None:
        self._clients = clients
        self._client = cast(Any, client)
        self._limits = limits

    async def describe(self, topic: str) -> TopicFacts | None:
        """Return the facts about a topic, or None if there is none of this name.

        If the broker that controls the others has just ended, they choose another one, and the client learns of it only
        by a list of all topics."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * self._limits.request_s
        while True:
            asked = self._asked(topic, self._limits.request_s / 2)
            try:
                return await self._facts(topic, asked)
            except StorageError as error:
                if not _is_without_answer(asked) or loop.time() > deadline:
                    raise
                try:
                    await asyncio.to_thread(self._client.list_topics, timeout=_LIST_TOPICS_S)
                except KafkaException:
                    raise error from None  # no broker can be reached
            await asyncio.sleep(0.05)

    async def describe_known(self, topic: str, timeout_s: float | None = None) -> TopicFacts | None:
        """As `describe`, for a topic that existed: a broker that is behind the others is asked again, for `unknown_s`,
        before the topic counts as deleted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.unknown_s
        while True:
            facts = await self._facts(topic, self._asked(topic, timeout_s or self._limits.request_s))
            if facts is not None or loop.time() > deadline:
                return facts
            await asyncio.sleep(0.05)

    def _asked(self, topic: str, timeout_s: float) -> Future[Any]:
        (asked,) = self._client.describe_topics(TopicCollection([topic]), request_timeout=timeout_s).values()
        return asked

    async def _facts(self, topic: str, asked: Future[Any]) -> TopicFacts | None:
        try:
            found = await answer_of(asked, self._clients, f"topic {topic!r} cannot be described")
        except StorageError:
            if _does_not_know(asked):
                return None
            raise
        return TopicFacts(
            str(found.topic_id), len(found.partitions), max(len(each.replicas) for each in found.partitions)
        )

    async def create(self, topic: str, partitions: int, replication: int | None, settings: Mapping[str, str]) -> None:
        """Create a topic. It may exist already."""
        new = NewTopic(topic, partitions, replication or -1, config=dict(settings))
        (made,) = self._client.create_topics([new], request_timeout=self._limits.request_s).values()
        try:
            await answer_of(made, self._clients, f"topic {topic!r} cannot be created", needs="Create")
        except StorageError:
            error = made.exception()
            if not (isinstance(error, KafkaException) and error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS):
                raise

    async def created(self, topic: str) -> TopicFacts:
        """Wait until a topic that was created is known, with a leader for each partition. Return its facts."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.request_s
        while True:
            try:
                facts = await self.describe(topic)
                if facts is not None:
                    await self.bounds(topic, range(facts.partitions))
                    return facts
            except StorageError:
                if loop.time() > deadline:
                    raise
            if loop.time() > deadline:
                raise StorageError(f"topic {topic!r} was created, but the brokers do not know it")
            await asyncio.sleep(0.05)

    async def settings(self, topic: str) -> Mapping[str, str]:
        """Return the settings of a topic that exists."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)  # pyright: ignore[reportUnknownMemberType]
        found = await self._of_known(
            lambda: self._client.describe_configs([resource], request_timeout=self._limits.request_s)[resource],
            f"the settings of topic {topic!r} cannot be read",
            needs="DescribeConfigs",
        )
        return {name: entry.value for name, entry in found.items()}

    async def set(self, topic: str, name: str, value: str) -> None:
        """Change a setting of a topic that exists."""
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])  # pyright: ignore[reportUnknownMemberType]
        request_s = self._limits.request_s
        await self._of_known(
            lambda: self._client.incremental_alter_configs([resource], request_timeout=request_s)[resource],
            f"{name} of topic {topic!r} cannot be set",
            needs="AlterConfigs",
        )

    async def _of_known(self, ask: Callable[[], Future[Any]], doing: str, *, needs: str) -> Any:
        """Return the answer to a request about a topic that exists. It is sent again while the broker that answers does
        not know the topic yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.request_s
        while True:
            asked = ask()
            try:
                return await answer_of(asked, self._clients, doing, needs=needs)
            except StorageError:
                if not _does_not_know(asked) or loop.time() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def bounds(self, topic: str, partitions: Iterable[int]) -> Mapping[int, Bounds]:
        """Return the retained offsets of partitions. The end is that of committed records."""
        asked_partitions = [TopicPartition(topic, partition) for partition in partitions]
        # One after the other: if one of two at a time failed, the other one would go on without an owner.
        first = await self._offsets(dict.fromkeys(asked_partitions, OffsetSpec.earliest()))
        following = await self._offsets(dict.fromkeys(asked_partitions, OffsetSpec.latest()))
        if any(offset < 0 for offset in (*first.values(), *following.values())):
            raise StorageError(f"the offsets of topic {topic!r} cannot be read: the brokers do not know them yet")
        return {partition: Bounds(first[partition], following[partition]) for partition in first}

    async def offset_at(self, topic: str, partition: int, time_ms: int) -> int | None:
        """Return the offset of the first record with this time or a later one, None if there is none."""
        found = await self._offsets({TopicPartition(topic, partition): OffsetSpec.for_timestamp(time_ms)})
        return found[partition] if found[partition] >= 0 else None

    async def _offsets(self, asked: Mapping[TopicPartition, OffsetSpec | None]) -> Mapping[int, int]:
        """Return offsets by partition. To choose a new leader takes the brokers up to 9 s, so one request has half of
        `request_s`, and all attempts have twice of it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 2 * self._limits.request_s
        while True:
            answers = self._client.list_offsets(
                asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=self._limits.request_s / 2
            )
            try:
                return {each.partition: await self._offset(each, answer) for each, answer in answers.items()}
            except StorageError:
                topics = {each.topic for each, answer in answers.items() if _has_other_leader(answer)}
                if not topics or loop.time() > deadline:
                    raise
            for topic in topics:
                await self._refresh(topic)
            await asyncio.sleep(0.05)

    async def _offset(self, partition: TopicPartition, answer: Any) -> int:
        doing = f"the offsets of partition {partition.partition} of topic {partition.topic!r} cannot be read"
        offset = (await answer_of(answer, self._clients, doing)).offset
        if offset < _NONE:  # the client's answer, without an error, if the broker does not answer
            raise StorageError(f"{doing}: the broker that leads it does not answer")
        return offset

    async def _refresh(self, topic: str) -> None:
        """Have the client learn the leaders anew. It does not do so by itself, for example after a broker has started
        again: then it asks with an older epoch of the leader."""
        try:
            await asyncio.to_thread(self._client.list_topics, topic, timeout=self._limits.request_s)
        except KafkaException as error:
            raise self._clients.failure(f"the leaders of topic {topic!r} cannot be read", error) from None

    async def delete_below(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Delete the records below an offset, by partition."""
        asked_partitions = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
        for answer in self._client.delete_records(asked_partitions, request_timeout=self._limits.request_s).values():
            await answer_of(
                answer, self._clients, f"finished records of topic {topic!r} cannot be deleted", needs="Delete"
            )


_OLD_LEADER = (
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
)


def _does_not_know(answer: Future[Any]) -> bool:
    """Return whether there is no topic of this name on the broker that answered."""
    error = answer.exception() if answer.done() else None
    unknown = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)  # noqa: SLF001 (its name)
    return isinstance(error, KafkaException) and error.args[0].code() in unknown


def _is_without_answer(answer: Future[Any]) -> bool:
    error = answer.exception()
    return isinstance(error, KafkaException) and error.args[0].code() < 0 and not _does_not_know(answer)


def _has_other_leader(answer: Any) -> bool:
    """Return whether another broker may lead the partition by now: the one that was asked does not answer, or leads no
    more, or has another epoch than the client."""
    if not answer.done():
        return False
    error = answer.exception()
    if error is None:
        return bool(answer.result().offset < _NONE)
    return isinstance(error, KafkaException) and error.args[0].code() in _OLD_LEADER


def added_partitions(topic: str, partitions: int, queues: int) -> str:
    """Return the reason why a raw topic to which partitions were added cannot be used, with the remedy."""
    return (
        f"the topic {topic!r} has {partitions} partitions now, and the provider has {queues} queues: other programs "
        f"write events into partitions that it does not read, and move keys there: create a provider of another name "
        f"with queues = {partitions} and this topic, and start its subscriptions at a time before the change"
    )
