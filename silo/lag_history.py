"""The lag of the subscriptions that this process serves, over the last minutes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..streams.errors import HeadraceError
from ..streams.subscriptions import CONSUMER_SEPARATOR, Mode, SubscriptionDefinition, is_consumers_position
from .provider_core import ProviderCore
from .views import age_s, lag_of

log = logging.getLogger("headrace.silo")

SAMPLE_S = 2.0
"""Interval of samples, in seconds."""
MAX_SHARE = 0.01
"""Share of the time that sampling takes at most. If samples take long, the interval grows."""
MAX_PAUSE_S = 30.0
"""The longest interval, in seconds: alerts must see the lag, even if measuring it takes a larger share."""
SHORTEST_OF = 3
"""The shortest of so many samples counts for the interval: one that waited for the processor says nothing."""
MAX_SAMPLE_S = 20.0
"""Longest time of one provider's sample, in seconds. After that its lag is not known."""
STORE_SAMPLES = 5
"""The control store is read for every fifth sample: the progress of subscriptions that are not served, and the number
of dead letters."""
KEPT_SAMPLES = 300
MAX_SUBSCRIPTIONS = 500
"""Subscriptions of a provider whose lag is kept; of further ones, only the last sample is."""


class Lag(NamedTuple):
    """The lag of a subscription at one time, over the queues that this process serves."""

    at_us: int
    batches: int = 0
    """From the first batch that is not finished to the end."""
    events: int | None = 0
    """Events of these batches, an estimate if there are many; None if the adapter does not know."""
    age_ms: int | None = 0
    """The age of the oldest of these events; None if it is not known."""
    delivered_events: int = 0

    def plus(self, other: Lag) -> Lag:
        """The lag of both together."""
        return Lag(
            max(self.at_us, other.at_us),
            self.batches + other.batches,
            None if self.events is None or other.events is None else self.events + other.events,
            None if self.age_ms is None or other.age_ms is None else max(self.age_ms, other.age_ms),
            self.delivered_events + other.delivered_events,
        )


class QueueLag(NamedTuple):
    """The lag of a subscription in one queue."""

    subscription: str
    queue: int
    lag: Lag


class LagHistory:
    """Takes samples in `run`, and keeps the last ones."""

    def __init__(self, providers: Mapping[str, ProviderCore], *, sample_s: float = SAMPLE_S) -> None:
        self._providers = providers
        self._sample_s = sample_s
        self._kept: dict[str, dict[str, deque[Lag]]] = {}
        self._last: dict[str, Sequence[QueueLag]] = {}
        self._delayed: dict[str, Mapping[int, int]] = {}
        self._samples: dict[str, int] = {}
        """The number of samples, by provider."""
        self._unserved_lags: dict[str, Sequence[QueueLag]] = {}
        self._dead_letters: dict[str, Mapping[str, int]] = {}

    async def run(self) -> None:
        """Take samples until the task is cancelled."""
        loop = asyncio.get_running_loop()
        took = deque([0.0], maxlen=SHORTEST_OF)
        while True:
            began = loop.time()
            for provider in self._providers.values():
                try:
                    async with asyncio.timeout(MAX_SAMPLE_S):
                        await self.sample(provider)
                except Exception as error:  # noqa: BLE001 (samples of other providers go on)
                    self._last.pop(provider.name, None)  # unknown is better than old
                    self._delayed.pop(provider.name, None)
                    log.warning("the lag of provider %r cannot be measured: %r", provider.name, error)
            took.append(loop.time() - began)
            await asyncio.sleep(min(max(self._sample_s, min(took) / MAX_SHARE), MAX_PAUSE_S))

    async def sample(self, provider: ProviderCore) -> None:
        """Take one sample of the subscriptions that this process serves, and of those that it does not."""
        found: dict[str, Lag] = {}
        by_queue: dict[tuple[str, int], Lag] = {}
        for name, queue, lag in await _measured(provider):
            found[name] = found[name].plus(lag) if name in found else lag
            key = name, queue
            by_queue[key] = by_queue[key].plus(lag) if key in by_queue else lag
        for name, queue, lag in await self._unserved(provider):
            by_queue.setdefault((name, queue), lag)
        self._last[provider.name] = [QueueLag(name, queue, lag) for (name, queue), lag in by_queue.items()]
        self._delayed[provider.name] = await _delayed(provider)
        before = self._kept.get(provider.name, {})
        kept = self._kept[provider.name] = {}
        for number, (name, lag) in enumerate(found.items()):
            length = KEPT_SAMPLES if number < MAX_SUBSCRIPTIONS else 1
            kept[name] = deque((*before.get(name, ()), lag), maxlen=length)

    async def _unserved(self, provider: ProviderCore) -> Sequence[QueueLag]:
        """Return the lag of subscriptions that this process does not serve, in the queues that it reads."""
        self._samples[provider.name] = number = self._samples.get(provider.name, -1) + 1
        if number % STORE_SAMPLES == 0:
            try:
                stored = await provider.store.subscriptions(provider.name)
                unserved_lags = await _measured_stored(provider, stored)
                dead_letters = await _count_dead_letters(provider, stored)
            except BaseException:
                for kept in (self._unserved_lags, self._dead_letters, self._samples):  # the next sample asks again
                    kept.pop(provider.name, None)
                raise
            self._unserved_lags[provider.name], self._dead_letters[provider.name] = unserved_lags, dead_letters
        served = {name.partition(CONSUMER_SEPARATOR)[0] for name in provider.manager.served}
        return [lag for lag in self._unserved_lags.get(provider.name, ()) if lag.subscription not in served]

    def last(self, provider: str) -> Sequence[QueueLag]:
        """Return the lag of each subscription in each queue that this process serves, in the last sample."""
        return self._last.get(provider, ())

    def delayed(self, provider: str) -> Mapping[int, int]:
        """Return the number of events by queue that were not due yet in the last sample. A queue whose adapter cannot
        count them is missing."""
        return self._delayed.get(provider, {})

    def dead_letters(self, provider: str) -> Mapping[str, int]:
        """Return the number of dead letters in the control store by subscription. Nothing if it is not known."""
        return self._dead_letters.get(provider, {})

    def unserved(self, provider: str) -> Mapping[str, Lag]:
        """Return the lag of each subscription that this process does not serve, over the queues that it reads, in the
        last sample. One without saved progress in these queues is missing."""
        found: dict[str, Lag] = {}
        for name, _, lag in self.last(provider):
            if name not in self._kept.get(provider, {}):
                found[name] = found[name].plus(lag) if name in found else lag
        return found

    def lags(self, provider: str, subscription: str, since_us: int) -> Iterable[Lag]:
        """Return the samples since a time, the oldest first; the last sample in any case, if there is one."""
        kept = self._kept.get(provider, {}).get(subscription, ())
        since = [lag for lag in kept if lag.at_us >= since_us]
        return since or list(kept)[-1:]


