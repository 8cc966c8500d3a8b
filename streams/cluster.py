"""Members of a cluster, leases of queues, and the view of both. Plain data.

All times are microseconds by the store's own clock (`headrace.store.store_clock`): compare them with `now_us` of the
same view, never with a clock of this process. The store's clock may be set, so no decision about leases or dead silos
depends on it. A lease is valid, and a silo alive, as long as its counter grows, and each silo times this by its own
monotonic clock (`headrace.balancer.sightings`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from .errors import Fenced


class SiloSuperseded(Fenced):
    """Another process joined under the silo's name."""


class SiloState(enum.Enum):
    ACTIVE = "active"
    LEAVING = "leaving"
    """Gets no new queue, and hands over its queues."""
    DEAD = "dead"
    """Declared dead by other silos, or its process has ended. The store refuses its requests."""
    LEFT = "left"


LIVING = (SiloState.ACTIVE, SiloState.LEAVING)


class SiloRecord(NamedTuple):
    """One run of a silo. A later run has the same name and a higher incarnation; there is at most one record per
    name."""

    name: str
    incarnation: int
    """Number that rises with each join in the cluster: of two silos, the one that joined later has the higher
    number."""
    address: str
    serves: Sequence[str]
    """The providers that it can serve, by name."""
    state: SiloState
    joined_at_us: int
    heartbeat_at_us: int
    secret_hash: str = ""
    """SHA-256, in hexadecimal digits, of the secret with which it calls other silos. Only the silo itself has the
    secret."""
    heartbeats: int = 0
    """Grows by one with each heartbeat of this incarnation."""
    settings: Mapping[str, str] = MappingProxyType({})
    """The settings that should be the same in all silos of a cluster: name to text."""
    process: str = ""
    """Place of the lock file that its process holds, for other processes of its machine; "" if unknown."""
    public_address: str = ""
    """Where clients reach it; "" if that is `address`."""


class Lease(NamedTuple):
    """The right to serve a queue. `epoch` grows by one with each grant, and no epoch is used again."""

    provider: str
    queue: int
    owner: str
    """Name of the silo; "" if no silo has the queue."""
    incarnation: int
    epoch: int
    renewals: int
    """Grows by one with each grant and each renewal."""
    home: str = ""
    """Name of the silo that should have the queue when all silos are present, as the last owner decided."""
    length_us: int = 0
    """Length of the lease after a grant or a renewal."""


class ClusterView(NamedTuple):
    """The cluster at one moment of the store: silos by name, leases by provider and queue.

    An expired lease still names its last owner. A queue that never had an owner is missing.
    """

    now_us: int
    silos: Sequence[SiloRecord]
    leases: Sequence[Lease]
    over: frozenset[tuple[str, int]] = frozenset()
    """Queues whose leases have expired, as timed by the silo that reads the view. The store leaves this empty."""

    @property
    def valid(self) -> list[Lease]:
        """Return the leases that have an owner and have not expired."""
        return [lease for lease in self.leases if lease.owner and (lease.provider, lease.queue) not in self.over]

    def keeping_expired(self, before: ClusterView) -> ClusterView:
        """Return this view. A queue is `over` if it was in an earlier view, and its lease has not changed since."""
        same = {(lease.provider, lease.queue) for lease in {*before.leases} & {*self.leases}}
        return self._replace(over=before.over & same)
