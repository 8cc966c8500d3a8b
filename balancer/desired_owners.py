"""Decides which silo should have each queue, from one silo's view of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ..streams.cluster import ClusterView, Lease, SiloState
from .cluster_options import ClusterOptions
from .maturity import eligible_silos
from .placement import Placement, homes
from .sightings import QueueKey, Sightings


class QueueCount(Protocol):
    """The number of queues of a provider."""

    @property
    def queues(self) -> int: ...


class DesiredOwners(NamedTuple):
    """The names of the silos that should have the queues."""

    now: Mapping[QueueKey, str]
    """The silo that should have each queue now. Queues that no silo can have are missing."""
    homes: Mapping[QueueKey, str]
    """The silo that should have each queue permanently; "" if no silo can have it."""


class OwnerDecision:
    """Applies the balancer to the views that one silo sees."""

    def __init__(self, options: ClusterOptions, providers: Mapping[str, QueueCount], sightings: Sightings) -> None:
        self._options = options
        self._providers = providers
        self._sightings = sightings

    def decide(self, view: ClusterView, now: float) -> DesiredOwners:
        """Return the owners that the balancer wants. `now` is the loop's time; `sightings` has seen the view last."""
        leases = {(lease.provider, lease.queue): lease for lease in view.valid}
        desired, permanent = dict[QueueKey, str](), dict[QueueKey, str]()
        for provider, count in self._providers.items():
            placement = self._placement(view, provider, count.queues, leases, now)
            desired.update({(provider, queue): silo for queue, silo in self._options.balancer(placement).items()})
            found = homes(self._options.balancer, placement)
            permanent.update({(provider, queue): found.get(queue, "") for queue in range(count.queues)})
        return DesiredOwners(desired, permanent)

    def why_unserved(self, view: ClusterView, now: float, queues: Sequence[QueueKey]) -> list[tuple[str, float]]:
        """Return for each queue why no silo serves it, as far as this silo knows, and for how many seconds."""
        leases = {(lease.provider, lease.queue): lease for lease in view.leases}
        active = {silo.name for silo in view.silos if silo.state is SiloState.ACTIVE}
        desired = self.decide(view, now)

        def why(queue: QueueKey) -> str:
            lease, silo, home = leases.get(queue), desired.now.get(queue, ""), desired.homes.get(queue, "")
            if lease is not None and lease.owner and queue not in view.over:
                length_s = lease.length_us / 1e6
                return f"silo {lease.owner!r} has its lease, for up to {length_s:g} s, and does not serve it"
            if silo:
                return f"silo {silo!r} is to serve it, and has not begun"
            if home and home not in active:
                return f"it is kept for silo {home}, which is not there"
            return "no silo that is there may serve it: see the balancer and its list"

        def for_s(queue: QueueKey) -> float:
            return now - self._sightings.since(leases[queue]) if queue in leases else 0.0

        return [(why(queue), for_s(queue)) for queue in queues]

    def _placement(
        self, view: ClusterView, provider: str, queues: int, leases: Mapping[QueueKey, Lease], now: float
    ) -> Placement:
        options = self._options
        owners = {queue: lease.owner for (of, queue), lease in leases.items() if of == provider}
        old_homes = {lease.queue: lease.home for lease in view.leases if lease.provider == provider and lease.home}
        silos = eligible_silos(
            self._sightings.timed(view, now), provider, view.now_us,
            known={*old_homes.values()}, maturity_s=options.maturity_s, silent_s=options.lease_s,
        )  # fmt: skip
        return Placement(
            silos.members, range(queues), owners, old_homes, silos.away, silos.newcomers, options.fixed, options.mapping
        )
