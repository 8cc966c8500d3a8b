"""Snapshots of providers and silos, from which metrics are made."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..agents.counts import LeaseCounts
from ..server.limits import TotalUsage
from ..streams.histograms import Histogram
from .lag_history import LagHistory, QueueLag
from .provider_core import ProviderCore
from .views import ProviderStatistics


class ProviderSnapshot(NamedTuple):
    """A provider at one moment. It stays as it is while the provider goes on."""

    name: str
    statistics: ProviderStatistics
    lags: Sequence[QueueLag]
    delayed: Mapping[int, int]
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


def provider_snapshot(provider: ProviderCore, history: LagHistory) -> ProviderSnapshot:
    """Return the provider as it is now. `history` has the last sample of its lag."""
    checkpointer, publishing = provider.manager.checkpointer, provider.publishing
    leases = provider.manager.queue_host.lease_counts
    return ProviderSnapshot(
        name=provider.name,
        statistics=provider.statistics(),
        lags=history.last(provider.name),
        delayed=history.delayed(provider.name),
        publish_durations=Histogram.sum_of([publishing.durations]),
        publish_errors=dict(publishing.errors),
        open_publishes=len(publishing),
        adapter_durations={name: Histogram.sum_of([each]) for name, each in provider.adapter.durations.items()},
        checkpoint_durations=Histogram.sum_of([checkpointer.durations]),
        checkpoint_age_s=asyncio.get_running_loop().time() - checkpointer.saved_at,
        leases=LeaseCounts(leases.gained, leases.given_back, leases.cut),
    )
