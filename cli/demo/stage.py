"""The demo at work: one publisher, eight queues, three subscriptions, in one silo."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from ...adapters import ProducerSequence
from ...silo.options import CacheOptions
from ...silo.provider import LocalSubscription, Provider
from ...store.datadir import DataDirectory
from ...streams.errors import DataDirectoryError
from ...streams.events import Event
from ...streams.identity import StreamId
from ...streams.subscriptions import SlowConsumer, Start
from .check import DeliveryTally, differences, tally
from .flights import Flights
from .jobs import DemoJob, FlightDelays
from .run import DemoRun, DemoSettings

PROVIDER = "default"
NAMESPACE = "flights"
QUEUES = 8
CACHE = CacheOptions(max_events=120_000, max_bytes=32 << 20)
"""Smaller than the flights, so that the slow consumer reaches its limits."""
EVENTS_AT_ONCE = 1000


class DemoVerdict(NamedTuple):
    """The result of a run."""

    events: int
    streams: int
    subscriptions: dict[str, DeliveryTally]
    seconds: float
    """Seconds from opening the provider until everything was delivered, in this process."""
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        return not self.problems


class DemoStage:
    """A run in this process: call `play` with the provider that `opened` opens."""

    def __init__(self, run: DemoRun, flights: Flights, jobs: Sequence[DemoJob]) -> None:
        self.run = run
        self.flights = flights
        self.jobs = jobs
        self.published = 0
        self.policy = SlowConsumer(run.record.settings.policy)
        self.durability = run.record.settings.durability
        self.began = time.monotonic()
        self.seconds = 0.0

    def opened(self) -> AbstractAsyncContextManager[Provider]:
        settings = self.run.record.settings
        adapter, options = settings.adapter or "log", _options(settings)
        return Provider.open(
            self.run.directory.path, name=PROVIDER, adapter=adapter, queues=QUEUES, options=options, cache=CACHE
        )

    async def play(self, provider: Provider) -> None:
        """Deliver every flight to every job. If it is cancelled nothing is lost, and the next run continues."""
        subscriptions = [await self._subscribe(provider, job) for job in self.jobs]
        await self._publish(provider)
        await asyncio.gather(*(subscription.caught_up() for subscription in subscriptions))
        self.seconds = time.monotonic() - self.began

    async def _subscribe(self, provider: Provider, job: DemoJob) -> LocalSubscription:
        return await provider.subscribe(
            job.name,
            f"{NAMESPACE}/*",
            job,
            start=Start.earliest(),
            slow_consumer=self.policy,
            concurrency=job.concurrency,
        )

    async def _publish(self, provider: Provider) -> None:
        """Publish the flights that are not published yet. The log knows the last row, also after kill -9."""
        flights, producer = self.flights, "flights"
        streams = {key: StreamId(NAMESPACE, key) for key in flights.keys}
        self.published = await provider.adapter.last_sequence(producer)
        while self.published < len(flights):
            rows = range(self.published, min(self.published + EVENTS_AT_ONCE, len(flights)))
            await provider.publish_many(
                [
                    (streams[flights.keys[n]], Event(flights.payloads[n], timestamp_us=flights.departures_us[n]))
                    for n in rows
                ],
                sequence=ProducerSequence(producer, rows.stop, rows.start),
            )
            self.published = rows.stop

    def verdict(self) -> DemoVerdict:
        """Compare the ledgers with the file."""
        keys = self.flights.keys
        tallies = {job.name: tally(job.rows(), keys) for job in self.jobs}
        allowed = self.run.record.crashes > 0
        problems = [
            f"subscription {name}: {_text(found)}"
            for name, found in tallies.items()
            if not found.good(duplicates_allowed=allowed)
        ]
        for job in self.jobs:
            problems += job.problems()
            if isinstance(job, FlightDelays):
                problems += differences(job.delays, self.flights.delays)
        return DemoVerdict(len(keys), len(set(keys)), tallies, self.seconds, problems)


def _options(settings: DemoSettings) -> dict[str, object]:
    """The options of the adapter. Kafka deletes the events of a run after a day."""
    if settings.adapter != "kafka":
        return {"durability": settings.durability}
    return {
        "bootstrap": settings.bootstrap,
        "topic": settings.topic,
        "retain_unfinished": False,
        "retain_age_s": 86400,
    }


def _text(found: DeliveryTally) -> str:
    return (
        f"{found.missing:,} events are missing, {found.out_of_order:,} came out of order, "
        f"{found.duplicates:,} came more than once"
    )


async def check_only_the_demo(directory: DataDirectory, events: int) -> None:
    """Raise DataDirectoryError if the data has events that the demo did not publish."""
    if not (directory.path / "providers" / PROVIDER).exists():
        return
    async with Provider.open(directory.path, name=PROVIDER) as provider:
        stored = [await provider.adapter.statistics(queue) for queue in range(provider.queues)]
        others = [record.name for record in await provider.store.providers() if record.name != PROVIDER]
    if others or sum(queue.events or 0 for queue in stored) > events:
        raise DataDirectoryError(
            f"data directory '{directory.path}': holds events of others, which a new run would remove: "
            "name another directory"
        )
