"""The metrics of a silo for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..server.limits import TotalUsage
from .views import OutboxView, ProviderStatistics, QueueView, SubscriptionView

_View = ProviderStatistics | OutboxView | QueueView | SubscriptionView


class ObservedProvider(NamedTuple):
    """A provider at one moment."""

    provider: str
    statistics: ProviderStatistics
    tails: Sequence[Mapping[int, int]]
    """The end of each queue, by the positions of its subscriptions. Empty if the adapter cannot read the queue."""
    delayed: Mapping[int, int]
    """By queue, the number of events that are not due yet. A queue whose adapter cannot count them is missing."""


class FieldMetric(NamedTuple):
    """A metric from a field of a view. If the field is a sequence, the metric is its length."""

    name: str
    help: str
    field: str
    total: bool = False
    """The metric is a counter."""

    def family(self, labels: Sequence[str]) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self.total else GaugeMetricFamily
        return kind(f"headrace_{self.name}", self.help, labels=labels)

    def read(self, view: _View) -> float:
        value = getattr(view, self.field)
        return len(value) if isinstance(value, Sequence) else value  # pyright: ignore[reportUnknownArgumentType]


_PROVIDER: Sequence[FieldMetric] = (
    FieldMetric("published_events", "Events published by this process.", "published_events", total=True),
    FieldMetric("published_bytes", "Bytes published by this process.", "published_bytes", total=True),
    FieldMetric("delays_stored_events", "Delayed events that this process stored.", "delays_stored_events", total=True),
    FieldMetric(
        "delays_published_events", "Delayed events published when they were due.", "released_events", total=True
    ),
    FieldMetric("delays_failing", "1 while delayed events that are due cannot be published.", "release_failing"),
)
_OUTBOX: Sequence[FieldMetric] = (
    FieldMetric("outbox_moved_events", "Events published from the outbox.", "moved_events", total=True),
    FieldMetric("outbox_waiting_events", "Events in the outbox that are not published yet.", "waiting_events"),
    FieldMetric("outbox_age_seconds", "Age of the oldest event in the outbox.", "age_s"),
    FieldMetric("outbox_held_batches", "Batches in the outbox that the queue refused.", "held_batches"),
    FieldMetric("outbox_failing", "1 while the outbox cannot be moved.", "is_failing"),
)
_QUEUE: Sequence[FieldMetric] = (
    FieldMetric("queue_received_events", "Events read from the queue.", "received_events", total=True),
    FieldMetric("queue_received_bytes", "Bytes read from the queue.", "received_bytes", total=True),
    FieldMetric("queue_read_offset", "Read position of the queue, exclusive.", "next_offset"),
    FieldMetric("cache_events", "Events in the queue's cache.", "cache_events"),
    FieldMetric("cache_bytes", "Bytes in the queue's cache.", "cache_bytes"),
    FieldMetric("cache_max_events", "Capacity of the queue's cache in events.", "max_events"),
    FieldMetric("cache_max_bytes", "Capacity of the queue's cache in bytes.", "max_bytes"),
    FieldMetric("cache_buckets", "Buckets in use, at most ten.", "buckets"),
    FieldMetric("cache_pressure", "1 while the cache is full and reading waits.", "pressure"),
)
_SUBSCRIPTION: Sequence[FieldMetric] = (
    FieldMetric("delivered_events", "Events delivered.", "delivered_events", total=True),
    FieldMetric("delivered_batches", "Batches delivered.", "delivered_batches", total=True),
    FieldMetric("filtered_events", "Events that the filter held back.", "filtered", total=True),
    FieldMetric("retries", "Deliveries tried again.", "retries", total=True),
    FieldMetric("dead_letters", "Events given up on and kept.", "dead_lettered", total=True),
    FieldMetric("skipped_events", "Events given up on and skipped.", "skipped", total=True),
    FieldMetric(
        "effects_already_applied",
        "Events whose effects had been committed before, so that their handler was not called.",
        "already_applied",
        total=True,
    ),
    FieldMetric("gaps", "Ranges that were gone before they were delivered.", "gaps", total=True),
    FieldMetric("handlers_running", "Handlers that run now, or parcels in the hands of remote consumers.", "in_flight"),
    FieldMetric("streams_ready", "Streams that are ready for a handler.", "ready"),
    FieldMetric("streams_waiting", "Streams that wait for their next attempt.", "waiting"),
    FieldMetric("streams_parked", "Streams that left the cache.", "parked"),
    FieldMetric("streams_paused", "Streams that wait to be resumed.", "paused"),
    FieldMetric("subscription_held", "1 while the circuit breaker holds the subscription, or it resumes.", "held"),
    FieldMetric("consumers", "Remote consumers that are attached.", "consumers"),
)


_USAGE: Sequence[tuple[str, str]] = (
    ("clients", "Clients with counts, including idle ones."),
    ("connections", "Connections of clients with calls on them."),
    ("calls", "Calls that are open; a stream is one."),
    ("publish_bytes", "Bytes that are being published: received, and not yet stored."),
)


def render(observed: Sequence[ObservedProvider], usage: TotalUsage | None = None) -> bytes:
    """Return the text of /metrics. `usage` is that of gRPC, if it is served."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(observed, usage))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class MetricsCollector:
    """Makes metric families of observed providers."""

    def __init__(self, observed: Sequence[ObservedProvider], usage: TotalUsage | None) -> None:
        self._observed = observed
        self._usage = usage

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics in the order of the tables above, then those of a subscription in a queue."""
        yield from _families(_PROVIDER, ["provider"], [([one.provider], one.statistics) for one in self._observed])
        outboxes = [(one.provider, one.statistics.outbox) for one in self._observed]
        yield from _families(_OUTBOX, ["provider"], [([name], each) for name, each in outboxes if each is not None])
        yield from _families(
            _QUEUE,
            ["provider", "queue"],
            [([one.provider, str(queue.index)], queue) for one in self._observed for queue in one.statistics.queues],
        )
        yield from _families(
            _SUBSCRIPTION,
            ["provider", "subscription"],
            [([one.provider, each.name], each) for one in self._observed for each in one.statistics.subscriptions],
        )
        yield self._states()
        yield self._delayed()
        yield self._lags()
        if self._usage is not None:
            yield from _used(self._usage)

    def _states(self) -> Metric:
        labels = ["provider", "queue", "state"]
        family = GaugeMetricFamily("headrace_queue_state", "1 for the present state of the queue.", labels=labels)
        for one in self._observed:
            for queue in one.statistics.queues:
                family.add_metric([one.provider, str(queue.index), queue.state], 1)
        return family

    def _delayed(self) -> Metric:
        help_ = "Events that are not due yet, in the queue or stored for it."
        family = GaugeMetricFamily("headrace_queue_delayed_events", help_, labels=["provider", "queue"])
        for one in self._observed:
            for queue, events in one.delayed.items():
                family.add_metric([one.provider, str(queue)], events)
        return family

    def _lags(self) -> Metric:
        labels = ["provider", "subscription", "queue"]
        help_ = "Batches from the first that the subscription has not finished to the queue's end."
        family = GaugeMetricFamily("headrace_lag_batches", help_, labels=labels)
        for one in self._observed:
            for queue, tail in zip(one.statistics.queues, one.tails, strict=True):
                for cursor in queue.cursors:
                    if cursor.watermark in tail:
                        labelled = [one.provider, cursor.subscription, str(queue.index)]
                        family.add_metric(labelled, max(tail[cursor.watermark] - cursor.watermark, 0))
        return family


def _used(usage: TotalUsage) -> Iterable[Metric]:
    for field, help_ in _USAGE:
        yield GaugeMetricFamily(f"headrace_grpc_{field}", help_, value=getattr(usage, field))
    refused = CounterMetricFamily("headrace_grpc_refused", "Refusals because of a limit.", labels=["limit"])
    for limit, count in usage.refused.items():
        refused.add_metric([limit], count)
    yield refused


def _families(
    measures: Sequence[FieldMetric], labels: Sequence[str], views: Sequence[tuple[Sequence[str], _View]]
) -> Iterable[Metric]:
    for measure in measures:
        family = measure.family(labels)
        for values, view in views:
            family.add_metric(values, measure.read(view))
        yield family
