"""Queues on Apache Kafka: headrace's adapter beside confluent-kafka and aiokafka, on one real broker."""

from __future__ import annotations

from functools import partial

from . import kafka_slow_handlers
from .peers.kafka_broker import AIOKAFKA, CONFLUENT, CONFLUENT_PACKED, PACKED, RAW
from .section import Run, Section, Target, cpu
from .slow_handlers import SlowSetting

ALL = (PACKED, RAW, CONFLUENT, CONFLUENT_PACKED, AIOKAFKA)
FACTORS = {PACKED.name: 10, CONFLUENT.name: 3, CONFLUENT_PACKED.name: 10}
"""So many times the events for faster cases: otherwise they measure little but the start of their clients."""


def sections(scale: float) -> list[Section]:
    """Sections `kafka-publish`, `kafka-publish-1k`, `kafka-end-to-end`, `kafka-end-to-end-1k`, `kafka-latency-500`,
    `kafka-latency-2000` and `kafka-slow-handlers`: `--only kafka` runs all."""

    def n(events: int) -> int:
        return max(2000, int(events * scale) // 1000 * 1000)

    def cases(measure: str, events: int, **args: float) -> dict[str, Run]:
        return {
            peer.name: partial(getattr(peer, measure), events=n(events * FACTORS.get(peer.name, 1)), **args)
            for peer in ALL
        }

    def latencies(**args: float) -> dict[str, Run]:
        return {peer.name: partial(peer.latency, **args) for peer in ALL}

    packed, raw, confluent, same, _ = (peer.name for peer in ALL)
    both = (
        Target(
            what="packed: CPU ≤ 0.2 × a record per event",
            case=packed,
            to=confluent,
            bound=0.2,
            metric=cpu,
            at_most=True,
        ),
        Target(what="packed: events/s ≥ 2.5 × a record per event", case=packed, to=confluent, bound=2.5),
        Target(what="packed: events/s ≥ 0.9 × the same records", case=packed, to=same, bound=0.9),
        Target(what="raw: events/s ≥ 0.5 × confluent-kafka", case=raw, to=confluent, bound=0.5),
    )
    return [
        *(
            Section(
                name=f"kafka-{name}{suffix}",
                group="kafka",
                title=f"Queues on Kafka: {title}, {shown}, batches of 1000",
                cases=cases(measure, events, size=size, batch=1000),
                targets=both,
            )
            for name, measure, title in (
                ("publish", "publish", "publish"),
                ("end-to-end", "end_to_end", "publish to consumer, two processes"),
            )
            for suffix, size, shown, events in (("", 100, "100 B", 300_000), ("-1k", 1024, "1 KiB", 100_000))
        ),
        *(
            Section(
                name=f"kafka-latency-{rate}",
                group="kafka",
                title=f"Queues on Kafka: latency at {rate:,} events/s, 100 B, two processes",
                cases=latencies(rate=rate, seconds=max(5 * scale, 1.0), size=100),
            )
            for rate in (500, 2000)
        ),
        kafka_slow_handlers.section(SlowSetting(seconds=max(10 * scale, 0.5))),
    ]