async def _delayed(provider: ProviderCore) -> dict[int, int]:
    counted: dict[int, int] = {}
    for queue in filter(provider.manager.state.reads, range(provider.queues)):
        with suppress(HeadraceError):
            counted[queue] = (await lag_of(provider.adapter, queue, None)).later_events
    return counted


async def _measured(provider: ProviderCore) -> list[QueueLag]:
    """Return the lag of each subscription in each queue. The consumers of a broadcast count for its subscription."""
    now_us = time.time_ns() // 1000
    found: list[QueueLag] = []
    ends: dict[int, int] = {}
    for name, one in list(provider.manager.served.items()):
        for queue, delivery in list(one.deliveries.items()):
            lag = Lag(now_us, delivered_events=delivery.counts.delivered_events)
            try:
                lag = await _with_backlog(provider, queue, delivery.progress.awaited, ends, lag)
            except HeadraceError:  # the queue cannot be read: its state reports that
                lag = lag._replace(events=None, age_ms=None)
            found.append(QueueLag(name.partition(CONSUMER_SEPARATOR)[0], queue, lag))
    return found


async def _count_dead_letters(provider: ProviderCore, stored: Iterable[SubscriptionDefinition]) -> dict[str, int]:
    counts = {one.name: 0 for one in stored if not is_consumers_position(one)}
    for name, count in (await provider.store.count_dead_letters(provider.name)).items():
        name = name.partition(CONSUMER_SEPARATOR)[0]  # noqa: PLW2901
        counts[name] = counts.get(name, 0) + count
    return counts


async def _measured_stored(provider: ProviderCore, stored: Iterable[SubscriptionDefinition]) -> list[QueueLag]:
    """Return the lag of the stored progress of the subscriptions that this process does not serve, in its queues."""
    served = {name.partition(CONSUMER_SEPARATOR)[0] for name in provider.manager.served}
    names = {one.name for one in stored if not is_consumers_position(one) and one.mode is not Mode.BROADCAST} - served
    now_us, ends = time.time_ns() // 1000, dict[int, int]()
    found: list[QueueLag] = []
    for queue in filter(provider.manager.state.reads, range(provider.queues) if names else ()):
        checkpoints = await provider.store.checkpoints_of_queue(provider.name, queue)
        for name in names & checkpoints.keys():
            lag = Lag(now_us)
            try:
                lag = await _with_backlog(provider, queue, checkpoints[name].awaited, ends, lag)
            except HeadraceError:
                lag = lag._replace(events=None, age_ms=None)
            found.append(QueueLag(name, queue, lag))
    return found


async def _with_backlog(provider: ProviderCore, queue: int, watermark: int, ends: dict[int, int], lag: Lag) -> Lag:
    """Add the backlog from `watermark` on. `ends` has the ends of queues that are known already."""
    adapter = provider.adapter
    if adapter.capabilities.ordered:
        if queue not in ends:
            ends[queue] = (await adapter.bounds(queue)).next
        if watermark >= ends[queue]:
            return lag
    backlog = await adapter.backlog(queue, watermark)
    if not backlog.batches:
        return lag
    age = age_s(backlog)
    return lag._replace(
        batches=backlog.batches, events=backlog.events, age_ms=None if age is None else round(1000 * age)
    )
