"""The metrics for Prometheus: the text of /metrics, registries of other programs, and the tables of docs/metrics.md."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from ..streams.errors import InvalidArgument
from .lag_history import LagHistory
from .metric_definitions import SECTIONS, MetricSection
from .metric_snapshots import ProviderSnapshot, Snapshot, provider_snapshot
from .provider_core import ProviderCore

ANSWER_S = 2.0
"""How long a reader of a registry in another thread waits for the loop of a provider, in seconds."""


def render(snapshot: Snapshot) -> bytes:
    """Return the text of /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class SnapshotCollector:
    """Makes the metrics of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics in the order of `SECTIONS`. A metric without values is left out."""
        return families(self._snapshot)


def families(snapshot: Snapshot) -> list[Metric]:
    """Return all metrics of a snapshot that have values."""
    made = (definition.family(snapshot) for section in SECTIONS for definition in section.definitions)
    return [family for family in made if family.samples]


def tables() -> str:
    """Return the tables of docs/metrics.md."""
    return "\n".join(_table(section) for section in SECTIONS)


def _table(section: MetricSection) -> str:
    rows = [
        f"| `{one.shown_name}` | {one.kind} | {', '.join(one.labels) or '–'} | {one.help} |"
        for one in section.definitions
    ]
    return "\n".join([f"### {section.title}\n", "| name | type | labels | meaning |", "|---|---|---|---|", *rows, ""])


# ---- in another program --------------------------------------------------------------------------------------------


class ProvidersCollector:
    """Shows the metrics of providers of this process in one registry. A registry may be read in any thread."""

    def __init__(self) -> None:
        self._shown: dict[ProviderCore, tuple[LagHistory, asyncio.AbstractEventLoop]] = {}

    def __len__(self) -> int:
        return len(self._shown)

    def add(self, provider: ProviderCore, history: LagHistory) -> None:
        """Show a provider of the running loop."""
        self._shown[provider] = history, asyncio.get_running_loop()

    @property
    def names(self) -> set[str]:
        """The names of the providers."""
        return {provider.name for provider in self._shown}

    def remove(self, provider: ProviderCore) -> None:
        self._shown.pop(provider, None)

    def describe(self) -> Iterable[Metric]:
        """Return nothing. Without this method, the registry would call `collect` when this is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all providers. One whose loop does not answer is left out."""
        taken = [self._taken(provider, history, loop) for provider, (history, loop) in [*self._shown.items()]]
        return families(Snapshot([one for one in taken if one is not None]))

    def _taken(
        self, provider: ProviderCore, history: LagHistory, loop: asyncio.AbstractEventLoop
    ) -> ProviderSnapshot | None:
        """Take the snapshot on the loop of the provider, so that nothing changes meanwhile. Return None if the loop is
        blocked for too long, or closed."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is loop:
            return provider_snapshot(provider, history)
        taken = Future[ProviderSnapshot]()

        def take() -> None:
            try:
                taken.set_result(provider_snapshot(provider, history))
            except Exception as error:  # noqa: BLE001 (the reader gets it)
                taken.set_exception(error)

        try:
            loop.call_soon_threadsafe(take)
            return taken.result(ANSWER_S)
        except (TimeoutError, RuntimeError):  # the loop is blocked, or closed
            return None


_collectors = WeakKeyDictionary[CollectorRegistry, ProvidersCollector]()


def show(provider: ProviderCore, history: LagHistory, registry: CollectorRegistry) -> Callable[[], None]:
    """Show a provider's metrics in a registry. Return the function that ends it. Raises InvalidArgument if another
    provider of the same name is shown there."""
    collector = _collectors.setdefault(registry, ProvidersCollector())
    if provider.name in collector.names:
        raise InvalidArgument(
            f"the registry has the metrics of a provider {provider.name!r} already: open this one under another name, "
            "or use another registry"
        )
    if not len(collector):
        registry.register(collector)
    collector.add(provider, history)

    def end() -> None:
        collector.remove(provider)
        if not len(collector):
            registry.unregister(collector)

    return end
