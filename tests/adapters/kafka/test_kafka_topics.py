"""Requests about topics, answered by a broker that is behind the others: a new topic is not known to it yet."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin._config import ConfigResource

from benchmarks.kafka_servers import KafkaServer
from headrace.adapters.kafka.client import KafkaClients
from headrace.adapters.kafka.limits import KafkaLimits
from headrace.adapters.kafka.options import KafkaOptions
from headrace.adapters.kafka.secrets import ClientSettings
from headrace.adapters.kafka.topics import KafkaTopics
from headrace.streams.errors import StorageError
from tests.adapters.kafka.opening import ForeignProgram, new_topic


def topics_behind(address: str, requests: int, **limits: float) -> KafkaTopics:
    clients = KafkaClients(KafkaOptions(bootstrap=address), ClientSettings({}))
    client: Any = BehindAtFirst(clients.admin(), requests)
    return KafkaTopics(clients, client, KafkaLimits(request_s=2.0)._replace(**limits))


class BehindAtFirst:
    """A client whose first requests ask for a topic that does not exist."""

    def __init__(self, client: Any, behind: int) -> None:
        self._client = client
        self._behind = behind

    def _name(self, topic: str) -> str:
        self._behind -= 1
        return topic if self._behind < 0 else "not." + topic

    def describe_topics(self, topics: Any, **options: Any) -> dict[str, Any]:
        (topic,) = topics.topic_names
        (answer,) = self._client.describe_topics(TopicCollection([self._name(topic)]), **options).values()
        return {topic: answer}

    def describe_configs(self, resources: list[Any], **options: Any) -> dict[Any, Any]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, self._name(resources[0].name))
        (answer,) = self._client.describe_configs([resource], **options).values()
        return {resources[0]: answer}


async def test_settings_are_asked_again_until_the_broker_knows_the_topic(kafka_server: KafkaServer):
    topic = new_topic()
    ForeignProgram(kafka_server.address).make_topic(topic, settings={"retention.ms": "12345"})
    settings = await topics_behind(kafka_server.address, 3).settings(topic)
    assert settings["retention.ms"] == "12345"
    with pytest.raises(StorageError, match=f"settings of topic '{topic}' cannot be read: .*Unknown topic"):
        await topics_behind(kafka_server.address, 1_000, request_s=0.3).settings(topic)


async def test_a_topic_that_existed_counts_as_deleted_after_a_while(kafka_server: KafkaServer):
    topic = new_topic()
    ForeignProgram(kafka_server.address).make_topic(topic)
    facts = await topics_behind(kafka_server.address, 3).describe_known(topic)
    assert facts is not None
    assert facts.partitions == 1
    assert await topics_behind(kafka_server.address, 1_000, unknown_s=0.3).describe_known(topic) is None
    assert await topics_behind(kafka_server.address, 1).describe(topic) is None
