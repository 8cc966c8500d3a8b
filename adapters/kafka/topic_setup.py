"""The topic of a provider when it is opened: its creation, and the settings that are refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...streams.errors import InvalidArgument, NotFound, StorageError
from ..seam import AdapterContext
from .client import MAX_RECORD_BYTES
from .ledgers import ledger_settings, ledger_topic
from .options import KafkaOptions
from .topics import KafkaTopics, TopicFacts, added_partitions

log = logging.getLogger("headrace.adapters.kafka")

MIN_RECORD_BYTES = 4 << 20
"""A topic that stores smaller records only is refused: a batch of events may be as large as this."""


async def open_topic(
    topic: str,
    context: AdapterContext,
    options: KafkaOptions,
    topics: KafkaTopics,
    *,
    topic_id: str,
    given_age_s: float | None,
) -> TopicFacts:
    """Return the facts about the topic, and create it and its ledger if they do not exist.

    `topic_id` is its id of the last time, "" if it was not used before. `given_age_s` is `retain_age_s` as this process
    gives it. Raises InvalidArgument, NotFound and StorageError as `open_adapter`.
    """
    found = await topics.describe(topic)
    if found is None and context.location:
        found = await topics.describe_known(topic)
    if found is None:
        if context.location:
            raise NotFound(
                f"provider {context.provider!r}: there is no topic {topic!r} at {options.bootstrap}: check bootstrap; "
                "if the topic was deleted, its events are gone: create a provider of another name"
            )
        if not options.create:
            raise _no_topic(topic, context.queues, options)
        # The brokers do not tell their default of replicas, and the queues need `min.insync.replicas` from the
        # beginning: another process may open them at once. So the ledger is made first, and then the queues like it.
        replicas = options.replication or (await _open_ledger(topic, None, topics)).replicas
        settings = {**_topic_settings(options), **_replica_settings(replicas)}
        await topics.create(topic, context.queues, replicas, settings)
    facts = await topics.created(topic)  # another process may just have created it
    if topic_id and topic_id != facts.topic_id:
        raise InvalidArgument(
            f"provider {context.provider!r}: the topic {topic!r} was deleted and created again, so its events are "
            "gone: create a provider of another name",
            option="options",
        )
    settings = await topics.settings(topic)
    check_topic(topic, facts, settings, context=context, options=options, given_age_s=given_age_s)
    await _open_ledger(topic, options.replication or facts.replicas, topics)
    return facts


async def _open_ledger(topic: str, replicas: int | None, topics: KafkaTopics) -> TopicFacts:
    """Return the facts about the topic of the ledger, and create it if it does not exist. `replicas` is the number of
    its replicas then; None: the default of the cluster."""
    ledger = ledger_topic(topic)
    if await topics.describe(ledger) is None:
        await topics.create(ledger, 1, replicas, {**ledger_settings(), **_replica_settings(replicas)})
    facts = await topics.created(ledger)
    if facts.replicas >= 3 and int((await topics.settings(ledger)).get("min.insync.replicas", "1")) < 2:
        name, value = "min.insync.replicas", str(facts.replicas - 1)
        try:
            await topics.set(ledger, name, value)
        except StorageError as error:  # its content can be read from the queues again
            log.warning("the topic %r keeps %s = 1, so one broker could lose its records: %s", ledger, name, error)
    return facts


def _retention_ms(age_s: float) -> int:
    return int(age_s * 1000)


def _topic_settings(options: KafkaOptions) -> Mapping[str, str]:
    """Return the settings of a topic that is created."""
    age_s = None if options.keeps_unfinished else options.retain_age_s
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(-1 if age_s is None else _retention_ms(age_s)),
        "retention.bytes": "-1",
        "max.message.bytes": str(MAX_RECORD_BYTES),
        "message.timestamp.type": "LogAppendTime",
        "unclean.leader.election.enable": "false",
    }


def _replica_settings(replicas: int | None) -> Mapping[str, str]:
    """Return how many replicas have to store a record of a topic that is created."""
    return {} if replicas is None else {"min.insync.replicas": str(max(1, replicas - 1))}


def check_topic(
    topic: str,
    facts: TopicFacts,
    settings: Mapping[str, str],
    *,
    context: AdapterContext,
    options: KafkaOptions,
    given_age_s: float | None,
) -> None:
    """Raise InvalidArgument if the topic could lose events, or does not fit, with the command that mends it.

    Partitions that were added to a packed topic of a known provider are accepted: nothing is stored in them.
    """
    keep, queues = options.keeps_unfinished, context.queues
    if context.location and facts.partitions > queues and options.format == "raw":
        raise InvalidArgument(f"adapter 'kafka': {added_partitions(topic, facts.partitions, queues)}", option="options")
    alter = (
        f"kafka-configs.sh --bootstrap-server {options.bootstrap} --alter --entity-type topics --entity-name {topic}"
    )
    problems: list[tuple[bool, str, str]] = [
        (
            facts.partitions < queues or (facts.partitions > queues and not context.location),
            f"has {facts.partitions} partitions, and the provider has {queues} queues",
            f"open the provider with queues = {facts.partitions}, or use another topic",
        ),
        (
            "compact" in settings.get("cleanup.policy", ""),
            "is compacted, which deletes events that were not delivered",
            f"{alter} --add-config cleanup.policy=delete",
        ),
        (
            facts.replicas >= 3 and int(settings.get("min.insync.replicas", "1")) < 2,
            f"has {facts.replicas} replicas but min.insync.replicas = 1, so one broker could lose acknowledged events",
            f"{alter} --add-config min.insync.replicas=2",
        ),
        (
            settings.get("unclean.leader.election.enable") == "true",
            "allows unclean leader elections, which lose acknowledged events",
            f"{alter} --add-config unclean.leader.election.enable=false",
        ),
        (
            options.format == "packed" and int(settings.get("max.message.bytes", MIN_RECORD_BYTES)) < MIN_RECORD_BYTES,
            f"stores no records above {settings.get('max.message.bytes')} bytes",
            f"{alter} --add-config max.message.bytes={MAX_RECORD_BYTES}, or set format = 'raw' if others write to it",
        ),
        (
            keep and settings.get("retention.ms") != "-1",
            f"deletes by age (retention.ms = {settings.get('retention.ms')}), also events that are not finished",
            f"{alter} --add-config retention.ms=-1, or set retain_unfinished = false",
        ),
        (
            keep and settings.get("retention.bytes") != "-1",
            f"deletes by size (retention.bytes = {settings.get('retention.bytes')}), also events that are not finished",
            f"{alter} --add-config retention.bytes=-1, or set retain_unfinished = false",
        ),
    ]
    if given_age_s is not None and not keep:
        asked, present = str(_retention_ms(given_age_s)), settings.get("retention.ms")
        problems.append(
            (
                asked != present,
                f"has retention.ms = {present}, and retain_age_s = {given_age_s:g} asks for {asked}",
                f"{alter} --add-config retention.ms={asked}, or leave retain_age_s out",
            )
        )
    for wrong, problem, remedy in problems:
        if wrong:
            raise InvalidArgument(f"adapter 'kafka': the topic {topic!r} {problem}: {remedy}", option="options")


def _no_topic(topic: str, queues: int, options: KafkaOptions) -> NotFound:
    settings = {} if options.format == "raw" else {"max.message.bytes": str(MAX_RECORD_BYTES)}
    if options.keeps_unfinished:
        settings["retention.ms"] = "-1"
    parts = [
        f"kafka-topics.sh --bootstrap-server {options.bootstrap} --create --topic {topic} --partitions {queues}",
        *([] if options.replication is None else [f"--replication-factor {options.replication}"]),
        *(f"--config {name}={value}" for name, value in {**settings, **_replica_settings(options.replication)}.items()),
    ]
    return NotFound(
        f"adapter 'kafka': there is no topic {topic!r} at {options.bootstrap}: set create = true, or create it with "
        + " ".join(parts)
    )
