"""Snapshots of providers and silos, from which metrics are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..agents.counts import DeliveryCounts, LeaseCounts
from ..server.limits import TotalUsage
from ..streams.histograms import Histogram
from ..streams.subscriptions import CONSUMER_SEPARATOR
from .lag_history import LagHistory, QueueLag
from .provider_core import ProviderCore
from .views import ProviderStatistics, SubscriptionView


class ProviderSnapshot(NamedTuple):
    """A provider at one moment: an immutable copy."""

    name: str
    statistics: ProviderStatistics
    subscriptions: Sequence[SubscriptionView]
    """A subscription with mode broadcast is one, with the sums of its consumers."""
    lags: Sequence[QueueLag]
    delayed: Mapping[int, int]
    dead_letters: Mapping[str, int]
    """The number of dead letters that are kept, by subscription."""
    publish_durations: Histogram
    publish_errors: Mapping[str, int]
    open_publishes: int
    adapter_durations: Mapping[str, Histogram]
    checkpoint_durations: Histogram
    checkpoint_age_s: float
    leases: LeaseCounts

    def lag_bytes(self, lag: QueueLag) -> float | None:
        """The lag in bytes, from the mean size of the events that this process has received from the queue."""
        queue = self.statistics.queues[lag.queue]
        if lag.lag.events is None or (lag.lag.events and not queue.received_events):
            return None
        return lag.lag.events * queue.received_bytes / max(queue.received_events, 1)


class StoreSnapshot(NamedTuple):
    """A control store at one moment."""

    use: str
    """`progress`, or `leases` for the connection that only renews leases."""
    durations: Histogram
    errors: Mapping[str, int]


class ClusterSnapshot(NamedTuple):
    """The cluster at one moment, as this silo sees it."""

    silos: Mapping[str, int]
    """The number of silos by state."""
    view_age_s: float | None
    """The time since the last view of the cluster was read."""
    unserved: Mapping[str, int]
    """The number of queues that no silo serves, by provider."""
    unserved_s: Mapping[str, float]
    """The time without a silo, summed over the queues, by provider."""


class Snapshot(NamedTuple):
    """A silo at one moment, or the providers of another program."""

    providers: Sequence[ProviderSnapshot]
    stores: Sequence[StoreSnapshot] = ()
    loop_delay: Histogram | None = None
    usage: TotalUsage | None = None
    """The usage of gRPC, if it is served."""
    failed_calls: Mapping[str, int] = {}
    """Calls over gRPC that ended with an error, by its code."""
    cluster: ClusterSnapshot | None = None


def merged_consumers(
    views: Sequence[SubscriptionView], ended: Callable[[str], DeliveryCounts | None]
) -> list[SubscriptionView]:
    """Return one view of each subscription with mode broadcast, not one of each consumer: the names of consumers would
    make more and more series. `ended` returns the counts of its consumers that have left."""
    by_name: dict[str, list[SubscriptionView]] = {}
    for view in views:
        by_name.setdefault(view.name.partition(CONSUMER_SEPARATOR)[0], []).append(view)
    return [
        of[0] if len(of) == 1 and of[0].name == name else _sum(name, of, ended(name)) for name, of in by_name.items()
    ]


def _sum(name: str, views: Sequence[SubscriptionView], ended: DeliveryCounts | None) -> SubscriptionView:
    sums: dict[str, Any] = {}
    for field, first in views[0]._asdict().items():
        parts = [getattr(view, field) for view in views]
        if ended is not None and hasattr(ended, field):
            parts.append(getattr(ended, field))
        if isinstance(first, Histogram):
            sums[field] = Histogram.sum_of(parts)
        elif not isinstance(first, str):
            sums[field] = sum(parts)
    return views[0]._replace(**{**sums, "name": name})


def provider_snapshot(provider: ProviderCore, history: LagHistory) -> ProviderSnapshot:
    """Return the provider as it is now. `history` has the last sample of its lag."""
    checkpointer, publishing = provider.manager.checkpointer, provider.publishing
    leases, statistics = provider.manager.queue_host.lease_counts, provider.statistics()
    return ProviderSnapshot(
        name=provider.name,
        statistics=statistics,
        subscriptions=merged_consumers(statistics.subscriptions, provider.manager.state.ended_counts),
        lags=history.last(provider.name),
        delayed=history.delayed(provider.name),
        dead_letters=history.dead_letters(provider.name),
        publish_durations=Histogram.sum_of([publishing.durations]),
        publish_errors=dict(publishing.errors),
        open_publishes=publishing.under_way,
        adapter_durations={name: Histogram.sum_of([each]) for name, each in provider.adapter.durations.items()},
        checkpoint_durations=Histogram.sum_of([checkpointer.durations]),
        checkpoint_age_s=checkpointer.age_s(),
        leases=LeaseCounts(leases.gained, leases.given_back, leases.cut),
    )
