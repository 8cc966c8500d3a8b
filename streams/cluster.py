"""What the silos of a cluster know of one another: members, leases of queues, and the view of both. Plain data.

All times are microseconds by the store's own clock (`headrace.store.store_clock`): compare them with `now_us` of the
same view, never with a clock of this process. That clock may be set, so no lease and no death depends on it: leases and
silos are alive as long as their counters grow, which each silo times by its own clock (`headrace.balancer.sightings`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from .errors import Fenced


class Superseded(Fenced):
    """Another process joined under the silo's name."""


class SiloState(enum.Enum):
    ACTIVE = "active"
    LEAVING = "leaving"
    """Gets no new queue, and gives away those it has."""
    DEAD = "dead"
    """Declared by its peers, or known to be gone: nothing it still wants from the store is granted."""
    LEFT = "left"


LIVING = (SiloState.ACTIVE, SiloState.LEAVING)


class SiloRecord(NamedTuple):
    """One run of a silo: the same name with a higher incarnation is a later one, and there is at most one per name."""

    name: str
    incarnation: int
    """Grows over the whole cluster: of two silos, the one that joined later has the higher one."""
    address: str
    serves: Sequence[str]
    """The providers that it can serve, by name."""
    state: SiloState
    joined_at_us: int
    heartbeat_at_us: int
    suspected_by: Sequence[str]
    """Silos whose vote against it counts at this moment, by name."""
    secret_hash: str = ""
    """SHA-256, in hexadecimal digits, of the secret that it calls other silos with. The silo alone has the secret."""
    heartbeats: int = 0
    """Grows by one with each heartbeat of this incarnation."""
    settings: Mapping[str, str] = MappingProxyType({})
    """The settings that all silos of a cluster should share, as text by name."""
    process: str = ""
    """Where other processes of its machine find the lock that its process holds; "" if that is unknown."""


class Lease(NamedTuple):
    """The right to serve a queue. `epoch` grows by one with each grant and never comes back."""

    provider: str
    queue: int
    owner: str
    """Name of the silo; "" if no silo has the queue."""
    incarnation: int
    epoch: int
    renewals: int
    """Grows by one with each grant and each renewal."""
    home: str = ""
    """The name of the silo that should have the queue when all silos are there, as its last owner decided."""
    length_us: int = 0
    """How long it lasts after a grant or a renewal."""


class ClusterView(NamedTuple):
    """The cluster at one moment of the store: silos by name, leases by provider and queue.

    An expired lease still names its last owner; a queue that no silo ever had is missing.
    """

    now_us: int
    silos: Sequence[SiloRecord]
    leases: Sequence[Lease]
    over: frozenset[tuple[str, int]] = frozenset()
    """Queues whose leases have expired, as timed by the silo that looks. The store itself names none."""

    @property
    def valid(self) -> list[Lease]:
        """The leases that have an owner and are not over."""
        return [lease for lease in self.leases if lease.owner and (lease.provider, lease.queue) not in self.over]
