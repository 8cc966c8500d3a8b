"""Measures how long leases and silos have been unchanged, by the clock of this process.

The store's clock may be set, forwards or backwards. So it decides neither that a lease is over nor that a silo is dead.
Instead, each grant and each renewal increments a counter of the lease, and each heartbeat one of the silo. A lease is
over if this silo has seen the same count for the length of the lease. The owner considers it over even earlier: it
measures from before its call for the last renewal, and this silo has seen that renewal later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..streams.cluster import ClusterView, Lease, SiloRecord

QueueKey = tuple[str, int]
"""Provider and queue."""


class Sighting(NamedTuple):
    """A lease or a silo, as it was seen last. Times are seconds by the clock of the process."""

    counted: tuple[int, int]
    """Epoch and renewals of a lease, or incarnation and heartbeats of a silo."""
    since: float
    """When this count was seen for the first time."""
    first: float
    """When this epoch or this incarnation was seen for the first time."""

    @property
    def has_changed(self) -> bool:
        """Its count has increased since `first`."""
        return self.since > self.first


class Sightings:
    """The leases and silos that one silo has seen in its views of the cluster."""

    def __init__(self) -> None:
        self._leases: Mapping[QueueKey, Sighting] = {}
        self._silos: Mapping[str, Sighting] = {}

    def see(self, view: ClusterView, now: float) -> ClusterView:
        """Record a view that was read at `now` or before. Return it with `over`, the leases that are over."""
        self._leases = {
            (lease.provider, lease.queue): _seen(
                self._leases.get((lease.provider, lease.queue)), (lease.epoch, lease.renewals), now
            )
            for lease in view.leases
        }
        self._silos = {
            silo.name: _seen(self._silos.get(silo.name), (silo.incarnation, silo.heartbeats), now)
            for silo in view.silos
        }
        over = [(lease.provider, lease.queue) for lease in view.leases if lease.owner and self.ends_at(lease) <= now]
        return view._replace(over=frozenset(over))

    def since(self, lease: Lease) -> float:
        """Return when the present count of a lease was seen for the first time. The lease is of the last view."""
        return self._leases[lease.provider, lease.queue].since

    def ends_at(self, lease: Lease) -> float:
        """Return when a lease of the last view is over, unless it is renewed."""
        return self.since(lease) + lease.length_us / 1e6

    def silent_s(self, silo: SiloRecord, now: float) -> float:
        """Return for how many seconds a silo of the last view has sent no heartbeat."""
        return now - self._silos[silo.name].since

    def timed(self, view: ClusterView, now: float) -> list[SiloRecord]:
        """Return the silos of the last view, with times relative to its `now_us`.

        Settings of the store's clock do not affect times since a silo was first seen here. For earlier times, the
        store's clock is the only source.
        """
        return [self._timed(silo, view.now_us, now) for silo in view.silos]

    def _timed(self, silo: SiloRecord, now_us: int, now: float) -> SiloRecord:
        sighting = self._silos[silo.name]
        silent_us, known_us = round((now - sighting.since) * 1e6), round((now - sighting.first) * 1e6)
        if not sighting.has_changed:
            silent_us = max(silent_us, now_us - silo.heartbeat_at_us)
        return silo._replace(heartbeat_at_us=now_us - silent_us, joined_at_us=min(silo.joined_at_us, now_us - known_us))


def _seen(before: Sighting | None, count: tuple[int, int], now: float) -> Sighting:
    """Return the sighting of `count` at `now`, after the sighting `before`."""
    if before is None or before.counted[0] != count[0]:
        return Sighting(count, now, now)
    return before if before.counted == count else Sighting(count, now, before.first)
