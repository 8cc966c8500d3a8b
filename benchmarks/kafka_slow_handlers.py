"""Handlers of 100 ms over many keys of a raw topic with 8 partitions, 1 % of the keys stuck for ever.

All cases read records that one producer wrote beforehand, each from a topic of its own. See `slow_handlers` for the
method. The others are:
- *A consumer group*: one event after the other in each partition, as a group of 8 consumers does it. A stuck key stops
  its partition.
- *Order by hand*: one consumer, a queue and a task for each key, and the offset of the first unhandled event committed.
- *pyrallel-consumer*: the key-ordered parallel consumer from PyPI, with its defaults. It needs Python 3.12 or newer.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import Provider

from .harness import Job, NotAvailable, Result
from .peers.kafka_broker import (
    CONNECT_S,
    LINGER_MS,
    NewTopicOnBroker,
    confluent_group,
    place_of,
    shared_broker,
    value_of,
)
from .section import Run, Section, Target
from .slow_handlers import (
    IDEAL,
    IN_HAND,
    Handling,
    Inbox,
    OrderByHand,
    SlowSetting,
    args_of,
    consume,
    handle_events,
    ideal,
    publish,
    result_of,
)
from .worker import StartingGate

if TYPE_CHECKING:
    import confluent_kafka

HERE = "benchmarks.kafka_slow_handlers"
PARTITIONS = 8
RAW, PACKED = "headrace, raw topic", "headrace, packed"
GROUP, BY_HAND = "consumer group, confluent-kafka", "confluent-kafka, order by hand"
PARALLEL = "pyrallel-consumer 1.0.0"
PARALLEL_SCRIPT = Path(__file__).parent / "peers" / "pyrallel_consumer_process.py"
PYTHON_VARIABLE = "HEADRACE_PYTHON"
"""Environment variable: the Python, 3.12 or newer, for pyrallel-consumer. Else one in PATH or of pyenv is taken."""


# ---- headrace --------------------------------------------------------------------------------------------------------


def in_silo(gate: StartingGate, *, address: str, raw: bool, **setting: Any) -> Mapping[str, Any]:
    return asyncio.run(_in_silo(gate, address, SlowSetting(**setting), raw=raw))


async def _in_silo(gate: StartingGate, address: str, setting: SlowSetting, *, raw: bool) -> Mapping[str, Any]:
    broker, topic = place_of(address)
    options: Mapping[str, Any] = {"bootstrap": broker, "topic": f"{topic}-packed"}
    if raw:
        options = {"bootstrap": broker, "topic": topic, "format": "raw", "namespace": "bench", "partitioner": "murmur2"}
        fill(address, setting)
    async with Provider.open(adapter="kafka", queues=PARTITIONS, options=options) as provider:
        if not raw:
            await publish(setting, provider)
        return await handle_events(gate, setting, provider)


# ---- confluent-kafka -------------------------------------------------------------------------------------------------


def fill(address: str, setting: SlowSetting) -> None:
    """Write a record for each event of each key."""
    from confluent_kafka import Producer  # noqa: PLC0415 (only in the process that uses it)

    broker, topic = place_of(address)
    producer = Producer({"bootstrap.servers": broker, "linger.ms": LINGER_MS, "partitioner": "murmur2_random"})
    for _ in range(setting.each):
        for key in setting.keys:
            producer.produce(topic, key.encode(), key)
        producer.flush(CONNECT_S)


class KafkaInbox(Inbox):
    """A consumer of all partitions. It commits the offset of the first record that is not acknowledged."""

    def __init__(self, consumer: confluent_kafka.Consumer) -> None:
        self._consumer = consumer
        self._next: dict[int, int] = {}
        self._acknowledged: dict[int, set[int]] = {}

    async def publish(self, keys: Sequence[str]) -> None:
        raise NotImplementedError  # see `fill`

    async def receive(self, most: int) -> Sequence[tuple[str, Any]]:
        messages = await asyncio.to_thread(self._consumer.consume, most, 0.05)
        events: list[tuple[str, tuple[int, int]]] = []
        for message in messages:
            key, partition, offset = value_of(message).decode(), message.partition(), message.offset()
            assert partition is not None
            assert offset is not None
            self._next.setdefault(partition, offset)
            events.append((key, (partition, offset)))
        return events

    async def acknowledge(self, events: Sequence[Any]) -> None:
        from confluent_kafka import TopicPartition  # noqa: PLC0415

        for partition, offset in events:
            self._acknowledged.setdefault(partition, set()).add(offset)
        moved: list[confluent_kafka.TopicPartition] = []
        topic = self._consumer.assignment()[0].topic
        for partition, done in self._acknowledged.items():
            before = offset = self._next[partition]
            while offset in done:
                done.remove(offset)
                offset += 1
            if offset != before:
                self._next[partition] = offset
                moved.append(TopicPartition(topic, partition, offset))
        if moved:
            self._consumer.commit(offsets=moved, asynchronous=True)


class OrderByPartition(OrderByHand):
    """What a consumer group does: one event after the other in each partition."""

    def lane(self, key: str, event: Any) -> Any:
        return event[0]


def confluent(gate: StartingGate, *, address: str, by_hand: bool, **setting: Any) -> Mapping[str, Any]:
    fill(address, SlowSetting(**setting))
    return asyncio.run(_confluent(gate, address, SlowSetting(**setting), by_hand=by_hand))


async def _confluent(gate: StartingGate, address: str, setting: SlowSetting, *, by_hand: bool) -> Mapping[str, Any]:
    handling = Handling(setting)
    kind = OrderByHand if by_hand else OrderByPartition
    with confluent_group(*place_of(address), "slow") as consumer:
        return await consume(gate, kind(KafkaInbox(consumer), handling.handle, IN_HAND), handling)


# ---- pyrallel-consumer -----------------------------------------------------------------------------------------------


def parallel(gate: StartingGate, *, address: str, **setting: Any) -> Mapping[str, Any]:
    """Run the script in an environment of its own, and ask it for its count at both ends of the window."""
    chosen = SlowSetting(**setting)
    fill(address, chosen)
    broker, topic = place_of(address)
    step = chosen.streams // max(chosen.stuck, 1)
    order = {"broker": broker, "topic": topic, "stuck": chosen.keys[::step][: chosen.stuck]}
    with subprocess.Popen(
        [*_command(), json.dumps(order)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(question: str) -> float:
            print(question, file=process.stdin, flush=True)
            assert process.stdout is not None
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError("pyrallel-consumer ended")
            return float(answer)

        try:
            ask("wait for the first event")
            ask(f"sleep {chosen.warm_up_s}")
            gate.wait()
            before = ask("count")
            ask(f"sleep {chosen.seconds}")
            events = ask("count") - before
            gate.done()
        finally:
            process.kill()
    return {"events": int(events)}


def _command() -> Sequence[str]:
    return (
        str(Path(sys.executable).with_name("uv")), "run", "--quiet", "--no-project", "--python", _newer_python(),
        "--with", "pyrallel-consumer==1.0.0", str(PARALLEL_SCRIPT),
    )  # fmt: skip


@cache
def _newer_python() -> str:
    """Return the path of a Python 3.12 or newer. Raises NotAvailable."""
    names = ("python3.14", "python3.13", "python3.12")
    found = (os.environ.get(PYTHON_VARIABLE), sys.executable, *map(shutil.which, names))
    for path in (*found, *map(str, Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python"))):
        if path is not None and _runs([path, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"]):
            return path
    raise NotAvailable(
        f"pyrallel-consumer needs Python 3.12 or newer: install it, or say where it is in {PYTHON_VARIABLE}"
    )


def _runs(command: Sequence[str]) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def _check_parallel() -> None:
    """Install what is missing, outside of the measurement."""
    if not _runs([*_command(), "{}"]):
        raise NotAvailable(f"pyrallel-consumer cannot be installed: {shlex.join(_command())} '{{}}'")


# ---- the section -----------------------------------------------------------------------------------------------------


def _run(function: str, setting: SlowSetting, **more: Any) -> Result:
    if function == "parallel":
        _check_parallel()
    with NewTopicOnBroker(shared_broker(), PARTITIONS) as topic:
        args = {"address": topic.address, **args_of(setting), **more}
        return result_of([Job("consumer", f"{HERE}:{function}", args)], topic)


def section(setting: SlowSetting) -> Section:
    cases: dict[str, Run] = {
        IDEAL: partial(ideal, setting),
        RAW: partial(_run, "in_silo", setting, raw=True),
        PACKED: partial(_run, "in_silo", setting, raw=False),
        GROUP: partial(_run, "confluent", setting, by_hand=False),
        BY_HAND: partial(_run, "confluent", setting, by_hand=True),
        PARALLEL: partial(_run, "parallel", setting),
    }
    return Section(
        name="kafka-slow-handlers",
        group="kafka",
        title=(
            f"Queues on Kafka: handlers of 100 ms over {setting.streams:,} keys in {PARTITIONS} partitions, "
            f"{setting.stuck} keys stuck for ever"
        ),
        cases=cases,
        ratio_to=IDEAL,
        targets=(
            Target(what=f"{RAW}: ≥ 0.95 × {IDEAL}", case=RAW, to=IDEAL, bound=0.95),
            Target(what=f"{RAW}: ≥ 1 × {PARALLEL}", case=RAW, to=PARALLEL, bound=1),
        ),
    )
