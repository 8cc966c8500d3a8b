"""The times of a cluster, and its balancer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..streams.errors import InvalidArgument
from .balancers import lease_count
from .placement import Balancer


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Times of a cluster, in seconds, and its balancer. All silos of the cluster must have the same options."""

    period_s: float = 1.0
    """Time between two heartbeats of a silo. Each heartbeat also reads the view of the cluster."""
    lease_s: float = 8.0
    """Length of a lease: when a silo stops without releasing its queues, no other silo gets them for this time."""
    dead_after_s: float = 10.0
    """A silo is declared dead if it has sent no heartbeat for this time and its peers cannot reach it."""
    maturity_s: float = 30.0
    """How long a new silo waits before it takes over queues. Set it to more than the restart of a silo takes."""
    drain_s: float = 10.0
    """How long events in flight may take to finish when a queue moves."""
    balancer: Balancer = lease_count
    fixed: Sequence[str] = ()
    """See `Placement.fixed`."""
    mapping: Mapping[int, str] = field(default_factory=dict[int, str])
    """See `Placement.mapping`."""

    def __post_init__(self) -> None:
        if not 0 < 3 * self.period_s <= self.lease_s:
            raise InvalidArgument(
                f"a lease of {self.lease_s:g} s with a period of {self.period_s:g} s: at least three periods, so that "
                "one call that fails loses nothing"
            )
        if self.dead_after_s < 2 * self.period_s:
            raise InvalidArgument(f"dead_after_s is {self.dead_after_s:g} s: at least two periods of {self.period_s:g}")
