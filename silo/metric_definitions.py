"""All metrics: their names, and how each value is read from a snapshot.

docs/metrics.md has the same tables; a test compares them. No label has the key of a stream, the id of a consumer, or
the text of an error: the number of series must not grow with the events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from math import inf
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..server.limits import TotalUsage
from ..streams.cluster import SiloState
from ..streams.histograms import Histogram
from .lag_history import QueueLag
from .metric_snapshots import ProviderSnapshot, Snapshot
from .views import OutboxView, QueueView, SubscriptionView

PREFIX = "headrace_"
VERSION = version("headrace")
QUEUE_STATES = ("idle", "starting", "running", "throttled", "faulted")

Kind = Literal["counter", "gauge", "histogram"]
Value = float | Histogram
Sample = tuple[Sequence[str], Value | None]
"""The values of the labels, and the value of the metric. None: it is not known, so there is no series."""


class Definition(NamedTuple):
    """A metric."""

    name: str
    """Without the prefix, and without `_total` for a counter."""
    kind: Kind
    labels: Sequence[str]
    help: str
    read: Callable[[Snapshot], Iterable[Sample]]

    @property
    def shown_name(self) -> str:
        """The name in Prometheus. That of a histogram gets `_bucket`, `_sum` and `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    def family(self, snapshot: Snapshot) -> Metric:
        """Return the metric with its values."""
        name = PREFIX + self.name
        if self.kind == "histogram":
            histograms = HistogramMetricFamily(name, self.help, labels=self.labels)
            for labels, value in self.read(snapshot):
                if isinstance(value, Histogram):
                    histograms.add_metric(labels, _buckets(value), value.sum_s)
            return histograms
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(name, self.help, labels=self.labels)
        for labels, value in self.read(snapshot):
            if value is not None and not isinstance(value, Histogram):
                family.add_metric(labels, value)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [("+Inf" if end == inf else repr(end), count) for end, count in histogram.buckets()]


# ---- values of snapshots ------------------------------------------------------------------------------------------


def _provider(
    name: str,
    kind: Kind,
    help: str,  # noqa: A002 (the word of Prometheus)
    read: Callable[[ProviderSnapshot], Value | None],
) -> Definition:
    def samples(now: Snapshot) -> Iterable[Sample]:
        return [([one.name], read(one)) for one in now.providers]

    return Definition(name, kind, ["provider"], help, samples)


def _coded(name: str, label: str, help: str, read: Callable[[ProviderSnapshot], Mapping[str, int]]) -> Definition:  # noqa: A002
    """A counter with another label, such as the code of an error."""

    def samples(now: Snapshot) -> Iterable[Sample]:
        return [([one.name, value], count) for one in now.providers for value, count in read(one).items()]

    return Definition(name, "counter", ["provider", label], help, samples)


def _outbox(name: str, kind: Kind, help: str, read: Callable[[OutboxView], float]) -> Definition:  # noqa: A002
    def value(one: ProviderSnapshot) -> float | None:
        return None if one.statistics.outbox is None else read(one.statistics.outbox)

    return _provider(name, kind, help, value)


def _queue(name: str, kind: Kind, help: str, read: Callable[[QueueView], Value | None]) -> Definition:  # noqa: A002
    def samples(now: Snapshot) -> Iterable[Sample]:
        return [([one.name, str(each.index)], read(each)) for one in now.providers for each in one.statistics.queues]

    return Definition(name, kind, ["provider", "queue"], help, samples)


def _subscription(name: str, kind: Kind, help: str, read: Callable[[SubscriptionView], Value | None]) -> Definition:  # noqa: A002
    def samples(now: Snapshot) -> Iterable[Sample]:
        return [([one.name, each.name], read(each)) for one in now.providers for each in one.subscriptions]

    return Definition(name, kind, ["provider", "subscription"], help, samples)


def _lag(name: str, help: str, read: Callable[[ProviderSnapshot, QueueLag], float | None]) -> Definition:  # noqa: A002
    def samples(now: Snapshot) -> Iterable[Sample]:
        return [
            ([one.name, each.subscription, str(each.queue)], read(one, each))
            for one in now.providers
            for each in one.lags
        ]

    return Definition(name, "gauge", ["provider", "subscription", "queue"], help, samples)


def _queue_states(now: Snapshot) -> Iterable[Sample]:
    for one in now.providers:
        for queue in one.statistics.queues:
            for state in QUEUE_STATES:
                yield [one.name, str(queue.index), state], queue.state == state


def _kept_dead_letters(now: Snapshot) -> Iterable[Sample]:
    return [([one.name, name], count) for one in now.providers for name, count in one.dead_letters.items()]


def _delayed(now: Snapshot) -> Iterable[Sample]:
    return [([one.name, str(queue)], events) for one in now.providers for queue, events in one.delayed.items()]


def _retries(now: Snapshot) -> Iterable[Sample]:
    for one in now.providers:
        for each in one.subscriptions:
            counted = each.retries - each.retries_unavailable - each.retries_held
            yield [one.name, each.name, "failure"], counted
            yield [one.name, each.name, "unavailable"], each.retries_unavailable
            yield [one.name, each.name, "held"], each.retries_held


def _lag_batches(_: ProviderSnapshot, one: QueueLag) -> float | None:
    return one.lag.batches if one.lag.batches or one.lag.events is not None else None


def _lag_seconds(_: ProviderSnapshot, one: QueueLag) -> float | None:
    return None if one.lag.age_ms is None else one.lag.age_ms / 1000


def _adapter_durations(now: Snapshot) -> Iterable[Sample]:
    return [([one.name, name], each) for one in now.providers for name, each in one.adapter_durations.items()]


def _moves(one: ProviderSnapshot) -> Mapping[str, int]:
    return {"gained": one.leases.gained, "given_back": one.leases.given_back, "cut": one.leases.cut}


def _usage(name: str, help: str, read: Callable[[TotalUsage], float]) -> Definition:  # noqa: A002
    def samples(now: Snapshot) -> Iterable[Sample]:
        return [] if now.usage is None else [([], read(now.usage))]

    return Definition(f"grpc_{name}", "gauge", [], help, samples)


def _refused(now: Snapshot) -> Iterable[Sample]:
    return [] if now.usage is None else [([limit], count) for limit, count in now.usage.refused.items()]


def _silos(now: Snapshot) -> Iterable[Sample]:
    if now.cluster is not None:
        yield from (([state.value], now.cluster.silos.get(state.value, 0)) for state in SiloState)


def _view_age(now: Snapshot) -> Iterable[Sample]:
    return [] if now.cluster is None else [([], now.cluster.view_age_s)]


def _unserved(now: Snapshot) -> Iterable[Sample]:
    return [] if now.cluster is None else [([name], count) for name, count in now.cluster.unserved.items()]


def _unserved_s(now: Snapshot) -> Iterable[Sample]:
    return [] if now.cluster is None else [([name], each) for name, each in now.cluster.unserved_s.items()]


def _store_durations(now: Snapshot) -> Iterable[Sample]:
    return [([one.use], one.durations) for one in now.stores]


def _store_errors(now: Snapshot) -> Iterable[Sample]:
    return [([one.use, code], count) for one in now.stores for code, count in one.errors.items()]


def _failed_calls(now: Snapshot) -> Iterable[Sample]:
    return [([code], count) for code, count in now.failed_calls.items()]


def _version(_: Snapshot) -> Iterable[Sample]:
    return [([VERSION], 1)]


def _loop_delay(now: Snapshot) -> Iterable[Sample]:
    return [([], now.loop_delay)]


class MetricSection(NamedTuple):
    """Metrics of one subject."""

    title: str
    definitions: Sequence[Definition]


SECTIONS: Sequence[MetricSection] = (
    MetricSection(
        "Publishing",
        (
            _provider(
                "published_events",
                "counter",
                "Events published by this process, without those whose publisher was cancelled.",
                lambda p: p.statistics.published_events,
            ),
            _provider(
                "published_bytes",
                "counter",
                "Encoded bytes published by this process: more than their payloads.",
                lambda p: p.statistics.published_bytes,
            ),
            _provider(
                "publish_seconds",
                "histogram",
                "Time until a publish was stored, or failed. One publish in eight is measured. The time of events that "
                "share a call begins with the call.",
                lambda p: p.publish_durations,
            ),
            _coded(
                "publish_errors", "code", "Publishes that failed, by the code of the error.", lambda p: p.publish_errors
            ),
            _provider("publishes_open", "gauge", "Publishes that are not stored yet.", lambda p: p.open_publishes),
            Definition(
                "adapter_seconds",
                "histogram",
                ["provider", "operation"],
                "Time that operations of the adapter took. The log has commit (with fsync), and sync (if relaxed).",
                _adapter_durations,
            ),
        ),
    ),
    MetricSection(
        "Delays",
        (
            _provider(
                "delays_stored_events",
                "counter",
                "Delayed events that this process stored.",
                lambda p: p.statistics.delays_stored_events,
            ),
            _provider(
                "delays_published_events",
                "counter",
                "Delayed events published when they were due.",
                lambda p: p.statistics.released_events,
            ),
            _provider(
                "delays_failing",
                "gauge",
                "1 while delayed events that are due cannot be published.",
                lambda p: p.statistics.release_failing,
            ),
            Definition(
                "queue_delayed_events",
                "gauge",
                ["provider", "queue"],
                "Events that are not due yet, in the queue or stored for it.",
                _delayed,
            ),
        ),
    ),
    MetricSection(
        "Outbox",
        (
            _outbox("outbox_moved_events", "counter", "Events published from the outbox.", lambda o: o.moved_events),
            _outbox(
                "outbox_waiting_events",
                "gauge",
                "Events in the outbox that are not published yet.",
                lambda o: o.waiting_events,
            ),
            _outbox("outbox_age_seconds", "gauge", "Age of the oldest event in the outbox.", lambda o: o.age_s),
            _outbox(
                "outbox_refused_batches",
                "gauge",
                "Batches in the outbox that the queue refused.",
                lambda o: o.refused_batches,
            ),
            _outbox("outbox_failing", "gauge", "1 while the outbox cannot be moved.", lambda o: o.is_failing),
        ),
    ),
    MetricSection(
        "Queues and caches",
        (
            _queue("queue_received_events", "counter", "Events read from the queue.", lambda q: q.received_events),
            _queue("queue_received_bytes", "counter", "Bytes read from the queue.", lambda q: q.received_bytes),
            _queue("queue_read_errors", "counter", "Failed attempts to read the queue.", lambda q: q.read_errors),
            _queue("queue_read_offset", "gauge", "Read position of the queue, exclusive.", lambda q: q.next_offset),
            Definition(
                "queue_state",
                "gauge",
                ["provider", "queue", "state"],
                "1 for the present state of the queue's agent, 0 for the others.",
                _queue_states,
            ),
            _queue("queue_owned", "gauge", "1 if this process reads the queue.", lambda q: q.epoch is not None),
            _queue(
                "queue_epoch",
                "gauge",
                "Epoch of the lease under which this process reads the queue.",
                lambda q: q.epoch or None,
            ),
            _queue("cache_events", "gauge", "Events in the queue's cache.", lambda q: q.cache_events),
            _queue("cache_bytes", "gauge", "Bytes in the queue's cache.", lambda q: q.cache_bytes),
            _queue(
                "cache_max_events",
                "gauge",
                "Capacity of the queue's cache in events, without that of catch-ups.",
                lambda q: q.max_events,
            ),
            _queue(
                "cache_max_bytes",
                "gauge",
                "Capacity of the queue's cache in bytes, without that of catch-ups.",
                lambda q: q.max_bytes,
            ),
            _queue("cache_buckets", "gauge", "Buckets in use, at most ten.", lambda q: len(q.buckets)),
            _queue("cache_pressure", "gauge", "1 while the cache is full and reading waits.", lambda q: q.pressure),
            _queue(
                "cache_pressure_seconds",
                "counter",
                "Time in which reading waited because a cache of the queue was full.",
                lambda q: q.pressure_s,
            ),
        ),
    ),
    MetricSection(
        "Lag",
        (
            _lag(
                "lag_events",
                "Events from the first unfinished one to the queue's end, without paused streams. Perhaps an estimate.",
                lambda _, one: one.lag.events,
            ),
            _lag(
                "lag_bytes",
                "Lag in encoded bytes, estimated from the mean size of the events that this process has read.",
                ProviderSnapshot.lag_bytes,
            ),
            _lag("lag_batches", "Lag in batches.", _lag_batches),
            _lag(
                "lag_seconds",
                "Time since the first unfinished event was stored, or became due, without paused streams.",
                _lag_seconds,
            ),
        ),
    ),
    MetricSection(
        "Delivery",
        (
            _subscription("delivered_events", "counter", "Events delivered and done.", lambda s: s.delivered_events),
            _subscription("delivered_batches", "counter", "Batches delivered and done.", lambda s: s.delivered_batches),
            _subscription(
                "delivery_delay_seconds",
                "histogram",
                "Time from an event's timestamp to its first delivery.",
                lambda s: s.delivery_delay,
            ),
            _subscription(
                "handling_seconds",
                "histogram",
                "Time from the delivery of a batch until its handler returned, or its consumer acknowledged it.",
                lambda s: s.handling,
            ),
            _subscription("filtered_events", "counter", "Events that the filter held back.", lambda s: s.filtered),
            Definition(
                "retries",
                "counter",
                ["provider", "subscription", "cause"],
                "Deliveries tried again. Causes: failure, unavailable (of a dependency), held (by the breaker).",
                _retries,
            ),
            _subscription(
                "returned_events",
                "counter",
                "Events taken back from a consumer that was gone or silent. They are delivered again.",
                lambda s: s.returned,
            ),
            _subscription("dead_letters", "counter", "Events given up on and kept.", lambda s: s.dead_lettered),
            Definition(
                "kept_dead_letters",
                "gauge",
                ["provider", "subscription"],
                "Dead letters that wait to be redriven or discarded, of all silos together.",
                _kept_dead_letters,
            ),
            _subscription("skipped_events", "counter", "Events given up on and skipped.", lambda s: s.skipped),
            _subscription(
                "effects_already_applied",
                "counter",
                "Events whose effects had been committed before, so that their handler was not called.",
                lambda s: s.already_applied,
            ),
            _subscription(
                "gaps", "counter", "Ranges of events that were gone before they were delivered.", lambda s: s.gaps
            ),
            _subscription(
                "handlers_running",
                "gauge",
                "Handlers that run now, or parcels that remote consumers hold.",
                lambda s: s.in_flight,
            ),
            _subscription(
                "streams_ready",
                "gauge",
                "Streams with a cached event that waits for a handler or a consumer. Running ones do not count.",
                lambda s: s.ready,
            ),
            _subscription("streams_waiting", "gauge", "Streams that wait for their next attempt.", lambda s: s.waiting),
            _subscription("streams_parked", "gauge", "Streams that left the cache.", lambda s: s.parked),
            _subscription("streams_paused", "gauge", "Streams that wait to be resumed.", lambda s: s.paused),
            _subscription(
                "detached_streams",
                "counter",
                "Streams taken out of the cache because their consumer was slow.",
                lambda s: s.detached,
            ),
            _subscription(
                "catch_ups",
                "gauge",
                "Queues in which the subscription reads events that are no longer in the cache.",
                lambda s: s.catch_ups,
            ),
            _subscription(
                "subscription_held",
                "gauge",
                "1 while the circuit breaker holds the subscription, or it resumes.",
                lambda s: s.held,
            ),
            _subscription("consumers", "gauge", "Remote consumers that are attached.", lambda s: s.consumers),
            _subscription(
                "credit_events", "gauge", "Events that remote consumers may still be sent.", lambda s: s.credit_events
            ),
            _subscription("held_events", "gauge", "Events that remote consumers hold.", lambda s: s.held_events),
        ),
    ),
    MetricSection(
        "Progress and leases",
        (
            _provider(
                "checkpoint_seconds", "histogram", "Time that saving progress took.", lambda p: p.checkpoint_durations
            ),
            _provider(
                "checkpoint_age_seconds",
                "gauge",
                "Time since progress was saved without an error; 0 while there is none to save.",
                lambda p: p.checkpoint_age_s,
            ),
            _coded("queue_moves", "change", "Leases that this silo gained, gave back in order, or lost (cut).", _moves),
            Definition(
                "store_seconds",
                "histogram",
                ["use"],
                "Time that transactions of the control store took, with the wait for earlier ones.",
                _store_durations,
            ),
            Definition(
                "store_errors",
                "counter",
                ["use", "code"],
                "Transactions of the control store that failed, by the code of the error.",
                _store_errors,
            ),
        ),
    ),
    MetricSection(
        "Cluster",
        (
            Definition("silos", "gauge", ["state"], "Silos of the cluster by state, as this silo sees them.", _silos),
            Definition(
                "cluster_view_age_seconds",
                "gauge",
                [],
                "Time since this silo read the state of the cluster.",
                _view_age,
            ),
            Definition(
                "queues_unserved",
                "gauge",
                ["provider"],
                "Queues that no silo serves, as this silo sees them.",
                _unserved,
            ),
            Definition(
                "queues_unserved_seconds",
                "counter",
                ["provider"],
                "Time in which queues had no silo, summed over the queues.",
                _unserved_s,
            ),
        ),
    ),
    MetricSection(
        "Process and gRPC",
        (
            Definition("info", "gauge", ["version"], "1, with the version of headrace.", _version),
            Definition(
                "loop_delay_seconds",
                "histogram",
                [],
                "How late the event loop ran a task. It is late while a handler blocks the loop.",
                _loop_delay,
            ),
            _usage("clients", "Clients whose usage is tracked, including idle ones.", lambda u: u.clients),
            _usage("connections", "Connections of clients with calls on them.", lambda u: u.connections),
            _usage("calls", "Calls that are open; a stream is one.", lambda u: u.calls),
            _usage(
                "publish_bytes",
                "Bytes that are being published: received, and not yet stored.",
                lambda u: u.publish_bytes,
            ),
            Definition("grpc_refused", "counter", ["limit"], "Refusals because of a limit.", _refused),
            Definition(
                "grpc_failed_calls",
                "counter",
                ["code"],
                "Calls that ended with an error, by its code: unauthenticated, permission_denied and others.",
                _failed_calls,
            ),
        ),
    ),
)
