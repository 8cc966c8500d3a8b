"""A new user's trial: an existing raw topic of Kafka, consumed in order for each key, with a poison record in it.

    python examples/raw_topic.py localhost:9092 --records 2000000

The first part makes the topic as any program would, with confluent-kafka. The second part is the whole consumer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections import Counter
from typing import Any, cast

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace import Event, Provider, RetryPolicy, Start

PARTITIONS, KEYS = 8, 1000


def make_topic(bootstrap: str, topic: str, records: int) -> None:
    """Write JSON records with ascending numbers for each key. The one in the middle is no JSON."""
    admin = cast(Any, AdminClient({"bootstrap.servers": bootstrap}))
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    # Without idempotence, a batch that is sent again may be stored after the next one of its partition.
    settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 50, "compression.type": "zstd"}
    producer = cast(Any, Producer(settings))
    for number in range(records):
        value = json.dumps({"order": number // KEYS, "amount": number % 97}) if number != records // 2 else "{poison"
        while True:
            try:
                producer.produce(topic, key=f"customer-{number % KEYS}", value=value)
                break
            except BufferError:
                producer.poll(0.1)
    assert not producer.flush(120), "the brokers did not take all records"


async def consume(bootstrap: str, topic: str, data: str) -> None:
    """Add up the amounts, and check the order of each customer."""
    totals: Counter[str] = Counter()
    last: dict[str, int] = {}

    async def add(event: Event) -> None:
        assert event.stream is not None
        customer, order = event.stream.key, json.loads(event.payload)
        if order["order"] <= last.get(customer, -1):
            print("out of order:", customer, order)
        last[customer] = order["order"]
        totals[customer] += order["amount"]

    options = {"bootstrap": bootstrap, "topic": topic, "format": "raw", "partitioner": "crc32"}
    async with Provider.open(data, adapter="kafka", queues=PARTITIONS, options=options) as provider:
        retry = RetryPolicy(max_attempts=3, initial_delay_s=0.1)
        began = time.monotonic()
        subscription = await provider.subscribe("totals", f"{topic}/*", add, start=Start.earliest(), retry=retry)
        await subscription.caught_up()
        print(f"{len(totals)} customers, sum {totals.total()}")
        for letter in await provider.dead_letters("totals"):
            print(f"dead letter: {letter.payload!r} after {letter.attempts} attempts")
        print(f"took {time.monotonic() - began:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bootstrap")
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--data", default="data")
    chosen = parser.parse_args()
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    make_topic(chosen.bootstrap, topic, chosen.records)
    asyncio.run(consume(chosen.bootstrap, topic, chosen.data))


if __name__ == "__main__":
    main()
